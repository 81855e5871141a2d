"""Copies of stock checkpoints, which have no manifest: damage is found in passing, and a second
copy finds everything there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools import IntegrityError, StorageError
from tests.jobs import torchrun_command
from tests.servers.buckets import uploads
from tests.servers.servers import Server

Run = Callable[..., subprocess.CompletedProcess[str]]
Saved = Callable[[int], Path]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """Tensors longer and shorter than a tile of 64 KiB, and objects."""
    state = {"a": torch.arange(300_000.0), "b": torch.ones(7), "step": 5, "lists": [1, "x"]}
    dcp.save(state, checkpoint_id=tmp_path / "src", no_dist=True)
    return tmp_path / "src"


@pytest.mark.parametrize("part", range(12))
def test_a_flipped_bit_of_a_stock_checkpoint_is_not_copied(
    part: int, stock: Path, tmp_path: Path
) -> None:
    """Anywhere in its data: header, payload, record, directory of the zip."""
    data = stock / "__0_0.distcp"
    flip(data, (data.stat().st_size - 1) * part // 11)
    with pytest.raises(IntegrityError):
        ckpt_tools.copy(stock, tmp_path / "dst", memory_bytes=1 << 20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_a_flipped_bit_of_one_torch_file_is_not_copied(tmp_path: Path, ckpt: Run) -> None:
    torch.save({"w": torch.arange(50_000.0)}, tmp_path / "src.pt")
    assert ckpt("copy", tmp_path / "src.pt", tmp_path / "good.pt").returncode == 0
    flip(tmp_path / "src.pt", 90_000)
    done = ckpt("copy", tmp_path / "src.pt", tmp_path / "dst.pt")
    assert done.returncode == 14 and "damaged" in done.stderr and not (tmp_path / "dst.pt").exists()


@pytest.mark.slow
def test_processes_together_find_a_record_that_each_has_read_in_part(
    stock: Path, tmp_path: Path
) -> None:
    flip(stock / "__0_0.distcp", 600_000)
    command = torchrun_command(
        2, "-m", "ckpt_tools", "copy", stock, tmp_path / "dst", "--memory", "1MiB"
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0 and "damaged" in done.stderr and not (tmp_path / "dst").exists(), (
        done.stderr
    )


def test_a_second_copy_finds_everything_there(stock: Path, tmp_path: Path, ckpt: Run) -> None:
    torch.save({"w": torch.arange(50.0)}, tmp_path / "one.pt")
    for source, target in ((stock, "dst"), (tmp_path / "one.pt", "copied.pt")):
        assert ckpt("copy", source, tmp_path / target).returncode == 0
        before = {
            p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file()
        }
        done = ckpt("copy", source, tmp_path / target)
        assert done.returncode == 0 and "it is there already" in done.stdout, done.stderr
        assert {
            p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file()
        } == before
    flip(tmp_path / "dst" / "__0_0.distcp", 700)  # as long, and another
    done = ckpt("copy", stock, tmp_path / "dst")
    assert done.returncode == 15 and "the destination exists" in done.stderr
    shutil.rmtree(tmp_path / "dst")
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "dst", no_dist=True)
    with pytest.raises(StorageError, match="the destination exists"):
        ckpt_tools.copy(stock, tmp_path / "dst")


def test_the_mark_that_a_power_cut_leaves_is_not_copied(tmp_path: Path, ckpt: Run) -> None:
    """The copy has the id of the attempt that wrote the source, and so a mark of the same name."""
    ckpt_tools.save(tmp_path / "a", {"w": torch.ones(3)})
    manifest = next((tmp_path / "a").glob("ckpt.manifest.*"))
    (tmp_path / "a" / manifest.name.replace("manifest", "attempt")).touch()
    assert "3 files" in ckpt("copy", tmp_path / "a", tmp_path / "b").stdout
    left = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert left == [".metadata", "__0_0.distcp", manifest.name]
    assert ckpt("verify", tmp_path / "b").returncode == 0


def test_a_folder_as_the_destination_keeps_the_name_of_the_step(
    stock: Path, tmp_path: Path, ckpt: Run
) -> None:
    for dst in (f"{tmp_path}/into/", f"{tmp_path}/exact/{stock.name}/", f"{tmp_path}/plain"):
        assert ckpt("copy", stock, dst).returncode == 0
    there = {str(p.parent.relative_to(tmp_path)) for p in tmp_path.rglob(".metadata")}
    assert there - {stock.name} == {f"into/{stock.name}", f"exact/{stock.name}", "plain"}


def test_a_second_copy_to_a_bucket_and_back_finds_everything_there(
    server: Server, stock: Path, tmp_path: Path
) -> None:
    server.bucket("twice")
    options = server.options
    for source, target in (
        (stock, "s3://twice/run/one"),
        ("s3://twice/run/one", "s3://twice/run/two"),
        ("s3://twice/run/two", tmp_path / "back"),
    ):
        assert not any(
            "already" in note
            for note in ckpt_tools.copy(source, target, storage_options=options).notes
        )
        assert (
            "it is there already" in ckpt_tools.copy(source, target, storage_options=options).notes
        )
    assert ckpt_tools.diff(stock, tmp_path / "back").is_same


RACER = """
import json, sys, ckpt_tools
source, target, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
try:
    ckpt_tools.copy(source, target, storage_options=options)
    print("won")
except ckpt_tools.StorageError as error:
    print("lost", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("are_sealed", [(True, True), (True, False), (False, False)])
def test_of_two_copies_at_one_instant_one_wins(
    are_sealed: tuple[bool, bool], server: Server, tmp_path: Path
) -> None:
    """Also of two that are the same: whoever comes second writes nothing."""
    fs, sources = server.bucket("duel"), []
    for number, is_sealed in enumerate(are_sealed):
        dcp.save(
            {"w": torch.full((5000,), float(number))},
            checkpoint_id=tmp_path / f"src{number}",
            no_dist=True,
        )
        if is_sealed:
            ckpt_tools.seal(tmp_path / f"src{number}")
        sources.append(tmp_path / f"src{number}")
    for turn, pair in enumerate([sources, sources, sources[:1] * 2]):
        target = f"s3://duel/run{''.join(str(int(s)) for s in are_sealed)}/step-{turn}"
        words = [sys.executable, "-c", RACER]
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        racers = [
            subprocess.Popen([*words, str(source), target, json.dumps(server.options)], **pipes)
            for source in pair
        ]
        for racer in racers:
            assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("\n")
            racer.stdin.flush()
        told = [racer.communicate(timeout=90) for racer in racers]
        assert sorted(out.split()[0] for out, _ in told) in (["lost", "won"], ["won", "won"]), told
        winners = [
            source for source, (out, _) in zip(pair, told, strict=True) if out.startswith("won")
        ]
        # the second of two equal ones may find all there
        assert len(winners) == 1 or pair[0] == pair[1], told
        result = ckpt_tools.diff(winners[0], target, storage_options=server.options)
        assert (
            result.is_same
            and ckpt_tools.verify(target, storage_options=server.options).problems == []
        )
        assert not fs.exists(f"{target}/.ckpt.lock")


def test_a_copy_of_what_has_no_manifest_does_not_doubt_a_store_that_refuses(
    server: Server, stock: Path, tmp_path: Path
) -> None:
    server.bucket("sure")
    result = ckpt_tools.copy(stock, "s3://sure/step-1", storage_options=server.options)
    assert not [note for note in result.notes if "second writer" in note]


KILLED = """
import json, os, sys, ckpt_tools
from ckpt_tools.storage.s3.multipart import Upload
inner = Upload.complete
Upload.complete = lambda self: os._exit(9) if "distcp" in self._url else inner(self)
ckpt_tools.copy(sys.argv[1], sys.argv[2], storage_options=json.loads(sys.argv[3]))
"""


@pytest.mark.slow
def test_a_copy_that_was_killed_gives_up_its_dead_uploads_when_it_goes_on(
    server: Server, tmp_path: Path
) -> None:
    fs = server.bucket("again")
    dcp.save({"w": torch.zeros(5_000_000)}, checkpoint_id=tmp_path / "src", no_dist=True)
    words = [
        sys.executable,
        "-c",
        KILLED,
        str(tmp_path / "src"),
        "s3://again/run/step-1",
        json.dumps(server.options),
    ]
    assert subprocess.run(words, timeout=90).returncode == 9
    assert len(uploads(fs, "again")) == 1 and fs.exists("again/run/step-1/.ckpt.lock")
    ckpt_tools.copy(tmp_path / "src", "s3://again/run/step-1", storage_options=server.options)
    assert uploads(fs, "again") == [] and not fs.exists("again/run/step-1/.ckpt.lock")
