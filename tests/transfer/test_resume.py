"""An interrupted merge, reshard or convert goes on with `--resume`: the same bytes as without the
interruption, and nothing done twice.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.errors import CheckpointError, IntegrityError, PlanError
from ckpt_tools.publish import journal
from tests import jobs
from tests.jobs import LONG, torchrun_command

ROOT = Path(__file__).parents[2]
NBYTES = 200_000_000
# with buffers of 1 MiB; a note is as long as its names
NUM_STEPS, STEP_NOTE_BYTES = NBYTES / (1 << 20) * 3, 300
MERGE = ("merge", "--dtype", "bf16", "--memory", "1MiB", "--jobs", "1")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three ranks have saved, 200 MB: large tensors, small ones, a value that a cast makes
    infinite; without a manifest.
    """
    path = tmp_path_factory.mktemp("resume")
    torch.manual_seed(0)
    model = {
        f"layers.{i}.w": torch.randn(1_000_000 // 100, 100) for i in range(NBYTES // 4_000_000)
    }
    state = {
        "model": model | {"norm": torch.full((7,), 3.4e38), "step": torch.tensor(3.0)},
        "optimizer": {"lr": 0.1},
    }
    dcp.save(state, checkpoint_id=path / "one", no_dist=True)
    ckpt_tools.reshard(path / "one", path / "src", to_ranks=3)
    for manifest in (path / "src").glob("ckpt.manifest.*"):
        manifest.unlink()
    ckpt_tools.merge(path / "src", path / "merged.safetensors", dtype="bf16")
    shutil.rmtree(path / "one")
    return path


def command(verb: str, src: Path, dst: Path, *options: str, size: int = 1) -> list[str]:
    words = ["-m", "ckpt_tools", verb, str(src), str(dst), *options]
    return [sys.executable, *words] if size == 1 else torchrun_command(size, *words)


def journals(folder: Path) -> list[Path]:
    for _ in range(5):
        with suppress(FileNotFoundError):  # one was renamed under the glob's eyes
            return sorted(folder.glob(f".tmp.*/{journal.GLOB}"))
    return []


def interrupt(
    words: Sequence[str],
    folder: Path,
    share: float,
    number: int = signal.SIGKILL,
    member: int | None = None,
) -> str:
    """Starts a command and sends it, or one of the processes that it starts, a signal once so much
    of the bytes is written.
    """
    done = jobs.interrupt(
        words,
        lambda: sum(map(_size, journals(folder))) >= share * NUM_STEPS * STEP_NOTE_BYTES,
        number,
        member,
    )
    return done.stderr


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def written(path: Path) -> int:
    """Bytes that a journal tells of."""
    try:
        return sum(
            int(p[1])
            for line in path.read_bytes().splitlines()[1:]
            for ps in json.loads(line[17:])["files"].values()
            for p in ps
        )
    except (OSError, ValueError):
        return 0


def ckpt(words: Sequence[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (done.returncode == 0) == (code == 0), done.stderr
    return done


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9] if LONG else [0.5])
def test_a_killed_merge_goes_on(share: float, source: Path, tmp_path: Path) -> None:
    words = command(*MERGE[:1], source / "src", tmp_path / "out.safetensors", *MERGE[1:])
    for _ in range(5):
        interrupt(words, tmp_path, share)
        before = sum(map(written, journals(tmp_path)))
        if not (tmp_path / "out.safetensors").exists():
            break
        for path in tmp_path.glob("out.safetensors*"):
            path.unlink()  # on a busy machine, the signal came too late
    assert before and not (tmp_path / "out.safetensors").exists()
    done = ckpt([*words, "--resume", "--json"])
    result = json.loads(done.stdout)
    total = ckpt_tools.merge(source / "src", tmp_path / "x.safetensors", dtype="bf16", dry_run=True)
    assert result["kept_nbytes"] == before and result["overflowed"] == {"norm": 7}
    # bf16 is half of what was read
    assert result["read_nbytes"] <= total.read_nbytes - 2 * result["kept_nbytes"] + (64 << 10)
    assert (tmp_path / "out.safetensors").read_bytes() == (
        source / "merged.safetensors"
    ).read_bytes()
    assert ckpt_tools.verify(tmp_path / "out.safetensors").problems == []
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_what_is_kept_and_what_not(source: Path, tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM leave nothing, but with --resume all that is done; a second interruption
    does not lose the first one's.
    """
    words = command(
        "reshard", source / "src", tmp_path / "out", "--to", "4", "--memory", "1MiB", "--jobs", "1"
    )
    errors = interrupt(words, tmp_path, 0.1, signal.SIGINT)
    assert "nothing was left" in errors and list(tmp_path.iterdir()) == []
    errors = interrupt([*words, "--resume"], tmp_path, 0.3, signal.SIGINT)
    assert "the same command continues from there" in errors and len(journals(tmp_path)) == 1
    interrupt([*words, "--resume"], tmp_path, 0.5, signal.SIGTERM)
    assert len(journals(tmp_path)) == 2 and not (tmp_path / "out").exists()
    done = ckpt([*words, "--resume"])
    assert "was there from an earlier attempt" in done.stdout
    assert (
        ckpt_tools.diff(source / "src", tmp_path / "out").is_same
        and ckpt_tools.verify(tmp_path / "out").problems == []
    )
    assert not any(tmp_path.glob(".*")) and not any((tmp_path / "out").glob(".ckpt*"))


@pytest.fixture
def halted(source: Path, tmp_path: Path) -> Path:
    """A folder with a source of its own and a merge of it that was killed in the middle."""
    shutil.copytree(source / "src", tmp_path / "src")
    interrupt(
        command("merge", tmp_path / "src", tmp_path / "out.safetensors", *MERGE[1:]), tmp_path, 0.5
    )
    assert journals(tmp_path)
    return tmp_path


def resumed(folder: Path, **how: object) -> ckpt_tools.TransferResult:
    return ckpt_tools.merge(
        folder / "src",
        folder / "out.safetensors",
        **{"dtype": "bf16", "memory_bytes": 1 << 20, "resume": True, **how},
    )  # type: ignore[arg-type]


def staged(folder: Path) -> Path:
    return next(p for p in folder.glob(".tmp.*/*.safetensors"))


def _copied(place: Path) -> None:
    """An archive or a clone has brought it: the same bytes, modes and owner."""
    shutil.copytree(place, place.with_name("copy"))
    shutil.rmtree(place)
    place.with_name("copy").rename(place)


def _journal_is(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def forge(place: Path) -> None:
        for path in place.glob(journal.GLOB):
            path.unlink()
            make(path)

    return forge


def _copied_with_many_journals(place: Path) -> None:
    """One of them guesses the inode of the directory."""
    _copied(place)
    (path,) = place.glob(journal.GLOB)
    head = json.loads(path.read_bytes().splitlines()[0].partition(b" ")[2])
    guess = json.dumps(head | {"inode": place.lstat().st_ino}).encode()
    crc = f"{crc64nvme(guess):016x} ".encode()
    path.with_name(path.name + "0").write_bytes(crc + guess + b"\n")


def _tiles_are(tiles: list[Any]) -> Callable[[Path], None]:
    def forge(place: Path) -> None:
        (path,) = place.glob(journal.GLOB)
        lines = path.read_bytes().splitlines(keepends=True)
        head = json.loads(lines[0].partition(b" ")[2])
        data = json.dumps(head | {"tiles": tiles}).encode()
        path.write_bytes(b"".join([f"{crc64nvme(data):016x} ".encode(), data, b"\n", *lines[1:]]))

    return forge


def _data_is_linked(hard: bool) -> Callable[[Path], None]:
    def forge(place: Path) -> None:
        victim, data = place.parent / "victim", next(place.glob("*.safetensors"))
        data.unlink()
        data.hardlink_to(victim) if hard else data.symlink_to(victim)

    return forge


@pytest.mark.slow
@pytest.mark.parametrize(
    "forge",
    [
        _copied,
        _copied_with_many_journals,
        lambda place: place.chmod(0o755),
        _data_is_linked(hard=False),
        _data_is_linked(hard=True),
        _journal_is(os.mkfifo),
        _journal_is(os.mkdir),
        _journal_is(lambda path: path.symlink_to("/dev/zero")),
    ],
    ids=[
        "copied",
        "many journals",
        "mode",
        "link",
        "hard link",
        "fifo",
        "directory",
        "device",
    ],
)
def test_an_attempt_that_somebody_brought_is_not_resumed(
    forge: Callable[[Path], None], halted: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its bytes would be those of the result, and its links would lead writes elsewhere."""
    (halted / "victim").write_bytes(b"mine")
    forge(staged(halted).parent)
    assert resumed(halted).kept_nbytes == 0
    assert (halted / "victim").read_bytes() == b"mine"
    assert (halted / "out.safetensors").read_bytes() == (source / "merged.safetensors").read_bytes()
    # a directory of another mode is not one of an attempt: nobody looks at it, or removes it
    assert "not resumed, since" in caplog.text or any(halted.glob(".tmp.*"))


@pytest.mark.slow
def test_a_journal_with_a_torn_first_line_does_not_stop_the_others(halted: Path) -> None:
    """A power cut may leave it so."""
    (whole,) = journals(halted)
    whole.with_name(whole.name + "0").write_bytes(whole.read_bytes()[:20])
    assert resumed(halted).kept_nbytes > 0


@pytest.mark.parametrize("tiles", [[1, 1], [True, True]], ids=str)
def test_a_journal_with_tiles_of_a_byte_is_not_believed(tiles: list[Any], halted: Path) -> None:
    """The work would take hours."""
    _tiles_are(tiles)(staged(halted).parent)
    assert resumed(halted).kept_nbytes == 0


@pytest.mark.slow
def test_an_endless_line_of_a_journal_is_not_read(halted: Path) -> None:
    path = journals(halted)[0]
    os.truncate(path, 1 << 43)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resumed(halted).kept_nbytes > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("out", ["out.safetensors", "out"])
def test_what_is_complete_is_left_as_it_is(out: str, source: Path, tmp_path: Path) -> None:
    words = ["merge", "--dtype", "bf16"] if "." in out else ["reshard", "--to", "2"]
    one, two = (
        command(words[0], source / "src", tmp_path / out, *words[1:], *more)
        for more in ([], ["--resume"])
    )
    ckpt(one)
    before = {
        path: (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_size)
        for path in tmp_path.rglob("*")
    }
    done = ckpt(two)
    assert "it is there since an earlier attempt; nothing was done" in done.stdout
    assert {
        path: (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_size)
        for path in tmp_path.rglob("*")
    } == before
    assert "the destination exists" in ckpt(one, 15).stderr
    other = command(
        words[0],
        source / "src",
        tmp_path / out,
        *words[1:-1],
        {"bf16": "fp16", "2": "3"}[words[-1]],
        "--resume",
    )
    assert "the destination exists" in ckpt(other, 15).stderr
    data = max((p for p in tmp_path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(data, data.stat().st_size - 1)
    assert "the destination exists" in ckpt(two, 15).stderr


@pytest.mark.slow
def test_other_files_beside_the_weights_are_another_result(source: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    words = command(
        "convert",
        source / "src",
        tmp_path / "out",
        "--to",
        "hf",
        "--base",
        str(tmp_path / "base"),
        "--resume",
    )
    for number, code in ((1, 0), (1, 0), (2, 15)):
        (tmp_path / "base" / "config.json").write_text(
            json.dumps({"model_type": "x", "layers": number})
        )
        ckpt(words, code)


@pytest.mark.slow
def test_another_source_or_another_wish_is_begun_anew(halted: Path, source: Path) -> None:
    kept = next(halted.glob(".tmp.*"))
    shutil.copytree(kept, halted / "kept")
    result = resumed(halted, dtype=None)
    ckpt_tools.merge(source / "src", halted / "whole.safetensors")
    assert (
        result.kept_nbytes == 0
        and (halted / "out.safetensors").read_bytes() == (halted / "whole.safetensors").read_bytes()
    )
    (halted / "out.safetensors").unlink()
    for manifest in halted.glob("*.ckpt.manifest.*"):
        manifest.unlink()
    os.rename(halted / "kept", kept)
    one = sorted((halted / "src").glob("*.distcp"))[1]
    one.write_bytes(one.read_bytes())  # the same bytes at another time
    result = resumed(halted)
    assert (
        result.kept_nbytes == 0
        and (halted / "out.safetensors").read_bytes()
        == (source / "merged.safetensors").read_bytes()
    )
    assert not list(halted.glob(".tmp.*"))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "longer"])
def test_what_is_not_there_any_more_is_done_again(damage: str, halted: Path, source: Path) -> None:
    file = staged(halted)
    head = json.loads(journals(halted)[0].read_bytes().splitlines()[1][17:])
    (start, nbytes, *_), *_ = next(iter(head["files"].values()))
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[start + nbytes // 2] ^= 16
        file.write_bytes(data)
    elif damage == "cut":
        os.truncate(file, start + nbytes - 1)
    elif damage == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size + 1)
    result = resumed(halted)
    assert (result.kept_nbytes > 0) == (damage == "flip")
    assert (halted / "out.safetensors").read_bytes() == (source / "merged.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20 if LONG else 2))
def test_a_damaged_journal_is_believed_in_nothing_wrong(
    seed: int, halted: Path, source: Path
) -> None:
    rng, path = random.Random(seed), journals(halted)[0]
    data = bytearray(path.read_bytes())
    for _ in range(5):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(
        data[: rng.randrange(len(data) // 2, len(data))] + b"{}\n\n0 []\n" + rng.randbytes(50)
    )
    result = resumed(halted)
    assert (halted / "out.safetensors").read_bytes() == (source / "merged.safetensors").read_bytes()
    assert (
        result.overflowed == {"norm": 7}
        and ckpt_tools.verify(halted / "out.safetensors").problems == []
    )


def test_a_directory_in_which_others_could_have_written_is_not_gone_on_with(halted: Path) -> None:
    next(halted.glob(".tmp.*")).chmod(0o777)
    assert resumed(halted).kept_nbytes == 0


@pytest.mark.slow
def test_nobody_goes_on_from_bytes_that_were_read_wrong(halted: Path, source: Path) -> None:
    """Damage in the source, of which the interrupted run had read one half: found, and nothing of
    it is kept.
    """
    path = max((halted / "src").glob("*.distcp"), key=lambda p: p.stat().st_size)
    at = path.stat()
    data = bytearray(path.read_bytes())
    for place in range(1000, len(data), 500_000):
        data[place] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    with pytest.raises(CheckpointError, match="damaged"):
        resumed(halted)
    assert not journals(halted) and not (halted / "out.safetensors").exists()


def test_a_run_that_finds_damage_leaves_nothing_to_go_on_from(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source / "src", tmp_path / "src")
    path = max((tmp_path / "src").glob("*.distcp"), key=lambda p: p.stat().st_size)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 + 100_000)  # within a payload
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(IntegrityError, match="damaged since they were written"):
        resumed(tmp_path)
    assert not list(tmp_path.glob(".tmp.*"))


def test_less_memory_than_the_interrupted_run_is_refused(halted: Path) -> None:
    with pytest.raises(PlanError, match="larger buffers"):
        resumed(halted, memory_bytes=1 << 19, jobs=1)
    assert journals(halted)
    assert resumed(halted, jobs=8).kept_nbytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("kill", range(50 if LONG else 1))
def test_a_team_of_which_one_is_killed_goes_on(kill: int, source: Path, tmp_path: Path) -> None:
    """At any instant, with another number of processes; at most 1.1 times the bytes of one run are
    read in all.
    """
    rng = random.Random(kill + 1)
    options = ("--to", "4", "--memory", "1MiB", "--jobs", "1", "--resume")
    for _ in range(10):
        share, member = rng.random(), rng.randrange(3)
        interrupt(
            command("reshard", source / "src", tmp_path / "out", *options, size=3),
            tmp_path,
            share * 1.8,
            member=member,
        )
        if not (tmp_path / "out").exists():
            break
        assert ckpt_tools.diff(source / "src", tmp_path / "out").is_same  # it was too late
        shutil.rmtree(tmp_path / "out")
    before = sum(map(written, journals(tmp_path)))
    done = ckpt(
        [
            *command("reshard", source / "src", tmp_path / "out", *options, size=2 + kill % 3),
            "--json",
        ]
    )
    result = json.loads(done.stdout)
    assert result["kept_nbytes"] >= before and before + result["read_nbytes"] <= 1.1 * NBYTES
    assert (
        ckpt_tools.diff(source / "src", tmp_path / "out").is_same
        and ckpt_tools.verify(tmp_path / "out").problems == []
    )
    assert not list(tmp_path.glob(".*"))
