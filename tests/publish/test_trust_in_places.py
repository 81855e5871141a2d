"""Directories, buckets and manifests that others can write to: what counts as ours, and what does
not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import CheckpointManager, IntegrityError, StorageError
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.publish.find_manifest import find_manifest, noted_by_host
from ckpt_tools.run.roots import open_root
from ckpt_tools.storage import LocalStore
from tests.command import run_ckpt
from tests.servers.buckets import names, save_locally
from tests.servers.servers import Server
from tests.states import tensors

Run = Callable[..., subprocess.CompletedProcess[str]]
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


def stock(path: Path) -> Path:
    dcp.save({"w": torch.arange(12.0)}, checkpoint_id=path, no_dist=True)
    return path


# ---- staging directories -------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize("kind", ["empty", "with a link", "ours, but open to all"])
def test_a_staging_directory_of_somebody_else_is_not_used(kind: str, tmp_path: Path) -> None:
    src, shared, victim = stock(tmp_path / "src"), tmp_path / "shared", tmp_path / "victim"
    shared.mkdir(0o1777)
    victim.mkdir()
    attempt = ckpt_tools.seal(src).manifest.split(".")[2]
    planted = shared / f".tmp.dst.{attempt}"
    planted.mkdir()
    planted.chmod(0o777)
    if kind != "ours, but open to all":
        os.chown(planted, NOBODY, NOBODY)
    if kind == "with a link":
        (planted / "sub").symlink_to(victim)
    with pytest.raises(StorageError, match="a staging directory is not used"):
        ckpt_tools.copy(src, shared / "dst")
    assert not (shared / "dst").exists() and not any(victim.iterdir()) and planted.exists()


@as_root
def test_what_another_user_named_like_a_leftover_stays(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(0o1777)
    theirs = shared / ".tmp.dst.12345678"
    theirs.mkdir(0o700)
    os.chown(theirs, NOBODY, NOBODY)
    ckpt_tools.copy(stock(tmp_path / "src"), shared / "dst")
    assert theirs.exists() and (shared / "dst").exists()


def test_two_overwrites_leave_no_staging_directory(tmp_path: Path) -> None:
    """The first one's result is replaced at the instant at which it still holds its lock."""
    small = save_locally(tmp_path / "a", tensors(2, 1 << 16))
    for _ in range(20):
        out = tmp_path / "out"
        ckpt_tools.reshard(small, out, to_ranks=1, overwrite=True)
        threads = [
            threading.Thread(
                target=ckpt_tools.reshard,
                args=(small, out),
                kwargs={"to_ranks": n, "overwrite": True},
            )
            for n in (2, 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".tmp")] == []
        assert ckpt_tools.verify(out).problems == []


def test_the_loser_of_two_copies_leaves_nothing(tmp_path: Path, ckpt: Run) -> None:
    src, out = save_locally(tmp_path / "a", tensors(4, 1 << 18)), tmp_path / "out"
    for _ in range(4):
        results: list[str] = []
        threads = [
            threading.Thread(target=lambda all_=results: all_.append(copy_quietly(src, out)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "" in results
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".tmp")] == [], results
        shutil.rmtree(out)


def copy_quietly(src: Path, dst: Path) -> str:
    """Copies, and returns the error or ""."""
    try:
        ckpt_tools.copy(src, dst)
    except StorageError as error:
        return str(error)
    return ""


@as_root
def test_a_leftover_that_cannot_be_removed_is_not_called_removed(tmp_path: Path, ckpt: Run) -> None:
    with CheckpointManager(tmp_path / "run", keep_last=None) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"x": torch.ones(3)}, asynchronous=False)
    held = tmp_path / "run/step-00000010/.metadata"
    if subprocess.run(["chattr", "+i", held], capture_output=True).returncode:
        pytest.skip("no immutable files on this file system")
    try:
        first = ckpt("prune", tmp_path / "run", "--keep-last", 1)
        (trash,) = (tmp_path / "run").glob(".trash.*")
        again = ckpt("prune", tmp_path / "run", "--keep-last", 1)
    finally:
        for path in tmp_path.rglob(".metadata"):
            subprocess.run(["chattr", "-i", path], capture_output=True)
    assert first.returncode == 15 and "was removed from the run" in first.stdout + first.stderr
    assert "removed" not in [line.split()[0] for line in again.stdout.splitlines() if line]
    assert f"could not remove all of {trash}" in again.stderr


# ---- manifests that others wrote -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["mine.safetensors", "mine.distcp", "my.metadata"])
def test_a_forged_manifest_gives_no_file_away(name: str, tmp_path: Path, ckpt: Run) -> None:
    src, dst = stock(tmp_path / "src"), stock(tmp_path / "dst")
    ckpt_tools.seal(dst)
    (manifest,) = dst.glob("ckpt.manifest.*")
    body = json.loads(manifest.read_text())
    body.pop("crc64nvme")
    (dst / name).write_bytes(b"user data")
    body["files"][name] = {"nbytes": 9, "crc64nvme": "0" * 16}
    head = json.dumps(body, indent=1).encode()[:-2]
    seal = hex64(crc64nvme(head)).encode()
    manifest.write_bytes(head + b',\n "crc64nvme": "' + seal + b'"\n}\n')
    assert find_manifest(LocalStore(dst)) is not None  # the forgery is good
    done = ckpt("convert", src, dst, "--to", "dcp", "--overwrite")
    assert done.returncode == 15 and name in done.stderr
    assert (dst / name).read_bytes() == b"user data"


@pytest.mark.slow
def test_a_manifest_of_any_length_is_not_read(tmp_path: Path, ckpt: Run) -> None:
    src = stock(tmp_path / "src")
    with (src / "ckpt.manifest.12345678.json").open("wb") as file:
        file.truncate(1 << 30)
    done = ckpt("inspect", src)
    assert done.returncode in (0, 11) and "Traceback" not in done.stderr
    done = ckpt("verify", src)
    assert "a manifest is too long" in done.stdout + done.stderr and done.returncode in (11, 14)


def test_a_note_of_the_host_has_a_bound(tmp_path: Path) -> None:
    note = tmp_path / "ckpt.host.deadbeef.json"
    note.write_text('{"a": [1, 2]}')
    assert noted_by_host(LocalStore(tmp_path)) == {"a": (1, 2)}
    note.write_text('{"a": [1, 2]' + " " * (16 << 20) + "}")
    assert noted_by_host(LocalStore(tmp_path)) == {}


@pytest.mark.slow
def test_many_manifests_take_no_more_memory_than_two(tmp_path: Path) -> None:
    src = stock(tmp_path / "src")
    ckpt_tools.seal(src)
    (path,) = src.glob("ckpt.manifest.*")
    body = json.loads(path.read_bytes())
    del body["crc64nvme"]
    body["index"]["crc64nvme"] = "0" * 16  # it fits no index
    entry = next(iter(body["tensors"].values()))
    body["tensors"] = {f"a.long.name.of.a.tensor.{n}": entry for n in range(40_000)}
    text = json.dumps(body).encode()[:-1]
    data = text + b',\n "crc64nvme": "%016x"\n}\n' % crc64nvme(text)
    peaks = []
    for number in (1, 9):
        for n in range(number):
            (src / f"ckpt.manifest.{n:07}a.json").write_bytes(data)
        tracemalloc.start()
        assert find_manifest(LocalStore(src)) is not None  # the one that fits
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0], peaks


# ---- the seal of one file ------------------------------------------------------------------------


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A directory with one sealed file, in which a bit has flipped."""
    torch.save({"model": {"q": torch.randn(64, 64)}}, tmp_path / "s.pt")
    (tmp_path / "t").mkdir()
    ckpt_tools.merge(tmp_path / "s.pt", tmp_path / "t/model.safetensors")
    (tmp_path / "t/config.json").write_text("{}")
    return tmp_path / "t"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


def test_the_seal_of_a_file_counts_for_its_directory(sealed: Path, tmp_path: Path) -> None:
    assert ckpt_tools.verify(sealed).problems == []
    assert ckpt_tools.verify(sealed, require_manifest=True).problems == []
    ckpt_tools.copy(sealed, tmp_path / "good")
    assert "it is there already" in ckpt_tools.copy(sealed, tmp_path / "good").notes
    flip(sealed / "model.safetensors")
    assert ckpt_tools.verify(sealed).problems
    for verb, out in (("merge", "o.safetensors"), ("copy", "c")):
        with pytest.raises(IntegrityError):
            getattr(ckpt_tools, verb)(sealed, tmp_path / out)
        assert not (tmp_path / out).exists()
    with pytest.raises(IntegrityError):
        ckpt_tools.convert(sealed, tmp_path / "o.pt", to="torch")


# ---- results in the bucket of a run --------------------------------------------------------------


def test_a_finished_file_below_a_run_is_no_leftover(server: Server, tmp_path: Path) -> None:
    fs, step = server.bucket("kept"), save_locally(tmp_path, tensors(2, 64))
    url, options = "s3://kept/run", server.options
    ckpt_tools.copy(step, f"{url}/step-00000001", storage_options=options)
    for name in ("models/final.safetensors", "step-00000009/model.safetensors"):
        ckpt_tools.merge(step, f"{url}/{name}", storage_options=options)
    ckpt_tools.convert(step, f"{url}/e/m.pt", to="torch", storage_options=options)
    fs.pipe_file("kept/run/step-00000003/__0_0.12345678.distcp", b"never committed", **marked(fs))
    before = names(fs, "kept/run")
    left = open_root(url, options).remove_leftovers(grace_s=-5)
    gone = set(before) - set(names(fs, "kept/run"))
    assert {f"s3://{name}" for name in gone} == {item.url for item in left}
    assert not [name for name in gone if "final" in name or "model" in name or "m.pt" in name]


def marked(fs: object) -> dict[str, object]:
    """The metadata by which objects of this tool are known."""
    from ckpt_tools.storage.s3.multipart import MARK

    return {"Metadata": {MARK: "1"}}


@pytest.mark.slow
def test_an_overwrite_of_one_object_replaces_no_newer_result(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.bucket("newer")
    options, url = server.options, "s3://newer/m.safetensors"
    old, mine, theirs = (
        save_locally(tmp_path / n, tensors(1, 8, n_)) for n_, n in enumerate("abc")
    )
    ckpt_tools.merge(old, url, storage_options=options)
    big = save_locally(tmp_path / "big", tensors(3, 3 << 20))
    started, go_on = threading.Event(), threading.Event()

    def wait(label: str, total: int):
        from contextlib import contextmanager

        @contextmanager
        def bar():
            started.set()
            go_on.wait(60)
            yield lambda nbytes: None

        return bar()

    errors = []

    def slow() -> None:
        try:
            ckpt_tools.merge(big, url, overwrite=True, storage_options=options, progress=wait)
        except StorageError as error:
            errors.append(str(error))

    thread = threading.Thread(target=slow)
    thread.start()
    assert started.wait(60)
    ckpt_tools.merge(theirs, url, overwrite=True, storage_options=options)
    go_on.set()
    thread.join()
    assert errors and "another writer" in errors[0], errors
    data = tmp_path / "got.safetensors"
    data.write_bytes(server.bucket("newer").cat_file("newer/m.safetensors"))
    assert torch.equal(load_file(data)["layer0.weight"], tensors(1, 8, 2)["layer0.weight"])
    del mine


@pytest.mark.slow
def test_of_two_that_resume_one_attempt_the_winner_stays_whole(
    server: Server, tmp_path: Path
) -> None:
    server.bucket("twice")
    options = server.options
    src = save_locally(tmp_path, tensors(4, 1 << 20))
    for number in range(2):
        url, results = f"s3://twice/r{number}", []

        def one(url: str = url, results: list[str] = results) -> None:
            try:
                ckpt_tools.reshard(src, url, to_ranks=2, resume=True, storage_options=options)
                results.append("")
            except StorageError as error:
                results.append(str(error))

        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "" in results, results
        assert ckpt_tools.verify(url, storage_options=options).problems == [], results


def test_hints_for_directories_without_an_index_lead_somewhere(tmp_path: Path, ckpt: Run) -> None:
    step = save_locally(tmp_path, tensors(1, 8))
    done = ckpt("convert", step, "s3://bucket/x", "--to", "per-rank")
    assert done.returncode == 13 and "store's own tool" in done.stderr
    assert "ckpt copy" not in done.stderr


def test_a_step_that_is_removed_during_a_listing_is_not_shown(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing is old when its manifests are read: a real deletion happens in between."""
    fs, options = server.bucket("going"), server.options
    for step in (1, 2):
        ckpt_tools.copy(
            save_locally(tmp_path / str(step), tensors(1, 8)),
            f"s3://going/run/step-{step:08d}",
            storage_options=options,
        )
    root = open_root("s3://going/run", options)
    listed = root.entries()
    fs.rm("going/run/step-00000001", recursive=True)
    monkeypatch.setattr(root, "entries", lambda: listed, raising=True)
    from ckpt_tools.run.steps import list_steps

    assert [step.number for step in list_steps(root)] == [2]


def test_a_password_in_a_url_with_one_slash_is_not_shown(ckpt: Run) -> None:
    done = run_ckpt("inspect", "s3:/k:SEKRET@b/x")
    assert done.returncode == 15 and "SEKRET" not in done.stderr + done.stdout


def test_a_full_disk_behind_stdout_is_not_blamed_on_the_result(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            ["ckpt", "merge", tmp_path / "m.safetensors", tmp_path / "o.safetensors"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PATH": f"{Path(os.sys.executable).parent}:{os.environ['PATH']}"},
        )
    assert done.returncode == 15 and "cannot write the report" in done.stderr
    assert "the command itself has done its work" in done.stderr
    assert torch.equal(load_file(tmp_path / "o.safetensors")["w"], torch.ones(2))
