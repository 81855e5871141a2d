"""What an object store is asked for: how often a save and a run list, and that each verb tells its
requests.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from aiohttp import web

import ckpt_tools
from ckpt_tools import CheckpointManager
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.steps import list_steps
from tests.command import run_ckpt
from tests.conftest import torchrun
from tests.servers.buckets import save_locally
from tests.servers.faults import watched
from tests.servers.servers import Server

Saved = Callable[[int], Path]


def kinds(passed: list[tuple[web.Request, int]]) -> collections.Counter[str]:
    return collections.Counter(
        "LIST" if "list-type=2" in r.query_string or "uploads&" in r.query_string else r.method
        for r, _ in passed
    )


@pytest.mark.slow
def test_a_save_lists_at_most_twice(server: Server) -> None:
    server.bucket("lists")
    with (
        watched(server.endpoint) as (url, passed),
        CheckpointManager(
            "s3://lists/run", storage_options=replace(server, endpoint=url).options, keep_last=2
        ) as checkpoints,
    ):
        for step in range(1, 6):
            passed.clear()
            checkpoints.save(step, {"w": torch.ones(3)}, asynchronous=False)
            checkpoints._writer._background().submit(int).result()  # old steps are removed there
            # a job's first save looks for a newer step, too
            assert kinds(passed)["LIST"] <= 2 + (step == 1), [r.path_qs for r, _ in passed]
    assert [s.number for s in list_steps(open_root("s3://lists/run", server.options))] == [4, 5]


def test_three_ranks_list_no_more_than_one(server: Server) -> None:
    server.bucket("three")
    with watched(server.endpoint) as (url, passed):
        torchrun(3, "steps.py", "s3://three/run", "4", **replace(server, endpoint=url).environment)
        count = kinds(passed)
    assert [s.number for s in list_steps(open_root("s3://three/run", server.options))] == [2, 3, 4]
    # at the start: dead jobs' uploads and objects, unfinished rollbacks; once: a newer step
    assert count["LIST"] <= 3 + 1 + 2 * 4, count


@pytest.mark.slow
def test_a_run_of_many_steps_is_listed_at_once(server: Server) -> None:
    fs = server.bucket("rows")
    for step in range(30):
        fs.pipe_file(f"rows/run/step-{step:08d}/.metadata", b"x")
        fs.pipe_file(f"rows/run/step-{step:08d}/__0_0.distcp", b"x")
    with watched(server.endpoint) as (url, passed):
        assert (
            len(list_steps(open_root("s3://rows/run", replace(server, endpoint=url).options))) == 30
        )
    assert kinds(passed)["LIST"] == 1


VERBS = [
    ("inspect", "SRC"),
    ("merge", "SRC", "{tmp}/m.safetensors"),
    ("reshard", "SRC", "s3://verbs/two", "--to", "2"),
    ("convert", "SRC", "{tmp}/t.pt", "--to", "torch"),
    ("verify", "SRC"),
    ("diff", "SRC", "SRC"),
    ("salvage", "SRC", "{tmp}/saved"),
    ("copy", "SRC", "{tmp}/copied"),
    ("ls", "s3://verbs/run"),
    ("latest", "s3://verbs/run"),
    ("pin", "SRC"),
    ("prune", "s3://verbs/run", "--keep-last", "1"),
    ("seal", "s3://verbs/bare"),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_each_verb_tells_its_requests(
    words: tuple[str, ...], server: Server, tmp_path: Path
) -> None:
    fs = server.bucket("verbs")
    step = save_locally(tmp_path / "run", {"w": torch.ones(30)})
    if not fs.exists("verbs/run/step-00000001/.metadata"):
        ckpt_tools.copy(step, "s3://verbs/run/step-00000001", storage_options=server.options)
        for file in (".metadata", "__0_0.distcp"):
            fs.put_file(str(step / file), f"verbs/bare/{file}")
    with watched(server.endpoint) as (url, passed):
        given = [
            word.format(tmp=tmp_path).replace("SRC", "s3://verbs/run/step-00000001")
            for word in words
        ]
        done = run_ckpt(*given, "--traffic", **replace(server, endpoint=url).environment)
    assert done.returncode == 0, done.stderr
    told = done.stderr.splitlines()[-1]
    assert told.startswith(f"{len(passed)} request"), (told, kinds(passed))
    for kind, number in kinds(passed).items():
        assert f"{number} {kind}" in told, (told, kinds(passed))


def fetched(passed: list[tuple[web.Request, int]], file: str) -> int:
    """The bytes of a file that were asked for, by the ranges of the requests."""
    total = 0
    for request, _ in passed:
        if request.method == "GET" and file in request.path:
            first, last = request.headers["Range"].removeprefix("bytes=").split("-")
            total += int(last) - int(first) + 1
    return total


@pytest.mark.slow
def test_statistics_fetch_each_byte_once(server: Server, tmp_path: Path) -> None:
    """The payloads of a sealed checkpoint lie where torch puts them, and fingerprints prove it."""
    state = {f"layers.{i}.w": torch.randn(64, 200) for i in range(60)}
    step = save_locally(tmp_path / "run", state)
    server.bucket("stats")
    ckpt_tools.copy(step, "s3://stats/one", storage_options=server.options)
    with watched(server.endpoint) as (url, passed):
        found = ckpt_tools.stats(
            "s3://stats/one", storage_options=replace(server, endpoint=url).options
        )
    nbytes = (step / "__0_0.distcp").stat().st_size
    assert 0.9 * nbytes < fetched(passed, "__0_0.distcp") <= 1.02 * nbytes
    for name, value in state.items():
        assert found.tensors[
            f"model.{name}" if f"model.{name}" in found.tensors else name
        ].rms == pytest.approx(value.square().mean().sqrt().item(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("alignment", [128, 1024])
def test_statistics_are_right_where_payloads_lie_elsewhere(
    alignment: int, server: Server, tmp_path: Path
) -> None:
    from torch.utils.serialization import config

    state = {f"w{i}": torch.randn(64, 200) for i in range(4)}
    before, config.save.storage_alignment = config.save.storage_alignment, alignment
    try:
        dcp.save(state, checkpoint_id=tmp_path / "odd", no_dist=True)
    finally:
        config.save.storage_alignment = before
    ckpt_tools.seal(tmp_path / "odd")
    server.bucket("stats")
    url = f"s3://stats/odd{alignment}"
    ckpt_tools.copy(tmp_path / "odd", url, storage_options=server.options)
    found = ckpt_tools.stats(url, storage_options=server.options).tensors
    for name, value in state.items():
        assert found[name].rms == pytest.approx(value.square().mean().sqrt().item(), rel=1e-4)
