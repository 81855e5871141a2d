"""Writing to object stores: parts, merge, reshard, copy and verify, on real S3 servers."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager, IntegrityError, StorageError
from ckpt_tools.publish.bucket.lease import Lease
from ckpt_tools.publish.disk.attempt_mark import mark_name
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.steps import list_steps
from ckpt_tools.storage import LocalStore, RemoteStore
from ckpt_tools.storage.s3.parts import MAX_PARTS, MIN_PART_BYTES, part_starts
from tests.command import run_ckpt
from tests.servers.buckets import MIB, names, save_locally, uploads
from tests.servers.servers import Server
from tests.states import tensors

Saved = Callable[[int], Path]


# ---- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nbytes", [0, 1, 8 * MIB, 8 * MIB + 1, 80_000 * MIB, 80_000 * MIB + 1, 5 << 40]
)
def test_ten_thousand_parts_suffice_up_to_five_tebibytes(nbytes: int) -> None:
    starts = part_starts(nbytes)
    assert len(starts) <= MAX_PARTS and (
        not nbytes or starts[-1] < nbytes <= starts[-1] + starts.step
    )
    assert starts.step >= MIN_PART_BYTES


# ---- merge, reshard, copy ------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_written_to_a_bucket_is_what_is_written_to_a_disk(
    server: Server, saved: Saved, tmp_path: Path
) -> None:
    fs, source = server.bucket("written"), saved(4) / "adamw"
    options: dict[str, Any] = {"storage_options": server.options}
    ckpt_tools.reshard(source, "s3://written/three", to_ranks=3, **options)
    ckpt_tools.reshard(source, tmp_path / "three", to_ranks=3)
    ckpt_tools.merge("s3://written/three", "s3://written/merged.safetensors", **options)
    ckpt_tools.merge(source, tmp_path / "merged.safetensors")
    assert fs.cat("written/merged.safetensors") == (tmp_path / "merged.safetensors").read_bytes()
    there = {n.rpartition("/")[2]: n for n in names(fs, "written/three")}
    attempts = {n.split(".")[1] for n in there if n.endswith(".distcp")}
    assert len(attempts) == 1 and there.keys() == {
        ".metadata",
        f"ckpt.manifest.{min(attempts)}.json",
        *(f"__{r}_0.{min(attempts)}.distcp" for r in range(3)),
    }
    for rank in range(3):
        assert (
            fs.cat(there[f"__{rank}_0.{min(attempts)}.distcp"])
            == (tmp_path / "three" / f"__{rank}_0.distcp").read_bytes()
        )
    ckpt_tools.merge(source, "s3://written/shards", max_shard_bytes=20_000, **options)
    ckpt_tools.merge("s3://written/shards", tmp_path / "again.safetensors", **options)
    one, two = load_file(tmp_path / "merged.safetensors"), load_file(tmp_path / "again.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    assert not uploads(fs, "written")


def test_a_checkpoint_there_is_refused_and_replaced_only_when_asked(
    server: Server, tmp_path: Path
) -> None:
    fs = server.bucket("replaced")
    old, new = (
        save_locally(tmp_path / "old", tensors(2, 900)),
        save_locally(tmp_path / "new", tensors(3, 800, 1)),
    )
    options: dict[str, Any] = {"storage_options": server.options}
    for target in ("s3://replaced/dcp", "s3://replaced/m.safetensors"):

        def write(source: Path, target: str = target, **more: Any) -> object:
            return (
                ckpt_tools.merge(source, target, **options, **more)
                if "." in target
                else ckpt_tools.reshard(source, target, to_ranks=2, **options, **more)
            )

        write(old)
        before = names(fs, "replaced")
        with pytest.raises(StorageError, match="the destination exists"):
            write(new)
        assert names(fs, "replaced") == before
        write(new, overwrite=True)
        assert ckpt_tools.inspect(target, server.options).total.num_tensors == 3
        assert len(names(fs, "replaced")) == len(before)  # nothing of the old one is left
    fs.pipe("replaced/dcp/notes.txt", b"mine")
    with pytest.raises(StorageError, match=r"files that --overwrite never replaces: notes\.txt"):
        ckpt_tools.reshard(old, "s3://replaced/dcp", to_ranks=2, overwrite=True, **options)
    with pytest.raises(StorageError, match="the destination lies in the source"):
        ckpt_tools.reshard("s3://replaced/dcp", "s3://replaced/dcp/below", to_ranks=2, **options)


def test_a_second_copy_transfers_what_is_missing_or_differs(server: Server, tmp_path: Path) -> None:
    fs = server.bucket("resumed")
    ckpt_tools.reshard(
        save_locally(tmp_path / "run", tensors(4, 3000)), tmp_path / "four", to_ranks=4
    )
    options: dict[str, Any] = {"storage_options": server.options}
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "four").glob("*.distcp")}
    ckpt_tools.copy(tmp_path / "four", "s3://resumed/up", **options)
    again = ckpt_tools.copy(tmp_path / "four", "s3://resumed/up", **options)
    assert (again.client_nbytes, list(again.notes)) == (0, ["it is there already"])
    fs.rm(["resumed/up/.metadata", "resumed/up/__2_0.distcp"])  # as if it had never come so far
    RemoteStore("s3://resumed/up", server.options).put("__1_0.distcp", bytes(sizes["__1_0.distcp"]))
    before = names(fs, "resumed")
    plan = ckpt_tools.copy(tmp_path / "four", "s3://resumed/up", dry_run=True, **options)
    assert names(fs, "resumed") == before
    third = ckpt_tools.copy(tmp_path / "four", "s3://resumed/up", **options)
    assert (plan.client_nbytes, plan.kept_nbytes) == (third.client_nbytes, third.kept_nbytes)
    assert third.client_nbytes == sizes["__1_0.distcp"] + sizes["__2_0.distcp"]
    assert third.kept_nbytes == sizes["__0_0.distcp"] + sizes["__3_0.distcp"]
    staged = (
        tmp_path
        / f".tmp.down.{next(iter((tmp_path / 'four').glob('ckpt.manifest.*'))).name.split('.')[2]}"
    )
    staged.mkdir()
    (staged / mark_name(staged.name[-8:])).touch()
    for name in ("__0_0.distcp", "__3_0.distcp"):
        (staged / name).write_bytes((tmp_path / "four" / name).read_bytes())
    (staged / "__1_0.distcp").write_bytes(bytes(sizes["__1_0.distcp"]))
    plan = ckpt_tools.copy("s3://resumed/up", tmp_path / "down", dry_run=True, **options)
    assert len(list(staged.iterdir())) == 4 and not (tmp_path / "down").exists()
    down = ckpt_tools.copy("s3://resumed/up", tmp_path / "down", **options)
    assert (plan.client_nbytes, plan.kept_nbytes) == (down.client_nbytes, down.kept_nbytes)
    assert down.kept_nbytes == sizes["__0_0.distcp"] + sizes["__3_0.distcp"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "four").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "down").iterdir()
    }
    ckpt_tools.reshard(tmp_path / "four", tmp_path / "two", to_ranks=2)
    with pytest.raises(StorageError, match="the destination exists: s3://resumed/up"):
        ckpt_tools.copy(tmp_path / "two", "s3://resumed/up", **options)


@pytest.mark.slow
def test_a_copy_that_is_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    ckpt_tools.reshard(
        save_locally(tmp_path / "run", tensors(24, 4 * MIB)), tmp_path / "many", to_ranks=24
    )
    command = [
        sys.executable,
        "-m",
        "ckpt_tools",
        "copy",
        str(tmp_path / "many"),
        str(tmp_path / "to" / "new"),
        "--json",
    ]
    for _ in range(20):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None:
            if list((tmp_path / "to").glob(".tmp.new.*/__1_0.distcp")):
                process.send_signal(signal.SIGSTOP)  # it cannot end before the signal comes
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, error = process.communicate(timeout=60)
        if process.returncode:
            break
        shutil.rmtree(tmp_path / "to")
    assert process.returncode == 130 and "the same command continues from there" in error, error
    assert not (tmp_path / "to" / "new").exists() and list((tmp_path / "to").glob(".tmp.new.*"))
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and "kept_nbytes" in again.stdout, again.stderr
    assert {p.name: p.read_bytes() for p in (tmp_path / "many").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "to" / "new").iterdir()
    }
    assert not list((tmp_path / "to").glob(".tmp.*"))


def test_a_copy_of_damaged_bytes_is_refused_and_nothing_is_visible(
    server: Server, tmp_path: Path
) -> None:
    fs = server.bucket("damaged")
    source = save_locally(tmp_path / "run", tensors(2, 3000))
    data = bytearray((source / "__0_0.distcp").read_bytes())
    data[5000] ^= 4
    (source / "__0_0.distcp").write_bytes(data)
    for target in ("s3://damaged/up", tmp_path / "down"):
        with pytest.raises(IntegrityError, match="bytes were damaged"):
            ckpt_tools.copy(source, target, storage_options=server.options)
    assert not (tmp_path / "down").exists() and "damaged/up/.metadata" not in names(fs, "damaged")
    assert run_ckpt("copy", source, "s3://damaged/up", **server.environment).returncode == 14


@pytest.mark.slow
def test_what_lies_in_a_bucket_is_compared_without_a_download(
    server: Server, tmp_path: Path
) -> None:
    fs = server.bucket("verified")
    source = save_locally(tmp_path / "run", tensors(2, 3 * MIB))
    options: dict[str, Any] = {"storage_options": server.options}
    ckpt_tools.copy(source, "s3://verified/a", **options)
    assert (
        ckpt_tools.verify("s3://verified/a", **options).problems
        == ckpt_tools.verify(source).problems
        == []
    )
    quick = ckpt_tools.verify("s3://verified/a", quick=True, **options)
    assert (quick.problems, quick.unknown, quick.nbytes) == (
        [],
        [],
        (source / "__0_0.distcp").stat().st_size,
    )
    assert ckpt_tools.verify(source, quick=True).unknown == ["__0_0.distcp"]
    ckpt_tools.merge(source, "s3://verified/m.safetensors", **options)
    ckpt_tools.copy("s3://verified/m.safetensors", "s3://verified/n.safetensors", **options)
    assert ckpt_tools.verify("s3://verified/n.safetensors", **options).problems == []
    assert ckpt_tools.verify("s3://verified/n.safetensors", quick=True, **options).unknown == []
    fs.pipe("verified/n.safetensors", fs.cat("verified/n.safetensors")[:-1] + b"\x7f")
    assert "damaged" in ckpt_tools.verify("s3://verified/n.safetensors", **options).problems[0].what
    with pytest.raises(IntegrityError, match="bytes were damaged"):
        ckpt_tools.merge("s3://verified/n.safetensors", tmp_path / "damaged.safetensors", **options)
    data = bytearray(fs.cat("verified/a/__0_0.distcp"))
    data[MIB] ^= 1
    # by another tool: our note of the checksum is gone with it
    fs.pipe("verified/a/__0_0.distcp", bytes(data))
    full = ckpt_tools.verify("s3://verified/a", **options)
    assert (
        {p.file for p in full.problems} == {"__0_0.distcp"}
        and len(full.lost) == 1
        and "damaged" in full.problems[0].what
    )
    assert ckpt_tools.verify("s3://verified/a", quick=True, **options).unknown == ["__0_0.distcp"]
    fs.pipe("verified/a/__7_0.distcp", b"old")
    fs.rm("verified/a/__0_0.distcp")
    done = run_ckpt("verify", "s3://verified/a", **server.environment)
    assert (
        done.returncode == 14
        and "__0_0.distcp is missing" in done.stdout
        and "__7_0.distcp is no part" in done.stdout
    ), done.stderr


def test_what_others_wrote_is_never_removed(server: Server, tmp_path: Path) -> None:
    fs, options = server.bucket("others"), {"storage_options": server.options}
    fs.pipe(
        {
            f"others/run/step-00000001/{n}": b"mine"
            for n in ("x.deadbeef.safetensors", "ckpt.manifest.deadbeef.json")
        }
    )
    fs.pipe(
        {
            f"others/run/{n}": b"mine"
            for n in ("x.safetensors.ckpt.uploads.deadbeef.json", "my.ckpt.uploads.txt")
        }
    )
    with CheckpointManager("s3://others/run", **options) as checkpoints:
        with pytest.raises(StorageError, match="the destination exists"):
            checkpoints.save(1, {"w": torch.ones(3)}, asynchronous=False)
        checkpoints.save(2, {"w": torch.ones(3)}, asynchronous=False)
    assert open_root("s3://others/run", server.options).remove_leftovers(grace_s=-5) == []
    assert (
        fs.cat("others/run/step-00000001/x.deadbeef.safetensors")
        == fs.cat("others/run/step-00000001/ckpt.manifest.deadbeef.json")
        == b"mine"
    )
    ckpt_tools.merge(
        save_locally(tmp_path / "run", tensors(3, 800)), tmp_path / "hf", max_shard_bytes=4000
    )
    index = tmp_path / "hf" / "model.safetensors.index.json"
    # as a hub names them: hashes look like attempts
    for number, path in enumerate(sorted((tmp_path / "hf").glob("*.safetensors"))):
        path.rename(path.with_name(f"model.{number:08d}.safetensors"))
        index.write_text(index.read_text().replace(path.name, f"model.{number:08d}.safetensors"))
    next((tmp_path / "hf").glob("ckpt.manifest.*")).unlink()
    (tmp_path / "hf" / "config.json").write_text("{}")
    ckpt_tools.copy(tmp_path / "hf", "s3://others/hf", **options)
    assert sorted(n.rpartition("/")[2] for n in names(fs, "others/hf")) == sorted(
        p.name for p in (tmp_path / "hf").iterdir()
    )
    assert ckpt_tools.inspect("s3://others/hf", server.options).total.num_tensors == 3


def test_more_files_than_are_written_side_by_side_are_the_same(tmp_path: Path) -> None:
    source = save_locally(
        tmp_path / "run",
        {f"t{i}": torch.randn(97 + i, 33) for i in range(9)} | {"step": torch.tensor(3.0)},
    )
    fs = fsspec.filesystem("memory")
    ckpt_tools.reshard(source, "memory://grouped/thirty", to_ranks=30)
    ckpt_tools.reshard(source, tmp_path / "thirty", to_ranks=30)
    there = {
        n.rpartition("/")[2].split(".")[0]: fs.cat(n)
        for n in fs.find("/grouped/thirty")
        if n.endswith(".distcp")
    }
    assert (
        there == {p.stem: p.read_bytes() for p in (tmp_path / "thirty").glob("*.distcp")}
        and len(there) > 24
    )
    sealed = [
        find_manifest(store)
        for store in (RemoteStore("memory://grouped/thirty"), LocalStore(tmp_path / "thirty"))
    ]
    assert (
        sealed[0] is not None
        and sealed[1] is not None
        and sealed[0].tensors == sealed[1].tensors
        and len(sealed[0].tensors) == 10
    )
    fs.rm("/grouped", recursive=True)


@pytest.mark.slow
def test_encryption_and_who_pays_are_told_with_every_request(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # whose events tell; of the other: tests/storage/test_obstore_client.py
    monkeypatch.setenv("CKPT_S3_CLIENT", "s3fs")
    if server.name != "moto":
        pytest.skip("a RadosGW without a vault does not encrypt")
    server.bucket("encrypted")
    options = server.options | {
        "s3_additional_kwargs": {"ServerSideEncryption": "AES256"},
        "requester_pays": True,
    }
    fs = fsspec.filesystem("s3", use_listings_cache=False, **options)  # the one that the store uses
    fs.connect()
    seen: dict[str, set[str | None]] = {}

    def note(request: Any, operation_name: str, **more: Any) -> None:
        payer = request.headers.get("x-amz-request-payer")
        seen.setdefault(operation_name, set()).add(
            payer.decode() if isinstance(payer, bytes) else payer
        )

    fs.s3.meta.events.register("request-created.s3", note)
    source = save_locally(tmp_path / "run", tensors(3, 5_000_000))
    ckpt_tools.merge(source, "s3://encrypted/out.safetensors", storage_options=options)
    ckpt_tools.copy(source, "s3://encrypted/step", storage_options=options)
    ckpt_tools.merge("s3://encrypted/step", tmp_path / "back.safetensors", storage_options=options)
    assert ckpt_tools.diff(
        "s3://encrypted/out.safetensors", tmp_path / "back.safetensors", storage_options=options
    ).is_same
    for name in names(fs, "encrypted"):
        bucket, _, key = name.partition("/")
        assert (
            fs.call_s3("head_object", Bucket=bucket, Key=key)["ServerSideEncryption"] == "AES256"
        ), name
    told = {
        "GetObject",
        "PutObject",
        "UploadPart",
        "CreateMultipartUpload",
        "CompleteMultipartUpload",
        "HeadObject",
        "ListObjectsV2",
    }
    assert {name: seen.get(name) for name in told} == {name: {"requester"} for name in told}


class Listing(MemoryFileSystem):
    """A store whose package remembers listings, as those of Azure and Google do, and learns of no
    writer's work.
    """

    protocol, store, pseudo_dirs = "listing", {}, [""]

    def ls(self, path: str, detail: bool = True, refresh: bool = False, **options: Any) -> Any:
        del refresh
        found = self._ls_from_cache(path)
        if found is None:
            found = self.dircache[path] = super().ls(path, detail=True, **options)
        return found if detail else [item["name"] for item in found]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("listing://").strip("/")


def test_what_a_package_has_listed_once_does_not_stay_true_for_ever(tmp_path: Path) -> None:
    fsspec.register_implementation("listing", Listing, clobber=True)
    with CheckpointManager("listing://run", keep_last=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": torch.full((3,), float(step))}, asynchronous=False)
        checkpoints.wait()
        # the first goes in the background
        assert [s.number for s in checkpoints.steps()][-2:] == [2, 3]
    state = {"w": torch.zeros(3)}
    with CheckpointManager("listing://run") as checkpoints:
        assert checkpoints.resume(state) == 3 and state["w"].tolist() == [3.0] * 3


def test_a_stream_store_takes_what_s3_takes(tmp_path: Path) -> None:
    source = save_locally(tmp_path / "run", tensors(3, 70_000))
    fs = fsspec.filesystem("memory")
    ckpt_tools.reshard(source, "memory://streams/three", to_ranks=3)
    merged = ckpt_tools.merge("memory://streams/three", "memory://streams/m.safetensors")
    assert "does not refuse a second writer" in merged.notes[0]
    ckpt_tools.copy("memory://streams/m.safetensors", tmp_path / "m.safetensors")
    ckpt_tools.copy("memory://streams/three", "memory://streams/again")
    assert ckpt_tools.diff("memory://streams/three", "memory://streams/again").is_same
    got, want = load_file(tmp_path / "m.safetensors"), tensors(3, 70_000)
    assert got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    model = nn.Linear(5, 6)
    with CheckpointManager("memory://streams/run", keep_last=1) as checkpoints:
        checkpoints.save(1, {"model": model}, asynchronous=False)
        checkpoints.save(2, {"model": model}, asynchronous=False)
    with (
        CheckpointManager("memory://streams/run", keep_last=1) as checkpoints,
        pytest.raises(StorageError, match="destination exists"),
    ):
        checkpoints.save(2, {"model": model}, asynchronous=False)
    assert [s.number for s in checkpoints.steps()] == [2]
    with pytest.raises(StorageError, match="the destination exists"):
        ckpt_tools.merge(source, "memory://streams/m.safetensors")
    fs.rm("/streams", recursive=True)


# ---- two copies to one place ---------------------------------------------------------------------


def test_a_copy_does_not_replace_what_another_may_be_writing(
    server: Server, tmp_path: Path
) -> None:
    fs, options = server.bucket("shared"), {"storage_options": server.options}
    one, two = (
        save_locally(tmp_path / name, tensors(2, 3000, seed))
        for name, seed in (("one", 0), ("two", 1))
    )
    for name in (one, two):
        ckpt_tools.reshard(name, tmp_path / f"{name.parent.name}2", to_ranks=2)
    step = "s3://shared/run/step-00000001"
    ckpt_tools.copy(tmp_path / "one2", step, **options)
    fs.rm("shared/run/step-00000001/.metadata")  # as if the copy was still at it
    lease = Lease(step, server.options)
    before = {n: fs.cat(n) for n in names(fs, "shared") if not n.endswith(".ckpt.lock")}
    with pytest.raises(StorageError, match="another manager open on .* or copies to it"):
        ckpt_tools.copy(tmp_path / "two2", step, **options)
    assert {n: fs.cat(n) for n in names(fs, "shared") if not n.endswith(".ckpt.lock")} == before
    lease.release()
    ckpt_tools.copy(tmp_path / "one2", step, **options)  # the same one goes on
    fs.rm("shared/run/step-00000001/.metadata")
    fs.pipe("shared/run/step-00000001/notes.txt", b"mine")
    dead = {**lease._me, "pid": 1, "started": "0"}
    # of a copy that was killed
    fs.pipe("shared/run/step-00000001/.ckpt.lock", json.dumps(dead).encode())
    left = open_root("s3://shared/run", server.options).remove_leftovers(grace_s=-5)
    assert len(left) == 3 and names(fs, "shared") == [
        "shared/run/step-00000001/.ckpt.lock",
        "shared/run/step-00000001/notes.txt",
    ]
    fs.rm("shared/run/step-00000001/notes.txt")
    ckpt_tools.copy(tmp_path / "two2", step, **options)
    assert ckpt_tools.verify(step, **options).problems == []
    assert not fs.exists("shared/run/step-00000001/.ckpt.lock")


def test_a_mirror_is_brought_up_to_date_by_the_next_job(server: Server, tmp_path: Path) -> None:
    server.bucket("late")
    source = save_locally(tmp_path / "run", tensors(2, 900))
    with CheckpointManager(
        tmp_path / "run", mirror="s3://late/run", storage_options=server.options
    ):
        pass  # a job that saves nothing: what the one before could not copy is copied now
    assert [s.number for s in list_steps(open_root("s3://late/run", server.options))] == [1]
    assert ckpt_tools.diff(
        source, "s3://late/run/step-00000001", read_all=True, storage_options=server.options
    ).is_same


@pytest.mark.parametrize(
    "url", ["s3://slips//run", "s3://slips/a//run", "s3:///run", "s3://slips/a/../run"]
)
def test_a_url_with_an_empty_segment_is_refused_by_whatever_takes_one(
    url: str, tmp_path: Path
) -> None:
    """`$BUCKET/$PREFIX/` with a slash too many: an object of another name was replaced, or a mirror
    was never found again.
    """
    source = save_locally(tmp_path / "src", tensors(2, 100))
    calls: list[Callable[[], object]] = [
        lambda: ckpt_tools.merge(source, f"{url}/m.safetensors", overwrite=True),
        lambda: ckpt_tools.copy(source, url),
        lambda: ckpt_tools.inspect(url),
        lambda: list_steps(open_root(url)),
        lambda: CheckpointManager(url),
        lambda: CheckpointManager(tmp_path / "run", mirror=url),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="a URL with an empty segment") as caught:
            call()
        assert caught.value.hint or ".." in url
    done = run_ckpt("ls", url)
    assert (
        done.returncode == 15 and "empty segment" in done.stderr and "Traceback" not in done.stderr
    )
