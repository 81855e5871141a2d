"""`ckpt convert --to hf`, with transformers as the reader, and key maps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import PlanError
from tests.conftest import torchrun
from tests.operations.llamas import base, llama
from tests.stock_jobs import assert_same

Run = Callable[..., Any]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).reshape(2, 6)).logits


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_directory_for_transformers_gives_the_same_logits(
    tied: bool, tmp_path: Path, ckpt: Run
) -> None:
    import transformers

    model = llama(tied)
    dcp.save(
        {"model": model.state_dict(), "optimizer": {"lr": 1.0}},
        checkpoint_id=tmp_path / "dcp",
        no_dist=True,
    )
    done = ckpt(
        "convert",
        tmp_path / "dcp",
        tmp_path / "hf",
        "--to",
        "hf",
        "--base",
        base(model, tmp_path / "base"),
        "--max-shard-size",
        "20KB",
        "--check",
    )
    assert done.returncode == 0, done.stderr
    assert "transformers loads it" in done.stdout and ("stored once" in done.stdout) == tied
    names = {p.name for p in (tmp_path / "hf").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
    } - names <= {"generation_config.json"} and "model.safetensors" not in names
    assert ("lm_head.weight" in ckpt_tools.inspect(tmp_path / "hf").catalog.tensors) != tied
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert torch.equal(logits(again), logits(model))
    result = ckpt_tools.convert(tmp_path / "dcp", tmp_path / "bare", to="hf")
    assert "no config and no tokenizer go along: --base DIR would bring them" in result.notes
    shutil.copytree(tmp_path / "base", tmp_path / "dcp" / "huggingface")
    result = ckpt_tools.convert(tmp_path / "dcp", tmp_path / "bare-too", to="hf", dry_run=True)
    assert (
        f"no config and no tokenizer go along: --base {tmp_path / 'dcp' / 'huggingface'} would"
        " bring them" in result.notes
    )
    ckpt_tools.convert(
        tmp_path / "dcp", tmp_path / "half", to="hf", base=tmp_path / "base", dtype="bf16"
    )
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
    assert (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype
        == torch.bfloat16
    )
    assert ckpt_tools.verify(tmp_path / "hf").problems == []


@pytest.mark.slow
def test_what_transformers_does_not_load_is_not_published(tmp_path: Path) -> None:
    model = llama()
    state = model.state_dict()
    state.pop("model.norm.weight")
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    place = base(model, tmp_path / "base")
    with pytest.raises(PlanError, match="names of the config.s model: model.norm.weight"):
        ckpt_tools.convert(tmp_path / "dcp", tmp_path / "hf", to="hf", base=place, check=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "dcp"]


def test_weights_that_a_config_ties_and_a_job_untied_are_refused(tmp_path: Path) -> None:
    model = llama(tied=True)
    state = {**model.state_dict(), "lm_head.weight": model.state_dict()["lm_head.weight"] + 1}
    save_file({n: v.contiguous().clone() for n, v in state.items()}, tmp_path / "m.safetensors")
    with pytest.raises(
        PlanError,
        match=(
            r"the config ties 'lm_head.weight' to 'model.embed_tokens.weight', but they hold"
            r" different values"
        ),
    ):
        ckpt_tools.convert(
            tmp_path / "m.safetensors",
            tmp_path / "hf",
            to="hf",
            base=base(model, tmp_path / "base"),
        )
    assert not (tmp_path / "hf").exists()


# ---- key maps ------------------------------------------------------------------------------------


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary heads from pairs to halves, as Hugging Face's conversion script of Llama does it."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


@pytest.mark.slow
def test_llama_changes_its_names_and_the_order_of_its_heads(
    saved_columns: Path, tmp_path: Path
) -> None:
    model = llama()
    hf = base(model, tmp_path / "base")
    weights = model.state_dict()
    save_file({n: v.contiguous().clone() for n, v in weights.items()}, tmp_path / "hf.safetensors")
    ckpt_tools.convert(
        tmp_path / "hf.safetensors",
        tmp_path / "titan",
        to="dcp",
        ranks=3,
        key_map="llama_hf_to_titan",
        base=hf,
    )
    titan = {
        n: torch.zeros(t.shape)
        for n, t in ckpt_tools.inspect(tmp_path / "titan").catalog.tensors.items()
    }
    dcp.load(titan, checkpoint_id=tmp_path / "titan", no_dist=True)
    assert {
        "tok_embeddings.weight",
        "norm.weight",
        "lm_head.weight",
        "layers.1.feed_forward.w2.weight",
    } <= titan.keys()
    for layer in range(2):
        for ours, theirs, heads in (("wq", "q_proj", 4), ("wk", "k_proj", 2)):
            want = weights[f"model.layers.{layer}.self_attn.{theirs}.weight"]
            name = f"layers.{layer}.attention.qkv_linear.{ours}.weight"
            assert torch.equal(permuted(titan[name], heads), want)
            assert not torch.equal(titan[name], want)
    ckpt_tools.convert(
        tmp_path / "titan",
        tmp_path / "back",
        to="hf",
        key_map="llama_titan_to_hf",
        base=hf,
        check=True,
    )
    assert ckpt_tools.diff(tmp_path / "hf.safetensors", tmp_path / "back").is_same
    ckpt_tools.convert(
        saved_columns,
        tmp_path / "split.safetensors",
        to="safetensors",
        key_map="llama_titan_to_hf",
        settings={"heads": 4, "kv_heads": 2},
        partial=True,
    )
    assert_same(
        load_file(tmp_path / "split.safetensors"),
        {n: v for n, v in weights.items() if "q_proj" in n or "k_proj" in n},
    )
    with pytest.raises(
        PlanError, match=r"the key map needs a number: kv_heads|needs a number: heads"
    ):
        ckpt_tools.convert(
            tmp_path / "titan", tmp_path / "no", to="hf", key_map="llama_titan_to_hf"
        )


@pytest.fixture
def saved_columns(tmp_path: Path) -> Path:
    """The q and k weights of a model in torchtitan's order, split by rows and by columns over four
    ranks.
    """
    weights = llama().state_dict()

    def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
        rows, width = weight.shape
        return (
            weight.view(heads, 2, rows // heads // 2, width)
            .transpose(1, 2)
            .reshape(rows, width)
            .contiguous()
        )

    torch.save(
        {
            f"layers.{i}.attention.w{c}.weight": paired(
                weights[f"model.layers.{i}.self_attn.{c}_proj.weight"], heads
            )
            for i in range(2)
            for c, heads in (("q", 4), ("k", 2))
        },
        tmp_path / "whole.pt",
    )
    torchrun(4, "columns.py", str(tmp_path / "columns"), str(tmp_path / "whole.pt"))
    return tmp_path / "columns"


def test_qkv_is_split_and_put_together_with_what_the_optimizer_keeps(tmp_path: Path) -> None:
    torch.manual_seed(2)
    fused = {
        "l.qkv_proj.weight": torch.randn(16, 6),
        "l.qkv_proj.bias": torch.randn(16),
        "o.weight": torch.randn(3, 3),
    }
    state = {
        str(i): {"exp_avg": torch.randn_like(v), "step": torch.tensor(4.0)}
        for i, v in enumerate(fused.values())
    }
    group = {"lr": 0.5, "params": [0, 1, 2]}
    torch.save(
        {
            "model": fused,
            "optimizer": {"state": {int(i): s for i, s in state.items()}, "param_groups": [group]},
        },
        tmp_path / "f.pt",
    )
    ckpt_tools.convert(
        tmp_path / "f.pt",
        tmp_path / "s",
        to="dcp",
        ranks=3,
        key_map="qkv_split",
        settings={"heads": 4, "kv_heads": 2},
        param_order="model",
    )
    catalog = ckpt_tools.inspect(tmp_path / "s").catalog
    assert [catalog.tensors[f"model.l.{c}_proj.weight"].shape for c in "qkv"] == [
        (8, 6),
        (4, 6),
        (4, 6),
    ]
    for key, whole in (
        ("model.l.{}_proj.weight", fused["l.qkv_proj.weight"]),
        ("optimizer.state.l.{}_proj.weight.exp_avg", state["0"]["exp_avg"]),
    ):
        got = {key.format(c): torch.zeros(n, 6) for c, n in zip("qkv", (8, 4, 4), strict=True)}
        ckpt_tools.load(tmp_path / "s", got, strict=False)
        assert torch.equal(torch.cat(list(got.values())), whole)
    ckpt_tools.convert(
        tmp_path / "s", tmp_path / "back.pt", to="torch", key_map="qkv_fuse", optimizer="ids"
    )
    back = torch.load(tmp_path / "back.pt")
    assert_same(back["model"], fused)
    assert_same(back["optimizer"]["state"], {int(i): s for i, s in state.items()})
    settings = {"heads": 5, "kv_heads": 1}
    with pytest.raises(PlanError, match="16 rows cannot be split as"):
        ckpt_tools.convert(
            tmp_path / "f.pt",
            tmp_path / "no",
            to="dcp",
            key_map="qkv_split",
            settings=settings,
            param_order="model",
        )
