"""Optimizers of torchao whose moments have few bits: saved and resumed under FSDP2, bit by bit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from tests import jobs
from tests.jobs import PYTHON_PATH
from tests.peers.environments import JOBS, python_of


def run(num_ranks: int, run_: Path, kind: str, what: str, *flags: str) -> None:
    words = [python_of("quantized"), "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(num_ranks), str(JOBS / "few_bits_job.py"), str(run_)]
    env = {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [*words, kind, what, *flags],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=jobs.ROOT,
    )
    assert done.returncode == 0, (what, num_ranks, done.stderr[-4000:])
    shutil.rmtree(run_ / "step-00000003", ignore_errors=True)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_moments_of_few_bits_go_on_as_without_the_interruption(kind: str, tmp_path: Path) -> None:
    run(2, tmp_path, kind, "steps")
    run(2, tmp_path, kind, "again")
    run(3, tmp_path, kind, "resume")
    run(3, tmp_path, kind, "uneven")
    if kind == "AdamW8bit":
        for num_ranks, what in ((1, "resume"), (2, "used"), (2, "columns")):
            run(num_ranks, tmp_path, kind, what)
    step = tmp_path / "step-00000002"
    # other names, and the numbers that torchao says the codes mean
    ckpt_tools.convert(step, tmp_path / "x.pt", to="torch", optimizer="flat")
    flat, every = torch.load(tmp_path / "x.pt")["optimizer"], torch.load(tmp_path / "want-0.pt")[0]
    moments = {name: value for name, value in every.items() if "exp_avg" in name}
    assert len(moments) >= 8
    measured = ckpt_tools.stats(step).tensors
    for name, value in moments.items():
        assert torch.equal(flat[f"state.{name}"], value.float()), name
        rms = measured[f"optimizer.state.{name}"].rms
        assert rms == pytest.approx(value.float().square().mean().sqrt().item(), rel=1e-5)
    assert not ckpt_tools.verify(step).problems
    assert "8 torchao optimizer" in ckpt_tools.inspect(step).extras["quantized"]
    # stock torch reads the parts, and they mean what torchao says they do
    names = ckpt_tools.inspect(step).catalog.tensors
    front = "optimizer.state.layers.0.weight.exp_avg."
    parts = {name.removeprefix(front): name for name in names if name.startswith(front)}
    tensors = {
        name: torch.empty(names[name].shape, dtype=getattr(torch, names[name].dtype.name))
        for name in parts.values()
    }
    dcp.load(tensors, checkpoint_id=step, no_dist=True)
    codes, scale = tensors[parts["codes"]], tensors[parts["scale"]]
    if kind == "AdamW4bit":
        codes = torch.stack([codes >> 4, codes & 15], dim=-1)
    values = tensors[parts["qmap"]][codes.int()] if "qmap" in parts else codes.float()
    want = torch.load(tmp_path / "want-0.pt")[0]["layers.0.weight.exp_avg"]
    got = values.reshape(scale.numel(), -1) * scale.reshape(-1, 1)
    assert torch.equal(got.reshape(want.shape), want)


@pytest.mark.parametrize("flags", [(), ("BF16",)])
def test_parts_that_are_no_blocks_become_float32_with_a_note(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """Also where one rank keeps codes, and another one plain numbers."""
    run(2, tmp_path, "AdamW8bit", "steps", "WIDE", *flags)
    run(3, tmp_path, "AdamW8bit", "resume", "WIDE", *flags)


def test_a_whole_model_on_each_rank(tmp_path: Path) -> None:
    run(2, tmp_path, "AdamW8bit", "steps", "DDP")
    run(2, tmp_path, "AdamW8bit", "resume")  # the same numbers, in parts
