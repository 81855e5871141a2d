"""Frozen parameters are written once: later saves link their file, and every step stays whole."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from torch import nn

import ckpt_tools
from ckpt_tools import (
    CheckpointError,
    CheckpointManager,
    Mirror,
    Outages,
    SaveReport,
    StorageError,
    Writing,
)
from ckpt_tools.publish.bucket import destination
from tests import jobs
from tests.command import run_command
from tests.conftest import torchrun
from tests.jobs import QUICK_STRACE
from tests.loop.outages import Impatient
from tests.servers.buckets import names, until
from tests.servers.faults import answering
from tests.servers.servers import Server
from tests.stock_jobs import check_steps, stock_load

FROZEN = "__0_1.distcp"
SAVE = Path(__file__).with_name("frozen_job.py")


class Job:
    """A loop over an adapter on a frozen base of 1.4 MB, and what its saves reported."""

    def __init__(self, root: Path | str, *, width: int = 600, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(600, width), nn.Linear(width, 4))
        self.base = self.model[0].requires_grad_(False).weight
        self.optimizer = torch.optim.AdamW(self.model[1].parameters())
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.reports: list[SaveReport] = []
        self.wanted: dict[int, dict[str, torch.Tensor]] = {}
        self.checkpoints = CheckpointManager(
            root, on_commit=self.reports.append, **{"keep_last": None} | options
        )

    def save(self, step: int, **options: Any) -> bool:
        """Trains and saves a step; returns whether the save linked the frozen file."""
        self.model(torch.randn(2, 600)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.wanted[step] = {n: t.clone() for n, t in self.model.state_dict().items()}
        self.checkpoints.save(step, self.state, **options)
        self.checkpoints.wait()
        return self.reports[-1].linked_nbytes > 0

    def check(self, root: Path, tmp_path: Path) -> None:
        """Compares each step that is there with the values at its save."""
        check_steps(root, self.wanted, tmp_path)


def stored(root: Path) -> int:
    """Returns the bytes below a directory, each file once."""
    found = {f.lstat().st_ino: f.lstat().st_size for f in root.rglob("*") if f.is_file()}
    return sum(found.values())


def sealed(path: Path) -> dict[str, Any]:
    (manifest,) = path.glob("ckpt.manifest*")
    return json.loads(manifest.read_text())["files"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_next_save_links_what_did_not_change(asynchronous: bool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    job = Job(root, asynchronous=asynchronous)
    with job.checkpoints:
        assert [job.save(step) for step in (1, 2, 3)] == [False, True, True]
    paths = [root / f"step-{step:08d}" for step in (1, 2, 3)]
    found = [os.lstat(path / FROZEN) for path in paths]
    assert len({one.st_ino for one in found}) == 1 and found[0].st_nlink == 3
    assert job.reports[1].linked_nbytes == found[0].st_size > 0.95 * job.reports[1].nbytes
    linked = [{n: f["linked"] for n, f in sealed(p).items() if "linked" in f} for p in paths]
    assert linked == [{}, {FROZEN: paths[0].name}, {FROZEN: paths[1].name}]
    job.check(root, tmp_path)
    shutil.rmtree(paths[0])  # each step is whole without the others
    shutil.rmtree(paths[1])
    job.check(root, tmp_path)
    state = {"model": nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 4))}
    ckpt_tools.load(paths[2], state, strict=False)
    assert torch.equal(state["model"][0].weight, job.base)


@pytest.mark.parametrize(
    "options",
    [{}, {"asynchronous": False}, {"statistics": True}, {"writing": Writing(overlap_copy=True)}],
    ids=["background", "blocking", "statistics", "overlap"],
)
def test_the_first_save_of_a_job_links_the_file_of_the_step_it_resumed(
    options: dict[str, Any], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    job = Job(root, statistics="statistics" in options)
    with job.checkpoints:
        assert [job.save(step) for step in (1, 2)] == [False, True]
    again = Job(root, keep_last=1, **options)
    torch.nn.init.zeros_(again.base)
    with again.checkpoints:
        assert again.checkpoints.resume(again.state) == 2
        assert [again.save(step) for step in (3, 4)] == [True, True]
    again.check(root, tmp_path)
    assert [p.name for p in root.glob("step*")] == ["step-00000004"]
    there = root / "step-00000004" / FROZEN
    assert os.lstat(there).st_nlink == 1 and ckpt_tools.verify(there.parent).problems == []
    if "statistics" in options:
        rms = ckpt_tools.stats(there.parent).tensors["model.0.weight"].rms
        assert rms == pytest.approx(again.base.double().square().mean().sqrt().item(), rel=1e-6)


@pytest.mark.parametrize("change", ["values", "bit", "gone", "no manifest", "shape"])
def test_the_first_save_of_a_job_writes_what_the_step_lacks(change: str, tmp_path: Path) -> None:
    root, where = tmp_path / "run", tmp_path / "run" / "step-00000002"
    with (job := Job(root)).checkpoints:
        assert [job.save(step) for step in (1, 2)] == [False, True]
    for path in where.glob("ckpt.manifest*") if change == "no manifest" else ():
        path.unlink()
    again = Job(root)
    with again.checkpoints:
        assert again.checkpoints.resume(again.state) == 2
        data = bytearray((where / FROZEN).read_bytes())
        if change == "values":
            with torch.no_grad():
                again.base[3, 5] += 1
        elif change in ("bit", "gone"):
            (where / FROZEN).unlink()  # a file of its own, so that step 1 stays whole
            data[len(data) // 2] ^= 1
            if change == "bit":
                (where / FROZEN).write_bytes(data)
        elif change == "shape":
            again.model[0].bias.requires_grad_(True)
            again.optimizer.add_param_group({"params": [again.model[0].bias]})
        assert [again.save(step) for step in (3, 4)] == [False, True]
    for step in (3, 4):
        path = root / f"step-{step:08d}"
        assert ckpt_tools.verify(path).problems == []
        with ckpt_tools.open(path) as found:
            for name, values in again.wanted[step].items():
                assert torch.equal(torch.as_tensor(found[f"model.{name}"][...]), values)


def test_the_step_that_was_resumed_may_be_replaced(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with (job := Job(root)).checkpoints:
        assert [job.save(step) for step in (1, 2)] == [False, True]
    again = Job(root)
    with again.checkpoints:
        assert again.checkpoints.resume(again.state, step=1) == 1
        assert again.save(1, overwrite=True) and again.save(3)
    for step in (1, 3):
        path = root / f"step-{step:08d}"
        assert ckpt_tools.verify(path).problems == []
        got = stock_load(path, tmp_path)["model"]
        assert all(torch.equal(got[name], values) for name, values in again.wanted[step].items())


def test_several_ranks_link_and_others_resume(tmp_path: Path) -> None:
    torchrun(3, "frozen.py", str(tmp_path), "save", "3")
    assert {os.lstat(path).st_nlink for path in tmp_path.glob("run/*/__*_1.distcp")} == {3}
    torchrun(1, "frozen.py", str(tmp_path), "resume", "2")
    torchrun(2, "frozen.py", str(tmp_path), "resume", "2")
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.symlink_to(tmp_path)
    torchrun(2, "frozen.py", str(tmp_path), "again", "2", str(link))
    for step in range(1, 10):
        path = tmp_path / "run" / f"step-{step:08d}"
        assert ckpt_tools.verify(path).problems == []
        got = stock_load(path, tmp_path)["model"]
        want = torch.load(tmp_path / "values" / f"{step}.pt")
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_small_or_trained_or_unwanted_parameters_have_no_file_of_their_own(tmp_path: Path) -> None:
    job = Job(tmp_path / "off", writing=Writing(incremental=False))
    with job.checkpoints:
        assert [job.save(1), job.save(2)] == [False, False]
    small = nn.Linear(500, 500).requires_grad_(False)  # 1.002 MB, below 1 MiB
    with CheckpointManager(tmp_path / "small") as checkpoints:
        checkpoints.save(1, {"model": small})
    with CheckpointManager(tmp_path / "trained") as checkpoints:
        checkpoints.save(1, {"model": nn.Linear(600, 600)})
    ckpt_tools.save(tmp_path / "single" / "step-1", {"model": job.model})
    assert list(tmp_path.rglob(FROZEN)) == []
    with pytest.raises(ValueError, match="incremental: expected 'auto' or False, got True"):
        Writing(incremental=True)


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda layer: layer.weight.add_(1),
    "through .data, which torch does not count": lambda layer: layer.weight.data.add_(1),
    "by NumPy": lambda layer: layer.weight.detach().numpy().__setitem__((0, 0), 7.0),
    "to other memory": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "by a load": lambda layer: layer.load_state_dict(nn.Linear(600, 600).state_dict()),
    "by a transposition": lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),
}


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("how", CHANGES)
def test_any_change_is_written(how: str, asynchronous: bool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    job = Job(root, asynchronous=asynchronous)
    layer = job.model[0]
    assert isinstance(layer, nn.Linear)
    first = layer.weight.detach().clone()
    with job.checkpoints:
        assert [job.save(1), job.save(2)] == [False, True]
        with torch.no_grad():
            CHANGES[how](layer)
        assert [job.save(3), job.save(4)] == [False, True]
        layer.weight.data = first.clone()  # back: the file of step 4 has other values
        assert [job.save(5), job.save(6)] == [False, False]
        assert sealed(root / "step-00000006").keys() == {"__0_0.distcp"}, "it is trained somehow"
    job.check(root, tmp_path)


def test_other_memory_with_the_same_values_is_no_change(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    with job.checkpoints:
        assert [job.save(1), job.save(2)] == [False, True]
        for _ in range(3):
            job.checkpoints.resume(job.state, step=1)
            job.base.data = job.base.data.clone()
        assert [job.save(3), job.save(4)] == [True, True]


def test_values_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", writing=Writing(max_mbps=0.2))
    with job.checkpoints:
        job.save(1)
        for step in (2, 3):
            job.wanted[step] = {n: t.clone() for n, t in job.model.state_dict().items()}
            job.checkpoints.save(step, job.state)
            with torch.no_grad():
                job.base.add_(1)
    job.check(tmp_path / "run", tmp_path)
    assert job.reports[1].linked_nbytes > 0


@pytest.mark.parametrize("by_data", [True, False])
def test_an_average_leaves_the_frozen_file_alone(by_data: bool, tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    average = nn.Linear(600, 600).requires_grad_(False)
    job.state["average"] = average
    with job.checkpoints:
        found = []
        for step in range(1, 6):
            with torch.no_grad():
                (average.weight.data if by_data else average.weight).mul_(0.9)
            found.append(job.save(step))
    assert found == [False, False, False, False, True]
    job.check(tmp_path / "run", tmp_path)
    newest = ckpt_tools.open(tmp_path / "run" / "step-00000005")
    assert torch.equal(torch.as_tensor(newest["average.weight"][:]), average.weight)


def test_parameters_may_be_frozen_later_and_unfrozen(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.base.requires_grad_(True)
    with job.checkpoints:
        assert [job.save(1), job.save(2)] == [False, False]
        job.base.requires_grad_(False)
        assert [job.save(3), job.save(4)] == [False, True]
        job.base.requires_grad_(True)
        for step in (5, 6):
            job.base.data.add_(1)
            assert not job.save(step)
    job.check(tmp_path / "run", tmp_path)


def test_a_parameter_that_trains_again_is_copied_in_time(tmp_path: Path) -> None:
    """With `overlap_copy`, the optimizer changes values while the save still copies others."""
    root = tmp_path / "run"
    job = Job(root, writing=Writing(overlap_copy=True))
    wanted = {}
    with job.checkpoints:
        assert [job.save(1), job.save(2)] == [False, True]
        job.base.requires_grad_(True)
        every = torch.optim.AdamW(job.model.parameters(), lr=0.1)
        state = {"model": job.model, "optimizer": every}
        for step in range(3, 13):
            job.model(torch.randn(2, 600)).sum().backward()
            job.base.requires_grad_(step % 2 == 0)
            wanted[step] = job.base.detach().clone()
            job.checkpoints.save(step, state)
            job.base.requires_grad_(True)
            every.step()
            every.zero_grad()
    for step, want in wanted.items():
        got = stock_load(root / f"step-{step:08d}", tmp_path)["model"]["0.weight"]
        assert torch.equal(got, want), step


def test_a_parameter_may_become_an_inference_tensor(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    layer = job.model[0]
    with job.checkpoints:
        job.save(1)
        with torch.inference_mode():
            layer.weight = nn.Parameter(torch.randn(600, 600), requires_grad=False)
        assert [job.save(2), job.save(3)] == [False, True]
    job.check(tmp_path / "run", tmp_path)


def test_a_sharded_base_that_is_loaded_anew_is_written(tmp_path: Path) -> None:
    torchrun(2, "frozen.py", str(tmp_path), "change", "4")


def test_if_neither_the_file_nor_the_values_are_there_the_save_fails(tmp_path: Path) -> None:
    root = tmp_path / "run"
    job = Job(root, writing=Writing(max_mbps=0.05))
    job.save(1)
    (root / "step-00000001").rename(tmp_path / "elsewhere")
    job.checkpoints.save(2, job.state)
    job.base.data.add_(1)
    with pytest.raises(
        CheckpointError, match=r"changed after the save had begun.*model\.0\.weight"
    ):
        job.checkpoints.close()
    assert not (root / "step-00000002").exists()


def test_a_checkpoint_that_is_removed_leaves_the_file_to_the_steps(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    with job.checkpoints:
        assert [job.save(1), job.save(2, name="best")] == [False, True]
        job.checkpoints.remove("best")
        assert [job.save(3), job.save(4)] == [True, True]
        assert [note for report in job.reports for note in report.notes] == []


@pytest.mark.parametrize("how", ["moved", "edited", "replaced by a link"])
def test_without_the_file_of_the_step_before_the_save_writes(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, other = tmp_path / "run", tmp_path / "elsewhere"
    job = Job(root)
    with job.checkpoints:
        job.save(1)
        path = root / "step-00000001"
        if how == "moved":
            path.rename(other)
        elif how == "edited":
            data = bytearray((path / FROZEN).read_bytes())
            data[5000] ^= 1
            (path / FROZEN).write_bytes(data)
        else:
            (path / FROZEN).rename(other)
            (path / FROZEN).symlink_to(other)
        with caplog.at_level(logging.WARNING):
            assert job.save(2) is False
        assert caplog.text.count("frozen parameters are written again: ") == 1
        assert job.save(3) is True
    job.wanted.pop(1)
    job.check(root, tmp_path)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("error", ["EPERM", "EMLINK", "EXDEV", "EOPNOTSUPP"])
def test_a_file_system_without_links_copies_and_says_so_once(error: str, tmp_path: Path) -> None:
    strace = [*QUICK_STRACE, "-o", str(tmp_path / "trace"), "-e", "trace=linkat"]
    strace += ["-e", f"inject=linkat:error={error}", sys.executable, str(SAVE)]
    done = subprocess.run(
        [*strace, str(tmp_path / "run"), *(["late"] if error != "EMLINK" else [])],
        env=os.environ | {"PYTHONPATH": str(jobs.ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "INJECTED" in (tmp_path / "trace").read_text()
    assert done.stdout.split() == ["0"] * 4
    assert done.stderr.count("frozen parameters are written again: cannot link") == 1
    for path in (tmp_path / "run").glob("step-*"):
        assert ckpt_tools.verify(path).problems == []
        assert os.lstat(path / FROZEN).st_nlink == 1


def test_statistics_of_a_linked_file(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", statistics=True)
    with job.checkpoints:
        assert [job.save(1), job.save(2), job.save(3)] == [False, True, True]
    found = [ckpt_tools.stats(tmp_path / "run" / f"step-{n:08d}") for n in (1, 3)]
    rms = [one.tensors["model.0.weight"].rms for one in found]
    assert rms[0] == rms[1] > 0
    (manifest,) = (tmp_path / "run" / "step-00000003").glob("ckpt.manifest*")
    tensors = json.loads(manifest.read_text())["tensors"]
    assert tensors["model.0.weight"]["statistics"][-1] == 0  # the change
    assert tensors["model.1.weight"]["statistics"][-1] > 0


def test_a_run_counts_a_shared_file_once(tmp_path: Path) -> None:
    root = tmp_path / "run"
    job = Job(root)
    with job.checkpoints:
        for step in range(1, 5):
            job.save(step)
    data = sum(f.lstat().st_size for f in root.rglob("*") if f.is_file()) / 1e6
    alone = os.lstat(root / "step-00000001" / FROZEN).st_size / 1e6
    said = run_command("ls", str(root)).stdout
    assert f"{data - 3 * alone:.2f} MB on the disk for {data:.2f} MB" in said
    thinned = run_command("thin", str(root), "--keep-full", "1")
    assert thinned.returncode == 0 and "freed 0 B in 0 steps" in thinned.stdout
    assert "other steps share 1,4" in thinned.stdout
    planned = json.loads(
        run_command("prune", str(root), "--keep-last", "1", "--dry-run", "--json").stdout
    )
    before = stored(root)
    pruned = json.loads(run_command("prune", str(root), "--keep-last", "1", "--json").stdout)
    assert planned["freed_nbytes"] == pruned["freed_nbytes"] == before - stored(root)
    assert "on the disk for" not in run_command("ls", str(root)).stdout
    job.check(root, tmp_path)


def test_a_bucket_copies_the_file_itself(server: Server) -> None:
    fs, where = server.bucket("frozen"), "s3://frozen/run"
    job = Job(where, storage_options=server.options)
    with job.checkpoints:
        assert [job.save(step) for step in (1, 2, 3)] == [False, True, True]
        name = next(n for n in names(fs, "frozen/run/step-00000003") if "__0_1" in n)
        fs.rm(name)
        assert [job.save(4), job.save(5)] == [True, True]  # from step 2
        name = next(n for n in names(fs, "frozen/run/step-00000005") if "__0_1" in n)
        fs.pipe(name, fs.cat(name)[:-1] + b"x")
        assert [job.save(6), job.save(7)] == [True, True]  # from step 4
    again = Job(where, storage_options=server.options)
    with again.checkpoints:
        assert again.checkpoints.resume(again.state) == 7
        keeps_checksums = server.name == "moto"  # without these, it would have to be read back
        assert [again.save(8), again.save(9)] == [keeps_checksums, True]
    for step, want in {**job.wanted, **again.wanted}.items():
        if step not in (3, 5):  # these were damaged
            path = f"{where}/step-{step:08d}"
            assert ckpt_tools.verify(path, storage_options=server.options).problems == []
            got = ckpt_tools.open(path, storage_options=server.options)["model.0.weight"][:]
            assert torch.equal(torch.as_tensor(got), want["0.weight"])


def test_an_outage_during_the_copy_is_none_of_the_store_s_abilities(server: Server) -> None:
    server.bucket("frozen")
    answer = ""

    def when(request: web.Request) -> str:
        return answer if "x-amz-copy-source" in request.headers else ""

    with answering(server.endpoint, when) as (url, refused):
        # a client's own patience would take minutes
        options = Impatient(server.name, server.endpoint).options | {"endpoint_url": url}
        where = "s3://frozen/outage"
        job = Job(where, storage_options=options, asynchronous=False, outages=Outages(retry_s=0))
        with job.checkpoints:
            assert [job.save(1), job.save(2)] == [False, True]
            answer = "503 SlowDown"
            with pytest.raises(StorageError):
                job.save(3)
            assert refused
            answer = ""
            assert job.save(4) is True, "the next save links again"
    assert [s.number for s in ckpt_tools.steps(where, storage_options=server.options)] == [1, 2, 4]


def test_a_copy_that_fails_at_its_end_leaves_no_upload(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(destination, "_COPY_BYTES", 5 << 20)
    fs, armed = server.bucket("frozen"), list[bool]()

    def when(request: web.Request) -> str:
        is_end = request.method == "POST" and "uploadId" in request.query
        return (
            "403 AccessDenied"
            if is_end and "__0_1" in request.path and armed and armed.pop()
            else ""
        )

    with answering(server.endpoint, when) as (url, refused):
        options = server.options | {"endpoint_url": url}
        where = "s3://frozen/end"
        job = Job(where, width=6000, storage_options=options)
        with job.checkpoints, caplog.at_level(logging.WARNING):
            assert [job.save(1), job.save(2)] == [False, True]
            armed += [True, True]  # from step 2, then from step 1
            assert job.save(3) is False
            assert len(refused) == 2 and "frozen parameters are written again" in caplog.text
            assert job.save(4) is True
    assert not fs.call_s3("list_multipart_uploads", Bucket="frozen").get("Uploads")
    for step, want in job.wanted.items():
        path = f"{where}/step-{step:08d}"
        assert ckpt_tools.verify(path, storage_options=server.options).problems == []
        got = ckpt_tools.open(path, storage_options=server.options)["model.0.weight"][:]
        assert torch.equal(torch.as_tensor(got), want["0.weight"])


def test_a_mirror_does_not_send_the_file_again(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fs, where = server.bucket("frozen"), "s3://frozen/copies"
    job = Job(tmp_path / "run", mirror=Mirror(where), storage_options=server.options)
    with caplog.at_level(logging.INFO), job.checkpoints:
        for step in (1, 2, 3):
            job.save(step)
            until(lambda n=step: names(fs, f"frozen/copies/step-{n:08d}/.metadata"))
    assert caplog.text.count("; the store copied 14") == 2
    for step in job.wanted:
        path = f"{where}/step-{step:08d}"
        assert ckpt_tools.verify(path, storage_options=server.options).problems == []


def test_a_mirror_whose_newest_manifest_is_damaged_gets_the_whole_step(
    server: Server, tmp_path: Path
) -> None:
    fs, where = server.bucket("frozen"), "s3://frozen/damaged"
    job = Job(tmp_path / "run", mirror=Mirror(where), storage_options=server.options)
    with job.checkpoints:
        for step in (1, 2, 3):
            job.save(step)
            until(lambda n=step: names(fs, f"frozen/damaged/step-{n:08d}/.metadata"))
            if step == 2:
                (name,) = [n for n in names(fs, "frozen/damaged/step-00000002") if "manifest" in n]
                fs.pipe(name, b"{garbage")
    path = f"{where}/step-00000003"
    assert ckpt_tools.verify(path, storage_options=server.options).problems == []
