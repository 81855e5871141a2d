"""What lies in a model's directory beside its weights: folders, variants, entries of the index."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_folders_that_a_base_names_go_along_and_others_are_named(tmp_path: Path) -> None:
    """As a directory of sentence-transformers, with a tokenizer of several templates."""
    base = tmp_path / "base"
    modules = [{"idx": n, "path": p} for n, p in enumerate(("", "1_Pooling", "2_Dense"))]
    for name, text in {
        "config.json": "{}",
        "modules.json": json.dumps(modules),
        "1_Pooling/config.json": '{"pooling": true}',
        "2_Dense/config.json": "{}",
        "additional_chat_templates/tool.jinja": "{{ x }}",
        "onnx/model.onnx": "no",
        "logs/x.txt": "no",
    }.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)
    save_file({"dense": torch.ones(2)}, base / "2_Dense" / "model.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    out = tmp_path / "out"
    result = ckpt_tools.convert(tmp_path / "m.safetensors", out, to="hf", base=base)
    for name in ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert (out / "additional_chat_templates" / "tool.jinja").read_text() == "{{ x }}"
    assert not (out / "onnx").exists() and not (out / "logs").exists()
    assert any("do not go along: logs, onnx" in note for note in result.notes)
    assert ckpt_tools.verify(out).problems == []


def test_a_link_out_of_a_folder_that_goes_along_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "1_Pooling").mkdir(parents=True)
    (base / "config.json").write_text("{}")
    (base / "modules.json").write_text('[{"path": "1_Pooling"}]')
    (tmp_path / "elsewhere.json").write_text("{}")
    (base / "1_Pooling" / "config.json").symlink_to(tmp_path / "elsewhere.json")
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    with pytest.raises(ckpt_tools.PlanError, match="cannot copy a model's file"):
        ckpt_tools.convert(tmp_path / "m.safetensors", tmp_path / "out", to="hf", base=base)


def test_a_variant_beside_a_model_is_named_and_not_read(tmp_path: Path, ckpt: Run) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"w": torch.ones(2).half()}, tmp_path / "model.fp16.safetensors")
    report = ckpt_tools.inspect(tmp_path)
    assert report.catalog.tensors["w"].dtype.name == "float32"
    assert report.catalog.beside == ("model.fp16.safetensors",)
    done = ckpt("inspect", tmp_path)
    assert done.returncode == 0 and "model.fp16.safetensors" in done.stdout
    (tmp_path / "model.safetensors").unlink()
    assert ckpt_tools.inspect(tmp_path).catalog.tensors["w"].dtype.name == "float16"


def sharded(folder: Path, more: dict[str, str]) -> Path:
    folder.mkdir()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / names[0])
    save_file({"c": torch.ones(4)}, folder / names[1])
    weight_map = {"a": names[0], "b": names[0], "c": names[1]} | more
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_one_entry_of_an_index_too_many_loses_one_tensor(tmp_path: Path, ckpt: Run) -> None:
    model = sharded(tmp_path / "m", {"gone": "model-00001-of-00002.safetensors"})
    done = ckpt("verify", model)
    assert done.returncode == 14 and "gone" in done.stdout
    assert not any(f"\n{n} " in done.stdout for n in "abc")
    done = ckpt("salvage", model, tmp_path / "out")
    assert done.returncode == 14 and "gone" in done.stdout, (done.stdout, done.stderr)
    saved = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        saved |= load_file(path)
    assert saved.keys() == {"a", "b", "c"} and ckpt("verify", tmp_path / "out").returncode == 0


@pytest.mark.parametrize("damage", ["one too many", "elsewhere", "a shard"])
def test_shards_of_bin_lose_no_more_than_is_damaged(damage: str, tmp_path: Path, ckpt: Run) -> None:
    model = tmp_path / "m"
    model.mkdir()
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    torch.save({"a": torch.ones(3), "b": torch.zeros(2)}, model / names[0])
    torch.save({"c": torch.arange(4.0)}, model / names[1])
    where = {"a": names[0], "b": names[0], "c": names[1]}
    more = {"one too many": {"gone": names[0]}, "elsewhere": {"a": names[1]}, "a shard": {}}[damage]
    index = {"metadata": {}, "weight_map": where | more}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    if damage == "a shard":
        (model / names[1]).write_bytes(b"x" * 500)
    done = ckpt("verify", model)
    assert done.returncode == 14, (done.stdout, done.stderr)
    result = ckpt_tools.salvage(model, tmp_path / "out")
    kept = {"a", "b"} if damage == "a shard" else {"a", "b", "c"}
    assert ckpt_tools.inspect(tmp_path / "out").catalog.tensors.keys() == kept
    assert bool(result.lost) == (damage != "elsewhere") and result.problems


def test_an_index_that_names_another_shard_loses_nothing(tmp_path: Path, ckpt: Run) -> None:
    model = sharded(tmp_path / "m", {"a": "model-00002-of-00002.safetensors"})
    assert ckpt("verify", model).returncode == 14
    result = ckpt_tools.salvage(model, tmp_path / "out")
    assert not result.lost and result.problems
    assert ckpt_tools.inspect(tmp_path / "out").catalog.tensors.keys() == {"a", "b", "c"}


def test_a_sound_checkpoint_is_salvaged_with_status_0(tmp_path: Path, ckpt: Run) -> None:
    model = sharded(tmp_path / "m", {})
    assert ckpt("salvage", model, tmp_path / "out").returncode == 0
