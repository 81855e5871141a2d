"""What `prune` leaves alone in a bucket: the work of those who still send, and read-only places."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools import CheckpointManager, StorageError
from ckpt_tools.publish.bucket.lease import Lease
from ckpt_tools.run.roots import open_root
from tests.command import run_command
from tests.servers.buckets import save_locally
from tests.servers.faults import held_at
from tests.servers.servers import Server

FILE = "step-00000009/__0_0.12345678.distcp"


def test_an_upload_with_a_young_part_is_not_old(server: Server) -> None:
    """moto says of each upload that it began in 2010, and a large file takes longer than a day."""
    fs, run = server.bucket("living"), f"living/{uuid.uuid4()}"
    place = {"Bucket": "living", "Key": f"{run[7:]}/{FILE}"}
    upload = fs.call_s3("create_multipart_upload", **place)["UploadId"]
    fs.call_s3("upload_part", **place, UploadId=upload, PartNumber=1, Body=b"x" * 100)
    root = open_root(f"s3://{run}", server.options)
    assert root.remove_leftovers(grace_s=3600) == []
    assert fs.call_s3("list_parts", **place, UploadId=upload)["Parts"]
    assert len(root.remove_leftovers(grace_s=-5)) == 1, "and an old one is"


def test_the_finished_file_of_one_rank_stays_while_another_sends(
    server: Server, tmp_path: Path
) -> None:
    fs = server.bucket("living")
    for _ in range(20):  # until the machine was quick enough for the ages to mean something
        run = f"living/{uuid.uuid4()}"
        with CheckpointManager(f"s3://{run}", storage_options=server.options) as checkpoints:
            checkpoints.save(9, {"x": 1}, asynchronous=False)
        fs.rm(f"{run}/step-00000009/.metadata")  # as before the commit
        before = sorted(fs.find(run))
        root = open_root(f"s3://{run}", server.options)
        time.sleep(4)
        begun = time.monotonic()
        place = {"Bucket": "living", "Key": f"{run[7:]}/step-00000009/__1_0.12345678.distcp"}
        upload = fs.call_s3("create_multipart_upload", **place)["UploadId"]
        # moto makes up when an upload began, but not when its part arrived
        fs.call_s3("upload_part", **place, UploadId=upload, PartNumber=1, Body=b"x" * 100)
        called = time.monotonic()  # what is removed is older than the upload by two seconds
        left = root.remove_leftovers(grace_s=called - begun + 2)
        if time.monotonic() - called < 1.5:
            break
    assert left == [] and sorted(fs.find(run)) == before
    fs.call_s3("abort_multipart_upload", **place, UploadId=upload)
    assert len(root.remove_leftovers(grace_s=2.0)) == 2, "without the upload, both files are old"


def test_the_work_of_a_living_job_stays_whatever_its_age(server: Server) -> None:
    fs, run = server.bucket("living"), f"living/{uuid.uuid4()}"
    place = {"Bucket": "living", "Key": f"{run[7:]}/{FILE}"}
    upload = fs.call_s3("create_multipart_upload", **place)["UploadId"]
    lease = Lease(f"s3://{run}", server.options)
    assert open_root(f"s3://{run}", server.options).remove_leftovers(grace_s=-5) == []
    fs.call_s3("list_parts", **place, UploadId=upload)
    lease.release()
    assert len(open_root(f"s3://{run}", server.options).remove_leftovers(grace_s=-5)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["simplecache::", "filecache::"])
def test_nothing_is_removed_by_a_chained_url(wrapper: str, server: Server) -> None:
    fs, run = server.bucket("chained"), f"chained/{uuid.uuid4()}"
    with CheckpointManager(f"s3://{run}", storage_options=server.options) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": step}, asynchronous=False)
    before, options = sorted(fs.find(run)), {"s3": server.options, "chained": True}
    for dry_run in (True, False):
        with pytest.raises(StorageError, match="a chained URL is read-only"):
            ckpt_tools.prune(f"{wrapper}s3://{run}", 1, storage_options=options, dry_run=dry_run)
    assert sorted(fs.find(run)) == before


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["prune", "dry run"])
def test_a_web_server_is_read_only(more: tuple[str, ...], tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", keep_last=None) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": step}, asynchronous=False)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{web.server_port}/run"
        done = run_command("prune", url, "--keep-last", "1", *more)
        web.shutdown()
    assert done.returncode == 15 and "a web server is read-only" in done.stderr, done.stderr
    assert "would remove" not in done.stdout


def test_the_upload_of_a_living_copy_stays(server: Server) -> None:
    fs, run = server.bucket("living"), f"living/{uuid.uuid4()}"
    place = {"Bucket": "living", "Key": f"{run[7:]}/{FILE}"}
    upload = fs.call_s3("create_multipart_upload", **place)["UploadId"]
    lease = Lease(f"s3://{run}/step-00000009", server.options)
    root = open_root(f"s3://{run}", server.options)
    assert root.remove_leftovers(grace_s=-5) == []
    fs.call_s3("list_parts", **place, UploadId=upload)
    lease.release()
    assert len(root.remove_leftovers(grace_s=-5)) == 1


def test_a_note_that_this_tool_did_not_write_gives_no_upload_away(server: Server) -> None:
    fs, run = server.bucket("living"), f"living/{uuid.uuid4()}"
    with CheckpointManager(f"s3://{run}", storage_options=server.options) as checkpoints:
        checkpoints.save(1, {"x": 1}, asynchronous=False)
    place = {"Bucket": "living", "Key": f"{run[7:]}/data/mine.bin"}
    upload = fs.call_s3("create_multipart_upload", **place)["UploadId"]
    note = {"work": "", "attempt": "", "files": [], "uploads": {"x": [upload, 1]}}
    fs.pipe_file(f"{run}/ckpt.uploads.cafecafe.json", json.dumps(note).encode())
    assert open_root(f"s3://{run}", server.options).remove_leftovers(grace_s=-5) == []
    fs.call_s3("list_parts", **place, UploadId=upload)


def test_an_object_with_an_odd_checksum_stops_nothing(server: Server) -> None:
    fs, run = server.bucket("living"), f"living/{uuid.uuid4()}"
    with CheckpointManager(f"s3://{run}", storage_options=server.options) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": step, "w": torch.ones(3)}, asynchronous=False)
    for crc in ("zz", "-1", "f" * 1000):
        for step in (1, 9):  # beside sound files, and where no step is
            key = f"{run[7:]}/step-0000000{step}/__0_0.dead{len(crc):04}.distcp"
            about = {"ckpt-upload": "1", "ckpt-crc64nvme": crc}
            fs.call_s3("put_object", Bucket="living", Key=key, Body=b"x", Metadata=about)
    options = server.options
    ckpt_tools.prune(f"s3://{run}", 1, dry_run=True, storage_options=options)
    ckpt_tools.thin(f"s3://{run}", 1, dry_run=True, storage_options=options)
    with CheckpointManager(f"s3://{run}", storage_options=options) as checkpoints:
        assert checkpoints.resume({"x": 0, "w": torch.zeros(3)}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reshard", "save", "copy"])
def test_a_writer_whose_files_were_taken_for_a_dead_one_s_does_not_commit(
    how: str, server: Server, tmp_path: Path
) -> None:
    """It stood still, longer than the grace, just before the commit, while `prune` ran."""
    fs, run = server.bucket("living"), f"living/{uuid.uuid4()}"
    target = f"s3://{run}/step-00000009"
    source = save_locally(tmp_path / "run", {"w": torch.ones(100), "v": torch.ones(50)})
    code = {
        "reshard": f"ckpt_tools.reshard({str(source)!r}, {target!r}, to_ranks=2)",
        "save": f"ckpt_tools.save({target!r}, {{'w': torch.ones(100)}})",
        "copy": f"ckpt_tools.copy({str(source)!r}, {target!r})",
    }[how]
    with held_at(server.endpoint, ("ckpt.manifest",), "PUT") as (url, gate):
        process = subprocess.Popen(
            [sys.executable, "-c", f"import torch, ckpt_tools; {code}"],
            env=os.environ | server.environment | {"AWS_ENDPOINT_URL": url},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert gate.reached.wait(60), process.communicate()
        for name in fs.find(f"{run}/step-00000009"):
            if name.endswith(".distcp"):
                fs.rm(name)
        gate.opened.set()
        _, errors = process.communicate(timeout=60)
    assert process.returncode, "it said that it had written a checkpoint without files"
    assert "a file is not what was written" in errors and "--grace" in errors
    fs.invalidate_cache()
    assert not any(name.endswith(".metadata") for name in fs.find(run))
