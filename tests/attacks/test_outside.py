"""Attacks that would read or write outside the checkpoint, through links, pipes and names."""

from __future__ import annotations

import collections
import json
import os
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from aiohttp import web

import ckpt_tools
from ckpt_tools import (
    CheckpointError,
    CheckpointManager,
    StorageError,
)
from ckpt_tools.run.rollback import RollbackNote
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.steps import list_steps
from ckpt_tools.storage import LocalStore, RemoteStore, read
from ckpt_tools.storage.base import check_path
from tests.attacks.hostile import (
    Run,
)
from tests.servers.faults import serving


@pytest.mark.parametrize("what", ["link", "device", "pipe", "giant"])
def test_side_files_are_regular_small_and_inside(what: str, tmp_path: Path, ckpt: Run) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (tmp_path / "id_rsa").write_text("PRIVATE")
    target = base / "tokenizer.json"
    if what == "link":
        target.symlink_to(tmp_path / "id_rsa")
    elif what == "device":
        target.symlink_to("/dev/zero")
    elif what == "pipe":
        os.mkfifo(target)
    else:
        target.write_bytes(b"x")
        os.truncate(target, 300 << 20)
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "s.pt")
    done = ckpt("convert", "s.pt", "out", "--to", "hf", "--base", "base", cwd=tmp_path)
    assert (
        done.returncode == 13 and "tokenizer.json" in done.stderr and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["zero", "pipe", "deep", "giant", "folder", "half"])
@pytest.mark.parametrize("option", ["--shapes", "--map", "--param-order", "--base"])
def test_named_files_of_any_kind_are_one_line(
    option: str, kind: str, tmp_path: Path, ckpt: Run
) -> None:
    path = tmp_path / ("config.json" if option == "--base" else "f.json")
    if kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "giant":
        path.write_bytes(b"[")
        os.truncate(path, 1 << 40)
    else:
        path.write_text("[" * 200_000 if kind == "deep" else '{"a": "\\ud800"}')
    torch.save(
        {
            "model": {"w": torch.ones(2)},
            "optimizer": {"state": {}, "param_groups": [{"params": [0]}]},
        },
        tmp_path / "s.pt",
    )
    value = str(tmp_path) if option == "--base" else str(path)
    to = "hf" if option == "--base" else "dcp"
    done = ckpt("convert", tmp_path / "s.pt", tmp_path / "out", "--to", to, option, value)
    assert done.returncode == 13 or (
        kind in ("half", "deep") and option in ("--base", "--shapes")
    ), done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr) < 2000


@pytest.mark.parametrize(
    "name", ["%2e%2e/secret.distcp", "a?b.distcp", "a#b.distcp", "%2e%2e%2fsecret.distcp"]
)
def test_a_name_with_codes_does_not_leave_a_web_server_s_folder(name: str, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(300)}, checkpoint_id=tmp_path / "c", no_dist=True)
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.raw_path)
        if request.path == "/c/":
            return web.Response(text='<a href=".metadata">x</a>', content_type="text/html")
        if request.path == "/c/.metadata":
            return web.Response(body=(tmp_path / "c" / ".metadata").read_bytes())
        return web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    with serving(app) as url, pytest.raises(CheckpointError):
        ckpt_tools.verify(f"{url}/c/")
    assert asked and not [
        path for path in asked if "secret" in path or "?b" in path or path.endswith("/a")
    ]


def test_a_file_that_is_swapped_for_a_link_while_it_is_opened_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "secret").write_bytes(b"SECRET")
    path, inside, outside = tmp_path / "c" / "f", tmp_path / "c" / "in", tmp_path / "c" / "out"
    inside.write_bytes(b"public")
    path.write_bytes(b"public")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            outside.symlink_to(tmp_path / "secret")
            os.replace(outside, path)
            inside.write_bytes(b"public")
            os.replace(inside, path)

    thread = threading.Thread(target=swap)
    thread.start()
    seen: collections.Counter[str] = collections.Counter()
    try:
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            store = LocalStore(tmp_path / "c")
            try:
                seen[read(store, "f", 0, 6).decode()] += 1
            except StorageError as error:
                seen["replaced by a link" if "replaced by a link" in str(error) else "refused"] += 1
            finally:
                store.close()
    finally:
        stop.set()
        thread.join()
    assert (
        "SECRET" not in seen and seen["public"] and seen["refused"] + seen["replaced by a link"]
    ), seen


@pytest.mark.parametrize("what", ["hard link", "pipe", "folder", "link"])
def test_the_lock_of_a_run_is_a_file_of_its_own(what: str, tmp_path: Path) -> None:
    victim, lock = tmp_path / "victim", tmp_path / "run" / ".ckpt.lock"
    victim.write_bytes(b"years of work")
    lock.parent.mkdir()
    {
        "hard link": lambda: os.link(victim, lock),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
        "link": lambda: lock.symlink_to(victim),
    }[what]()
    with pytest.raises(StorageError, match=r"lock of a run is not used|cannot create"):
        CheckpointManager(tmp_path / "run")
    assert victim.read_bytes() == b"years of work"


def test_a_manifest_of_an_older_kind_vouches_for_nothing(tmp_path: Path, ckpt: Run) -> None:
    """Version 1 had no checksum of its own, so that anybody could have changed it."""
    dcp.save({"w": torch.ones(300)}, checkpoint_id=tmp_path / "c", no_dist=True)
    sealed = ckpt_tools.seal(tmp_path / "c")
    path = tmp_path / "c" / sealed.manifest
    body = json.loads(path.read_bytes())
    del body["crc64nvme"]
    path.write_text(json.dumps(body | {"ckpt_manifest": 1}))
    done = ckpt("verify", tmp_path / "c")
    assert done.returncode == 14 and "another version" in done.stdout
    path.unlink()
    done = ckpt("verify", tmp_path / "c")
    assert done.returncode == 0 and "it has no manifest" in done.stdout
    done = ckpt("verify", tmp_path / "c", "--require-manifest")
    assert (
        done.returncode == 14 and "it has no manifest" in done.stderr and "ckpt seal" in done.stderr
    )


def test_paths_that_leave_a_root_are_refused_for_every_store() -> None:
    for path in (
        "../x",
        "a/../x",
        "/x",
        "a//x",
        "a\\..\\x",
        "s3://b/x",
        "a::b",
        "C:\\x",
        "a\x00b",
        "./x",
    ):
        with pytest.raises(StorageError):
            check_path(path, "here")
        with pytest.raises(StorageError):
            RemoteStore("memory://attacks")._full(path)


@pytest.mark.parametrize("what", ["link", "dangling link", "pipe"])
def test_a_pin_is_not_written_through_anything(what: str, tmp_path: Path, ckpt: Run) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)}, asynchronous=False)
    victim, pin = tmp_path / "victim", tmp_path / "run" / "step-00000001" / "ckpt.pin"
    if what == "link":
        victim.write_text("precious")
    if what == "pipe":
        os.mkfifo(pin)
    else:
        pin.symlink_to(victim)
    done = ckpt("pin", tmp_path / "run" / "step-00000001")
    assert done.returncode in (0, 15) and "Traceback" not in done.stderr
    assert not victim.exists() or victim.read_text() == "precious"


def test_a_note_of_a_rollback_by_somebody_else_moves_no_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"n": step}, asynchronous=False)
    attempts = {s.name: s.manifest.attempt for s in list_steps(open_root(tmp_path)) if s.manifest}
    note = RollbackNote("x", "aaaaaaaa-0000-4000-8000-000000000000", 1, attempts, True)
    (tmp_path / note.file).write_bytes(note.render())
    os.chown(tmp_path / note.file, 12345, 12345)
    assert [s.number for s in list_steps(open_root(tmp_path))] == [1, 2, 3]
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        assert checkpoints.resume({"n": 0}) == 3
