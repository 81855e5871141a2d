"""Merge, reshard, convert and copy on file systems that share blocks: XFS and Btrfs on loop devices.

What they write is compared with torch's own reading, and with what the same call writes on a file
system that cannot clone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import CheckpointManager, IntegrityError, StorageError
from ckpt_tools.publish.base import CopiedRange
from ckpt_tools.publish.disk.clones import DiskClones
from ckpt_tools.storage import PinnedStore
from tests.command import run_command
from tests.jobs import PYTHON_PATH, QUICK_STRACE
from tests.servers.buckets import until
from tests.states import one_step
from tests.strategies import flip

MB = 1_000_000
MARKS = "**/ckpt.attempt.*"


def mounted(folder: Path, mib: int, kind: str = "xfs") -> Iterator[Path]:
    image, where = folder / "image", folder / kind
    where.mkdir()
    with image.open("wb") as file:
        file.truncate(mib << 20)
    if os.geteuid() or not shutil.which(f"mkfs.{kind}"):
        pytest.skip(f"needs root and mkfs.{kind}")
    subprocess.run([f"mkfs.{kind}", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, where], capture_output=True).returncode:
        pytest.skip("no loop device can be mounted here")
    try:
        yield where
    finally:
        subprocess.run(["umount", "--lazy", where], check=True)


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def disk(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Path]:
    yield from mounted(tmp_path_factory.mktemp("disk"), 2000, request.param)


@pytest.fixture
def work(disk: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = disk / f"{abs(hash(request.node.nodeid)):x}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "a.weight": (1024, 1024),
        "odd": (333, 77),
        "b.weight": (2048, 512),
        "wide": (100, 1001),
    }
    found = {f"model.{n}": torch.randn(s, generator=generator) for n, s in shapes.items()}
    found["model.half"] = torch.randn(4096, 256, generator=generator).bfloat16()
    found["model.none"] = torch.zeros(0, 4)
    found["model.one"] = torch.tensor(3.0)
    return found


def free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def used(path: Path) -> int:
    os.sync()
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_verb_clones_and_gives_the_bytes_of_another_file_system(
    ranks: int, work: Path, tmp_path: Path
) -> None:
    state = weights()
    ckpt_tools.save(work / "one", state)
    ckpt_tools.reshard(work / "one", work / "src", to_ranks=ranks)
    shutil.copytree(work / "src", tmp_path / "src")
    source = work / "src"
    kept, written = {}, {}
    for name, call in {
        "m.safetensors": lambda at, to: ckpt_tools.merge(at, to),
        "hf": lambda at, to: ckpt_tools.convert(at, to, to="hf", max_shard_bytes=5 * MB),
        "m.pt": lambda at, to: ckpt_tools.convert(at, to, to="torch"),
        "r1": lambda at, to: ckpt_tools.reshard(at, to, to_ranks=1),
        "r2": lambda at, to: ckpt_tools.reshard(at, to, to_ranks=2),
        "copy": lambda at, to: ckpt_tools.copy(at, to),
    }.items():
        before = used(work)
        done = call(source, work / name)
        written[name] = used(work) - before
        kept[name] = done.store_nbytes
        other = call(tmp_path / "src", tmp_path / name)
        assert other.store_nbytes == 0
        if name == "hf":
            notes = [note for note in done.notes if note.startswith("not read again for the proof")]
            assert len(notes) == 1 and notes[0].endswith("that were cloned, or copied by the store")
            with_elements = sum(t.numel() > 0 for t in state.values())
            assert notes[0].split(": ")[1].split()[0] == str(with_elements - done.num_proved)
            assert other.num_proved == with_elements
            assert not any("not read again" in note for note in other.notes)
        assert ckpt_tools.verify(work / name).problems == []
        for path in (p for p in (tmp_path / name).rglob("*") if p.is_file()):
            ours = work / name / path.relative_to(tmp_path / name)
            if not path.name.startswith("ckpt.manifest"):
                assert ours.read_bytes() == path.read_bytes(), ours
    assert not [*work.glob(MARKS)]  # Btrfs does not list them in a directory that was opened before
    total = sum(t.nbytes for t in state.values())
    share = 0.9 if ranks == 1 else 0.6  # thirds of some tensors begin in the middle of a page
    assert min(kept["m.safetensors"], kept["hf"]) > share * total and kept["copy"] > total
    assert written["m.safetensors"] < (1.1 - share) * total
    merged = load_file(work / "m.safetensors")
    assert all(torch.equal(merged[n], t) for n, t in state.items())
    target = {n: torch.empty_like(t) for n, t in state.items()}
    dcp.load(target, checkpoint_id=work / "r2", no_dist=True)
    assert all(torch.equal(target[n], t) for n, t in state.items())


def test_a_complete_version_is_pulled(work: Path) -> None:
    """The note of the pull lies in memory over the version, so nothing can clone it."""
    state = weights()
    save_file({n.removeprefix("model."): t for n, t in state.items()}, work / "m.safetensors")
    (work / "base").mkdir()
    shutil.copy(work / "m.safetensors", work / "base" / "model.safetensors")
    (work / "base" / "config.json").write_text("{}")
    for _ in range(2):
        first = ckpt_tools.publish_version(work / "base", work / "root", full=True, partial=True)
    assert first.version == 2
    for number in (1, 2):
        done = ckpt_tools.pull(work / "root", work / "local", version=number)
        assert (done.version, done.num_deltas) == (number, 0)
    merged = load_file(next((work / "local").glob("*.safetensors")))
    assert all(torch.equal(merged[n.removeprefix("model.")], t) for n, t in state.items())
    assert len([*(work / "local").glob("ckpt.pulled.*")]) == 1
    assert ckpt_tools.pull(work / "root", work / "local").is_there


def test_a_clone_changes_with_neither_file(work: Path) -> None:
    ckpt_tools.save(work / "src", weights())
    ckpt_tools.merge(work / "src", work / "m.safetensors")
    data = (work / "m.safetensors").read_bytes()
    with next((work / "src").glob("*.distcp")).open("r+b") as file:
        file.write(b"\xff" * (4 * MB))
    assert (work / "m.safetensors").read_bytes() == data
    shutil.rmtree(work / "src")
    assert ckpt_tools.verify(work / "m.safetensors").problems == []


def test_damage_of_the_source_is_found_in_the_clone(work: Path) -> None:
    """A clone reads nothing, so the damage goes along, and the seal tells."""
    ckpt_tools.save(work / "src", weights())
    path = next((work / "src").glob("*.distcp"))
    at = path.read_bytes().index(weights()["model.a.weight"].numpy().tobytes()[:64])
    with path.open("r+b") as file:
        file.seek(at + 200_000)
        file.write(b"\x55" * 8)
    ckpt_tools.merge(work / "src", work / "m.safetensors")
    problems = ckpt_tools.verify(work / "m.safetensors").problems
    assert [problem.fqn for problem in problems] == ["", "model.a.weight"]
    with pytest.raises(IntegrityError):
        ckpt_tools.load(
            work / "m.safetensors",
            {"model": {"a": {"weight": torch.empty(1024, 1024)}}},
            strict=False,
        )


def test_what_nobody_has_sealed_is_read_and_written(work: Path) -> None:
    dcp.save(weights(), checkpoint_id=work / "stock", no_dist=True)
    assert ckpt_tools.merge(work / "stock", work / "m.safetensors").store_nbytes == 0
    ckpt_tools.save(work / "src", weights())
    cast = ckpt_tools.merge(work / "src", work / "c.safetensors", dtype="bf16")
    assert cast.store_nbytes < 3 * MB  # only what is bfloat16 already


def test_the_command_says_what_it_cloned(work: Path) -> None:
    ckpt_tools.save(work / "src", weights())
    done = run_command("merge", work / "src", work / "m.safetensors")
    assert "cloned (both files share the blocks)" in done.stdout
    done = run_command("copy", work / "src", work / "copy")
    assert "cloned (both files share the blocks)" in done.stdout


def test_another_file_system_and_a_full_one(work: Path, tmp_path: Path) -> None:
    ckpt_tools.save(work / "src", weights())
    assert ckpt_tools.merge(work / "src", tmp_path / "m.safetensors").store_nbytes == 0
    for small in mounted(tmp_path, 310):
        with CheckpointManager(small / "run") as checkpoints:
            checkpoints.save(1, weights(), asynchronous=False)
        step = small / "run" / "step-00000001"
        os.sync()
        with (small / "rest").open("wb") as rest:  # the file system gives blocks back at will
            while (room := free(small)) > MB // 2:
                rest.write(os.urandom(min(room - MB // 2 + 4096, 50 * MB)))
                rest.flush()
                os.fsync(rest.fileno())
        with pytest.raises(StorageError):  # the free space is asked for first
            ckpt_tools.merge(step, small / "m.safetensors")
        assert sorted(p.name for p in small.iterdir()) == ["rest", "run"]


def test_what_the_file_system_refuses_to_clone_is_copied(work: Path) -> None:
    data = os.urandom(3 * MB)
    (work / "a").write_bytes(data)
    source, into = PinnedStore(work), PinnedStore(work)
    ranges = [CopiedRange(5, 2 * MB, "a", 77)]  # of no whole blocks
    DiskClones(into, source).create_copied("b", 2 * MB + 5, (), ranges).finish()
    assert (work / "b").read_bytes() == bytes(5) + data[77 : 77 + 2 * MB]


def test_thin_reads_before_it_removes(work: Path) -> None:
    """The damaged step stays, as on any file system."""
    model = torch.nn.Linear(1024, 1024)
    optimizer = one_step(model, torch.ones(1024))
    with CheckpointManager(work / "run", keep_last=None) as checkpoints:
        for number in (1, 2):
            state = {"model": model, "optimizer": optimizer}
            checkpoints.save(number, state, asynchronous=False)
    (path,) = (work / "run" / "step-00000001").glob("*.distcp")
    at = path.read_bytes().index(model.weight.detach().numpy().tobytes()[:64])
    flip(path, at + 300_000, 3)
    done = ckpt_tools.thin(work / "run", 1)
    assert not done.thinned and len(done.damaged) == 1


JOB = """
import sys, ckpt_tools
while True:
    ckpt_tools.merge(sys.argv[1], sys.argv[2], overwrite=True)
    ckpt_tools.reshard(sys.argv[1], sys.argv[3], to_ranks=1, overwrite=True)
"""


def test_a_kill_leaves_a_whole_result_or_none(work: Path) -> None:
    ckpt_tools.save(work / "one", weights())
    ckpt_tools.reshard(work / "one", work / "src", to_ranks=4)
    out, again = work / "m.safetensors", work / "r1"
    for number in range(12):
        job = subprocess.Popen(
            [sys.executable, "-c", JOB, work / "src", out, again],
            env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        )
        before = out.stat().st_ino if out.exists() else 0
        until(lambda: out.exists() and out.stat().st_ino != before, 60)  # noqa: B023  (at once)
        time.sleep(0.03 * number)
        job.send_signal(signal.SIGKILL)
        job.wait()
        for result in (out, again):
            assert not result.exists() or ckpt_tools.verify(result).problems == []
    ckpt_tools.merge(work / "src", out, overwrite=True)
    ckpt_tools.reshard(work / "src", again, to_ranks=1, overwrite=True)
    names = {p.name for p in work.iterdir() if ".ckpt.manifest." not in p.name}
    assert names == {"m.safetensors", "one", "r1", "src"}


def save_frozen(work: Path, inject: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    """Saves four steps with frozen parameters under strace, and returns their frozen files."""
    shutil.rmtree(work / "run", ignore_errors=True)
    job = Path(__file__).parents[1] / "loop" / "frozen_job.py"
    strace = [*QUICK_STRACE, "-o", str(work / "trace"), "-e", "trace=linkat,ioctl"]
    strace += ["-e", "inject=linkat:error=EPERM", *(["-e", f"inject={inject}"] if inject else [])]
    done = subprocess.run(
        [*strace, sys.executable, str(job), str(work / "run")],
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    steps = sorted((work / "run").glob("step-*"))
    assert len(steps) == 3 and all(ckpt_tools.verify(step).problems == [] for step in steps)
    with ckpt_tools.open(steps[0]) as first:
        want = first["model.0.weight"].torch()
    for step in steps:
        with ckpt_tools.open(step) as now:
            assert torch.equal(now["model.0.weight"].torch(), want)
    return done, [step / "__0_1.distcp" for step in steps]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_where_links_fail_the_file_of_frozen_parameters_is_cloned(work: Path) -> None:
    done, files = save_frozen(work, "")
    assert all(int(nbytes) > MB for nbytes in done.stdout.split()[1:])
    assert len({path.stat().st_ino for path in files}) == 3
    blocks = subprocess.run(["du", "-s", "-B1", work / "run"], capture_output=True, text=True)
    assert int(blocks.stdout.split()[0]) > 3 * MB, "each file has a size of its own"
    before = used(work)
    for path in files[1:]:
        path.unlink()
    assert before - used(work) < 200_000, "but they share their blocks"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_clone_of_the_frozen_file_that_fails_is_written_instead(work: Path) -> None:
    save_frozen(work, "")
    seen, calls = Counter[str](), set[int]()
    for line in (work / "trace").read_text().splitlines():
        if " ioctl(" in line:  # strace counts the calls of each thread
            seen[line.split()[0]] += 1
            if "FICLONERANGE" in line:
                calls.add(seen[line.split()[0]])
    assert calls
    told = ""
    for number in calls:
        done, _ = save_frozen(work, f"ioctl:error=EIO:when={number}")
        told += done.stderr
    assert "frozen parameters are written again: cannot clone into" in told, told
