"""Another framework's names are found by themselves, with the config's model.

The oracle reorders rotary heads and renames with torch and plain text, and is no map of ours.
`tests/peers/test_others.py` does the same with torchtitan's own models and adapters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.errors import PlanError
from tests.command import run_command
from tests.operations.llamas import base, llama

State = dict[str, torch.Tensor]
_NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
}


def as_meta(weights: State) -> State:
    """A Llama as Meta names it: rotary heads in pairs."""
    found = {}
    for name, values in weights.items():
        for text, new in _NAMES.items():
            name = name.replace(text, new)
        for part, heads in (("wq", 4), ("wk", 2)):
            if f"attention.{part}." in name:
                rows, width = values.shape
                halves = values.view(heads, 2, rows // heads // 2, width)
                values = halves.transpose(1, 2).reshape(rows, width)
        found[name] = values.contiguous()
    return found


@pytest.fixture
def llamas(tmp_path: Path) -> tuple[State, Path, Path]:
    """The weights of a Llama, the directory of its config, and a file of Meta's names."""
    model = llama()
    weights = {n: v.clone() for n, v in model.state_dict().items()}
    folder = base(model, tmp_path / "base")
    torch.save(as_meta(weights), tmp_path / "consolidated.00.pth")
    return weights, folder, tmp_path / "consolidated.00.pth"


def same(path: Path, want: State) -> bool:
    found: State = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        found |= load_file(file)
    return found.keys() == want.keys() and all(torch.equal(found[n], want[n]) for n in want)


@pytest.mark.slow
def test_meta_s_names_become_those_of_the_hub(
    llamas: tuple[State, Path, Path], tmp_path: Path
) -> None:
    weights, folder, meta = llamas
    result = ckpt_tools.convert(meta, tmp_path / "hf", to="hf", base=folder, check=True)
    assert same(tmp_path / "hf", weights)
    assert (
        "the names are those of torchtitan or Meta for Llama: converted with the map"
        " llama_titan_to_hf" in result.notes
    )
    shown = "names and layout were changed by the key map llama_titan_to_hf"
    assert shown in ckpt_tools.verify(tmp_path / "hf").notes
    several = tmp_path / "original"
    several.mkdir()
    for number in range(2):
        parts = {
            name: value.chunk(2, int(".wo." in name or ".w2." in name))[number].clone()
            if value.dim() == 2
            else value
            for name, value in as_meta(weights).items()
        }
        torch.save(parts, several / f"consolidated.{number:02}.pth")
    ckpt_tools.convert(several, tmp_path / "of-several", to="hf", base=folder)
    assert same(tmp_path / "of-several", weights)
    done = run_command("convert", str(meta), str(tmp_path / "cli"), "--to", "hf", "--base", folder)
    assert done.returncode == 0 and "llama_titan_to_hf" in done.stdout, done.stderr
    assert same(tmp_path / "cli", weights)


@pytest.mark.slow
def test_torchtitan_s_names_from_the_hub_s_and_from_meta_s(
    llamas: tuple[State, Path, Path], tmp_path: Path
) -> None:
    weights, folder, meta = llamas
    save_file(weights, tmp_path / "hub.safetensors")
    want = {
        name.replace("attention.w", "attention.qkv_linear.w").replace("output.", "lm_head.")
        if "wo." not in name
        else name: values
        for name, values in as_meta(weights).items()
    }
    for number, source in enumerate((tmp_path / "hub.safetensors", meta)):
        there = tmp_path / f"titan-{number}.safetensors"
        ckpt_tools.convert(source, there, to="safetensors", base=folder, names="torchtitan")
        assert same(there, want)
    back = tmp_path / "back.safetensors"
    ckpt_tools.convert(there, back, to="safetensors", base=folder, names="hub")
    assert same(back, weights)
    again = tmp_path / "again.safetensors"  # these names already
    ckpt_tools.convert(there, again, to="safetensors", base=folder, names="torchtitan")
    assert same(again, want)


@pytest.mark.slow
def test_meta_s_names_from_the_hub_s_and_from_torchtitan_s(
    llamas: tuple[State, Path, Path], tmp_path: Path
) -> None:
    weights, folder, meta = llamas
    save_file(weights, tmp_path / "hub.safetensors")
    titan = tmp_path / "titan.safetensors"
    ckpt_tools.convert(meta, titan, to="safetensors", base=folder, names="torchtitan")
    for source in (tmp_path / "hub.safetensors", titan, meta):
        there = tmp_path / "consolidated.pth"
        ckpt_tools.convert(source, there, to="torch", base=folder, names="meta", overwrite=True)
        found, want = torch.load(there), as_meta(weights)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], values) for name, values in want.items())
    tied = {name: values for name, values in weights.items() if name != "lm_head.weight"}
    save_file(tied, tmp_path / "tied.safetensors")
    values = json.loads((folder / "config.json").read_text())
    base = config(tmp_path / "base-of-tied", **values | {"tie_word_embeddings": True})
    result = ckpt_tools.convert(
        tmp_path / "tied.safetensors", there, to="torch", base=base, names="meta", overwrite=True
    )
    assert any("written, too" in note for note in result.notes)
    found = torch.load(there)
    assert found.keys() == want.keys()
    assert torch.equal(found["output.weight"], weights["model.embed_tokens.weight"])
    back = tmp_path / "back"
    ckpt_tools.convert(there, back, to="hf", base=base, check=True)
    assert same(back, tied)


def test_inspect_tells_whose_names_they_are(
    llamas: tuple[State, Path, Path], tmp_path: Path
) -> None:
    weights, _, meta = llamas

    def shown(path: Path) -> str:
        return ckpt_tools.inspect(path).extras.get("names", "")

    assert shown(meta).startswith("like torchtitan or Meta has those of Llama")
    save_file(weights, tmp_path / "hub.safetensors")
    assert shown(tmp_path / "hub.safetensors").startswith("like those of Llama")
    for state, start in (
        (as_meta(weights), "like torchtitan or Meta has those of Llama"),
        (weights, "like those of Llama"),
    ):
        step = tmp_path / "run" / f"step-{len(start)}"
        parameters = {name: torch.nn.Parameter(values) for name, values in state.items()}
        optimizer = torch.optim.AdamW(parameters.items())
        for values in parameters.values():
            values.grad = torch.ones_like(values)
        optimizer.step()
        ckpt_tools.save(step, {"model": parameters, "optimizer": optimizer})
        assert shown(step).startswith(start)
    save_file(
        {"a.weight": torch.ones(2), "output.bias": torch.ones(2)}, tmp_path / "own.safetensors"
    )
    assert shown(tmp_path / "own.safetensors") == ""
    assert "names: like torchtitan" in run_command("inspect", str(meta)).stdout


@pytest.mark.slow
def test_a_comparison_with_the_config_tells_whose_names_they_are(
    llamas: tuple[State, Path, Path],
) -> None:
    _, folder, meta = llamas
    done = run_command("inspect", str(meta), "--base", str(folder))
    assert (
        done.returncode == 1
        and "the names are those of torchtitan or Meta for Llama" in done.stdout
    )


@pytest.mark.slow
def test_names_stay_where_nobody_asks_for_others(
    llamas: tuple[State, Path, Path], tmp_path: Path
) -> None:
    weights, folder, meta = llamas
    result = ckpt_tools.convert(meta, tmp_path / "plain", to="hf")  # which model it is, is unknown
    assert same(tmp_path / "plain", as_meta(weights))
    assert any("the names are like torchtitan or Meta" in note for note in result.notes)
    ckpt_tools.convert(meta, tmp_path / "a.safetensors", to="safetensors")
    assert same(tmp_path / "a.safetensors", as_meta(weights))
    ckpt_tools.convert(
        meta,
        tmp_path / "b",
        to="hf",
        base=folder,
        key_map="llama_titan_to_hf",
    )
    assert same(tmp_path / "b", weights)


def config(folder: Path, **values: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_candidates(
    llamas: tuple[State, Path, Path], tmp_path: Path
) -> None:
    weights, folder, meta = llamas
    out = tmp_path / "out"
    other = config(tmp_path / "other", model_type="gemma2", num_attention_heads=4)
    with pytest.raises(PlanError, match="are those of Llama.*another model: 'gemma2'"):
        ckpt_tools.convert(meta, out, to="hf", base=other)
    with pytest.raises(PlanError, match="--names torchtitan: no map for 'gemma2'"):
        ckpt_tools.convert(meta, out, to="dcp", base=other, names="torchtitan", partial=True)
    with pytest.raises(PlanError, match="not for --to hf"):
        ckpt_tools.convert(meta, out, to="hf", base=folder, names="torchtitan")
    with pytest.raises(PlanError, match="--names needs --base"):
        ckpt_tools.convert(meta, out, to="dcp", names="torchtitan")
    with pytest.raises(
        PlanError, match="expected one of hub, transformers, torchtitan, meta, got 'metta'"
    ):
        ckpt_tools.convert(meta, out, to="dcp", base=folder, names="metta")
    qwen = config(tmp_path / "qwen", model_type="qwen3", num_attention_heads=4)
    with pytest.raises(PlanError, match="--names meta: no map for 'qwen3'"):
        ckpt_tools.convert(meta, out, to="dcp", base=qwen, names="meta", partial=True)
    # one tensor more, which no rule explains
    torch.save(as_meta(weights) | {"extra.weight": torch.ones(2)}, tmp_path / "more.pth")
    with pytest.raises(PlanError, match=r"matches 1 names: extra\.weight \(llama_titan"):
        ckpt_tools.convert(tmp_path / "more.pth", out, to="hf", base=folder)
    ckpt_tools.convert(tmp_path / "more.pth", tmp_path / "most", to="hf", base=folder, partial=True)
    assert same(tmp_path / "most", weights | {"extra.weight": torch.ones(2)})
    # a name that both have tells nothing
    save_file({"lm_head.weight": torch.ones(64, 32)}, tmp_path / "head.safetensors")
    ckpt_tools.convert(
        tmp_path / "head.safetensors", tmp_path / "head", to="hf", base=folder, partial=True
    )
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 1),
        ("num_attention_heads", 8),
        ("intermediate_size", 40),
        ("num_hidden_layers", 1),
        ("num_hidden_layers", 3),
    ],
)
def test_a_config_of_another_size_is_refused(
    key: str, value: int, llamas: tuple[State, Path, Path], tmp_path: Path
) -> None:
    """Other heads would reorder other rows, and no shape of a file tells."""
    weights, folder, meta = llamas
    save_file(weights, tmp_path / "hub.safetensors")
    told = json.loads((folder / "config.json").read_text())
    if key == "num_attention_heads":
        told.pop("head_dim", None)
    wrong = config(tmp_path / "wrong", **told | {key: value})
    for source in (meta, tmp_path / "hub.safetensors"):
        for how in ({"to": "hf"}, {"to": "dcp", "names": "torchtitan"}):
            if value == 3 and "names" in how:  # a part of the model, which is noted
                result = ckpt_tools.convert(
                    source, tmp_path / "part", base=wrong, dry_run=True, **how
                )
                assert any("names that the result lacks" in note for note in result.notes)
                continue
            with pytest.raises(PlanError):
                ckpt_tools.convert(source, tmp_path / "out", base=wrong, **how)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_job_s_tied_model_as_torchtitan_has_it(tmp_path: Path) -> None:
    """No key above the model, no second name of the embedding, and a flat optimizer."""
    model = llama(tied=True)
    folder = base(model, tmp_path / "base")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    ckpt_tools.save(tmp_path / "step-1", {"model": model, "optimizer": optimizer})
    there = tmp_path / "titan"
    result = ckpt_tools.convert(
        tmp_path / "step-1", there, to="dcp", base=folder, names="torchtitan"
    )
    assert any("is tied to" in note for note in result.notes)
    names = set(ckpt_tools.inspect(there).catalog.tensors)
    weights = {n for n in names if not n.startswith("optimizer.")}
    assert "tok_embeddings.weight" in weights and "lm_head.weight" not in weights
    assert not any(name.startswith("model.") for name in weights)
    assert "optimizer.state.tok_embeddings.weight.exp_avg" in names
    ckpt_tools.convert(there, tmp_path / "hf", to="hf", base=folder, check=True)
    want = {n: v for n, v in model.state_dict().items() if n != "lm_head.weight"}
    assert same(tmp_path / "hf", want)


def test_the_manifest_tells_what_has_changed_the_names(tmp_path: Path) -> None:
    save_file({"a.w": torch.ones(4, 2), "b.w": torch.zeros(3)}, tmp_path / "src.safetensors")
    own = tmp_path / "own.json"
    own.write_text('{"rename": [["^a\\\\.", "c."], ["^b\\\\.", "d."]]}')
    out = tmp_path / "out.safetensors"
    ckpt_tools.convert(
        tmp_path / "src.safetensors", out, to="safetensors", key_map=own, rename=["^c=e"]
    )
    (note, proof) = ckpt_tools.verify(out).notes
    assert proof == "the inverse gave 2 tensors of the source back"
    crc = crc64_of(own.read_bytes())
    assert note == (
        f"names and layout were changed by the key map own.json (CRC-64 {crc}), then --rename ^c=e"
    )
    plain = tmp_path / "plain.safetensors"
    ckpt_tools.convert(tmp_path / "src.safetensors", plain, to="safetensors", prove=False)
    assert ckpt_tools.verify(plain).notes == []


def crc64_of(data: bytes) -> str:
    """CRC-64/NVME bit by bit, by its definition."""
    crc = 0xFFFFFFFFFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return f"{crc ^ 0xFFFFFFFFFFFFFFFF:016x}"
