"""Tensors that stay the same for some saves are written once, though they may change at any time."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager, SaveReport, Writing
from ckpt_tools.loop.saving.staying import SettledTensors
from tests.conftest import torchrun
from tests.servers.servers import Server
from tests.stock_jobs import check_steps

SETTLED = "__0_2.distcp"


class Job:
    """A loop over experts of 1.4 MB each, of which a step uses some, with their moments."""

    def __init__(self, root: Path | str, **options: Any) -> None:
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(600, 600) for _ in range(3))
        self.model = nn.ModuleDict({"experts": self.experts, "head": nn.Linear(600, 4)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.0)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.reports: list[SaveReport] = []
        self.wanted: dict[int, dict[str, torch.Tensor]] = {}
        self.checkpoints = CheckpointManager(
            root, on_commit=self.reports.append, **{"keep_last": None} | options
        )

    def train(self, *used: int) -> None:
        hidden = sum(self.experts[n](torch.randn(2, 600)) for n in (0, *used))
        self.model["head"](hidden).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step: int, *used: int, **options: Any) -> int:
        """Trains and saves a step; returns the number of MB that the save linked."""
        self.train(*used)
        self.wanted[step] = {n: t.clone() for n, t in self.model.state_dict().items()}
        self.checkpoints.save(step, self.state, **options)
        self.checkpoints.wait()
        return round(self.reports[-1].linked_nbytes / 1e6)

    def check(self, root: Path, tmp_path: Path) -> None:
        """Compares each step that is there with the values at its save."""
        check_steps(root, self.wanted, tmp_path)


@pytest.mark.parametrize(
    "options",
    [{}, {"asynchronous": False}, {"writing": Writing(overlap_copy=True)}, {"statistics": True}],
    ids=["background", "blocking", "overlap", "statistics"],
)
def test_what_gets_no_gradient_is_written_once(options: dict[str, Any], tmp_path: Path) -> None:
    """Chosen after the second save, told at the third, written at the fourth, linked at the next."""
    root = tmp_path / "run"
    job = Job(root, **options)
    with job.checkpoints:
        assert [job.save(step) for step in range(1, 8)] == [0, 0, 0, 0, 3, 3, 3]
        assert job.save(8, 1) == 0, "an expert is used: the file is written"
        assert job.save(9) == 3, "its values are linked"
        assert [job.save(step) for step in (10, 11)] == [0, 1], "and it is an ordinary one again"
    files = [root / f"step-{step:08d}" / SETTLED for step in range(1, 12)]
    assert [f.stat().st_nlink if f.exists() else 0 for f in files] == [0] * 3 + [4] * 4 + [
        2
    ] * 2 + [2] * 2
    job.check(root, tmp_path)
    for step in range(1, 11):  # each step is whole without the others
        shutil.rmtree(root / f"step-{step:08d}")
    job.check(root, tmp_path)
    state = Job(tmp_path / "other").state
    ckpt_tools.load(root / "step-00000011", state)
    assert torch.equal(state["model"]["experts"][2].weight, job.experts[2].weight)


@pytest.mark.parametrize("frozen", [False, True], ids=["settled", "frozen"])
def test_statistics_of_an_accelerator_are_those_of_the_host(
    frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file has the statistics of its own tensors, also where most values are zeros."""

    def saved(root: Path) -> list[dict[str, Any]]:
        job = Job(root, statistics=True)
        with torch.no_grad():
            job.experts[1].weight.zero_()
        job.experts[1].requires_grad_(not frozen)
        with job.checkpoints:
            for step in range(1, 8):
                job.save(step)
        assert job.reports[-1].linked_nbytes > 1_400_000
        again = Job(root, statistics=True)
        again.experts[1].requires_grad_(not frozen)
        with again.checkpoints:
            again.checkpoints.resume(again.state)
            for step in (8, 9):
                again.save(step)
                assert again.reports[-1].linked_nbytes > 1_400_000
        changes = [ckpt_tools.stats(root / f"step-0000000{n}").tensors for n in (8, 9)]
        assert {one.change_rms for one in changes[0].values()} == {None}  # since which step?
        assert changes[1]["model.experts.1.weight"].change_rms == 0
        return [
            {name: one.packed() for name, one in ckpt_tools.stats(path).tensors.items()}
            for path in sorted(root.glob("step-*"))
        ]

    host = saved(tmp_path / "host")
    monkeypatch.setattr("ckpt_tools.loop.state.device_statistics.DEVICE_TYPES", ("cpu",))
    device = saved(tmp_path / "device")
    for one, other in zip(host, device, strict=True):
        assert one.keys() == other.keys()
        for name, values in one.items():
            assert other[name] == pytest.approx(values, rel=1e-5, nan_ok=True), name
    # the last field is the change since the step before
    assert host[6]["model.experts.1.weight"][2] == 600 * 600
    assert host[6]["model.experts.0.weight"][-1] > 0 == host[6]["model.experts.1.weight"][-1]


def test_moments_settle_with_their_parameters(tmp_path: Path) -> None:
    """After an expert was used at the first step, its moments stay the same, too."""
    job = Job(tmp_path / "run")
    with job.checkpoints:
        assert [job.save(step, *[1, 2] * (step == 1)) for step in range(1, 6)] == [0, 0, 0, 0, 9]
    job.check(tmp_path / "run", tmp_path)


def test_values_that_change_right_after_the_save_are_those_of_the_save(tmp_path: Path) -> None:
    """Settled tensors are copied like others, so a link that fails loses nothing."""
    root = tmp_path / "run"
    job = Job(root, writing=Writing(max_mbps=20))
    with job.checkpoints:
        for step in range(1, 6):
            job.save(step)
        for step in range(1, 6):
            (root / f"step-{step:08d}").rename(tmp_path / f"elsewhere-{step}")
        job.wanted[6] = {n: t.clone() for n, t in job.model.state_dict().items()}
        job.checkpoints.save(6, job.state)
        for expert in job.experts:
            expert.weight.data.add_(1)
        job.checkpoints.wait()
    assert job.reports[-1].linked_nbytes == 0
    assert any("what stayed the same is written again" in note for note in job.reports[-1].notes)
    job.check(root, tmp_path)


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "through .data": lambda layer: layer.weight.data.add_(1),
    "one bit": lambda layer: layer.weight.data.view(torch.int32)[3, 5].bitwise_xor_(1),
    "by NumPy": lambda layer: layer.weight.detach().numpy().__setitem__((0, 0), 7.0),
    "to other memory": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "by a load": lambda layer: layer.load_state_dict(nn.Linear(600, 600).state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_written(change: str, tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    with job.checkpoints:
        for step in range(1, 10):
            if step > 5:
                CHANGES[change](job.experts[2])
            job.save(step)
    job.check(tmp_path / "run", tmp_path)


def test_what_changes_now_and_then_is_left_alone(tmp_path: Path) -> None:
    """The layout changes a few times, and not at each save; no value is ever wrong."""
    job = Job(tmp_path / "run")
    with job.checkpoints:
        for step in range(1, 34):
            job.save(step, 1 + step // 5 % 2) if step % 3 == 0 else job.save(step)
    job.check(tmp_path / "run", tmp_path)


def rounds(*changed: Iterable[str]) -> list[list[str]]:
    """What is chosen after each save, if these tensors change at it."""
    settled, found = SettledTensors(), []
    values = dict.fromkeys("abcde", 0)
    for names in changed:
        for name in names:
            values[name] += 1
        settled.note({name: str(value) for name, value in values.items()})
        found.append(sorted(settled.chosen))
    return found


def test_the_choice() -> None:
    assert rounds("", "ab", "ab", "ab") == [[], list("cde"), list("cde"), list("cde")]
    # a tensor that changes is out until the choice after the next one
    assert rounds("", "", "a", "", "", "", "", "") == [
        [],
        list("abcde"),
        *[list("bcde")] * 5,
        list("abcde"),
    ]
    # at once, then after 2 saves, 4 saves and so on, those of this time together
    each = rounds(*[""] * 16, "a", "b", "c", "d", "", "", "e", *[""] * 9)
    assert each[15:23] == [list(x) for x in ("abcde", "bcde", "bcde", "de", "de", "de", "de", "")]
    assert each[31] == []
    # a save of a part of the state drops nothing else
    settled = SettledTensors()
    for number in range(1, 9):
        settled.note({"a": "1", "b": "2"} if number % 2 else {"a": "1"})
    assert settled.chosen == {"a", "b"}


def test_short_or_unwanted_ones_have_no_file_of_their_own(tmp_path: Path) -> None:
    job = Job(tmp_path / "off", writing=Writing(incremental=False))
    with job.checkpoints:
        assert {job.save(step) for step in range(1, 7)} == {0}
    short = nn.Linear(500, 500)  # 1.002 MB, below 1 MiB
    with CheckpointManager(tmp_path / "short", keep_last=None) as checkpoints:
        for step in range(1, 7):
            checkpoints.save(step, {"model": short})
    assert list(tmp_path.rglob(SETTLED)) == []


def test_frozen_and_settled_files_side_by_side(tmp_path: Path) -> None:
    """What settles does not make the frozen file, which may be long, be written again."""
    root = tmp_path / "run"
    job = Job(root)
    job.experts[1].requires_grad_(False)
    with job.checkpoints:
        assert [job.save(step) for step in range(1, 7)] == [0, 1, 1, 1, 3, 3]
        job.experts[2].weight.data.add_(1)
        assert [job.save(step) for step in (7, 8)] == [1, 3]
    found = {os.lstat(root / f"step-{step:08d}" / "__0_1.distcp").st_ino for step in range(1, 9)}
    assert len(found) == 1
    job.check(root, tmp_path)


def test_a_resumed_job_links_at_once_and_old_steps_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    with caplog.at_level(logging.WARNING):
        job = Job(root, keep_last=2)
        with job.checkpoints:
            for step in range(1, 8):
                job.save(step)
        again = Job(root, keep_last=2)
        with again.checkpoints:
            assert again.checkpoints.resume(again.state) == 7
            assert [again.save(step) for step in range(8, 12)] == [3, 3, 3, 3]
            assert [again.save(12, 1), again.save(13), again.save(14)] == [0, 3, 0]
        third = Job(root, keep_last=2)
        with third.checkpoints:
            assert third.checkpoints.resume(third.state) == 14
            assert [third.save(15, 1), third.save(16, 1, 2)] == [1, 0]
    third.check(root, tmp_path)
    assert "written again" not in caplog.text


def test_several_ranks_and_fsdp1(tmp_path: Path) -> None:
    """Whole tensors are chosen, the same on all ranks; FSDP1's flat parameters, too."""
    for kind in ("fsdp2", "fsdp1", "ddp"):
        torchrun(3, "settled.py", str(tmp_path / kind), kind)


def test_a_bucket_copies_the_file_itself(server: Server) -> None:
    server.bucket("settled")
    where = "s3://settled/run"
    job = Job(where, storage_options=server.options)
    with job.checkpoints:
        assert [job.save(step) for step in range(1, 7)] == [0, 0, 0, 0, 3, 3]
        assert [job.save(7, 1), job.save(8)] == [0, 3]
    for step, want in job.wanted.items():
        path = f"{where}/step-{step:08d}"
        assert ckpt_tools.verify(path, storage_options=server.options).problems == []
        with ckpt_tools.open(path, storage_options=server.options) as there:
            for name, values in want.items():
                assert torch.equal(torch.as_tensor(there[f"model.{name}"][...]), values)
