"""A copy within one store: one request for a small file, and the store's own checksum as proof."""

from __future__ import annotations

import uuid

import pytest
import torch

import ckpt_tools
from ckpt_tools import CheckpointManager, StorageError
from tests.servers.faults import faulty, watched
from tests.servers.servers import Server

FILES = {f"part-{number}.txt": f"text {number}".encode() for number in range(40)}


@pytest.fixture
def step(server: Server) -> str:
    server.bucket("copied")
    root = f"s3://copied/{uuid.uuid4()}/run"
    with CheckpointManager(root, storage_options=server.options) as checkpoints:
        checkpoints.save(1, {"w": torch.arange(9000.0)}, files=FILES, asynchronous=False)
    return f"{root}/step-00000001"


@pytest.mark.slow
def test_a_small_file_takes_one_request(server: Server, step: str) -> None:
    to = f"s3://copied/{uuid.uuid4()}/step-00000001"
    with watched(server.endpoint) as (url, passed):
        options = server.options | {"endpoint_url": url}
        done = ckpt_tools.copy(step, to, storage_options=options)
        each = 1 if server.name == "moto" else 2  # RadosGW tells no CRC-64: a HEAD proves it
        assert len(passed) <= each * len(done.files) + 30, len(passed)
    assert done.store_nbytes > 0 == done.client_nbytes
    assert not ckpt_tools.verify(to, storage_options=server.options).problems
    fs = server.bucket("copied")
    for name, data in FILES.items():
        assert fs.cat_file(f"{to.removeprefix('s3://')}/{name}") == data


def test_names_with_a_percent_sign_pass_through_this_machine_and_a_note_says_so(
    server: Server,
) -> None:
    server.bucket("copied")
    root = f"s3://copied/{uuid.uuid4()}/run"
    with CheckpointManager(root, storage_options=server.options) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(9)}, files={"a%20b.txt": b"text"}, asynchronous=False)
    to = f"s3://copied/{uuid.uuid4()}/step-00000001"
    done = ckpt_tools.copy(f"{root}/step-00000001", to, storage_options=server.options)
    assert "copied through this machine, since a name has a %" in done.notes
    assert done.client_nbytes > 0 == done.store_nbytes
    assert not ckpt_tools.verify(to, storage_options=server.options).problems


@pytest.mark.slow
def test_a_lost_answer_is_no_second_writer(server: Server, step: str) -> None:
    to = f"s3://copied/{uuid.uuid4()}/step-00000001"
    with faulty(server.endpoint, 0.3, 1, ("lost", "503", "reset"), writes=True) as (url, log):
        options = server.options | {"endpoint_url": url}
        try:
            ckpt_tools.copy(step, to, storage_options=options)
        except StorageError:  # too many in a row; the next copy goes on from there
            ckpt_tools.copy(step, to, storage_options=server.options)
    assert "lost" in log
    assert not ckpt_tools.verify(to, storage_options=server.options).problems
