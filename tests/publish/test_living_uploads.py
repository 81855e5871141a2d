"""What `prune` leaves alone in a bucket: the work of those who still send, and read-only places."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

import ckpt_tools
from ckpt_tools import CheckpointManager
from ckpt_tools.publish.destinations import open_root
from ckpt_tools.publish.lease import Lease
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
    fs, run = server.bucket("living"), f"living/{uuid.uuid4()}"
    with CheckpointManager(f"s3://{run}", storage_options=server.options) as checkpoints:
        checkpoints.save(9, {"x": 1}, asynchronous=False)
    fs.rm(f"{run}/step-00000009/.metadata")  # as before the commit
    place = {"Bucket": "living", "Key": f"{run[7:]}/step-00000009/__1_0.12345678.distcp"}
    upload = fs.call_s3("create_multipart_upload", **place)["UploadId"]
    before = sorted(fs.find(run))
    root = open_root(f"s3://{run}", server.options)
    if (
        server.name == "moto"
    ):  # without a part, the time of its beginning decides, which moto makes up
        fs.call_s3("upload_part", **place, UploadId=upload, PartNumber=1, Body=b"x" * 100)
    assert root.remove_leftovers(grace_s=0.0) == [] or server.name == "moto"
    if server.name != "moto":
        assert sorted(fs.find(run)) == before


def test_the_work_of_a_living_job_stays_whatever_its_age(server: Server) -> None:
    fs, run = server.bucket("living"), f"living/{uuid.uuid4()}"
    place = {"Bucket": "living", "Key": f"{run[7:]}/{FILE}"}
    upload = fs.call_s3("create_multipart_upload", **place)["UploadId"]
    lease = Lease(f"s3://{run}", server.options)
    assert open_root(f"s3://{run}", server.options).remove_leftovers(grace_s=-5) == []
    fs.call_s3("list_parts", **place, UploadId=upload)
    lease.release()
    assert len(open_root(f"s3://{run}", server.options).remove_leftovers(grace_s=-5)) == 1


@pytest.mark.parametrize("wrapper", ["simplecache::", "filecache::"])
def test_nothing_is_removed_by_a_chained_url(wrapper: str, server: Server) -> None:
    fs, run = server.bucket("chained"), f"chained/{uuid.uuid4()}"
    with CheckpointManager(f"s3://{run}", storage_options=server.options) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": step}, asynchronous=False)
    before, options = sorted(fs.find(run)), {"s3": server.options, "chained": True}
    found = ckpt_tools.prune(f"{wrapper}s3://{run}", 1, storage_options=options)
    assert not found.removed and (found.failed or found.unreadable)
    assert all("a chained URL is read-only" in text for text in found.failed.values())
    assert sorted(fs.find(run)) == before


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
