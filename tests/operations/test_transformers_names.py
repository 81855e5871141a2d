"""`--names`: what transformers has in memory, and what it saves. The oracle is `save_pretrained`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import IntegrityError, PlanError
from ckpt_tools.core.grid import GridPlace, Relation
from ckpt_tools.formats.registry import open_source
from ckpt_tools.operations.convert.take_apart import take_apart
from ckpt_tools.operations.convert.transformers_names import HUB, MEMORY, ModelNames, rename_as

Run = Callable[..., Any]
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN = {**SMALL, "num_experts": 4, "head_dim": 4}
DEEPSEEK = {
    **SMALL,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3Moe": QWEN,
    "Qwen2Moe": {**QWEN, "shared_expert_intermediate_size": 8},
    "Mixtral": {**SMALL, "num_local_experts": 4},
    "DeepseekV3": DEEPSEEK,
    "Glm4Moe": {**DEEPSEEK, "num_key_value_heads": 2},
    "Jamba": {**SMALL, "num_experts": 2, "use_mamba_kernels": False, "attn_layer_offset": 1},
    "GraniteMoe": {**SMALL, "num_local_experts": 4},
    "GptOss": {**SMALL, "num_local_experts": 4, "head_dim": 4},
    "Llama": SMALL,
}


def model_of(name: str) -> Any:
    torch.manual_seed(1)
    kind = getattr(transformers, f"{name}ForCausalLM", None)
    config = getattr(transformers, f"{name}Config", None)
    if kind is None or config is None:
        pytest.skip(f"no {name} in this release")
    return kind(config(**MODELS[name]))


def job_of(model: Any) -> dict[str, Any]:
    """Returns the state of a training job after a step with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    numbered = optimizer.state_dict()
    return {
        "model": model.state_dict(),
        "optimizer": {
            "state": {names[n]: state for n, state in numbered["state"].items()},
            "param_groups": [
                {**g, "params": [names[n] for n in g["params"]]} for g in numbered["param_groups"]
            ],
        },
    }


def config_of(model: Any, folder: Path) -> Path:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def oracle(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Returns what transformers itself saves."""
    model.save_pretrained(folder)
    return read_all(folder)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def mixed(
    memory: Mapping[str, torch.Tensor], files: Mapping[str, torch.Tensor], prefix: str
) -> dict[str, torch.Tensor]:
    """Returns a model in memory, but with the files' names below a prefix."""
    kept = {name: value for name, value in memory.items() if not name.startswith(prefix)}
    return kept | {name: value for name, value in files.items() if name.startswith(prefix)}


def same(found: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_job_becomes_the_files_that_transformers_saves(name: str, tmp_path: Path) -> None:
    """And back: the names of memory, with the moments, bit by bit."""
    model = model_of(name)
    job = job_of(model)
    dcp.save(job, checkpoint_id=tmp_path / "dcp", no_dist=True)
    base = config_of(model, tmp_path / "base")
    want = oracle(model, tmp_path / "want")
    result = ckpt_tools.convert(tmp_path / "dcp", tmp_path / "hf", to="hf", base=base)
    same(read_all(tmp_path / "hf"), want)
    told = [note for note in result.notes if "with the names of files" in note]
    assert bool(told) == (want.keys() != job["model"].keys())
    # with the optimizer, to the Hub's names and back
    for step, (source, names) in enumerate((("dcp", "hub"), ("step0", "transformers"))):
        ckpt_tools.convert(
            tmp_path / source, tmp_path / f"step{step}", to="dcp", base=base, names=names, ranks=3
        )
    assert not ckpt_tools.verify(tmp_path / "step1").problems
    back = {
        "model": {n: torch.zeros_like(v) for n, v in job["model"].items()},
        "optimizer": {
            "state": {
                n: {k: torch.zeros_like(v) for k, v in state.items()}
                for n, state in job["optimizer"]["state"].items()
            }
        },
    }
    dcp.load(back, checkpoint_id=tmp_path / "step1", no_dist=True)
    same(back["model"], job["model"])
    for parameter, state in job["optimizer"]["state"].items():
        same(back["optimizer"]["state"][parameter], state)


@pytest.mark.slow
def test_names_by_themselves_and_on_request(tmp_path: Path) -> None:
    """A directory for transformers has the names of files, whatever lies beside the config."""
    model = model_of("Qwen3Moe")
    base = config_of(model, tmp_path / "base")
    want = oracle(model, tmp_path / "want")
    memory = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(memory, tmp_path / "m.safetensors")
    result = ckpt_tools.convert(
        tmp_path / "m.safetensors", tmp_path / "hf", to="hf", base=base, check=True
    )
    same(read_all(tmp_path / "hf"), want)
    assert any("25 tensors became 45 with the names of files" in note for note in result.notes)
    assert any("transformers loads it" in note for note in result.notes)
    # weights in the directory: they have these names, and nothing needs to be asked
    result = ckpt_tools.convert(
        tmp_path / "hf", tmp_path / "again", to="hf", base=tmp_path / "want"
    )
    same(read_all(tmp_path / "again"), want)
    assert not any("became" in note for note in result.notes)
    # on request, those of memory stay
    result = ckpt_tools.convert(
        tmp_path / "m.safetensors", tmp_path / "kept", to="hf", base=base, names="transformers"
    )
    same(read_all(tmp_path / "kept"), memory)
    told = next(note for note in result.notes if "in memory" in note)
    assert "files on the Hub have otherwise" in told and "experts.gate_up_proj" in told


@pytest.mark.slow
def test_what_cannot_be_named_is_refused(tmp_path: Path, ckpt: Run) -> None:
    model = model_of("Qwen3Moe")
    base = config_of(model, tmp_path / "base")
    files = oracle(model, tmp_path / "want")
    memory = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = "model.layers.0.mlp.experts.", "model.layers.1.mlp.experts."
    both = mixed(memory, files, second)
    wide = {**memory, f"{first}down_proj": torch.zeros(4, 16, 9)}
    lacking = {n: v for n, v in files.items() if n != f"{first}2.up_proj.weight"}
    cases: list[tuple[dict[str, torch.Tensor], str, str]] = [
        (both, "hub", "some tensors have names of transformers in memory"),
        (wide, "hub", r"has the shape \[4, 16, 9\], and in the config's model \[4, 16, 8\]"),
        ({**memory, "head.weight": torch.zeros(2)}, "hub", "config's model has no head.weight"),
        ({f"net.{n}": v for n, v in memory.items()}, "hub", "config's model has no net.lm_head"),
        (lacking, "transformers", "up_proj.weight' beside 'model.layers.0.mlp.experts.0.gate_proj"),
    ]
    for number, (tensors, names, told) in enumerate(cases):
        save_file(tensors, tmp_path / f"{number}.safetensors")
        with pytest.raises(PlanError, match=told):
            ckpt_tools.convert(
                tmp_path / f"{number}.safetensors", tmp_path / "o", to="dcp", base=base, names=names
            )
    assert not (tmp_path / "o").exists()
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    done = ckpt(
        "convert",
        tmp_path / "want",
        tmp_path / "o",
        "--to",
        "dcp",
        "--names",
        "transformers",
        "--base",
        base,
    )
    assert done.returncode == 13 and "transformers has no model 'NoSuchModel'" in done.stderr
    for more, told in (
        (["--names", "transformers"], "--names needs --base DIR"),
        (
            ["--names", "metta", "--base", base],
            "--names: expected one of hub, transformers, torchtitan, meta, got 'metta'",
        ),
    ):
        done = ckpt("convert", tmp_path / "want", tmp_path / "o", "--to", "dcp", *more)
        assert done.returncode == 13 and told in done.stderr, done.stderr


@pytest.mark.slow
def test_a_flipped_bit_in_an_expert_is_found(tmp_path: Path) -> None:
    """In both directions, and if it is cast: then the source is read once more."""
    model = model_of("Qwen3Moe")
    base = config_of(model, tmp_path / "base")
    memory = {name: value.clone() for name, value in model.state_dict().items()}
    dcp.save({"model": memory}, checkpoint_id=tmp_path / "stock", no_dist=True)
    ckpt_tools.convert(tmp_path / "stock", tmp_path / "memory", to="dcp")
    ckpt_tools.convert(tmp_path / "stock", tmp_path / "hub", to="hf", base=base)
    expert = memory["model.layers.0.mlp.experts.gate_up_proj"][2, 9:].contiguous()
    for folder, names, dtype in (
        ("memory", "hub", None),
        ("memory", "hub", "bf16"),
        ("hub", "transformers", None),
    ):
        (file,) = [
            p for p in (tmp_path / folder).iterdir() if expert.numpy().tobytes() in p.read_bytes()
        ]
        before = file.read_bytes()
        data = bytearray(before)
        data[data.index(expert.numpy().tobytes()) + 5] ^= 1
        file.write_bytes(data)
        with pytest.raises(IntegrityError, match="gate_up_proj|gate_proj|up_proj"):
            ckpt_tools.convert(
                tmp_path / folder, tmp_path / "o", to="dcp", base=base, names=names, dtype=dtype
            )
        assert not (tmp_path / "o").exists()
        file.write_bytes(before)


@pytest.mark.slow
def test_a_partial_model_and_one_that_nothing_tells(tmp_path: Path) -> None:
    """`--partial` keeps names that cannot be converted, and says so."""
    model = model_of("Qwen3Moe")
    base = config_of(model, tmp_path / "base")
    files = oracle(model, tmp_path / "want")
    memory = {name: value.clone() for name, value in model.state_dict().items()}
    second = "model.layers.1.mlp.experts."
    both = mixed(memory, files, second)
    save_file(both, tmp_path / "m.safetensors")
    result = ckpt_tools.convert(
        tmp_path / "m.safetensors", tmp_path / "hf", to="hf", base=base, partial=True
    )
    same(read_all(tmp_path / "hf"), both)
    assert any("all names are kept: some tensors have names" in note for note in result.notes)
    # one layer of the model, and what the job has beside it
    part = {n: v for n, v in memory.items() if "layers.1." in n}
    torch.save({"model": part | {"probe": torch.ones(2)}, "ema": part}, tmp_path / "p.pt")
    result = ckpt_tools.convert(
        tmp_path / "p.pt", tmp_path / "o.pt", to="torch", base=base, names="hub", partial=True
    )
    got = torch.load(tmp_path / "o.pt")
    same(
        got["model"],
        {n: v for n, v in files.items() if "layers.1." in n} | {"probe": torch.ones(2)},
    )
    same(got["ema"], part)
    assert any("with the same names as before: ema.model.layers.1" in n for n in result.notes)
    # the names of memory, from files that have a tied weight once
    tied = {n: v for n, v in files.items() if n != "lm_head.weight"}
    save_file(tied, tmp_path / "t.safetensors")
    result = ckpt_tools.convert(
        tmp_path / "t.safetensors", tmp_path / "t.pt", to="torch", base=base, names="transformers"
    )
    assert any("names that the result lacks: lm_head.weight" in note for note in result.notes)


@pytest.mark.slow
def test_files_that_may_be_transposed_are_refused(tmp_path: Path) -> None:
    """transformers transposes them by their shapes alone, and these may be those of both."""
    config = transformers.Qwen3VLMoeConfig()
    config.text_config.update({**QWEN, "hidden_size": 16, "moe_intermediate_size": 8})
    config.vision_config.update(
        {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
    )
    config.architectures = ["Qwen3VLMoeForConditionalGeneration"]
    config.save_pretrained(tmp_path / "base")
    with torch.device("meta"):
        model = transformers.Qwen3VLMoeForConditionalGeneration._from_config(config)
    memory = {n: torch.zeros(v.shape, dtype=v.dtype) for n, v in model.state_dict().items()}
    torch.save({"model": memory}, tmp_path / "m.pt")
    for names in ("hub", "transformers"):
        with pytest.raises(PlanError, match="may have 'model.language_model.*' transposed"):
            ckpt_tools.convert(
                tmp_path / "m.pt", tmp_path / "o", to="dcp", base=tmp_path / "base", names=names
            )
    result = ckpt_tools.convert(tmp_path / "m.pt", tmp_path / "o", to="hf", base=tmp_path / "base")
    assert any("it stays as it is, and so do all names" in note for note in result.notes)


@pytest.mark.slow
def test_a_moment_that_only_gets_another_name_keeps_its_fingerprint(tmp_path: Path) -> None:
    """Even if the archives of its chunks have no CRC-32."""
    model = model_of("Mixtral")
    base = config_of(model, tmp_path / "base")
    job = job_of(model)
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(job, checkpoint_id=tmp_path / "step", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    ckpt_tools.seal(tmp_path / "step")
    moment = job["optimizer"]["state"]["model.layers.0.mlp.gate.weight"]["exp_avg"]
    (file,) = (tmp_path / "step").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(moment.numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match="gate.weight"):
        ckpt_tools.convert(tmp_path / "step", tmp_path / "o", to="dcp", base=base, names="hub")


def test_lost_files_are_refused_in_both_directions(tmp_path: Path) -> None:
    """Files with other values than those of memory, as of Inkling 2, which pads."""
    names = ModelNames(
        "5",
        {"whole": (4, 2), "head": (5, 2)},
        {"a": (2, 2), "b": (2, 2)},
        {
            name: [Relation((2, 2), GridPlace("whole", at, (2, 1)), GridPlace(name, 0, (2, 1)))]
            for name, at in (("a", 0), ("b", 4))
        },
        lost=("head.padded",),
    )
    for to, tensors in ((HUB, {"whole": (4, 2)}), (MEMORY, {"a": (2, 2), "b": (2, 2)})):
        save_file({n: torch.ones(s) for n, s in tensors.items()}, tmp_path / f"{to}.safetensors")
        source = open_source(tmp_path / f"{to}.safetensors")
        parts = take_apart(source.catalog, source.store, None, False, True)
        with pytest.raises(PlanError, match="are not made of parts of those in memory: head"):
            rename_as(parts, names, to, source, "base", True)
