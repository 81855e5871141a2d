"""An interrupted merge or reshard into S3 goes on with `--resume`: what was sent is not sent again,
and the bytes are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools import PlanError, StorageError
from ckpt_tools.publish.bucket.destination import _try
from ckpt_tools.run.roots import open_root
from ckpt_tools.storage import RemoteStore
from tests import jobs
from tests.jobs import LONG, torchrun_command
from tests.servers.buckets import names, real, uploads
from tests.servers.servers import Server, storage_words

ROOT = Path(__file__).parents[2]
PART = 8 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB of two ranks, and what they are as one file."""
    path = tmp_path_factory.mktemp("resume-bucket")
    torch.manual_seed(2)
    state = {f"layers.{i}.w": torch.randn(2500, 1000) for i in range(20)} | {
        "norm": torch.ones(7),
        "step": torch.tensor(3),
    }
    dcp.save({"model": state}, checkpoint_id=path / "one", no_dist=True)
    ckpt_tools.reshard(path / "one", path / "src", to_ranks=2)
    shutil.rmtree(path / "one")
    ckpt_tools.merge(path / "src", path / "one.safetensors")
    return path


def command(
    verb: str, src: Path, dst: str, server: Server, *options: str, size: int = 1
) -> list[str]:
    words = [
        "-m",
        "ckpt_tools",
        verb,
        str(src),
        dst,
        *options,
        "--resume",
        "--json",
        *storage_words(server),
    ]
    return [sys.executable, *words] if size == 1 else torchrun_command(size, *words)


def parts(fs: Any, bucket: str, data: bytes = b"") -> dict[tuple[str, str], int]:
    """Bytes that the uploads that have not ended hold; where it is told what they should hold,
    those that do.

    What was on its way at the instant of a kill may be there in part.
    """
    return {
        upload: sum(p["Size"] for p in found if not data or is_right(p, data))
        for upload, found in listed(fs, bucket).items()
    }


def listed(fs: Any, bucket: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The parts of the uploads that have not ended, as the server tells them."""
    found = {}
    for upload in fs.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads") or ():
        with suppress(FileNotFoundError):  # it has just ended
            answer = fs.call_s3(
                "list_parts", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
            found[upload["Key"], upload["UploadId"]] = answer.get("Parts") or []
    return found


def is_right(part: dict[str, Any], data: bytes) -> bool:
    """Tells whether a part holds what its file has there."""
    return (
        part["ETag"].strip('"')
        == hashlib.md5(
            data[(part["PartNumber"] - 1) * PART : part["PartNumber"] * PART]
        ).hexdigest()
    )


def interrupt(
    words: Sequence[str],
    fs: Any,
    bucket: str,
    nbytes: int,
    number: int = signal.SIGKILL,
    member: int | None = None,
) -> str:
    """Starts a command and sends it, or one of the processes that it starts, a signal once so many
    bytes are there.
    """
    done = jobs.interrupt(words, lambda: sum(parts(fs, bucket).values()) >= nbytes, number, member)
    assert done.returncode, f"it ended before the signal came: {done.stdout}"
    return done.stderr


def resumed(words: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_a_killed_merge_goes_on_and_sends_nothing_twice(server: Server, source: Path) -> None:
    fs, bucket = server.bucket("resume-merge"), "resume-merge"
    words = command(
        "merge", source / "src", f"s3://{bucket}/out.safetensors", server, "--jobs", "1"
    )
    interrupt(words, fs, bucket, 6 * PART)
    before = sum(parts(fs, bucket, (source / "one.safetensors").read_bytes()).values())
    assert before >= 5 * PART and [n.split("/")[-1][:28] for n in names(fs, bucket)] == [
        "out.safetensors.ckpt.uploads"
    ]
    result = resumed(words)
    assert result["kept_nbytes"] == before and result["read_amplification"] < 1.01
    assert fs.cat(f"{bucket}/out.safetensors") == (source / "one.safetensors").read_bytes()
    assert uploads(fs, bucket) == [] and not any("uploads" in name for name in names(fs, bucket))
    assert (
        ckpt_tools.verify(f"s3://{bucket}/out.safetensors", storage_options=server.options).problems
        == []
    )
    again = resumed(words)
    assert (
        again["notes"] == ["it is there since an earlier attempt; nothing was done"]
        and again["read_nbytes"] == 0
    )


@pytest.mark.slow
def test_a_team_goes_on_with_what_another_number_of_processes_has_begun(
    server: Server, source: Path
) -> None:
    real(server)
    for attempt in range(4):
        bucket = f"resume-group-{attempt}"
        fs = server.bucket(bucket)
        words = command(
            "reshard", source / "src", f"s3://{bucket}/four", server, "--to", "4", size=3
        )
        interrupt(words, fs, bucket, 4 * PART, member=1)
        if before := listed(fs, bucket):  # a file of one member may have ended; or all of them
            break
    assert before and not any(".metadata" in n or ".manifest." in n for n in names(fs, bucket))
    result = resumed(
        command("reshard", source / "src", f"s3://{bucket}/four", server, "--to", "4", size=2)
    )
    fs.invalidate_cache()
    right = [
        p["Size"]
        for (key, _), found in before.items()
        for p in found
        if is_right(p, fs.cat(f"{bucket}/{key}"))
    ]
    assert result["kept_nbytes"] == sum(right) > 0
    assert uploads(fs, bucket) == [] and not any("uploads" in name for name in names(fs, bucket))
    assert ckpt_tools.verify(f"s3://{bucket}/four", storage_options=server.options).problems == []
    assert ckpt_tools.diff(
        source / "src", f"s3://{bucket}/four", storage_options=server.options
    ).is_same


@pytest.mark.slow
def test_a_part_that_is_not_what_it_should_be_is_sent_again(server: Server, source: Path) -> None:
    real(server)
    fs, bucket = server.bucket("resume-part"), "resume-part"
    words = command(
        "merge", source / "src", f"s3://{bucket}/out.safetensors", server, "--jobs", "1"
    )
    errors = interrupt(words, fs, bucket, 4 * PART, signal.SIGINT)
    assert "the same command continues from there" in errors
    data = (source / "one.safetensors").read_bytes()
    ((key, upload_id), before), *none = parts(fs, bucket, data).items()
    assert before >= 3 * PART and not none
    one, two, *_ = (
        p["PartNumber"]
        for p in listed(fs, bucket)[key, upload_id]
        if p["Size"] == PART and is_right(p, data)
    )
    fs.call_s3(
        "upload_part", Bucket=bucket, Key=key, UploadId=upload_id, PartNumber=one, Body=bytes(PART)
    )
    fs.call_s3(
        "upload_part", Bucket=bucket, Key=key, UploadId=upload_id, PartNumber=two, Body=b"short"
    )
    assert resumed(words)["kept_nbytes"] == before - 2 * PART
    assert fs.cat(f"{bucket}/out.safetensors") == (source / "one.safetensors").read_bytes()


def wait_for_the_clock(server: Server, bucket: str) -> None:
    """Waits until the store's clock, which has seconds, is past all that was written."""
    store = RemoteStore(f"s3://{bucket}", server.options)
    begun = store.now()
    while (now := store.now()) is not None and begun is not None and (now - begun).seconds < 2:
        time.sleep(0.1)


@pytest.mark.slow
def test_other_work_does_not_go_on_with_it(server: Server, source: Path, tmp_path: Path) -> None:
    real(server)
    fs, bucket = server.bucket("resume-other"), "resume-other"
    shutil.copytree(source / "src", tmp_path / "src")
    words = command(
        "merge", tmp_path / "src", f"s3://{bucket}/out.safetensors", server, "--jobs", "1"
    )
    interrupt(words, fs, bucket, 2 * PART)
    assert open_root(f"s3://{bucket}", server.options).remove_leftovers() == []  # they are young
    # another source, for all that is known
    os.utime(next((tmp_path / "src").glob("*.distcp")), ns=(1, 1))
    assert resumed(words)["kept_nbytes"] == 0
    assert fs.cat(f"{bucket}/out.safetensors") == (source / "one.safetensors").read_bytes()
    assert uploads(fs, bucket) == ["out.safetensors"] and not any(
        "uploads" in name for name in names(fs, bucket)
    )
    before = sum(parts(fs, bucket).values())
    interrupt(
        command("merge", source / "src", f"s3://{bucket}/two.safetensors", server, "--jobs", "1"),
        fs,
        bucket,
        before + 2 * PART,
    )
    wait_for_the_clock(server, bucket)
    left = open_root(f"s3://{bucket}", server.options).remove_leftovers(0)
    assert sorted(item.what for item in left) == ["object", "upload", "upload"]
    assert uploads(fs, bucket) == [] and not any("uploads" in name for name in names(fs, bucket))


@pytest.mark.slow
def test_an_upload_that_is_gone_is_begun_again(server: Server, source: Path) -> None:
    real(server)
    fs, bucket = server.bucket("resume-gone"), "resume-gone"
    words = command(
        "reshard", source / "src", f"s3://{bucket}/two", server, "--to", "3", "--jobs", "1"
    )
    interrupt(words, fs, bucket, 4 * PART)
    assert len(uploads(fs, bucket)) == 3
    wait_for_the_clock(server, bucket)
    # with the notes and the lease
    assert len(open_root(f"s3://{bucket}", server.options).remove_leftovers(0)) == 5
    assert resumed(words)["kept_nbytes"] == 0
    assert ckpt_tools.diff(
        source / "src", f"s3://{bucket}/two", storage_options=server.options
    ).is_same


@pytest.mark.slow
def test_small_files_that_are_there_already_are_written_again(
    server: Server, source: Path, tmp_path: Path
) -> None:
    real(server)
    fs, bucket = server.bucket("resume-small"), "resume-small"
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "x"}')
    more = ("--to", "hf", "--base", str(tmp_path / "base"), "--jobs", "1")
    words = command("convert", source / "src", f"s3://{bucket}/hf", server, *more)
    interrupt(words, fs, bucket, 3 * PART)
    assert (
        f"{bucket}/hf/config.json" in names(fs, bucket)
        and sum(parts(fs, bucket).values()) >= 2 * PART
    )
    fs.pipe(f"{bucket}/hf/notes.txt", b"somebody's")
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 15 and "the destination exists" in done.stderr
    fs.rm(f"{bucket}/hf/notes.txt")
    assert resumed(words)["kept_nbytes"] >= 2 * PART
    assert ckpt_tools.diff(
        source / "one.safetensors", f"s3://{bucket}/hf", storage_options=server.options
    ).is_same
    assert not any("uploads" in name for name in names(fs, bucket))


@pytest.mark.skipif(not LONG, reason="ten kills: CKPT_LONG=1")
def test_kills_one_after_the_other_always_come_to_an_end(server: Server, source: Path) -> None:
    real(server)
    fs, bucket = server.bucket("resume-often"), "resume-often"
    words, kept = (
        command(
            "reshard", source / "src", f"s3://{bucket}/two", server, "--to", "2", "--jobs", "1"
        ),
        0,
    )

    def held() -> int:
        """Bytes of open uploads, and of files whose upload has ended."""
        done = sum(fs.size(name) for name in names(fs, bucket) if name.endswith(".distcp"))
        return sum(parts(fs, bucket).values()) + done

    for number in range(1, 11):
        jobs.interrupt(words, lambda least=number * 2 * PART: held() >= least, signal.SIGKILL)
        assert held() >= kept
        kept = held()
    assert resumed(words)["kept_nbytes"] == kept
    assert ckpt_tools.diff(
        source / "src", f"s3://{bucket}/two", storage_options=server.options
    ).is_same


def test_another_kind_of_store_is_refused(source: Path) -> None:
    with pytest.raises(PlanError, match="--resume needs a local path or S3"):
        ckpt_tools.merge(source / "src", "memory://out.safetensors", resume=True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"work": "w"}',
        '{"work": "w", "attempt": 3, "uploads": {}}',
        '{"work": "w", "attempt": "../x", "uploads": {}}',
    ],
)
def test_notes_that_are_not_ours_are_passed_over(text: str) -> None:
    attempt = "01234567-89ab-cdef-0123-456789abcdef"
    assert _try(text.encode(), "w") is None
    strange = ({"a": ["\ud800", "y"]}, {"a": ["x" * 5000, "y"]})
    for odd in ([], {"a": 3}, {"a": [1]}, {"a": ["x", "y", "z"]}, *strange):
        assert (
            _try(
                json.dumps({"work": "w", "attempt": attempt, "files": [], "uploads": odd}).encode(),
                "w",
            )
            is None
        )
    good = json.dumps(
        {"work": "w", "attempt": attempt, "files": ["a"], "uploads": {"a": ["x", "y"]}}
    ).encode()
    assert _try(good, "w") == (attempt, ["a"], {"a": ("x", "y")}) and _try(good, "other") is None


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_forged_note_does_not_open_a_checkpoint_to_an_attempt(
    is_marked: bool, server: Server, tmp_path: Path
) -> None:
    """Whoever may only put objects must not turn the right to write of another into a loss."""
    fs, root = server.bucket("forged"), f"forged/{is_marked}"
    for number in (1, 2):
        state = {"model": {"w": torch.full((8, 8), float(number))}}
        dcp.save(state, checkpoint_id=tmp_path / f"src{number}", no_dist=True)

    def reshard(number: int, dst: str) -> None:
        options: Any = {"to_ranks": 2, "resume": True, "storage_options": server.options}
        ckpt_tools.reshard(tmp_path / f"src{number}", f"s3://{root}/{dst}", **options)

    def manifest(dst: str) -> Any:
        return json.loads(fs.cat_file(next(n for n in names(fs, f"{root}/{dst}") if "manif" in n)))

    reshard(1, "theirs")
    reshard(2, "mine")  # tells how this work is called
    before = {n: fs.cat_file(n) for n in names(fs, f"{root}/theirs")}
    assert len(before) == 4, "two data files, index and manifest: no note stays"
    attempt = manifest("theirs")["attempt"]
    note = {
        "work": manifest("mine")["source"]["work"],
        "attempt": attempt,
        "files": [n.rpartition("/")[2] for n in before],
        "uploads": {},
    }
    path = f"{root}/theirs/ckpt.uploads.{attempt[:8]}.json"
    body = json.dumps(note).encode()
    if is_marked:
        RemoteStore(f"s3://{root}/theirs", server.options).put(path.rpartition("/")[2], body)
    else:
        fs.pipe_file(path, body)
    with pytest.raises(StorageError, match="the destination exists"):
        reshard(2, "theirs")
    assert {n: fs.cat_file(n) for n in before} == before


def test_a_long_note_is_not_read(server: Server, tmp_path: Path) -> None:
    fs, root = server.bucket("forged"), "forged/long"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "src", no_dist=True)
    RemoteStore(f"s3://{root}", server.options).put(
        "one.safetensors.ckpt.uploads.1234abcd.json", b"[" + b"{}," * (6 << 20) + b"{}]"
    )
    options: Any = {"resume": True, "storage_options": server.options}
    tracemalloc.start()
    ckpt_tools.merge(tmp_path / "src", f"s3://{root}/one.safetensors", **options)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 << 20 and len(names(fs, root)) == 2, "the stale note is gone"
