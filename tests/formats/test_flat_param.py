"""FSDP1, one file a rank: ShardedTensors, and flat parameters with the shapes beside them. The
oracles: FSDP's own full weights; and for the moments one process without FSDP, since FSDP1's full
optimizer state on a CPU has exp_avg_sq in the place of exp_avg.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import FormatError
from tests.conftest import torchrun
from tests.jobs import LONG

Run = Callable[..., subprocess.CompletedProcess[str]]

SHAPES = {
    "a.weight": [7, 5],
    "a.bias": [7],
    "b.0.weight": [3, 7],
    "b.0.bias": [3],
    "b.1.weight": [3],
    "b.1.bias": [3],
    "c.weight": [3, 3],
}


@pytest.fixture(scope="module", params=[2, 3] if LONG else [3])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fsdp1")
    torchrun(request.param, "fsdp1_local.py", str(out))
    for kind in ("orig", "flat"):
        (out / f"local_{kind}" / "shapes.json").write_text(json.dumps(SHAPES))
    return out


@pytest.mark.parametrize("kind", ["orig", "flat"])
@pytest.mark.parametrize("case", ["sharded", "local"])
def test_weights_and_moments_are_those_of_the_full_state(
    case: str, kind: str, saved: Path, tmp_path: Path
) -> None:
    folder, want = saved / f"{case}_{kind}", torch.load(saved / f"full_{kind}.pt")
    assert ckpt_tools.verify(folder).problems == []
    ckpt_tools.merge(folder, tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == want["model"].keys() and all(
        torch.equal(got[n], v) for n, v in want["model"].items()
    )
    ckpt_tools.convert(folder, tmp_path / "state.pt", to="torch")
    (state,) = torch.load(tmp_path / "state.pt").values()  # below the files' own name
    assert state["optim"]["state"].keys() == want["optim"].keys() == SHAPES.keys()
    for name, values in want["optim"].items():
        for key, value in values.items():
            assert torch.allclose(
                state["optim"]["state"][name][key], value, rtol=1e-4, atol=1e-9
            ), (name, key)
    assert (
        set(state["optim"]["param_groups"][0]["params"]) == set(SHAPES)
        and state["optim"]["param_groups"][0]["lr"] == 1e-3
    )
    if case == "local":
        assert state["iteration"] == 1


@pytest.mark.parametrize("kind", ["orig", "flat"])
def test_both_ways_to_save_hold_the_same_bits(kind: str, saved: Path, tmp_path: Path) -> None:
    for case in ("sharded", "local"):
        ckpt_tools.convert(
            saved / f"{case}_{kind}", tmp_path / f"{case}.pt", to="torch", optimizer="ids"
        )
        (state,) = torch.load(tmp_path / f"{case}.pt").values()
        state.pop("iteration", None)
        torch.save(state, tmp_path / f"{case}_alone.pt")
    assert ckpt_tools.diff(tmp_path / "sharded_alone.pt", tmp_path / "local_alone.pt").is_same


def test_shapes_that_are_missing_or_do_not_fit_are_asked_for(saved: Path, tmp_path: Path) -> None:
    for kind in ("orig", "flat"):
        folder = tmp_path / kind
        shutil.copytree(saved / f"local_{kind}", folder)
        (folder / "shapes.json").unlink(missing_ok=True)
        with pytest.raises(
            FormatError, match="no shapes for the parts of an FSDP1 flat parameter"
        ) as told:
            ckpt_tools.inspect(folder)
        assert "model.named_parameters()" in str(told.value.hint)
        for text, message in (
            ('{"a.weight": [2, 2]}', "does not fit: .* has"),
            ("[1]", "is malformed"),
            ('{"a.weight": [-1]}', "is malformed"),
            ('{"a.weight": [2, 2], "a.weight": [4]}', "'a.weight' occurs twice"),
        ):
            (folder / "shapes.json").write_text(text)
            with pytest.raises(FormatError, match=message):
                ckpt_tools.inspect(folder)


def test_shapes_come_from_a_file_or_a_models_config(saved: Path, tmp_path: Path, ckpt: Run) -> None:
    """The files stay as they are: they may lie in a bucket, or be somebody else's."""
    folder = tmp_path / "flat"
    shutil.copytree(saved / "local_flat", folder)
    (folder / "shapes.json").rename(tmp_path / "model.json")
    want = torch.load(saved / "full_flat.pt")["model"]
    assert (
        ckpt(
            "merge", folder, tmp_path / "m.safetensors", "--shapes", tmp_path / "model.json"
        ).returncode
        == 0
    )
    got = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(got[n], v) for n, v in want.items())
    assert ckpt("verify", folder, "--shapes", tmp_path / "model.json").returncode == 0
    assert (
        ckpt(
            "diff", folder, tmp_path / "m.safetensors", "--shapes", tmp_path / "model.json"
        ).returncode
        == 0
    )
    assert (
        ckpt(
            "reshard", folder, tmp_path / "two", "--to", "2", "--shapes", tmp_path / "model.json"
        ).returncode
        == 0
    )
    shown = ckpt("inspect", folder, "--shapes", tmp_path / "model.json", "--tree").stdout
    assert "weight" in shown and "flat_param" not in shown
    assert (
        ckpt("salvage", folder, tmp_path / "whole", "--shapes", tmp_path / "model.json").returncode
        == 0
    )
    assert sorted(p.suffix for p in folder.iterdir()) == [".pth"] * len(list(folder.iterdir()))
    assert (
        ckpt("copy", folder, tmp_path / "copied", "--shapes", tmp_path / "model.json").returncode
        == 0
    )
    # the shapes went along
    assert ckpt_tools.diff(tmp_path / "copied", saved / "local_flat").is_same
    for text, message in (
        ("[1]", "is malformed"),
        ("{", "--shapes: cannot be read"),
        ('{"model_type": "nothing"}', "transformers cannot build a model"),
    ):
        (tmp_path / "wrong.json").write_text(text)
        failed = ckpt("inspect", folder, "--shapes", tmp_path / "wrong.json")
        assert failed.returncode and message in failed.stderr and "Traceback" not in failed.stderr


@pytest.mark.slow
def test_a_tied_model_of_transformers_by_its_config(tmp_path: Path, ckpt: Run) -> None:
    pytest.importorskip("transformers")
    torchrun(3, "fsdp1_llama.py", str(tmp_path))
    want = torch.load(tmp_path / "full.pt")
    config = tmp_path / "model" / "config.json"  # and below, the directory that has it
    done = ckpt("merge", tmp_path / "flat", tmp_path / "m.safetensors", "--shapes", config)
    assert done.returncode == 0, done.stderr
    got = load_file(tmp_path / "m.safetensors")
    assert want.keys() - got.keys() == {"lm_head.weight"}  # tied: the vector has it once
    assert all(
        torch.equal(tensor, want[name]) and tensor.dtype == torch.bfloat16
        for name, tensor in got.items()
    )
    assert torch.equal(want["lm_head.weight"], got["model.embed_tokens.weight"])
    base = tmp_path / "model"
    done = ckpt(
        "convert",
        tmp_path / "flat",
        tmp_path / "hf",
        "--to",
        "hf",
        "--shapes",
        base,
        "--base",
        base,
        "--check",
    )
    assert done.returncode == 0 and "transformers loads it" in done.stdout, done.stderr


@pytest.mark.parametrize("kind", ["flat", "orig"])
def test_parameters_outside_of_units_stay(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "half"
    out.mkdir()
    torchrun(2, "fsdp1_half.py", str(out), kind)
    ckpt_tools.merge(out, tmp_path / "m.safetensors")
    want, got = torch.load(tmp_path / "half.full"), load_file(tmp_path / "m.safetensors")
    assert got.keys() == want.keys() and all(torch.equal(got[n], v) for n, v in want.items())
    (out / "rank_0.pt").rename(out / "other")
    (out / "rank_1.pt").rename(out / "rank_0.pt")
    (out / "other").rename(out / "rank_1.pt")
    with pytest.raises(FormatError, match="have changed places"):
        ckpt_tools.inspect(out)
