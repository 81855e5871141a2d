"""A power cut at any call of a save, merge, reshard, copy, prune: the old or the new is there,
whole, and the new for sure once it was said so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import CheckpointManager
from ckpt_tools.publish.disk.staging import restore_aside
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.steps import find_latest
from tests.command import run_command
from tests.faults.crashes import Disk, crash, record
from tests.jobs import LONG

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
STATES = 4000 if LONG else 250
Files = dict[str, bytes]
SAVE = """
import sys, torch
from ckpt_tools import CheckpointManager
with CheckpointManager(sys.argv[1], keep_last=1) as checkpoints:
    newest = checkpoints.latest()
    step = newest.number if newest else 0
    checkpoints.save(step + 1, {"w": torch.arange(4000.0) + step, "b": torch.ones(3)}, asynchronous=False)
"""
LINK = """
import sys, torch
from torch import nn
from ckpt_tools import CheckpointManager
model = nn.Sequential(nn.Linear(520, 520).requires_grad_(False), nn.Linear(2, 2))
with CheckpointManager(sys.argv[1], keep_last=None) as checkpoints:
    for step in (1, 2, 3):
        checkpoints.save(step, {"model": model, "step": step}, asynchronous=False)
"""


def contents(path: Path) -> Files:
    """Every file below a directory, or a file by itself.

    A power cut may leave the empty mark of an attempt in a result, which readers ignore.
    """
    if path.is_file():
        return {"": path.read_bytes()}
    return {
        p.relative_to(path).as_posix(): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and not (p.name.startswith("ckpt.attempt.") and not p.stat().st_size)
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    state = {f"layer{i}.w": torch.randn(50, 31) for i in range(4)} | {"step": torch.tensor(3)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "source", no_dist=True)
    return tmp_path / "source"


def run(tmp_path: Path, *words: object, faults: Sequence[str] = ()) -> Disk:
    return record([sys.executable, *map(str, words)], tmp_path / "disk", tmp_path / "trace", faults)


def old_or_new(
    name: str, old: Files | None, new: Files, seen: set[str]
) -> Callable[[Path, bool], None]:
    """Checks that what bears the name is one or the other, byte by byte."""

    def check(folder: Path, is_over: bool) -> None:
        found = contents(folder / name) if (folder / name).exists() else None
        assert found == new or (found == old and not is_over), (
            folder,
            is_over,
            found and {n: len(d) for n, d in found.items()},
        )
        seen.add("new" if found == new else "old")

    return check


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("verb", ["merge", "reshard", "copy"])
def test_a_result_is_there_whole_or_not_at_all(
    verb: str, overwrite: bool, source: Path, tmp_path: Path
) -> None:
    if verb == "copy" and overwrite:
        pytest.skip("a copy replaces nothing")
    (tmp_path / "disk").mkdir()
    name = "out.safetensors" if verb == "merge" else "out"
    words = [
        "-m",
        "ckpt_tools",
        verb,
        str(source),
        str(tmp_path / "disk" / name),
        *(("--to", "2") if verb == "reshard" else ()),
    ]
    old = None
    if overwrite:
        dcp.save({"model": {"x": torch.ones(700)}}, checkpoint_id=tmp_path / "before", no_dist=True)
        if verb == "merge":
            ckpt_tools.merge(tmp_path / "before", tmp_path / "disk" / name)
        else:
            ckpt_tools.reshard(tmp_path / "before", tmp_path / "disk" / name, to_ranks=3)
        old, words = contents(tmp_path / "disk" / name), [*words, "--overwrite"]
    disk = run(tmp_path, *words)
    new, seen = contents(tmp_path / "disk" / name), set[str]()
    crash(disk, STATES, 1, tmp_path, old_or_new(name, old, new, seen))
    assert seen == {"old", "new"}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["publish", "pull"])
def test_a_version_is_there_whole_or_not_at_all(verb: str, tmp_path: Path) -> None:
    """The version before stays, and what is pulled takes its place as a whole."""
    torch.manual_seed(0)
    base, disk_root, states = tmp_path / "base", tmp_path / "disk", []
    base.mkdir()
    (base / "config.json").write_text('{"architectures": ["Mine"]}')
    for number in range(3):
        states.append({f"layer{i}.w": torch.randn(50, 31) for i in range(3)})
        path = base / "model.safetensors" if number == 0 else tmp_path / f"{number}.safetensors"
        save_file(states[-1], path)
    disk_root.mkdir()
    root = disk_root / "root" if verb == "publish" else tmp_path / "root"
    ckpt_tools.publish_version(tmp_path / "1.safetensors", root, base=base, partial=True)
    if verb == "pull":
        ckpt_tools.pull(root, disk_root / "local")
        ckpt_tools.publish_version(tmp_path / "2.safetensors", root, partial=True)
        name, words = "local", ["pull", root, disk_root / "local"]
    else:
        name = "root/weight_v000002"
        words = ["publish", tmp_path / "2.safetensors", root, "--partial"]
    old = contents(disk_root / name) if verb == "pull" else None
    disk = run(tmp_path, "-m", "ckpt_tools", *words)
    new, seen = contents(disk_root / name), set[str]()
    assert new != old
    crash(disk, STATES, 1, tmp_path, old_or_new(name, old, new, seen))
    assert seen == {"old", "new"}


@pytest.mark.slow
def test_where_names_cannot_be_exchanged_the_old_one_comes_back(
    source: Path, tmp_path: Path
) -> None:
    """As the next run finds it: before that, for a moment, it may stand aside."""
    dcp.save({"model": {"x": torch.ones(700)}}, checkpoint_id=tmp_path / "before", no_dist=True)
    out = tmp_path / "disk" / "out"
    ckpt_tools.reshard(tmp_path / "before", out, to_ranks=3)
    old = contents(out)
    words = ["-m", "ckpt_tools", "reshard", source, out, "--to", "2", "--overwrite"]
    disk = run(tmp_path, *words, faults=["renameat2:error=EINVAL"])
    seen, stood_aside = set[str](), set[bool]()
    check = old_or_new("out", old, contents(out), seen)

    def check_the_next(folder: Path, is_over: bool) -> None:
        stood_aside.add(not (folder / "out").exists())
        restore_aside(folder)
        check(folder, is_over)

    crash(disk, 6 * STATES, 4, tmp_path, check_the_next)
    assert seen == {"old", "new"} and stood_aside == {True, False}


@pytest.mark.slow
def test_a_run_has_a_newest_step_that_is_right(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    right: dict[str, Files] = {}
    for number in (1, 2):
        disk = run(tmp_path, "-c", SAVE, tmp_path / "disk" / "run")
        right[f"step-{number:08d}"] = contents(tmp_path / "disk" / "run" / f"step-{number:08d}")
        seen = set[str]()

        def check(folder: Path, is_over: bool, number: int = number, seen: set[str] = seen) -> None:
            found = (
                find_latest(open_root(folder / "run")).step if (folder / "run").exists() else None
            )
            name = Path(found.path).name if found else ""
            assert name in ([f"step-{number:08d}"] if is_over else ["", *right][number - 1 :]), (
                folder,
                name,
            )
            assert not name or contents(folder / "run" / name) == right[name], (folder, name)
            seen.add(name)

        crash(disk, STATES, 2, tmp_path / f"states{number}", check)
        assert len(seen) == 2


@pytest.mark.slow
def test_steps_that_link_a_file_are_right_after_a_power_cut(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    root = tmp_path / "disk" / "run"
    disk = run(tmp_path, "-c", LINK, root)
    assert os.lstat(root / "step-00000003" / "__0_1.distcp").st_nlink == 3
    right, seen = {path.name: contents(path) for path in root.glob("step-*")}, set[str]()

    def check(folder: Path, is_over: bool) -> None:
        steps = list((folder / "run").glob("step-*"))
        assert all(contents(path) == right[path.name] for path in steps), folder
        newest = max((path.name for path in steps), default="")
        assert newest == "step-00000003" or not is_over
        seen.add(newest)

    crash(disk, STATES // 2, 5, tmp_path / "states", check)
    assert seen == {"", *right}


def test_what_is_pruned_goes_and_the_newest_stays(tmp_path: Path) -> None:
    run_folder = tmp_path / "disk" / "run"
    with CheckpointManager(run_folder, keep_last=9) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": torch.arange(2000.0) + step}, asynchronous=False)
    right = {path.name: contents(path) for path in run_folder.glob("step-*")}
    disk = run(tmp_path, "-m", "ckpt_tools", "prune", run_folder, "--keep-last", "1")

    def check(folder: Path, is_over: bool) -> None:
        found = find_latest(open_root(folder / "run")).step
        assert found is not None and Path(found.path).name == "step-00000003"
        assert all(contents(path) == right[path.name] for path in (folder / "run").glob("step-*"))

    crash(disk, STATES, 3, tmp_path, check)


def test_prune_tells_the_bytes_that_a_dead_job_left(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
from ckpt_tools.publish.disk.staging import staging
with staging(pathlib.Path({str(tmp_path)!r}) / "run" / "step-00000009", "a" * 32) as place:
    (place.path / "x").write_bytes(b"x" * 50_000)
    os.link(place.path / "x", place.path / "again")
    os.link({str(tmp_path / "other")!r}, place.path / "shared")
    os._exit(1)
"""
    (tmp_path / "other").write_bytes(b"y" * 50_000)
    ckpt_tools.save(tmp_path / "run" / "step-00000001", {"w": torch.ones(4)})
    subprocess.run([sys.executable, "-c", code])
    said = run_command("ls", tmp_path / "run")
    assert (
        said.returncode == 0
        and "KB in 1 hidden directory; the next save or ckpt prune" in said.stderr
    )
    for more, verb in ((["--dry-run"], "would remove"), ([], "removed")):
        done = run_command("prune", tmp_path / "run", "--keep-last", "1", *more)
        (line,) = [line for line in done.stdout.splitlines() if "what a dead job left" in line]
        size = re.search(r"  ([\d.]+) KB, what", line)
        assert line.startswith(verb) and size and 50 <= float(size[1]) < 55
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["step-00000001"]
    assert "unfinished" not in run_command("ls", tmp_path / "run").stderr


@pytest.mark.parametrize("kind", ["files", "folders"])
def test_the_states_are_bad_enough_to_show_a_missing_fsync(
    kind: str, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    disk = run(
        tmp_path, "-m", "ckpt_tools", "reshard", source, tmp_path / "disk" / "out", "--to", "2"
    )
    for inode in disk.inodes:
        if inode.is_folder == (kind == "folders"):
            inode.syncs.clear()
    with pytest.raises(AssertionError):
        crash(
            disk,
            STATES,
            4,
            tmp_path,
            old_or_new("out", None, contents(tmp_path / "disk" / "out"), set()),
        )
