"""One file a rank, written by real jobs, read as one checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import ckpt_tools
from ckpt_tools import CatalogError, CheckpointError, FormatError, IntegrityError, PlanError
from tests.conftest import torchrun
from tests.strategies import flip

CASES = ("fsdp", "tp", "hsdp")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("per_rank")
    torchrun(4, "per_rank.py", str(out))
    return out


@pytest.mark.parametrize("case", CASES)
def test_the_files_of_all_ranks_are_the_whole(case: str, ranks: Path, tmp_path: Path) -> None:
    want = torch.load(ranks / f"{case}.pt")
    report = ckpt_tools.inspect(ranks / case)
    assert (report.format, report.world_size) == ("per_rank", 4) and ckpt_tools.verify(
        ranks / case
    ).problems == []
    ckpt_tools.merge(ranks / case, tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == want["model"].keys() and all(
        torch.equal(got[n], v) for n, v in want["model"].items()
    )
    net = nn.Sequential(nn.Linear(10, 14), nn.Linear(14, 7), nn.BatchNorm1d(7))
    ckpt_tools.load(ranks / case, {"model": net})
    assert all(torch.equal(v, want["model"][n]) for n, v in net.state_dict().items())
    state = {f"optim.state.{n}": torch.zeros_like(v) for n, v in want["moments"].items()}
    ckpt_tools.load(ranks / case, state, strict=False)
    assert all(torch.equal(state[f"optim.state.{n}"], v) for n, v in want["moments"].items())


@pytest.mark.parametrize("case", CASES)
def test_they_become_dcp_for_any_number_of_ranks(case: str, ranks: Path, tmp_path: Path) -> None:
    want = torch.load(ranks / f"{case}.pt")["model"]
    ckpt_tools.reshard(ranks / case, tmp_path / "dcp", to_ranks=3)
    own = {
        f"rank_{r}": {"rng": torch.zeros(5056, dtype=torch.uint8), "step": 0, "mine": 0}
        for r in range(4)
    }
    got = {
        "model": {n: torch.zeros_like(v) for n, v in want.items()},
        "optim": {"param_groups": [{"lr": 0.0}]},
        "extra_state": own,
    }
    dcp.load(got, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert (
        all(torch.equal(got["model"][n], v) for n, v in want.items())
        and got["optim"]["param_groups"][0]["lr"] == 1e-3
    )
    assert [
        (own[f"rank_{r}"]["step"], own[f"rank_{r}"]["mine"], int(own[f"rank_{r}"]["rng"][0]))
        for r in range(4)
    ] == [(5, r, r) for r in range(4)]
    assert (
        ckpt_tools.diff(ranks / case, tmp_path / "dcp").is_same
        and ckpt_tools.verify(tmp_path / "dcp").problems == []
    )
    ckpt_tools.reshard(ranks / f"{case}.pt", tmp_path / "two", to_ranks=2)
    assert len(list((tmp_path / "two").glob("*.distcp"))) == 2
    assert ckpt_tools.diff(ranks / f"{case}.pt", tmp_path / "two").is_same


def test_a_job_of_other_ranks_goes_on_from_what_was_written_for_it(
    ranks: Path, tmp_path: Path
) -> None:
    """What four ranks saved, flat and in two axes, what lies in DCP, and a model alone, without
    knowing which of it is a buffer.
    """
    for case in ("fsdp", "hsdp"):
        result = ckpt_tools.convert(ranks / case, tmp_path / case, to="per-rank", ranks=3)
        assert any("taken for buffers" in note and ": 3 (2.num" in note for note in result.notes)
        assert ckpt_tools.verify(tmp_path / case).problems == []
        assert ckpt_tools.diff(ranks / case, tmp_path / case, select=["model.*", "optim.*"]).is_same
    ckpt_tools.reshard(ranks / "fsdp", tmp_path / "dcp", to_ranks=2)
    ckpt_tools.convert(tmp_path / "dcp", tmp_path / "of_dcp", to="per-rank", ranks=3, mesh="cpu:dp")
    ckpt_tools.merge(ranks / "fsdp", tmp_path / "m.safetensors")
    ckpt_tools.convert(
        tmp_path / "m.safetensors", tmp_path / "of_file", to="per-rank", ranks=3, mesh="cpu:fsdp"
    )
    jobs = [
        f"{tmp_path / name}:{axis}"
        for name, axis in (("fsdp", ""), ("hsdp", "inner"), ("of_dcp", "dp"), ("of_file", "fsdp"))
    ]
    torchrun(3, "per_rank_on.py", str(ranks / "fsdp.pt"), *jobs)


def test_what_cannot_be_written_a_file_a_rank(ranks: Path, tmp_path: Path) -> None:
    for how, message in (
        ({"mesh": "CUDA 0"}, "expected a device's type and the name of its axis"),
        ({"to": "dcp", "mesh": "cpu"}, "--mesh is for --to per-rank"),
        ({"ranks": 0}, "at least 1"),
    ):
        with pytest.raises(PlanError, match=message):
            ckpt_tools.convert(ranks / "fsdp", tmp_path / "out", **({"to": "per-rank"} | how))
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_missing_or_from_another_save_is_told(ranks: Path, tmp_path: Path) -> None:
    shutil.copytree(ranks / "fsdp", tmp_path / "c")
    (tmp_path / "c" / "model_world_size_4_rank_2.pt").unlink()
    with pytest.raises(CatalogError, match=r"files of ranks are missing: 2 of 4 \(model\)"):
        ckpt_tools.inspect(tmp_path / "c")
    shutil.copy(
        ranks / "fsdp" / "model_world_size_4_rank_1.pt",
        tmp_path / "c" / "model_world_size_4_rank_2.pt",
    )
    with pytest.raises(CheckpointError, match="leave a hole|another shape"):
        ckpt_tools.inspect(tmp_path / "c")
    with pytest.raises(FormatError, match="the file has only one rank.s part of a tensor"):
        ckpt_tools.inspect(ranks / "fsdp" / "model_world_size_4_rank_1.pt")


def test_replicas_that_differ_and_bits_that_flip_are_told(ranks: Path, tmp_path: Path) -> None:
    shutil.copytree(ranks / "hsdp", tmp_path / "c")
    path = tmp_path / "c" / "model_world_size_4_rank_3.pt"
    mine = torch.load(path, weights_only=False)["2.running_mean"].numpy().tobytes()
    flip(path, path.read_bytes().index(mine) + 2, 1)
    assert {p.file for p in ckpt_tools.verify(tmp_path / "c").problems} == {path.name}
    with pytest.raises(IntegrityError, match=r"replicas differ: '2\.running_mean'|damaged"):
        ckpt_tools.merge(tmp_path / "c", tmp_path / "m.safetensors")


def test_bare_shards_among_them_are_not_left_out(ranks: Path, tmp_path: Path) -> None:
    """As torch_checkpointing writes an item that is laid out as safetensors; it may well be the
    model.
    """
    shutil.copytree(ranks / "fsdp", tmp_path / "run")
    for rank in range(4):
        save_file({"w": torch.zeros(3)}, tmp_path / "run" / f"model_{rank}.safetensors")
    with pytest.raises(FormatError, match=r"do not record their position: model_0\.safetensors"):
        ckpt_tools.inspect(tmp_path / "run")


def test_a_model_in_files_that_are_called_so_too(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for rank in range(2):
        state = {
            "model": {"model.w": torch.ones(3), "model.b": torch.zeros(2)},
            "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}},
        }
        torch.save(state, tmp_path / "run" / f"model_rank_{rank}.pt")
    ckpt_tools.merge(tmp_path / "run", tmp_path / "m.safetensors")
    ckpt_tools.convert(tmp_path / "run", tmp_path / "c.safetensors", to="safetensors")
    for name in ("m", "c"):
        assert load_file(tmp_path / f"{name}.safetensors").keys() == {"model.w", "model.b"}, name
