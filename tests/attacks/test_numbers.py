"""Numbers of a manifest and of an index that no checkpoint can have: one line, at once."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_tools
from ckpt_tools import CheckpointManager, FormatError
from ckpt_tools.core.checksum import crc64nvme
from tests.command import run_command

SHAPES: dict[str, Any] = {
    "many dims": [1] * 1_200_000,
    "long dims": [int("9" * 4000)],
    "a product": [1 << 40, 1 << 40],
    "negative": [-1],
    "a fraction": [2.5],
    "no list": 7,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            state = {"model": {"w": torch.full((4,), float(step))}, "items": [{"a": torch.ones(1)}]}
            checkpoints.save(step, state, asynchronous=False)
    return tmp_path / "run"


def forge(step: Path, change: Any) -> None:
    """Changes a manifest, and gives it the checksum of its new text."""
    (path,) = step.glob("ckpt.manifest.*")
    body = json.loads(path.read_bytes())
    del body["crc64nvme"]
    change(body)
    text = json.dumps(body).encode()[:-1]
    path.write_bytes(text + b',\n "crc64nvme": "%016x"\n}\n' % crc64nvme(text))


@pytest.mark.parametrize("kind", SHAPES)
def test_a_forged_shape_is_one_line_for_every_verb(kind: str, run: Path, tmp_path: Path) -> None:
    step = run / "step-00000002"
    forge(step, lambda body: body["tensors"]["model.w"].update(shape=SHAPES[kind]))
    for words in (
        ["latest", run],
        ["ls", run],
        ["ls", run, "--bytes"],
        ["verify", step],
        ["check", run],
    ):
        done = run_command(*words, timeout=30)
        text = done.stdout + done.stderr
        assert "Traceback" not in text and len(max(text.splitlines(), key=len)) < 2000
    assert run_command("latest", run).stdout.strip().endswith("step-00000001")
    assert run_command("verify", step).returncode == 14
    with CheckpointManager(run) as checkpoints:
        into = {"model": {"w": torch.zeros(4)}, "items": [{"a": torch.zeros(1)}]}
        assert checkpoints.resume(into) == 1


@pytest.mark.parametrize("field", ["step", "world_size", "nbytes"])
def test_other_numbers_have_bounds_too(field: str, run: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        where = next(iter(body["files"].values())) if field == "nbytes" else body
        where[field] = int("9" * 4000)

    forge(run / "step-00000002", change)
    for words in (
        ["latest", run],
        ["ls", run, "--json"],
        ["ls", run, "--bytes"],
        ["report", run, "--json"],
    ):
        done = run_command(*words, timeout=30)
        assert "Traceback" not in done.stderr, done.stderr
    assert run_command("latest", run).stdout.strip().endswith("step-00000001")


@pytest.mark.parametrize("ranks", [20_000_000, (1 << 62) - 1])
def test_a_job_of_impossibly_many_ranks_is_refused(ranks: int, run: Path, tmp_path: Path) -> None:
    forge(run / "step-00000001", lambda body: body.update(world_size=ranks))
    for words in (
        ["ls", run, "--bytes"],
        ["thin", run, "--keep-full", 1, "--dry-run"],
        ["report", run, "-o", tmp_path / "page.html"],
    ):
        done = run_command(*words, timeout=30)
        assert "Traceback" not in done.stderr, done.stderr


def test_a_step_of_the_far_future_is_one_gap(run: Path) -> None:
    shutil.copytree(run / "step-00000001", run / "step-3000000000")
    found = [p for p in ckpt_tools.check_run(run, every=1) if p.kind == "missing"]
    assert [p.step for p in found] == [3]
    assert "nor the next 2,999,999,996 up to 2999999999" in found[0].text


@pytest.mark.parametrize(
    "path",
    [
        ("items", -1, "a"),
        ("items", 10**18, "a"),
        ("items", 1 << 20, "a"),
        tuple("x" * 600),
        ("items", *[(1 << 20) - 1] * 150),
        ("items", *[1 << 19] * 3, "a"),
    ],
    ids=["negative", "huge", "large", "long", "nested", "sum"],
)
def test_an_index_of_a_list_is_refused_where_it_is_read(
    path: tuple[Any, ...], tmp_path: Path
) -> None:
    state = {"items": [{"a": torch.ones(2)}], "w": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    index = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(index.read_bytes())  # of this test
    assert metadata.planner_data["items.0.a"] == ("items", 0, "a")
    metadata.planner_data["items.0.a"] = path
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(FormatError, match=r"an index of a list|keys to an entry|lists of about"):
        ckpt_tools.inspect(tmp_path / "c")
    with pytest.raises(FormatError):
        ckpt_tools.load(tmp_path / "c", {"items": [{"a": torch.zeros(2)}], "w": torch.zeros(2)})
    reader = ckpt_tools.distributed.StorageReader(tmp_path / "c")
    with pytest.raises(
        CheckpointException, match=r"an index of a list|keys to an entry|lists of about"
    ):
        dcp.load({"w": torch.zeros(2)}, storage_reader=reader, no_dist=True)
