"""What real FSDP jobs of 1, 3, 4, 8 and 16 ranks saved, against stock torch and safetensors as
oracles.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt_tools
from tests.conftest import ALL_CASES, torchrun
from tests.stock_jobs import RESHARDED, assert_same, same_bits, stock_load

Saved = Callable[[int], Path]
MERGED = [c for c in ALL_CASES.split() if c != "differ"]








def inference_names(names: list[str]) -> list[str]:
    """`module.` is a wrapper's if all names begin with it, and else may be a child of the model."""
    for part in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        names = [name.replace(part, "") for name in names]
    while all(name.startswith("module.") for name in names):
        names = [name[len("module.") :] for name in names]
    return names


@pytest.mark.parametrize("case", MERGED)
def test_a_merged_model_is_the_live_model_bit_for_bit(case: str, saved: Saved, tmp_path: Path) -> None:
    root = saved(8)
    oracle = torch.load(root / f"{case}.pt", weights_only=False)
    other = ("optimizer", "train_state", "lr_scheduler")
    model = oracle.get("model") or {k: v for k, v in oracle.items() if k not in other}
    select = [k for k in model if k != "complex128"] if case == "dtypes" else []
    ckpt_tools.merge(root / case, tmp_path / "m.safetensors", select=select)
    got = load_file(tmp_path / "m.safetensors")
    chosen = {k: v for k, v in model.items() if not select or k in select}
    want = dict(zip(inference_names(list(chosen)), chosen.values(), strict=True))
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert same_bits(got[name], tensor), name


@pytest.mark.parametrize("case", RESHARDED)
@pytest.mark.parametrize("num_ranks", [1, 3, 16])
def test_a_resharded_checkpoint_is_the_same_to_stock_torch(case: str, num_ranks: int, saved: Saved, tmp_path: Path) -> None:
    source = saved(8) / case
    ckpt_tools.reshard(source, tmp_path / "r", to_ranks=num_ranks, from_ranks=8)
    assert_same(stock_load(tmp_path / "r", tmp_path), stock_load(source, tmp_path))


def chunks(path: Path) -> dict[str, Any]:
    """Every entry as stock torch reads it: properties, size, and chunks with their coordinates;
    strides, of torch 2.15, go into no load.
    """
    metadata = FileSystemReader(path).read_metadata()
    entries: dict[str, Any] = {"planner_data": metadata.planner_data}
    for fqn, value in metadata.state_dict_metadata.items():
        if hasattr(value, "chunks"):
            kind = {k: v for k, v in vars(value.properties).items() if k != "strides"}
            entries[fqn] = (kind, value.size, sorted((tuple(c.offsets), tuple(c.sizes)) for c in value.chunks))
        else:
            entries[fqn] = type(value).__name__
    return entries


@pytest.mark.parametrize("case", ["adamw", "columns"])
@pytest.mark.parametrize("num_ranks", [1, 3, 4, 16])
def test_a_reshard_makes_the_very_chunks_that_a_real_job_saves(case: str, num_ranks: int, saved: Saved, tmp_path: Path) -> None:
    ckpt_tools.reshard(saved(8) / case, tmp_path / "r", to_ranks=num_ranks)
    assert chunks(tmp_path / "r") == chunks(saved(num_ranks) / case)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_a_resharded_checkpoint_loads_in_a_real_job(num_ranks: int, saved: Saved, tmp_path: Path) -> None:
    ckpt_tools.reshard(saved(8) / "adamw", tmp_path / "r", to_ranks=num_ranks)
    torchrun(num_ranks, "load.py", str(tmp_path / "r"), str(saved(8) / "adamw.pt"))


def test_hsdp_replicas_are_saved_once_and_reshard_like_fsdp(saved: Saved, tmp_path: Path) -> None:
    report = ckpt_tools.inspect(saved(8) / "hsdp")
    assert all(len({c.box for c in t.chunks}) == len(t.chunks) for t in report.catalog.tensors.values())
    ckpt_tools.reshard(saved(8) / "hsdp", tmp_path / "r", to_ranks=4)
    assert chunks(tmp_path / "r") == chunks(saved(4) / "adamw")


def test_a_two_dimensional_mesh_becomes_dim_0(saved: Saved, tmp_path: Path) -> None:
    before = ckpt_tools.inspect(saved(8) / "tp").catalog.tensors["model.d.weight"]
    assert len({c.box.offsets[0] for c in before.chunks}) > 1
    assert len({c.box.offsets[1] for c in before.chunks}) > 1
    ckpt_tools.reshard(saved(8) / "tp", tmp_path / "r", to_ranks=4)
    after = ckpt_tools.inspect(tmp_path / "r").catalog.tensors["model.d.weight"]
    assert [c.box.sizes for c in after.chunks] == [(2, 16), (2, 16), (2, 16), (0, 16)]


def test_there_and_back_is_the_same_again(saved: Saved, tmp_path: Path) -> None:
    source = saved(8) / "adamw"
    ckpt_tools.reshard(source, tmp_path / "three", to_ranks=3)
    ckpt_tools.reshard(tmp_path / "three", tmp_path / "eight", to_ranks=8, from_ranks=3)
    assert chunks(tmp_path / "eight") == chunks(source)
    assert_same(stock_load(tmp_path / "eight", tmp_path), stock_load(source, tmp_path))


def test_one_rank_splits_into_what_four_save_but_for_buffers(saved: Saved, tmp_path: Path) -> None:
    ckpt_tools.reshard(saved(1) / "adamw", tmp_path / "r", to_ranks=4)
    got, want = chunks(tmp_path / "r"), chunks(saved(4) / "adamw")
    assert {k for k in want if got[k] != want[k]} == {"model.bn.running_mean", "model.bn.running_var"}


def test_fingerprints_do_not_depend_on_the_sharding(saved: Saved, tmp_path: Path) -> None:
    import json

    prints = []
    for case in ("adamw", "columns"):
        for num_ranks in (1, 3, 5):
            ckpt_tools.reshard(saved(8) / case, tmp_path / f"{case}{num_ranks}", to_ranks=num_ranks)
            (manifest,) = (tmp_path / f"{case}{num_ranks}").glob("ckpt.manifest.*.json")
            prints.append((case, json.loads(manifest.read_text())["tensors"]))
    assert all(tensors == next(t for c, t in prints if c == case) for case, tensors in prints)


def test_replicas_that_differ_are_refused_by_rank(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(ckpt_tools.IntegrityError, match=r"'buffer'.*rank 0.*rank 1"):
        ckpt_tools.merge(saved(8) / "differ", tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_save_without_collectives_joins_into_what_a_collective_one_holds(saved: Saved, tmp_path: Path) -> None:
    ckpt_tools.reshard(saved(8) / "local", tmp_path / "r", to_ranks=8, from_ranks=8)
    assert chunks(tmp_path / "r") == chunks(saved(8) / "adamw")
    assert_same(stock_load(tmp_path / "r", tmp_path), stock_load(saved(8) / "adamw", tmp_path))
