"""Attacks on destinations: whatever is replaced or removed belongs to a checkpoint of this tool."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import (
    CheckpointError,
    CheckpointManager,
    IntegrityError,
    Retention,
    StorageError,
)
from ckpt_tools.core.plan import Literal
from ckpt_tools.publish.bucket.lease import Lease
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.run.roots import open_root
from ckpt_tools.storage import LocalStore, write_file
from tests.attacks.hostile import Run
from tests.jobs import LONG
from tests.servers.servers import Server

ID = "1234567a-1234-1234-1234-123456789abc"
OTHER = "abcdef12-1234-1234-1234-123456789abc"
MANIFEST = Literal("ckpt.manifest.12345678.json", 0, b"{}")
INDEX = Literal(".metadata", 0, b"index")
MINE = b"years of work"


def checkpoint(path: Path, value: float = 1.0) -> Path:
    ckpt_tools.save(path, {"model": {"w": torch.full((30, 5), value)}})
    return path


def storage(server: Server) -> dict[str, Any]:
    return {"storage_options": server.options}


def names(fs: Any, prefix: str) -> set[str]:
    return {name.removeprefix(f"{prefix}/") for name in fs.find(prefix)}


# ---- on a disk -----------------------------------------------------------------------------------


@contextmanager
def attempt(target: Path, overwrite: bool = False) -> Iterator[Any]:
    """Yields an attempt at a directory that has written its data."""
    with open_destination(target).stage(ID, overwrite) as staged:
        write_file(staged.writable, "__0_0.distcp", b"data")
        yield staged


@pytest.mark.parametrize("with_link", [True, False])
def test_a_staging_directory_that_is_moved_away_is_not_published(
    with_link: bool, tmp_path: Path
) -> None:
    """Whoever may write into the folder above can exchange it, even for root's attempt."""
    (tmp_path / "victim").mkdir()
    with attempt(tmp_path / "out") as staged:
        os.rename(staged.folder, tmp_path / "moved")
        if with_link:
            staged.folder.symlink_to(tmp_path / "victim")
        else:
            staged.folder.mkdir(mode=0o700)
        write_file(staged.writable, "__1_0.distcp", b"more")
        with pytest.raises(StorageError, match="has moved the staging directory away"):
            staged.publish(MANIFEST, INDEX, {})
    assert not list((tmp_path / "victim").iterdir()) and not (tmp_path / "out").exists()
    assert sorted(p.name for p in (tmp_path / "moved").glob("*.distcp")) == [
        "__0_0.distcp",
        "__1_0.distcp",
    ]


def add_file(target: Path) -> None:
    (target / "thesis.txt").write_bytes(MINE)


def exchange_directory(target: Path) -> None:
    os.rename(target, target.with_name("old"))
    target.mkdir()
    add_file(target)


def make_link(target: Path) -> None:
    os.rename(target, target.with_name("old"))
    target.symlink_to(target.with_name("old"))


@pytest.mark.parametrize("change", [add_file, exchange_directory, make_link])
def test_a_directory_that_changes_during_the_write_is_not_replaced(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    target = checkpoint(tmp_path / "out")
    open_destination(target).check(overwrite=True)
    with attempt(target, overwrite=True) as staged:
        change(target)
        before = os.readlink(target) if target.is_symlink() else sorted(os.listdir(target))
        with pytest.raises(StorageError, match="--overwrite never replaces"):
            staged.publish(MANIFEST, INDEX, {})
    assert before == (os.readlink(target) if target.is_symlink() else sorted(os.listdir(target)))
    assert not list(tmp_path.glob(".tmp.*"))


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_that_appears_during_the_write_is_not_replaced(
    is_link: bool, tmp_path: Path
) -> None:
    target, mine = tmp_path / "m.safetensors", tmp_path / "mine"
    mine.write_bytes(MINE)
    manifest = Literal("m.safetensors.ckpt.manifest.12345678.json", 0, b"{}")
    with open_destination(target).stage(ID, True, target.name) as staged:
        write_file(staged.writable, target.name, b"new")
        target.symlink_to(mine) if is_link else target.write_bytes(MINE)
        with pytest.raises(StorageError, match="--overwrite never replaces"):
            staged.publish(manifest, None, {})
    assert target.read_bytes() == MINE and target.is_symlink() is is_link
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.safetensors", "mine"]


def test_an_empty_manifest_makes_no_file_replaceable(tmp_path: Path, ckpt: Run) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "src.pt")
    for name in ("t.safetensors", "t.pt"):
        target = tmp_path / name
        target.write_bytes(MINE)
        for text in ("", "{}", '{"files": {"t.pt": {}}}'):
            (tmp_path / f"{name}.ckpt.manifest.12345678.json").write_text(text)
            verb = ("merge",) if name.endswith("s") else ("convert",)
            more = () if name.endswith("s") else ("--to", "torch")
            done = ckpt(*verb, tmp_path / "src.pt", target, *more, "--overwrite")
            assert done.returncode == 15 and target.read_bytes() == MINE, done.stderr
    # with the manifest of these very bytes, it is replaced
    own = tmp_path / "own.pt"
    assert ckpt("convert", tmp_path / "src.pt", own, "--to", "torch").returncode == 0
    assert ckpt("convert", tmp_path / "src.pt", own, "--to", "torch", "--overwrite").returncode == 0
    own.write_bytes(own.read_bytes()[:-1] + b"x")
    done = ckpt("convert", tmp_path / "src.pt", own, "--to", "torch", "--overwrite")
    assert done.returncode == 15


def test_a_file_is_published_from_the_directory_that_was_opened(tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    manifest = Literal("m.safetensors.ckpt.manifest.12345678.json", 0, b"{}")
    with open_destination(target).stage(ID, True, target.name) as staged:
        write_file(staged.writable, target.name, b"new")
        os.rename(staged.folder, tmp_path / "moved")
        staged.folder.mkdir(mode=0o700)
        (staged.folder / target.name).write_bytes(b"EVIL")
        with suppress(StorageError):
            staged.publish(manifest, None, {})
    assert not target.exists() or target.read_bytes() == b"new"


@pytest.mark.slow
def test_overwriting_loses_nothing_while_others_look_for_leftovers(tmp_path: Path) -> None:
    source, out = checkpoint(tmp_path / "src"), tmp_path / "run" / "out"
    ckpt_tools.reshard(source, out, to_ranks=2)
    code = (
        "import sys, pathlib; from ckpt_tools.run.disk_root import LocalRoot\n"
        "root = LocalRoot(pathlib.Path(sys.argv[1])); print('on', flush=True)\n"
        "while True: root.remove_leftovers()"
    )
    words = [sys.executable, "-c", code, str(out.parent)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "on\n"
        try:
            for number in range(60):
                ckpt_tools.reshard(source, out, to_ranks=1 + number % 3, overwrite=True)
                assert not ckpt_tools.verify(out).problems
        finally:
            other.kill()


def test_a_lock_of_the_folder_by_somebody_else_holds_nothing_up(tmp_path: Path) -> None:
    """As `flock FOLDER ckpt merge …` in a table of cron."""
    source = checkpoint(tmp_path / "src")
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        ckpt_tools.merge(source, tmp_path / "m.safetensors")
        ckpt_tools.reshard(source, tmp_path / "two", to_ranks=2)
    finally:
        os.close(folder)


@pytest.mark.parametrize("prefix", [".tmp", ".trash", ".aside"])
def test_folders_with_a_date_in_their_name_are_no_leftovers(prefix: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with CheckpointManager(run, asynchronous=False) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)})
    mine = run / f"{prefix}.step-00000001.20240115"
    mine.mkdir(mode=0o700)
    (mine / "ckpt.manifest.abcdef12.json").write_bytes(MINE)
    assert not ckpt_tools.prune(run, keep_last=1).removed
    open_root(run).remove_leftovers()
    with CheckpointManager(run, asynchronous=False) as checkpoints:
        checkpoints.resume({"w": torch.ones(3)})
        checkpoints.save(2, {"w": torch.ones(3)})
    assert (mine / "ckpt.manifest.abcdef12.json").read_bytes() == MINE


@pytest.mark.parametrize("name", ["__7_0.distcp", "__9.metadata"])
def test_files_like_data_that_no_index_names_are_not_overwritten(name: str, tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "out")
    (target / name).write_bytes(MINE)
    with pytest.raises(StorageError, match="--overwrite never replaces"):
        ckpt_tools.reshard(checkpoint(tmp_path / "src"), target, to_ranks=1, overwrite=True)
    assert (target / name).read_bytes() == MINE


@pytest.mark.parametrize("text", [b"draft of years", b"other"])
def test_a_small_file_that_a_person_has_changed_keeps_its_checkpoint(
    text: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, files = tmp_path / "run", {"notes.md": b"draft"}
    with CheckpointManager(run, keep_last=1, asynchronous=False) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, files=files)
        checkpoints.save(1, {"w": torch.ones(3)}, files=files, name="best")
        for name in ("best", "step-00000001"):
            (run / name / "notes.md").write_bytes(text)
        checkpoints.remove("best")
        checkpoints.save(2, {"w": torch.ones(3)}, files=files)
        checkpoints.save(3, {"w": torch.ones(3)}, files=files)
    assert (run / "best/notes.md").read_bytes() == text and "notes.md" in caplog.text
    assert (run / "step-00000001/notes.md").read_bytes() == text
    assert not (run / "step-00000002").exists()


def damage_side_file(step: Path) -> None:
    (step / "config.json").write_bytes(b"")


def damage_manifest(step: Path) -> None:
    (manifest,) = step.glob("ckpt.manifest.*")
    manifest.write_bytes(manifest.read_bytes()[:-40])


def add_pin(step: Path) -> None:
    damage_side_file(step)
    (step / "ckpt.pin").write_bytes(b"")


@pytest.mark.parametrize("change", [damage_side_file, damage_manifest, add_pin])
def test_a_damaged_step_with_files_does_not_stop_the_job(
    change: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with CheckpointManager(run, asynchronous=False) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": torch.ones(3)}, files={"config.json": b"{}"})
    change(run / "step-00000003")
    state = {"w": torch.zeros(3)}
    with CheckpointManager(run, asynchronous=False) as checkpoints:
        assert checkpoints.resume(state) == 2
        checkpoints.save(3, state, files={"config.json": b"{}"})
    with CheckpointManager(run) as checkpoints:
        assert checkpoints.resume(state) == 3
    (aside,) = run.glob("step-00000003.superseded-*")
    assert (aside / "config.json").exists() and "is set aside as" in caplog.text


def test_a_directory_with_the_name_of_a_manifest_fails_no_result(tmp_path: Path, ckpt: Run) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "src.pt")
    (tmp_path / "m.safetensors.ckpt.manifest.12345678.json").mkdir()
    for more in ((), ("--overwrite",)):
        done = ckpt("merge", tmp_path / "src.pt", tmp_path / "m.safetensors", *more)
        assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("m.safetensors.ckpt.manifest.*"))) == 2


# ---- in a bucket ---------------------------------------------------------------------------------

FOREIGN = (
    "model.safetensors",
    "hf/model.safetensors",
    "extra.distcp",
    "model.safetensors.index.json",
    "hf/.metadata",
    "sub/__0_0.distcp",
    "eval.12345678.safetensors",
)


@pytest.mark.slow
def test_a_step_of_a_bucket_with_a_foreign_file_stays(server: Server) -> None:
    """Each of the first steps has another foreign file; the one after them has none."""
    fs, url, options = server.bucket("strangers"), "s3://strangers/run", storage(server)
    bare, newest = len(FOREIGN) + 1, len(FOREIGN) + 2
    with CheckpointManager(url, keep_last=None, **options) as checkpoints:
        for step in range(1, newest + 1):
            checkpoints.save(step, {"w": torch.ones(3)}, asynchronous=False)
        checkpoints.save(newest, {"w": torch.ones(3)}, asynchronous=False, name="best")
    mine = [f"strangers/run/step-{i:08d}/{name}" for i, name in enumerate(FOREIGN, 1)]
    mine += [f"strangers/run/best/{FOREIGN[0]}"]
    for path in mine:
        fs.pipe_file(path, MINE)
    assert not ckpt_tools.thin(url, keep_full=2, **options).thinned
    pruned = ckpt_tools.prune(url, retention=Retention(1), **options)
    assert [step.number for step in pruned.removed] == [bare]
    with CheckpointManager(url, keep_last=1, **options) as checkpoints:
        checkpoints.resume({"w": torch.zeros(3)})
        checkpoints.remove("best")
        checkpoints.save(newest + 1, {"w": torch.ones(3)}, asynchronous=False)
        with pytest.raises(StorageError):
            checkpoints.save(1, {"w": torch.ones(3)}, asynchronous=False, overwrite=True)
    assert all(fs.cat(path) == MINE for path in mine)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN if LONG else FOREIGN[:3])
def test_overwriting_in_a_bucket_removes_no_foreign_file(
    name: str, server: Server, tmp_path: Path, ckpt: Run
) -> None:
    fs, root = server.bucket("overwritten"), f"overwritten/of-{FOREIGN.index(name)}"
    source, options = checkpoint(tmp_path / "src"), {"storage_options": server.options}
    ckpt_tools.reshard(source, f"s3://{root}", to_ranks=1, **options)
    fs.pipe_file(f"{root}/{name}", MINE)
    before = names(fs, root)
    with pytest.raises(StorageError, match="--overwrite never replaces|the destination exists"):
        ckpt_tools.reshard(source, f"s3://{root}", to_ranks=2, overwrite=True, **options)
    assert names(fs, root) == before and fs.cat(f"{root}/{name}") == MINE
    fs.rm(f"{root}/{name}")
    ckpt_tools.reshard(source, f"s3://{root}", to_ranks=2, overwrite=True, **options)
    assert sum(n.endswith(".distcp") for n in names(fs, root)) == 2


def test_a_copy_into_a_prefix_of_results_removes_none(server: Server, tmp_path: Path) -> None:
    fs, options = server.bucket("results"), {"storage_options": server.options}
    source = checkpoint(tmp_path / "src")
    for name in ("a", "b.20261126"):
        ckpt_tools.merge(source, f"s3://results/rel/{name}.safetensors", **options)
    before = names(fs, "results/rel")
    for target in ("s3://results/rel", "s3://results/rel/"):
        with pytest.raises(StorageError, match="the destination exists"):
            ckpt_tools.reshard(source, target, to_ranks=1, **options)
    with pytest.raises(StorageError, match="the destination exists"):
        ckpt_tools.copy(source, "s3://results/rel", **options)
    ckpt_tools.copy(source, "s3://results/rel/", **options)  # below it, under its own name
    assert before < names(fs, "results/rel") and f"{source.name}/.metadata" in names(
        fs, "results/rel"
    )
    fs.rm(f"results/rel/{source.name}", recursive=True)
    for name in [n for n in before if "manifest" in n]:
        fs.rm(f"results/rel/{name}")
    with pytest.raises(StorageError, match="the destination exists"):
        ckpt_tools.copy(source, "s3://results/rel", **options)
    ckpt_tools.merge(source, "s3://results/mirror/step-00000002/m.safetensors", **options)
    checkpoints = CheckpointManager(tmp_path / "run", mirror="s3://results/mirror", **options)
    checkpoints.save(2, {"w": torch.ones(3)}, asynchronous=False)
    with pytest.raises(StorageError, match="could not be mirrored"):
        checkpoints.close()
    assert {"a.safetensors", "b.20261126.safetensors"} <= names(fs, "results/rel")
    assert "step-00000002/m.safetensors" in names(fs, "results/mirror")


def test_a_date_in_a_name_is_no_leftover(server: Server, tmp_path: Path) -> None:
    fs, options = server.bucket("dates"), {"storage_options": server.options}
    source = checkpoint(tmp_path / "src")
    for name in ("20261126", "deadbeef"):
        url = f"s3://dates/run/export/model.{name}.safetensors"
        ckpt_tools.merge(source, url, **options)
    before = names(fs, "dates")
    assert open_root("s3://dates/run", server.options).remove_leftovers(grace_s=-5) == []
    assert names(fs, "dates") == before


def test_a_save_that_does_not_commit_changes_no_file_of_the_one_that_does(
    server: Server, tmp_path: Path
) -> None:
    fs, url, options = server.bucket("extras"), "s3://extras/x", server.options
    destination = open_destination(url, options)
    with destination.stage(ID) as first, open_destination(url, options).stage(OTHER) as second:
        write_file(first.writable, "config.json", b"first")
        with pytest.raises(StorageError):
            write_file(second.writable, "config.json", b"second")
    fs.rm("extras/x", recursive=True)
    ckpt_tools.save(url, {"w": torch.ones(3)}, files={"config.json": b"old"}, **storage(server))
    # as if a save had been killed right before its commit
    attempt = open_destination(url, options)
    attempt.check(overwrite=True)
    staged = attempt.join(OTHER)
    staged._overwrite, staged._replaces = True, "x"  # type: ignore[attr-defined]
    write_file(staged.writable, "config.json", b"newer")
    new = {"w": torch.ones(3)}
    ckpt_tools.save(url, new, files={"config.json": b"new"}, overwrite=True, **storage(server))
    assert not ckpt_tools.verify(url, **storage(server)).problems


def test_a_checkpoint_of_ranks_without_an_index_is_no_leftover(
    server: Server, tmp_path: Path
) -> None:
    fs, options = server.bucket("ranks"), storage(server)
    state = {"m": {"w": torch.ones(30)}}
    dcp.save(state, checkpoint_id=tmp_path / "own", no_dist=True, use_collectives=False)
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    step = "s3://ranks/run/step-00000001"
    ckpt_tools.copy(tmp_path / "own", step, **options)
    before = {name: fs.cat(name) for name in fs.find("ranks")}
    assert "ranks/run/step-00000001/__0.metadata" in before
    assert open_root("s3://ranks/run", server.options).remove_leftovers(grace_s=-5) == []
    with pytest.raises(StorageError, match="the destination exists"):
        ckpt_tools.copy(tmp_path / "stock", step, **options)
    assert {name: fs.cat(name) for name in fs.find("ranks")} == before


def test_a_copy_that_is_running_leaves_nothing_to_remove(server: Server, tmp_path: Path) -> None:
    fs, source = server.bucket("leased"), checkpoint(tmp_path / "src")
    step = "s3://leased/run/step-00000001"
    ckpt_tools.copy(source, step, **storage(server))
    fs.rm("leased/run/step-00000001/.metadata")  # not committed yet
    lease = Lease(step, server.options)
    assert open_root("s3://leased/run", server.options).remove_leftovers(grace_s=-5) == []
    lease.release()
    assert open_root("s3://leased/run", server.options).remove_leftovers(grace_s=-5)


def test_uploads_of_others_are_not_ended(server: Server, tmp_path: Path) -> None:
    fs = server.bucket("uploading")
    keys = ["other/model.safetensors", "run/user.safetensors", "run/other/__0_0.distcp"]
    ours = ["run/step-00000001/__0_0.distcp", "run/best/__0_0.1234567a.distcp"]
    for key in [*keys, *ours]:
        fs.call_s3("create_multipart_upload", Bucket="uploading", Key=key)
    left = open_root("s3://uploading/run", server.options).remove_leftovers(grace_s=-5)
    assert sorted(x.url.removeprefix("s3://uploading/") for x in left) == sorted(ours)
    assert open_root("s3://uploading", server.options).remove_leftovers(grace_s=-5) == []
    listed = fs.call_s3("list_multipart_uploads", Bucket="uploading").get("Uploads", [])
    assert sorted(upload["Key"] for upload in listed) == sorted(keys)


def test_a_checksum_that_a_stranger_claims_is_not_believed(server: Server, tmp_path: Path) -> None:
    fs, options = server.bucket("claimed"), {"storage_options": server.options}
    source = checkpoint(tmp_path / "src")
    data = (source / "__0_0.distcp").read_bytes()
    sealed = find_manifest(LocalStore(source))
    assert sealed is not None
    crc = sealed.files["__0_0.distcp"].crc64nvme
    wrong = bytes([data[0], *data[1:-1], data[-1] ^ 1])
    for number, notes in enumerate(
        ({"ckpt-crc64nvme": crc}, {"ckpt-crc64nvme": crc, "ckpt-upload": "x"})
    ):
        target = f"claimed/{number}"
        fs.pipe_file(f"{target}/__0_0.distcp", wrong, Metadata=notes)
        try:
            ckpt_tools.copy(source, f"s3://{target}", **options)
        except StorageError:
            assert names(fs, target) == {"__0_0.distcp"}  # it is refused
        else:
            assert fs.cat(f"{target}/__0_0.distcp") == data


@pytest.mark.slow
@pytest.mark.parametrize("pid", ["abc", None, [1], 1e300, True])
def test_a_lease_with_a_malformed_process_is_none(pid: Any, server: Server, tmp_path: Path) -> None:
    fs = server.bucket("leases")
    lease = Lease("s3://leases/run", server.options)
    holder = {**lease._me, "pid": pid}
    lease.release()

    fs.pipe_file("leases/run/.ckpt.lock", json.dumps(holder).encode())
    Lease("s3://leases/run", server.options).release()  # its holder is dead


# ---- names that mean something else --------------------------------------------------------------


def test_a_file_whose_name_has_a_date_is_read_by_its_path(tmp_path: Path, ckpt: Run) -> None:
    source, out = checkpoint(tmp_path / "src"), tmp_path / "out.20261126.safetensors"
    ckpt_tools.merge(source, out)
    assert ckpt("verify", out).returncode == 0
    assert ckpt_tools.inspect(out).total.num_tensors == 1
    state = {"w": torch.zeros(30, 5)}
    ckpt_tools.load(out, state)
    assert state["w"].unique().tolist() == [1.0]
    for manifest in tmp_path.glob("*.manifest.*"):
        manifest.unlink()
    assert ckpt("seal", out).returncode == 0
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    save_file({"b": torch.ones(3)}, folder / "extra.20261126.safetensors")
    done = ckpt("convert", folder, tmp_path / "dcp", "--to", "dcp")
    assert done.returncode == 10 and "extra.20261126.safetensors" in done.stderr
    (folder / "extra.20261126.safetensors").rename(folder / "extra.deadbeef.safetensors")
    done = ckpt("convert", folder, tmp_path / "dcp", "--to", "dcp")
    assert done.returncode == 10 and "give the path of the file itself" in done.stderr
    assert not (tmp_path / "dcp").exists()


def test_the_manifest_of_another_file_says_nothing(tmp_path: Path, ckpt: Run) -> None:
    one, two = (checkpoint(tmp_path / n, v) for n, v in (("one", 1.0), ("two", 2.0)))
    for source in (one, two):
        ckpt_tools.merge(source, tmp_path / f"{source.name}.safetensors")
    (manifest,) = tmp_path.glob("one.safetensors.ckpt.manifest.*")
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "two.safetensors").read_bytes())
    (tmp_path / manifest.name.replace("one", "x", 1)).write_bytes(manifest.read_bytes())
    for verb in ("stats", "verify", "inspect", "merge", "copy"):
        more = (tmp_path / "y.safetensors",) if verb in ("merge", "copy") else ()
        done = ckpt(verb, tmp_path / "x.safetensors", *more)
        if verb != "inspect":
            assert done.returncode == 14, (verb, done.stdout, done.stderr)
    with pytest.raises(IntegrityError, match="is of another file"):
        ckpt_tools.diff(tmp_path / "x.safetensors", tmp_path / "one.safetensors")
    assert not (tmp_path / "y.safetensors").exists()
    assert load_file(tmp_path / "x.safetensors")


@pytest.mark.parametrize("how", ["save", "reshard", "shards", "hf", "salvage"])
def test_a_run_with_one_step_is_not_replaced_by_a_checkpoint(how: str, tmp_path: Path) -> None:
    """The only checkpoint below a directory was looked for in the directory: a traceback."""
    state = {"model": {"a": torch.ones(4)}}
    ckpt_tools.save(tmp_path / "source", state)
    ckpt_tools.save(tmp_path / "run" / "step-00000001", state)
    before = sorted(tmp_path.rglob("*"))
    run, source = tmp_path / "run", tmp_path / "source"
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: ckpt_tools.save(run, state, overwrite=True),
        "reshard": lambda: ckpt_tools.reshard(source, run, to_ranks=1, overwrite=True),
        "shards": lambda: ckpt_tools.merge(source, run, max_shard_bytes=8, overwrite=True),
        "hf": lambda: ckpt_tools.convert(source, run, to="hf", overwrite=True),
        "salvage": lambda: ckpt_tools.salvage(source, run, overwrite=True),
    }
    with pytest.raises(CheckpointError, match="--overwrite never replaces: step-00000001"):
        calls[how]()
    assert sorted(tmp_path.rglob("*")) == before
