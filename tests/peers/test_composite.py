"""torchao's quantized weights: saved and resumed as plain tensors, bit by bit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import ckpt_tools
from tests import jobs
from tests.jobs import PYTHON_PATH
from tests.peers.environments import JOBS, python_of


def run(num_ranks: int, root: Path, kind: str, what: str) -> None:
    words = [python_of("quantized"), "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(num_ranks), str(JOBS / "composite_job.py"), str(root)]
    env = {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [*words, kind, what],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=jobs.ROOT,
    )
    assert done.returncode == 0, (kind, what, num_ranks, done.stderr[-4000:])
    shutil.rmtree(root / "step-00000003", ignore_errors=True)


@pytest.mark.parametrize("kind", ["int8", "nf4", "each", "rows", "columns"])
def test_quantized_weights_go_on_as_without_the_interruption(kind: str, tmp_path: Path) -> None:
    """Also on other numbers of ranks; and what would part codes from scales is refused."""
    run(2, tmp_path, kind, "steps")
    run(2, tmp_path, kind, "again")
    run(4 if kind in ("nf4", "columns") else 1, tmp_path, kind, "resume")
    step = tmp_path / "step-00000002"
    found = ckpt_tools.inspect(step)
    assert f"{3 if kind == 'each' else 2} torchao" in found.extras["quantized"]
    assert not ckpt_tools.verify(step).problems
    # no cast touches codes or scales
    ckpt_tools.merge(step, tmp_path / "x.safetensors", dtype="bf16")
    merged = ckpt_tools.inspect(tmp_path / "x.safetensors").catalog.tensors
    for name, entry in found.catalog.tensors.items():
        if "_weight_" in name and name.startswith("model."):
            assert merged[name.removeprefix("model.")].dtype is entry.dtype, name


def test_dcp_with_its_planners_keeps_weights_and_moments(tmp_path: Path) -> None:
    run(2, tmp_path, "int8", "dcp")
    for step in (tmp_path / "0", tmp_path / "1"):
        assert "torchao" in ckpt_tools.inspect(step).extras["quantized"]
        assert not any(
            b"torchao" in path.read_bytes() for path in step.iterdir()
        )  # no pickle of it
