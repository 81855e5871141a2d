"""Several processes that torchrun or srun starts share one merge, reshard or convert: the same
bytes, one commit, all or nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools.core.box import whole
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.plan import plan_transfer
from ckpt_tools.engine.schedule import schedule, shares
from ckpt_tools.errors import PlanError
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.registry import Request, TargetTensor, open_source
from ckpt_tools.ranks.launch import first_host, slurm_variables
from tests.jobs import LONG, interrupt, torchrun_command
from tests.servers import slurm
from tests.servers.hosts import ended, network, two_by_two
from tests.transfer.groups import ROOT, group

STATE = {
    "model": (
        {f"layers.{i}.w": torch.arange(7000.0 * (i + 1)).reshape(-1, 100) for i in range(5)}
        | {"norm": torch.ones(3), "step": torch.tensor(7)}
    ),
    "optimizer": {
        "state": {"w": {"exp_avg": torch.linspace(0, 1, 300_000).reshape(600, 500)}},
        "lr": 0.1,
    },
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three ranks have saved, without a manifest."""
    path = tmp_path_factory.mktemp("group")
    dcp.save(STATE, checkpoint_id=path / "one", no_dist=True)
    ckpt_tools.reshard(path / "one", path / "three", to_ranks=3)
    for manifest in (path / "three").glob("ckpt.manifest.*"):
        manifest.unlink()
    return path


@pytest.mark.parametrize("size", [2, 3, 5] if LONG else [3])
def test_a_team_writes_what_one_process_writes(size: int, source: Path, tmp_path: Path) -> None:
    ckpt_tools.merge(source / "three", tmp_path / "one.safetensors", dtype="bf16")
    done = group(
        size,
        "merge",
        source / "three",
        tmp_path / "group.safetensors",
        "--dtype",
        "bf16",
        "--memory",
        "1MiB",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote ") == 1
    assert (tmp_path / "group.safetensors").read_bytes() == (
        tmp_path / "one.safetensors"
    ).read_bytes()
    assert ckpt_tools.verify(tmp_path / "group.safetensors").problems == []
    others = (
        ("reshard", "--to", "4"),
        ("convert", "--to", "dcp", "--ranks", "2"),
        ("merge", "--max-shard-size", "1MB"),
    )
    for words in others if LONG else others[:1]:
        done = group(size, words[0], source / "three", tmp_path / words[0], *words[1:])
        assert done.returncode == 0, done.stderr
        assert ckpt_tools.verify(tmp_path / words[0]).problems == []
        if words[0] != "merge":
            assert ckpt_tools.diff(source / "one", tmp_path / words[0]).is_same
    assert not list(tmp_path.glob(".tmp.*"))


def test_shares_are_of_equal_bytes_and_cover_everything_once() -> None:
    """Of one giant and many small tensors, whatever the number of shares."""
    from ckpt_tools.core.catalog import Catalog, Extent, TensorEntry, one_chunk

    shapes = {"giant": (4000, 1000), "empty": (0, 3), "scalar": ()} | {
        f"small.{i}": (i + 1, 7) for i in range(50)
    }
    f32, at, tensors = BY_NAME["float32"], 0, {}
    for fqn, shape in shapes.items():
        nbytes = whole(shape).numel * 4
        tensors[fqn] = TensorEntry(
            fqn, f32, shape, one_chunk(whole(shape), Extent("f", at, nbytes))
        )
        at += nbytes
    layout = safetensors.lay_out(
        Request([TargetTensor(f, f32, s, (whole(s),)) for f, s in shapes.items()])
    )
    plan = plan_transfer(Catalog("x", tensors, file_sizes={"f": at}), layout)
    every = [
        (t.tensor.fqn, t.box) for step in schedule(plan, {}, 1 << 16, 1 << 16) for t in step.tiles
    ]
    for count in (1, 2, 7, 64):
        parts = [
            [t for step in schedule(plan, {}, 1 << 16, 1 << 16, share) for t in step.tiles]
            for share in shares(plan, count)
        ]
        assert [(t.tensor.fqn, t.box) for part in parts for t in part] == every
        sizes = [sum(t.dst_nbytes for t in part) for part in parts]
        assert max(sizes) - min(sizes) <= 2 << 16


def test_damage_in_what_no_member_reads_in_full_is_found(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(900, 500)}, tmp_path / "w.pt")
    ckpt_tools.convert(tmp_path / "w.pt", tmp_path / "src", to="dcp")
    store = open_source(tmp_path / "src")
    big = max(
        (c.extent for t in store.catalog.tensors.values() for c in t.chunks), key=lambda e: e.nbytes
    )
    for manifest in (tmp_path / "src").glob("ckpt.manifest.*"):
        manifest.unlink()
    places = [big.nbytes // 4, big.nbytes // 2, big.nbytes * 3 // 4]
    for place in places if LONG else places[1:2]:
        with (tmp_path / "src" / big.file).open("r+b") as file:
            file.seek(big.start + place)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 4]))
        done = group(2, "merge", tmp_path / "src", tmp_path / "out.safetensors")
        assert done.returncode and "bytes were damaged since they were written" in done.stderr, (
            done.stderr
        )
        assert not (tmp_path / "out.safetensors").exists() and not list(tmp_path.glob(".tmp.*"))
        with (tmp_path / "src" / big.file).open("r+b") as file:
            file.seek(big.start + place)
            file.write(byte)
    assert group(2, "merge", tmp_path / "src", tmp_path / "out.safetensors").returncode == 0
    assert torch.equal(
        load_file(tmp_path / "out.safetensors")["w"], torch.load(tmp_path / "w.pt")["w"]
    )


@pytest.mark.slow
def test_members_that_see_different_sources_refuse(source: Path, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        ckpt_tools.merge(
            source / "three",
            tmp_path / str(rank) / "src.safetensors",
            select=["layers.*"] if rank else ["*"],
        )
    script = (
        f"cd {tmp_path}/$RANK && exec {sys.executable} -m ckpt_tools merge src.safetensors"
        f" {tmp_path}/out.safetensors"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
        "sh",
        "-c",
        script,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (
        done.returncode
        and "processes see different sources: process 1 differs from process 0" in done.stderr
    )
    assert not (tmp_path / "out.safetensors").exists()


def test_an_error_of_one_member_ends_all_and_is_told(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.safetensors").write_bytes(b"x")
    done = group(2, "merge", source / "three", tmp_path / "out.safetensors")
    assert done.returncode and "the destination exists" in done.stderr
    assert (tmp_path / "out.safetensors").read_bytes() == b"x"
    done = group(2, "inspect", source / "three")
    assert done.returncode and "ckpt inspect runs in one process only" in done.stderr


@pytest.mark.parametrize("is_sealed", [False, True] if LONG else [False])
def test_a_team_verifies(is_sealed: bool, tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "src", no_dist=True)
    if is_sealed:
        ckpt_tools.seal(tmp_path / "src")
    done = group(3, "verify", tmp_path / "src", "--deep")
    assert done.returncode == 0 and done.stdout.count("src: ") == 1, done.stderr
    found = ckpt_tools.verify(tmp_path / "src", deep=True).findings
    assert (
        [f.fqn for f in found] == ["model.norm"]
        and "model.norm" in done.stdout
        and "one value" in done.stdout
    )
    whole = ckpt_tools.verify(tmp_path / "src")
    data = bytearray((tmp_path / "src" / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "src" / "__0_0.distcp").write_bytes(data)
    done = group(3, "verify", tmp_path / "src", "--json")
    found = json.loads(done.stdout)
    alone = ckpt_tools.verify(tmp_path / "src")
    assert (
        done.returncode
        and found["lost"] == list(alone.lost)
        and len(found["problems"]) == len(alone.problems) > len(whole.problems)
    )


def test_a_team_compares(source: Path, tmp_path: Path) -> None:
    state = {"model": dict(STATE["model"]), "optimizer": STATE["optimizer"]}  # type: ignore[call-overload]
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    other = STATE["model"]["layers.3.w"].clone()  # type: ignore[index, union-attr, call-overload]
    other[1, 5:9] += 1.5
    other[-1, -1] = float("nan")
    state["model"]["layers.3.w"] = other
    dcp.save(state, checkpoint_id=tmp_path / "b", no_dist=True)
    assert group(3, "diff", tmp_path / "a", source / "three", "--memory", "1MiB").returncode == 0
    done = group(3, "diff", tmp_path / "a", tmp_path / "b", "--memory", "1MiB", "--json")
    found, alone = json.loads(done.stdout), ckpt_tools.diff(tmp_path / "a", tmp_path / "b")
    (theirs,), (mine,) = found["differences"], alone.differences
    assert (
        done.returncode
        and theirs["fqn"] == mine.fqn == "model.layers.3.w"
        and theirs["num_different"] == mine.num_different == 5
    )
    assert tuple(theirs["first"]) == mine.first


def test_a_team_copies(source: Path, tmp_path: Path) -> None:
    done = group(3, "copy", source / "three", tmp_path / "out")
    assert done.returncode == 0 and done.stdout.count("copied ") == 1, done.stderr
    for path in (source / "three").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    done = group(2, "copy", source / "three", tmp_path / "out")
    assert done.returncode == 0 and "it is there already" in done.stdout
    data = next((tmp_path / "out").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    done = group(2, "copy", source / "three", tmp_path / "out")
    assert done.returncode and "the destination exists" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(4) if LONG else [1])
def test_a_member_that_is_killed_leaves_nothing_and_the_next_run_completes(
    victim: int, tmp_path: Path
) -> None:
    state = {f"w{i}": torch.randn(2_000_000) for i in range(25)}  # 200 MB
    torch.save(state, tmp_path / "src.pt")
    command = torchrun_command(
        2,
        "-m",
        "ckpt_tools",
        "reshard",
        tmp_path / "src.pt",
        tmp_path / "out",
        "--to",
        4,
        "--memory",
        "1MiB",
    )
    few = 1 + victim // 2 * (20 << 11)  # blocks of 512 bytes
    job = interrupt(
        command,
        lambda: sum(p.stat().st_blocks for p in tmp_path.glob(".tmp.out.*/*.distcp")) >= few,
        member=victim % 2,
    )
    assert job.returncode and not (tmp_path / "out").exists(), job.stderr
    done = group(2, "reshard", tmp_path / "src.pt", tmp_path / "out", "--to", "4")
    assert done.returncode == 0, done.stderr
    assert ckpt_tools.diff(tmp_path / "src.pt", tmp_path / "out").is_same and not list(
        tmp_path.glob(".tmp.*")
    )


@pytest.mark.slow
def test_two_hosts_share_a_directory(source: Path, tmp_path: Path) -> None:
    ckpt_tools.merge(source / "three", tmp_path / "one.safetensors")
    with network() as net:
        if net is None:
            pytest.skip("network namespaces cannot be made here")
        outputs = ended(two_by_two(net, "merge", source / "three", tmp_path / "group.safetensors"))
    assert sum(out.count("wrote ") for out, _ in outputs) == 1
    assert (tmp_path / "group.safetensors").read_bytes() == (
        tmp_path / "one.safetensors"
    ).read_bytes()


_jobs = itertools.count(os.getpid())


def by_slurm(size: int, *words: object, **environment: str) -> list[subprocess.Popen[str]]:
    """Starts `ckpt` as srun would, with its variables; process 0 listens on the first node, here
    this machine.
    """
    jobs, number = [], next(_jobs)
    for rank in range(size):
        slurm = {
            "PROCID": rank,
            "STEP_NUM_TASKS": size,
            "JOB_ID": number,
            "STEP_ID": 3,
            "JOB_NODELIST": "localhost",
        }
        own = (
            {f"SLURM_{key}": str(value) for key, value in slurm.items()}
            | {"PYTHONPATH": str(ROOT)}
            | environment
        )
        command = [sys.executable, "-m", "ckpt_tools", *map(str, words)]
        jobs.append(
            subprocess.Popen(
                command,
                env=os.environ | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return jobs


@pytest.mark.slow
@pytest.mark.skipif(bool(slurm.missing()), reason=f"no Slurm here: {slurm.missing()}")
def test_slurm_starts_them_too(
    source: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A real one: three tasks write one file, an error of all ends the step, and a task that is
    killed ends the others.
    """
    # 200 MB
    torch.save({f"w{i}": torch.randn(2_000_000) for i in range(25)}, tmp_path / "large.pt")
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as environment:

        def srun(size: int, *words: object) -> subprocess.Popen[str]:
            command = [
                "srun",
                f"--ntasks={size}",
                "--kill-on-bad-exit=1",
                sys.executable,
                "-m",
                "ckpt_tools",
                *map(str, words),
            ]
            own = os.environ | environment | {"PYTHONPATH": str(ROOT)}
            return subprocess.Popen(
                command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )

        for is_well, says in ((True, "wrote "), (False, "the destination exists")):
            job = srun(3, "merge", source / "three", tmp_path / "out.safetensors")
            out, errors = job.communicate(timeout=180)
            assert (
                (job.returncode == 0) == is_well
                and out.count("wrote ") == is_well
                and says in out + errors
            ), errors
        job = srun(
            2,
            "reshard",
            tmp_path / "large.pt",
            tmp_path / "four",
            "--to",
            4,
            "--memory",
            "1MiB",
            "--jobs",
            1,
        )
        victim = 0
        while job.poll() is None and not victim:
            victim = next(
                (
                    pid
                    for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
                    if _is_task(pid, 1, tmp_path / "four")
                ),
                0,
            )
        while job.poll() is None and not any(tmp_path.glob(".tmp.four.*/*.distcp")):
            time.sleep(0.001)
        assert victim, job.communicate(timeout=180)
        os.kill(victim, signal.SIGKILL)
        _, errors = job.communicate(timeout=180)
        assert job.returncode and not (tmp_path / "four").exists(), errors
        job = srun(2, "reshard", tmp_path / "large.pt", tmp_path / "four", "--to", 4, "--resume")
        assert job.communicate(timeout=180) and job.returncode == 0
    assert ckpt_tools.verify(tmp_path / "out.safetensors").problems == []
    assert ckpt_tools.diff(tmp_path / "large.pt", tmp_path / "four").is_same


def _is_task(pid: int, number: int, dst: Path) -> bool:
    """Tells whether a process is the task of that number that srun has started to write there."""
    try:
        words, environment = (
            Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0") for name in ("cmdline", "environ")
        )
    except OSError:
        return False
    return (
        f"SLURM_PROCID={number}".encode() in environment
        and str(dst).encode() in words
        and b"srun" not in words[0]
    )


@pytest.mark.slow
def test_a_member_that_hangs_is_given_up(tmp_path: Path) -> None:
    torch.save({f"w{i}": torch.randn(2_000_000) for i in range(25)}, tmp_path / "src.pt")  # 200 MB
    jobs = by_slurm(
        2,
        "reshard",
        tmp_path / "src.pt",
        tmp_path / "out",
        "--to",
        4,
        "--memory",
        "1MiB",
        CKPT_TEAM_TIMEOUT_S="5",
    )
    try:
        while jobs[0].poll() is None and not any(tmp_path.glob(".tmp.out.*/*.distcp")):
            time.sleep(0.002)
        jobs[1].send_signal(signal.SIGSTOP)
        _, errors = jobs[0].communicate(timeout=600)
    finally:
        jobs[1].kill()
        jobs[1].communicate()
    assert jobs[0].returncode == 16 and re.search(
        r"rank 1 did not answer \(.*at most 5 s", errors
    ), errors
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp.*"))


def test_slurms_variables_are_understood() -> None:
    step = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_JOB_ID": "1234567",
        "SLURM_STEP_NODELIST": "gpu[007-009,12],login1",
    }
    found = slurm_variables(step | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"})
    assert (
        found["RANK"],
        found["WORLD_SIZE"],
        found["MASTER_ADDR"],
        found["LOCAL_WORLD_SIZE"],
    ) == ("5", "8", "gpu007", "4")
    assert 20_000 <= int(found["MASTER_PORT"]) < 30_000
    for nodes, first in {
        "a": "a",
        "a,b": "a",
        "a[1-2]": "a1",
        "a[03,05]-ib,b": "a03-ib",
        "n-1[10-20]": "n-110",
    }.items():
        assert first_host(nodes) == first
    with pytest.raises(PlanError, match="not a job step of Slurm"):
        slurm_variables({"SLURM_PROCID": "5"})
