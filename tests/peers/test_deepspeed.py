"""DeepSpeed's checkpoints, written by DeepSpeed; the oracles are its own zero_to_fp32 and
ds_to_universal.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import CatalogError, FormatError
from tests.conftest import torchrun
from tests.jobs import LONG
from tests.peers.environments import run_job
from tests.stock import assert_stock_torch_reads

CASES = (
    [(1, "bf16", 2), (2, "fp32", 3), (3, "bf16", 3)] if LONG else [(2, "bf16", 3), (3, "fp32", 2)]
)
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"zero{c[0]}-{c[1]}-{c[2]}ranks")
def saved(
    request: pytest.FixtureRequest, shared: Callable[[str, Callable[[Path], object]], Path]
) -> Path:
    stage, dtype, ranks = request.param

    def make(out: Path) -> None:
        (out / "run").mkdir()
        run_job("deepspeed", ranks, "deepspeed_job.py", out / "run", stage, dtype)
        run_job("deepspeed", 0, "deepspeed_oracle.py", out / "run", out / "oracle")

    return shared(f"zero{stage}-{dtype}-{ranks}", make) / "run"


def oracle(saved: Path) -> dict[str, torch.Tensor]:
    return torch.load(saved.parent / "oracle" / "fp32.pt")


def stage_of(saved: Path) -> int:
    return int(ckpt_tools.inspect(saved).extras["deepspeed"][-1])


def moment(saved: Path, name: str, key: str) -> torch.Tensor:
    found = torch.load(saved.parent / "oracle" / "universal" / "zero" / name / f"{key}.pt")
    return found["param"] if isinstance(found, dict) else found


def test_the_weights_are_those_of_zero_to_fp32(saved: Path, tmp_path: Path) -> None:
    assert ckpt_tools.verify(saved).problems == []
    ckpt_tools.merge(saved, tmp_path / "m.safetensors")
    got, want = load_file(tmp_path / "m.safetensors"), oracle(saved)
    assert want.keys() - got.keys() == set() and all(
        torch.equal(got[n], v) for n, v in want.items()
    )
    assert got.keys() - want.keys() <= {"frozen.weight"}  # which zero_to_fp32 forgets at stage 1


def test_the_optimizer_becomes_that_of_dcp(saved: Path, tmp_path: Path) -> None:
    ckpt_tools.convert(saved, tmp_path / "dcp", to="dcp", ranks=2)
    assert ckpt_tools.diff(
        saved, tmp_path / "dcp", select=["model.*", "optimizer.*", "epoch"]
    ).is_same
    names = [n for n in oracle(saved) if n not in ("scale", "head.weight", "frozen.weight")]
    state = {
        n: {k: torch.zeros_like(oracle(saved)[n]) for k in MOMENTS} | {"step": torch.tensor(0.0)}
        for n in names
    }
    groups = [
        {"lr": 0.0, "weight_decay": 0.0, "betas": (), "amsgrad": True, "params": []}
        for _ in range(2)
    ]
    got = {"optimizer": {"state": state, "param_groups": groups}, "epoch": 0}
    dcp.load(got, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert got["epoch"] == 7 and [(g["lr"], g["weight_decay"], g["betas"]) for g in groups] == [
        (1e-2, 0.1, (0.9, 0.999)),
        (5e-3, 0.0, (0.9, 0.999)),
    ]
    assert_stock_torch_reads(tmp_path / "dcp")
    assert [n for g in groups for n in g["params"]] == [
        "embed.weight",
        "layers.0.weight",
        "layers.2.weight",
        "layers.0.bias",
        "layers.3.weight",
        "layers.3.bias",
    ]
    for name in names:
        assert state[name]["step"] == 3
        for key in MOMENTS:
            assert torch.equal(state[name][key].flatten(), moment(saved, name, key).flatten()), (
                name,
                key,
            )


def test_a_universal_checkpoint_is_read(saved: Path) -> None:
    universal = saved.parent / "oracle" / "universal"
    catalog = ckpt_tools.inspect(universal).catalog
    assert ckpt_tools.verify(universal).problems == []
    want = oracle(saved)
    trained = [n for n in want if n not in ("scale", "head.weight", "frozen.weight")]
    assert {f"optimizer.state.{n}.{k}" for n in trained for k in MOMENTS} <= catalog.tensors.keys()
    one, two = (
        {f"optimizer.state.{n}.{k}": torch.zeros_like(want[n]) for n in trained for k in MOMENTS}
        for _ in range(2)
    )
    one |= {f"model.{n}": torch.zeros_like(want[n]) for n in [*trained, "scale"]}
    two |= {f"model.{n}": torch.zeros_like(want[n]) for n in [*trained, "scale"]}
    ckpt_tools.load(universal, one, strict=False)
    ckpt_tools.load(saved, two, strict=False)
    assert all(torch.equal(one[n], two[n]) for n in one) and all(
        torch.equal(one[f"model.{n}"], want[n]) for n in trained
    )


def test_deepspeed_loads_what_convert_made_universal(saved: Path, tmp_path: Path) -> None:
    """Out of DCP, on another number of ranks, under another stage; what it then saves has the same
    weights, moments and options.
    """
    if not LONG and stage_of(saved) != 2:
        pytest.skip("one of two in the short form")
    ckpt_tools.convert(saved, tmp_path / "dcp", to="dcp", ranks=2)
    ckpt_tools.convert(tmp_path / "dcp", tmp_path / "run" / "step3", to="deepspeed-universal")
    assert ckpt_tools.verify(tmp_path / "run" / "step3").problems == []
    stage = {1: 3, 2: 1, 3: 2}[stage_of(saved)]
    (tmp_path / "again").mkdir()
    run_job(
        "deepspeed",
        2,
        "deepspeed_job.py",
        tmp_path / "again",
        stage,
        "fp32",
        tmp_path / "run" / "step3",
    )
    # stage 3 gives every group the options of the first
    names = ["model.embed*", "model.layers*", "optimizer.state.*"] + (
        ["optimizer.param_groups.*"] if stage < 3 else []
    )
    assert ckpt_tools.diff(saved, tmp_path / "again", select=names).is_same


def test_training_goes_on_with_fsdp2_as_with_one_process(saved: Path, tmp_path: Path) -> None:
    """From DCP on two ranks of FSDP2, and from the consolidated weights and moments in one process:
    the same weights a step later.
    """
    if not LONG and stage_of(saved) != 3:
        pytest.skip("one of two in the short form")
    ckpt_tools.convert(saved, tmp_path / "run" / "step-3", to="dcp", ranks=2)
    moments = {
        n: {k: moment(saved, n, k).reshape(v.shape) for k in MOMENTS}
        for n, v in oracle(saved).items()
        if n not in ("scale", "head.weight", "frozen.weight")
    }
    torch.save({"model": oracle(saved), "moments": moments}, tmp_path / "whole.pt")
    torchrun(2, "../peers/continue_fsdp.py", str(tmp_path), str(saved))


def test_what_is_missing_or_of_another_save_is_told(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "c")
    folder = tmp_path / "c" / "global_step3"
    last = max(folder.glob("*_optim_states.pt"))
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(CatalogError, match=r"files of ranks are missing|are missing: expected \d"):
        ckpt_tools.inspect(tmp_path / "c")
    last.write_bytes(kept)
    shutil.copy(last, folder / last.name.replace("mp_rank_00", "mp_rank_01"))
    with pytest.raises(FormatError, match="split by tensor parallelism"):
        ckpt_tools.inspect(tmp_path / "c")
    (folder / last.name.replace("mp_rank_00", "mp_rank_01")).unlink()
    (tmp_path / "c" / "latest").write_text("global_step9")
    with pytest.raises(CatalogError, match="names a folder that is not there"):
        ckpt_tools.inspect(tmp_path / "c")
    for path in folder.glob("*model_states.pt"):
        path.unlink()
    with pytest.raises(CatalogError, match="the model's states are missing"):
        ckpt_tools.inspect(folder)
