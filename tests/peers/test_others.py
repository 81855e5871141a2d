"""Checkpoints of Composer, Lightning, Megatron-Core, torch_checkpointing, torchtitan, verl and
PEFT, written by them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import IntegrityError, PlanError
from tests.jobs import LONG
from tests.peers.environments import python_of, run_job
from tests.stock import assert_stock_torch_reads, chunks


def test_composer(tmp_path: Path) -> None:
    """What its Trainer saved, and went on from with another number of ranks."""
    run_job("composer", 2, "composer_job.py", tmp_path)
    want, step = torch.load(tmp_path / "full.pt", weights_only=False), tmp_path / "run" / "ep0-ba2"
    report = ckpt_tools.inspect(step)
    assert report.world_size == 2 and "state.timestamp.Timestamp.batch" in report.catalog.objects
    assert ckpt_tools.verify(step).problems == []
    ckpt_tools.merge(step, tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == want["model"].keys() and all(
        torch.equal(got[n], v) for n, v in want["model"].items()
    )
    ckpt_tools.convert(step, tmp_path / "s.pt", to="torch")
    state = torch.load(tmp_path / "s.pt")["state"]
    moments = state["optimizers"]["AdamW"]["state"]
    assert (
        moments.keys() == want["optim"].keys()
        and state["timestamp"]["Timestamp"]["batch"] == want["batch"] == 2
    )
    assert all(
        torch.equal(moments[n][k], v)
        for n, values in want["optim"].items()
        for k, v in values.items()
    )
    ckpt_tools.reshard(step, tmp_path / "three", to_ranks=3)
    (tmp_path / "on").mkdir()
    run_job("composer", 3, "composer_job.py", tmp_path / "on", tmp_path / "three")
    again = torch.load(tmp_path / "on" / "full.pt", weights_only=False)
    assert again["batch"] == 2 and all(
        torch.equal(again["model"][n], v) for n, v in want["model"].items()
    )
    assert all(
        torch.equal(again["optim"][n][k], v)
        for n, values in want["optim"].items()
        for k, v in values.items()
    )


@pytest.mark.parametrize("kind", ["sharded", "file"] if LONG else ["sharded"])
def test_lightning(kind: str, tmp_path: Path) -> None:
    """A directory of ModelParallelStrategy (FSDP2), and a `.ckpt` file of DDP; the FSDP strategy
    itself wants a GPU.
    """
    run_job("lightning", 2, "lightning_job.py", tmp_path / "a.ckpt", kind)
    want = torch.load(tmp_path / "whole.pt")
    report = ckpt_tools.inspect(tmp_path / "a.ckpt")
    assert {"epoch", "global_step"} <= report.catalog.objects.keys() and ckpt_tools.verify(
        tmp_path / "a.ckpt"
    ).problems == []
    ckpt_tools.merge(tmp_path / "a.ckpt", tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == want["model"].keys() and all(
        torch.equal(got[n], v) for n, v in want["model"].items()
    )
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
    ckpt_tools.convert(
        tmp_path / "run", tmp_path / "m.safetensors", to="safetensors", key_map="megatron_unstack"
    )
    got = load_file(tmp_path / "m.safetensors")
    assert all(
        torch.equal(got[f"decoder.layers.{n}.weight"], want["decoder.layers.weight"][n])
        for n in range(4)
    )
    ckpt_tools.convert(tmp_path / "run", tmp_path / "s.pt", to="torch")
    assert torch.equal(
        torch.load(tmp_path / "s.pt")["optimizer"]["state"]["final.bias"]["exp_avg"],
        want["optimizer.state.exp_avg.final.bias"],
    )


def test_torch_checkpointing(tmp_path: Path) -> None:
    run_job("torch_checkpointing", 3, "torch_checkpointing_job.py", tmp_path / "run" / "step-5")
    want = torch.load(tmp_path / "run" / "whole.pt")
    report = ckpt_tools.inspect(tmp_path / "run" / "step-5")
    assert (report.format, report.world_size) == ("per_rank", 3) and ckpt_tools.verify(
        tmp_path / "run" / "step-5"
    ).problems == []
    assert {"progress.step", "progress.rank.rank_2"} <= report.catalog.objects.keys()
    ckpt_tools.convert(tmp_path / "run" / "step-5", tmp_path / "s.pt", to="torch", optimizer="ids")
    state = torch.load(tmp_path / "s.pt")
    assert state["model"].keys() == want["model"].keys() and all(
        torch.equal(state["model"][n], v) for n, v in want["model"].items()
    )
    assert all(
        torch.equal(state["optim"]["state"][i][k], v)
        for i, s in want["state"].items()
        for k, v in s.items()
    )


def test_torchtitan(tmp_path: Path) -> None:
    """What its CheckpointManager saved, and loads again: resharded, and by way of one file with an
    optimizer of another form.
    """
    run_job("torchtitan", 2, "torchtitan_job.py", tmp_path, "save")
    want, step = torch.load(tmp_path / "save.pt"), tmp_path / "run" / "step-2"
    assert (
        want["step"] == want["scheduler"]["last_epoch"] == 2
        and ckpt_tools.verify(step).problems == []
    )
    ckpt_tools.merge(step, tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == want["model"].keys() and all(
        torch.equal(got[n], v) for n, v in want["model"].items()
    )
    ckpt_tools.reshard(step, tmp_path / "resharded" / "run" / "step-2", to_ranks=3)
    ckpt_tools.convert(step, tmp_path / "whole.pt", to="torch", optimizer="groups")
    moments = torch.load(tmp_path / "whole.pt")["optimizer"]["state"]
    assert all(
        torch.equal(v, want["optim"][f"state.{n}.{k}"])
        for n, values in moments.items()
        for k, v in values.items()
    )
    ckpt_tools.convert(
        tmp_path / "whole.pt",
        tmp_path / "converted" / "run" / "step-2",
        to="dcp",
        ranks=3,
        optimizer="flat",
    )
    for kind in ("resharded", "converted"):
        run_job("torchtitan", 3, "torchtitan_job.py", tmp_path / kind, "load")
        again = torch.load(tmp_path / kind / "load.pt")
        assert again["step"] == 2 and again["scheduler"] == want["scheduler"]
        for part in ("model", "optim"):
            assert again[part].keys() == want[part].keys(), kind
            for name, value in want[part].items():
                same = (
                    torch.equal(again[part][name], value)
                    if isinstance(value, torch.Tensor)
                    else again[part][name] == value
                )
                assert same, (kind, name)


@pytest.mark.skipif(not LONG, reason="600 MB to install: CKPT_LONG=1")
@pytest.mark.parametrize(
    ("kind", "dtype", "ranks"),
    [
        ("fsdp2", "float32", 2),
        ("fsdp2", "bfloat16", 3),
        ("hsdp", "float32", 4),
        ("fsdp1", "float32", 2),
    ],
)
def test_verl(kind: str, dtype: str, ranks: int, tmp_path: Path) -> None:
    """A tied model of transformers; merged by verl's own merger, which makes bfloat16 of
    everything.
    """
    actor = tmp_path / "actor"
    run_job("verl", ranks, "verl_job.py", actor, kind, dtype)
    merger = [
        "-m",
        "verl.model_merger",
        "merge",
        "--backend",
        "fsdp",
        "--local_dir",
        actor,
        "--target_dir",
        tmp_path / "merged",
    ]
    # it wants a tokenizer, when all is written
    subprocess.run([python_of("verl"), *map(str, merger)], capture_output=True)
    assert ckpt_tools.verify(actor).problems == [] and ckpt_tools.inspect(actor).world_size == ranks
    ckpt_tools.convert(
        actor, tmp_path / "hf", to="hf", base=actor / "huggingface", dtype="bf16", check=True
    )
    assert ckpt_tools.diff(tmp_path / "hf", tmp_path / "merged").is_same
    if kind == "fsdp1":  # each rank's flat moments under the same number
        with pytest.raises(IntegrityError, match=r"replicas differ: 'optim\.state\.0\.exp_avg'"):
            ckpt_tools.convert(actor, tmp_path / "s.pt", to="torch")
        return
    want = torch.load(tmp_path / "whole.pt")
    ckpt_tools.convert(actor, tmp_path / "s.pt", to="torch", optimizer="ids")
    got = torch.load(tmp_path / "s.pt")
    assert got["model"].keys() == want["model"].keys() and all(
        torch.equal(got["model"][n], v) for n, v in want["model"].items()
    )
    assert len(got["optim"]["state"]) == len(want["state"])
    for number, values in enumerate(want["state"].values()):
        assert all(
            torch.equal(got["optim"]["state"][number][key], value) for key, value in values.items()
        )
    ckpt_tools.convert(
        actor,
        tmp_path / "on" / "from",
        to="per-rank",
        ranks=5 - ranks if ranks < 4 else 2,
        base=actor / "huggingface",
    )
    run_job(
        "verl",
        5 - ranks if ranks < 4 else 2,
        "verl_job.py",
        tmp_path / "on" / "actor",
        "fsdp2",
        dtype,
        tmp_path / "on" / "from",
    )
    again = torch.load(tmp_path / "on" / "whole.pt")
    assert (
        again["lr"] == want["lr"] < 1e-2
        and again["epoch"] == want["epoch"] == 2
        and again["state"].keys() == want["state"].keys()
    )
    assert all(torch.equal(again["model"][n], v) for n, v in want["model"].items())
    assert all(
        torch.equal(again["state"][n][k], v)
        for n, values in want["state"].items()
        for k, v in values.items()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if LONG else ["float32"])
def test_peft(dtype: str, tmp_path: Path) -> None:
    """A merge with an adapter is PEFT's own; an adapter taken out of a model's checkpoint is what
    PEFT saves.
    """
    run_job("peft", 0, "peft_job.py", tmp_path, dtype)
    want = torch.load(tmp_path / "merged.pt")
    ckpt_tools.convert(tmp_path / "base.pt", tmp_path / "dcp", to="dcp", ranks=3)
    ckpt_tools.merge(tmp_path / "dcp", tmp_path / "m.safetensors", lora=tmp_path / "adapter")
    got, base = load_file(tmp_path / "m.safetensors"), torch.load(tmp_path / "base.pt")["model"]
    assert got.keys() == want.keys()
    for name, value in want.items():
        is_changed = "q_proj" in name or "down_proj" in name
        assert torch.equal(base[name], value) != is_changed
        assert got[name].dtype == value.dtype
        # of bfloat16, PEFT rounds what it adds and then the sum; here the sum is rounded, once
        if dtype == "float32" or not is_changed:
            assert torch.allclose(got[name], value, rtol=1e-6, atol=1e-6), name
        if is_changed:
            exact = base[name].double() + _product(tmp_path, name)
            # at least half of one in the last place
            unit = exact.abs() * 2.0 ** (-24 if dtype == "float32" else -8)
            error = (got[name].double() - exact).abs() - unit
            # the product of A and B is a sum of float32
            assert error.max() <= 1e-5, (name, error.max())
    ckpt_tools.convert(tmp_path / "peft.pt", tmp_path / "out", to="peft", base=tmp_path / "adapter")
    assert {p.name for p in (tmp_path / "out").glob("adapter*")} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert (
        ckpt_tools.diff(tmp_path / "out", tmp_path / "adapter").is_same
        and ckpt_tools.verify(tmp_path / "out").problems == []
    )
    with pytest.raises(PlanError, match="the adapter changes a weight that is not there"):
        ckpt_tools.merge(
            tmp_path / "adapter", tmp_path / "no.safetensors", lora=tmp_path / "adapter"
        )
    with pytest.raises(PlanError, match="holds 0 LoRA adapters"):
        ckpt_tools.convert(
            tmp_path / "base.pt", tmp_path / "no", to="peft", base=tmp_path / "adapter"
        )
    config = (tmp_path / "adapter" / "adapter_config.json").read_text()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        config.replace('"use_dora": false', '"use_dora": true')
    )
    with pytest.raises(PlanError, match="a kind that is not merged here: DoRA"):
        ckpt_tools.merge(tmp_path / "dcp", tmp_path / "no.safetensors", lora=tmp_path / "adapter")


def _product(folder: Path, name: str) -> torch.Tensor:
    """What the adapter adds, in float64."""
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    a, b = (
        adapter[f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight"].double()
        for side in "AB"
    )
    # rank-stabilised: alpha over the root of 4
    return (3 if "down_proj" in name else 10) / 2 * b @ a


def test_every_adapter_of_peft_is_merged_as_peft_does_or_refused_by_name(tmp_path: Path) -> None:
    """Adapters that changed their base at the beginning, and models that mix Linear and Conv1D,
    whose layout the config does not tell.
    """
    run_job("peft", 0, "peft_kinds_job.py", tmp_path)
    refused = {}
    for folder in sorted(tmp_path.iterdir()):
        base, want = torch.load(folder / "base.pt"), torch.load(folder / "merged.pt")
        torch.save({"model": base}, folder / "model.pt")
        try:
            result = ckpt_tools.merge(
                folder / "model.pt", folder / "m.safetensors", lora=folder / "adapter"
            )
        except PlanError as error:
            refused[folder.name] = str(error)
            continue
        is_guess = any("taken for Linear" in note for note in result.notes)
        assert is_guess == (
            folder.name in ("linear", "mixed-unknown") or folder.name.startswith("begins")
        ), result.notes
        if folder.name == "mixed-unknown":
            continue  # a square Conv1D among Linears: no file tells
        got = load_file(folder / "m.safetensors")
        assert any(not torch.equal(base[name], value) for name, value in want.items())
        for name, value in want.items():
            assert torch.allclose(got[name], value, rtol=1e-5, atol=1e-5), (folder.name, name)
    assert refused.keys() == {
        "begins-pissa",
        "begins-pissa_niter_4",
        "begins-olora",
        "square-conv1d",
        "mixed-unknown-too",
    }
    assert all(
        "init_lora_weights" in text for name, text in refused.items() if name.startswith("begins")
    )
    assert all(
        "layers of Conv1D" in text
        for name, text in refused.items()
        if not name.startswith("begins")
    )


_SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
}
_EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
_TITAN = {  # how the job makes the model: its map, and the config of Hugging Face's
    "fused": ("llama", "llama", "Llama", {}),
    "separate": ("llama", "llama", "Llama", {}),
    "qwen3": ("qwen3", "qwen3", "Qwen3", {"head_dim": 8, "tie_word_embeddings": False}),
    "qwen3_moe": ("qwen3", "qwen3_moe", "Qwen3Moe", {"head_dim": 8, "num_experts": 4, **_EXPERTS}),
    "deepseek_v3": (
        "deepseek_v3",
        "deepseek_v3",
        "DeepseekV3",
        {
            **_EXPERTS,
            "num_key_value_heads": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 4,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        "gpt_oss",
        "GptOss",
        {
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
_NO_BIAS = ("qwen3_moe", "gpt_oss")  # Hugging Face's have none of experts, to balance their load


def experts_of_gpt_oss(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the experts as transformers has them: it transposes what it reads of the blocks.

    torchtitan's adapter (0.3.0) knows other names than its model has, and leaves them out.
    """
    found = {}
    for name, value in model.items():
        where, _, part = name.partition("moe.routed_experts.inner_experts.")
        there, is_weight = f"model.{where}mlp.experts.", "weight" in part
        kind = {"mlp1": "gate_up_proj", "mlp2": "down_proj"}.get(part[:4])
        if kind is not None:
            found[f"{there}{kind}{'' if is_weight else '_bias'}"] = (
                value.transpose(1, 2).contiguous() if is_weight else value
            )
    return found


@pytest.mark.parametrize(
    ("how", "axes"),
    [
        ("fused", "fsdp=2,tp=2"),
        ("deepseek_v3", "fsdp=2,tp=2"),
        ("qwen3_moe", "fsdp=2,tp=2,ep=2"),
        ("gpt_oss", "fsdp=4,ep=2"),
    ],
)
def test_a_mesh_has_the_chunks_that_torchtitan_saves(how: str, axes: str, tmp_path: Path) -> None:
    for mesh, num_ranks in (("fsdp=1", 1), (axes, 4)):
        run_job("torchtitan", num_ranks, "torchtitan_mesh_job.py", tmp_path / mesh, how, mesh)
    done = ckpt_tools.reshard(tmp_path / "fsdp=1", tmp_path / "out", mesh=axes)
    assert list(done.notes) == [f"split for {axes} by the plan torchtitan"]
    assert chunks(tmp_path / "out") == chunks(tmp_path / axes)
    assert_stock_torch_reads(tmp_path / "out")


@pytest.mark.parametrize("how", _TITAN)
def test_a_model_of_torchtitan_becomes_that_of_hugging_face_and_back(
    how: str, tmp_path: Path
) -> None:
    """The model and its moments, as torchtitan's adapter makes them; and back into a job of its
    own. transformers loads the result."""
    family, model_type, kind, more = _TITAN[how]
    run_job("torchtitan", 2, "torchtitan_models_job.py", tmp_path, "save", how)
    step = tmp_path / "run" / "step-2"
    want, hf = torch.load(tmp_path / "save.pt"), torch.load(tmp_path / "hf.pt")
    if how == "gpt_oss":
        assert not [name for name in hf["model"] if ".experts." in name]  # without a word
        hf["model"] |= experts_of_gpt_oss(want["model"])
        for kind_of in ("exp_avg", "exp_avg_sq"):
            values = {
                n.removeprefix("state.").removesuffix(f".{kind_of}"): v
                for n, v in want["optim"].items()
                if n.endswith(f".{kind_of}")
            }
            hf[kind_of] |= experts_of_gpt_oss(values)
    base = tmp_path / "base"
    base.mkdir()
    config = {"model_type": model_type, "architectures": [f"{kind}ForCausalLM"], **_SIZES, **more}
    (base / "config.json").write_text(json.dumps(config))
    (base / "config.json").write_text(json.dumps(config | {"model_type": "gemma2"}))
    with pytest.raises(ckpt_tools.PlanError, match="the config is of another model: 'gemma2'"):
        ckpt_tools.convert(step, tmp_path / "no", to="hf", base=base)
    (base / "config.json").write_text(json.dumps(config))
    there = f"{family}_titan_to_hf"
    result = ckpt_tools.convert(step, tmp_path / "hf", to="hf", base=base, check=True)
    assert any(f"converted with the map {there}" in note for note in result.notes)
    got = load_file(next((tmp_path / "hf").glob("*.safetensors")))
    assert got.keys() == hf["model"].keys()
    assert all(torch.equal(got[name], value) for name, value in hf["model"].items())

    result = ckpt_tools.convert(step, tmp_path / "w.pt", to="torch", base=base, names="hub")
    # torchtitan's adapter leaves them out, too: Hugging Face's Qwen3 has no bias of experts
    lost = {n for n in want["model"] if n.endswith("expert_bias_E") and how in _NO_BIAS}
    assert result.left_out.keys() == lost
    whole = torch.load(tmp_path / "w.pt")
    for moment in ("exp_avg", "exp_avg_sq"):
        moments = {name: state[moment] for name, state in whole["optimizer"]["state"].items()}
        assert moments.keys() == hf[moment].keys()
        assert all(torch.equal(moments[name], value) for name, value in hf[moment].items())

    back = tmp_path / "back" / "run" / "step-2"
    result = ckpt_tools.convert(
        tmp_path / "w.pt",
        back,
        to="dcp",
        ranks=3,
        base=base,
        names="torchtitan",
    )
    assert not result.left_out, result.left_out
    if how == "separate":
        return  # the map's moments are those of the fused projection, as torchtitan's models have it
    if lost:  # so a job cannot load it; all else is there
        ckpt_tools.convert(back, tmp_path / "b.pt", to="torch")
        again = torch.load(tmp_path / "b.pt")
        assert all(torch.equal(again[n], v) for n, v in want["model"].items() if n not in lost)
        return
    run_job("torchtitan", 3, "torchtitan_models_job.py", tmp_path / "back", "load", how)
    again = torch.load(tmp_path / "back" / "load.pt")
    for part in ("model", "optim"):
        assert again[part].keys() == want[part].keys()
        for name, value in want[part].items():
            other = again[part][name]
            same = torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value
            assert same, name
