"""Everything that is left out, guessed or kept is said, in the result or in an error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager, FormatError, IntegrityError, PlanError
from ckpt_tools.core.catalog import Catalog
from ckpt_tools.formats.in_memory import InMemoryFile
from ckpt_tools.operations.verification import Verification

Run = Callable[..., subprocess.CompletedProcess[str]]


def step(model: nn.Module, parameters: object) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


def notes(result: object) -> str:
    return "\n".join(result.notes)  # type: ignore[attr-defined]


def test_a_name_that_only_a_shape_gave_is_said_to_be_a_guess(tmp_path: Path) -> None:
    """The optimizer's one parameter is not in the file's model, which has one of that shape."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = step(model, [model[1].weight])
    state = {"model": {"a": model[0].weight.detach()}, "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "y.pt")
    said = notes(ckpt_tools.convert(tmp_path / "y.pt", tmp_path / "o.pt", to="torch"))
    assert "each number became the only parameter of its shape" in said
    (tmp_path / "order.json").write_text('["a"]')
    said = notes(
        ckpt_tools.convert(
            tmp_path / "y.pt", tmp_path / "p.pt", to="torch", param_order=tmp_path / "order.json"
        )
    )
    assert "became the only parameter" not in said


def test_a_file_of_torch_beside_a_model_is_named(tmp_path: Path, ckpt: Run) -> None:
    model = nn.Linear(4, 5)
    optimizer = step(model, model.parameters())
    (tmp_path / "o").mkdir()
    save_file(model.state_dict(), tmp_path / "o/model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "o/optim.pt")
    assert "optim.pt" in ckpt("inspect", tmp_path / "o").stdout
    said = notes(ckpt_tools.convert(tmp_path / "o", tmp_path / "x", to="dcp"))
    assert "stay behind: optim.pt" in said


def test_a_shard_that_the_index_does_not_name_is_named(tmp_path: Path, ckpt: Run) -> None:
    folder = tmp_path / "o"
    folder.mkdir()
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({f"w{number}": torch.full((3,), float(number))}, folder / name)
    index = {"metadata": {}, "weight_map": {"w1": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "beside: model-00002-of-00002.safetensors" in ckpt("inspect", folder).stdout
    said = notes(ckpt_tools.convert(folder, tmp_path / "x", to="dcp"))
    assert "stay behind: model-00002-of-00002.safetensors" in said


def test_an_optimizer_of_any_name_stays_out_of_a_model_file(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = step(model, model.parameters()).state_dict()
    torch.save({"net": model.state_dict(), "opt": optimizer}, tmp_path / "one.pt")
    two = {"gen": model.state_dict(), "disc": model.state_dict(), "opt_g": optimizer}
    torch.save(two, tmp_path / "two.pt")
    ckpt_tools.merge(tmp_path / "one.pt", tmp_path / "m.safetensors")
    for name, keys in (("one", {"weight", "bias"}), ("two", None)):
        out = tmp_path / f"{name}.safetensors"
        result = ckpt_tools.convert(tmp_path / f"{name}.pt", out, to="safetensors", dtype="bf16")
        names = set(load_file(out))
        assert names == (keys or {f"{k}.{n}" for k in ("gen", "disc") for n in ("weight", "bias")})
        assert any(key.startswith("opt") for key in result.left_out)


def test_tensors_that_no_model_has_are_named(tmp_path: Path) -> None:
    names = ("encoder.weight", "scaler.weight", "sampler.w", "steps")
    save_file({name: torch.ones(2) for name in names}, tmp_path / "s.safetensors")
    source = tmp_path / "s.safetensors"
    left = {"sampler", "scaler", "steps"}
    assert set(ckpt_tools.merge(source, tmp_path / "m.safetensors").left_out) == left
    result = ckpt_tools.average([source, source], tmp_path / "a.safetensors")
    assert set(result.left_out) == left
    said = notes(ckpt_tools.convert(source, tmp_path / "d", to="dcp", dtype="bf16"))
    assert "not of the model, so not cast" in said and "scaler.weight" in said


def test_a_sound_model_is_rescued_from_beside_a_damaged_optimizer(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    save_file(nn.Linear(4, 5).state_dict(), tmp_path / "o/model.safetensors")
    (tmp_path / "o/optimizer.pt").write_bytes(b"no archive at all")
    result = ckpt_tools.salvage(tmp_path / "o", tmp_path / "rescued")
    assert any("optimizer.pt" in str(problem) for problem in result.problems)
    assert ckpt_tools.inspect(tmp_path / "rescued").total.num_tensors == 2


@pytest.fixture
def adapted(tmp_path: Path) -> Path:
    """A model with an adapter inside, as PEFT names it."""
    names = ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
    shapes = ((4, 4), (2, 4), (4, 2))
    model = {
        f"base_model.model.layer.q_proj.{name}": torch.ones(shape)
        for name, shape in zip(names, shapes, strict=True)
    }
    torch.save({"model": model}, tmp_path / "lora.pt")
    return tmp_path / "lora.pt"


def test_a_merge_of_a_model_with_adapters_is_refused(adapted: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="adapters of PEFT inside") as caught:
        ckpt_tools.merge(adapted, tmp_path / "o.safetensors")
    assert "--to peft" in str(caught.value.hint) and "--lora" in str(caught.value.hint)
    assert not (tmp_path / "o.safetensors").exists()


@pytest.mark.parametrize("rank", [2, 8])
def test_the_config_of_an_adapter_has_its_rank(rank: int, adapted: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (tmp_path / "base/adapter_config.json").write_text(json.dumps(config))
    arguments = {"to": "peft", "base": tmp_path / "base"}
    if rank == 2:
        ckpt_tools.convert(adapted, tmp_path / "out", **arguments)
        return
    with pytest.raises(PlanError, match="r=8, and the adapter has rank 2"):
        ckpt_tools.convert(adapted, tmp_path / "out", **arguments)


@pytest.fixture
def attention(tmp_path: Path) -> Path:
    model = {f"{name}.weight": torch.ones(4, 4) for name in "qkv"}
    torch.save({"model": model, "optimizer": {}}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.mark.parametrize("words", ["qkv_split", "megatron_unstack", "llama_hf_to_titan"])
def test_a_key_map_that_matches_nothing_is_an_error(
    words: str, attention: Path, tmp_path: Path, ckpt: Run
) -> None:
    done = ckpt("convert", attention, tmp_path / "o.pt", "--to", "torch", "--map", words)
    assert done.returncode == 13 and "the key map matches none of 3 tensors" in done.stderr
    assert not (tmp_path / "o.pt").exists()


def test_a_number_that_a_key_map_does_not_have_is_an_error(
    attention: Path, tmp_path: Path, ckpt: Run
) -> None:
    (tmp_path / "map.json").write_text('{"rename": [["q", "queries"]]}')
    done = ckpt(
        "convert",
        attention,
        tmp_path / "o.pt",
        "--to",
        "torch",
        "--map",
        tmp_path / "map.json",
        "--set",
        "heads=2",
    )
    assert done.returncode == 13 and "no such number" in done.stderr


def test_runs_beside_a_file_are_named(tmp_path: Path, ckpt: Run) -> None:
    both = tmp_path / "both"
    with CheckpointManager(both / "runA") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)}, asynchronous=False)
    save_file({"w": torch.ones(2)}, both / "m.safetensors")
    done = ckpt("inspect", both)
    assert done.returncode == 0 and "runA/" in done.stdout
    file, out = tmp_path / "a.safetensors", tmp_path / "a.pt"
    for words in (["merge", both, file], ["convert", both, out, "--to", "torch"], ["verify", both]):
        done = ckpt(*words)
        assert done.returncode == 0 and "not looked at: runA/" in done.stdout, done.stderr
    step = both / "runA" / "step-00000001"
    save_file({"w": torch.ones(2)}, both / "runA" / "m.safetensors")
    done = ckpt("reshard", step, tmp_path / "two", "--to", "2")
    assert done.returncode == 0 and "not looked at" not in done.stdout, "the step itself was given"


def test_a_glob_of_what_merge_leaves_out_says_so(tmp_path: Path, ckpt: Run) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = step(model, model.parameters())
    ckpt_tools.save(tmp_path / "job", {"model": model, "optimizer": optimizer})
    for option in ("--select", "--exclude"):
        done = ckpt("merge", tmp_path / "job", tmp_path / "m.safetensors", option, "optimizer.*")
        assert done.returncode == 13
        assert "only the model is written, and 'optimizer.state" in done.stderr
    file = tmp_path / "m.safetensors"
    done = ckpt("convert", tmp_path / "job", file, "--to", "safetensors", "--select", "optimizer.*")
    assert done.returncode == 13
    assert "only the model is written, and 'optimizer.state" in done.stderr, done.stderr
    done = ckpt("merge", tmp_path / "job", tmp_path / "m.safetensors", "--select", "nothing.*")
    assert done.returncode == 13 and "the nearest names: " in done.stderr


class Odd:
    """A value that no reader knows."""


def test_each_value_of_an_unknown_type_is_named(tmp_path: Path, ckpt: Run) -> None:
    values = {f"odd{number}": type(f"Kind{number}", (Odd,), {}) for number in range(15)}
    for kind in values.values():
        kind.__module__, kind.__qualname__ = __name__, kind.__name__
        globals()[kind.__name__] = kind
    state = {name: kind() for name, kind in values.items()} | {"w": torch.ones(2)}
    torch.save(state, tmp_path / "x.pt")
    done = ckpt("convert", tmp_path / "x.pt", tmp_path / "o.pt", "--to", "torch", "--json")
    assert done.returncode == 0, done.stderr
    said = "\n".join(json.loads(done.stdout)["notes"])
    assert [name for name in values if name not in said] == []
    for verb, out, *more in (
        ("merge", "m.safetensors"),
        ("convert", "hf", "--to", "hf"),
    ):  # of the model alone
        done = ckpt(verb, tmp_path / "x.pt", tmp_path / out, *more, "--json")
        said = "\n".join(json.loads(done.stdout)["notes"])
        assert [name for name in values if name not in said] == []


def test_a_tuple_that_becomes_a_list_is_said(tmp_path: Path) -> None:
    torch.save({"tup": (1, torch.ones(2)), "w": torch.ones(2)}, tmp_path / "x.pt")
    said = notes(ckpt_tools.convert(tmp_path / "x.pt", tmp_path / "c", to="dcp"))
    assert "tuples with tensors become lists, because DCP has no tuples: tup" in said


def test_tensors_that_an_option_leaves_out_are_counted(attention: Path, tmp_path: Path) -> None:
    result = ckpt_tools.convert(attention, tmp_path / "o.pt", to="torch", exclude=["*q.weight"])
    assert "--select and --exclude leave out 1 tensors with 64 bytes" in notes(result)


@pytest.mark.parametrize(
    "words",
    [
        ["--storage-option", "a=1", "--storage-option", "a.b=2"],
        ["--storage-option", f"a={'9' * 5000}"],
        ["--memory", "9" * 400],
        ["--memory", "70000000iB"],
    ],
    ids=["a value and a table", "a long number", "a giant", "a unit of nothing"],
)
def test_options_that_mean_nothing_are_no_traceback(
    words: list[str], tmp_path: Path, ckpt: Run
) -> None:
    done = ckpt("merge", "s3://bucket/x", tmp_path / "o.safetensors", *words)
    assert done.returncode in (2, 15) and "Traceback" not in done.stderr


@pytest.mark.slow
def test_options_of_a_store_are_for_an_adapter_too(
    attention: Path, tmp_path: Path, ckpt: Run
) -> None:
    done = ckpt(
        "merge",
        attention,
        tmp_path / "o.safetensors",
        "--lora",
        "s3://bucket/adapter",
        "--storage-option",
        "endpoint_url=http://127.0.0.1:9",
        "--storage-option",
        "anon=true",
    )
    assert done.returncode == 15 and "no object store is named" not in done.stderr


def test_a_file_of_which_all_values_are_made_has_no_checksum(tmp_path: Path) -> None:
    """No CRC covers a text, so verify does not say that every CRC is right."""
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    work = Verification(tmp_path / "x.pt", {})
    assert work.files_without_archives({"x.pt"}) == set()
    entry = next(iter(work.catalog.tensors.values()))
    made = InMemoryFile()
    chunk = entry.chunks[0]._replace(extent=made.add(bytes(8)))
    text = replace(entry, chunks=(chunk,))
    work.catalog = Catalog("text", {"w": text}, file_sizes={"x.pt": 100}, memory_files=made.files)
    assert work.files_without_archives({"x.pt"}) == {"x.pt"}


@pytest.mark.parametrize("front", ["model.", ""])
@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_weight_is_selected_by_either_of_its_names(
    front: str, name: str, tmp_path: Path
) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3)})
    model["head"] = torch.nn.Linear(3, 4, bias=False)
    model["head"].weight = model["embed"].weight
    ckpt_tools.save(tmp_path / "c", {"model": model})
    ckpt_tools.merge(tmp_path / "c", tmp_path / "m.safetensors", select=[front + name])
    assert list(load_file(tmp_path / "m.safetensors")) == [name]


@pytest.mark.parametrize("differs", [False, True])
def test_an_adapter_of_several_ranks_is_merged_if_they_agree(differs: bool, tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "base.safetensors")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["a"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    a, b = torch.arange(8.0).view(2, 4), torch.arange(8.0).view(4, 2)
    for rank in range(2):
        names = [f"base_model.model.a.lora_{side}.weight" for side in "AB"]
        torch.save(
            dict(zip(names, (a + (rank if differs else 0), b), strict=True)),
            adapter / f"model_world_size_2_rank_{rank}.pt",
        )
    out = tmp_path / "out.safetensors"
    if differs:
        with pytest.raises(IntegrityError, match="replicas differ: .*lora_A"):
            ckpt_tools.merge(tmp_path / "base.safetensors", out, lora=adapter)
        return
    ckpt_tools.merge(tmp_path / "base.safetensors", out, lora=adapter)
    assert torch.equal(load_file(out)["a.weight"], b @ a)


def test_an_adapter_that_is_split_over_ranks_is_merged(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(6, 4)}, tmp_path / "base.safetensors")
    a, b = torch.arange(8.0).view(2, 4), torch.arange(12.0).view(6, 2)
    ckpt_tools.save(tmp_path / "one", {"a.lora_A.weight": a, "a.lora_B.weight": b})
    ckpt_tools.reshard(tmp_path / "one", tmp_path / "adapter", to_ranks=3)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["a"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    ckpt_tools.merge(
        tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "adapter"
    )
    assert torch.equal(load_file(tmp_path / "out.safetensors")["a.weight"], b @ a)


def test_a_damaged_adapter_that_nobody_has_sealed_is_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(400, 400)}, tmp_path / "base.safetensors")
    a, b = torch.randn(2, 400), torch.randn(400, 2)
    adapter = tmp_path / "adapter"
    dcp.save({"a.lora_A.weight": a, "a.lora_B.weight": b}, checkpoint_id=adapter, no_dist=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["a"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    data = bytearray((adapter / "__0_0.distcp").read_bytes())
    data[data.index(b.numpy().tobytes()[:16]) + 100] ^= 64
    (adapter / "__0_0.distcp").write_bytes(data)
    with pytest.raises(IntegrityError, match="expected CRC-32 .*lora_B"):
        ckpt_tools.merge(tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=adapter)


def test_shapes_of_an_adapter_are_compared_before_anything_is_read(tmp_path: Path) -> None:
    """The matrices repeat one value, and would take 640 MB."""
    save_file({"m.weight": torch.zeros(4, 4)}, tmp_path / "base.safetensors")
    names = [f"base_model.model.m.lora_{side}.weight" for side in "AB"]
    torch.save(
        {name: torch.zeros(1).expand(4, 20_000_000) for name in names},
        tmp_path / "adapter_model.bin",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, "target_modules": ["m"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    code = (
        "import ckpt_tools, pathlib, re\n"
        "try: ckpt_tools.merge('base.safetensors', 'o.safetensors', lora='adapter_model.bin')\n"
        "except ckpt_tools.PlanError as error: print(error)\n"
        "print(re.search(r'VmHWM:\\s*(\\d+)', pathlib.Path('/proc/self/status').read_text())[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    *_, said, peak = done.stdout.splitlines() or [""]
    assert "the adapter does not fit" in done.stdout, done.stdout + done.stderr
    assert int(peak) < 450_000, said
    matrices = {names[0]: torch.zeros(70_000, 4), names[1]: torch.zeros(4, 70_000)}
    torch.save(matrices, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"r": 70_000}))
    with pytest.raises(FormatError, match="a LoRA matrix of rank 70000"):
        ckpt_tools.merge(
            tmp_path / "base.safetensors",
            tmp_path / "o.safetensors",
            lora=tmp_path / "adapter_model.bin",
        )
