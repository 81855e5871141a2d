"""Checkpoints of Lightning, Megatron-Core and torch_checkpointing, written by them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from tests.peers.environments import run_job


@pytest.mark.parametrize("kind", ["sharded", "file"])
def test_lightning(kind: str, tmp_path: Path) -> None:
    """A directory of ModelParallelStrategy (FSDP2), and a `.ckpt` file of DDP; the FSDP strategy itself wants a GPU."""
    run_job("lightning", 2, "lightning_job.py", tmp_path / "a.ckpt", kind)
    want = torch.load(tmp_path / "whole.pt")
    report = ckpt_tools.inspect(tmp_path / "a.ckpt")
    assert {"epoch", "global_step"} <= report.catalog.objects.keys() and ckpt_tools.verify(tmp_path / "a.ckpt").problems == []
    ckpt_tools.merge(tmp_path / "a.ckpt", tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == want["model"].keys() and all(torch.equal(got[n], v) for n, v in want["model"].items())
    ckpt_tools.convert(tmp_path / "a.ckpt", tmp_path / "s.pt", to="torch", optimizer="ids")
    state = torch.load(tmp_path / "s.pt")
    optimizer = state["optimizer_0"] if kind == "sharded" else state["optimizer_states"][0]
    assert state["global_step"] == 2 and optimizer["param_groups"][0]["lr"] == want["lr"]
    for number, values in want["state"].items():
        assert all(torch.equal(optimizer["state"][number][k], v) for k, v in values.items())


def test_megatron_core(tmp_path: Path) -> None:
    run_job("megatron", 3, "megatron_job.py", tmp_path / "run" / "iter_0000010")
    want = torch.load(tmp_path / "run" / "whole.pt")
    report = ckpt_tools.inspect(tmp_path / "run" / "iter_0000010")
    assert (
        report.world_size == 3
        and {"iteration", "args.lr"} <= report.catalog.objects.keys()
        and report.optimizer_states["exp_avg"].num_tensors == 1
    )
    assert ckpt_tools.verify(tmp_path / "run").problems == []
    state = {n: torch.zeros_like(t) for n, t in want.items()}
    ckpt_tools.load(tmp_path / "run", state, strict=False)
    assert all(torch.equal(state[n], t) for n, t in want.items())
    ckpt_tools.convert(tmp_path / "run", tmp_path / "m.safetensors", to="safetensors", key_map="megatron_unstack")
    got = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(got[f"decoder.layers.{n}.weight"], want["decoder.layers.weight"][n]) for n in range(4))
    ckpt_tools.convert(tmp_path / "run", tmp_path / "s.pt", to="torch")
    assert torch.equal(
        torch.load(tmp_path / "s.pt")["optimizer"]["state"]["final.bias"]["exp_avg"], want["optimizer.state.exp_avg.final.bias"]
    )


def test_torch_checkpointing(tmp_path: Path) -> None:
    run_job("torch_checkpointing", 3, "torch_checkpointing_job.py", tmp_path / "run" / "step-5")
    want = torch.load(tmp_path / "run" / "whole.pt")
    report = ckpt_tools.inspect(tmp_path / "run" / "step-5")
    assert (report.format, report.world_size) == ("per_rank", 3) and ckpt_tools.verify(tmp_path / "run" / "step-5").problems == []
    assert {"progress.step", "progress.rank.rank_2"} <= report.catalog.objects.keys()
    ckpt_tools.convert(tmp_path / "run" / "step-5", tmp_path / "s.pt", to="torch", optimizer="ids")
    state = torch.load(tmp_path / "s.pt")
    assert state["model"].keys() == want["model"].keys() and all(torch.equal(state["model"][n], v) for n, v in want["model"].items())
    assert all(torch.equal(state["optim"]["state"][i][k], v) for i, s in want["state"].items() for k, v in s.items())
