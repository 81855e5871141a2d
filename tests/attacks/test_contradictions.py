"""Checkpoints of other programs that contradict themselves: refused or named, never resolved."""

from __future__ import annotations

import copy
import json
import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import CatalogError, CheckpointError, CheckpointManager, FormatError, PlanError
from tests.attacks.hostile import Run, limited

# ---- files beside DCP ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["meta.pt", "common.pt"])
def test_a_file_that_no_save_sealed_gives_no_values(name: str, tmp_path: Path, ckpt: Run) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, asynchronous=False)
    step = tmp_path / "run" / "step-00000001"
    torch.save({"progress": {"epoch": 99}}, step / name)
    state = {"w": torch.zeros(3), "progress": {"epoch": 0}}
    with pytest.raises(PlanError, match=r"progress\.epoch"):
        ckpt_tools.load(step, state)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert checkpoints.resume({"w": torch.zeros(3), "progress": {}}, strict=False) == 1
    assert state["progress"] == {"epoch": 0}
    done = ckpt("verify", step)
    assert done.returncode == 0 and f"no save wrote: {name}" in done.stdout
    assert f"beside: {name} (not sealed)" in ckpt("inspect", step).stdout
    merged = ckpt_tools.merge(step, tmp_path / "merged.safetensors")
    assert any(f"stay behind: {name}" in note for note in merged.notes), merged.notes
    ckpt_tools.reshard(step, tmp_path / "two", to_ranks=2)
    assert ckpt_tools.inspect(tmp_path / "two").total.num_objects == 0


def test_tensors_beside_dcp_are_named(tmp_path: Path) -> None:
    dcp.save({"state_dict": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "l", no_dist=True)
    callbacks = {"EMA": {"w": torch.full((2,), 7.0)}}
    torch.save({"epoch": 3, "callbacks": callbacks, "state_dict": {"w": 5}}, tmp_path / "l/meta.pt")
    results = [
        ckpt_tools.convert(tmp_path / "l", tmp_path / "a.pt", to="torch"),
        ckpt_tools.convert(tmp_path / "l", tmp_path / "b", to="dcp"),
        ckpt_tools.reshard(tmp_path / "l", tmp_path / "c", to_ranks=1),
    ]
    for result in results:
        notes = " ".join(result.notes)
        assert "meta.pt.callbacks.EMA.w" in notes and "meta.pt.state_dict.w" in notes, notes
    assert "meta.pt.callbacks.EMA.w" in ckpt_tools.salvage(tmp_path / "l", tmp_path / "d").lost


def test_special_files_beside_a_sealed_checkpoint_are_named(tmp_path: Path, ckpt: Run) -> None:
    ckpt_tools.save(tmp_path / "s", {"w": torch.ones(3)})
    os.mkfifo(tmp_path / "s" / "pipe")
    (tmp_path / "s" / "out").symlink_to("/etc/passwd")
    done = ckpt("verify", tmp_path / "s")
    assert done.returncode == 0 and "out" in done.stdout and "pipe" in done.stdout
    os.mkfifo(tmp_path / "s" / "__9_0.distcp")
    assert ckpt("verify", tmp_path / "s").returncode == 15


# ---- one file per rank ---------------------------------------------------------------------------


def ranks(folder: Path, *values: Any, name: str = "rank_{}.pt") -> Path:
    folder.mkdir(exist_ok=True)
    for rank, value in enumerate(values):
        torch.save(value, folder / name.format(rank))
    return folder


@pytest.mark.parametrize("to", ["torch", "dcp", "accelerate"])
@pytest.mark.parametrize("what", ["lr", "step"])
def test_options_that_differ_between_ranks_are_refused(what: str, to: str, tmp_path: Path) -> None:
    def state(rank: int) -> Any:
        own = {"lr": 0.1, "step": 3} | {what: rank}
        moments = {0: {"exp_avg": torch.ones(2), "step": own["step"]}}
        group = {"lr": own["lr"], "weight_decay": 1, "params": [0]}
        return {
            "model": {"w": torch.ones(2)},
            "optimizer": {"state": moments, "param_groups": [group]},
        }

    source = ranks(tmp_path / "x", state(0), state(1))
    name = "out.pt" if to == "torch" else "out"
    with pytest.raises(PlanError, match=f"differ between ranks: .*{what}.rank_0"):
        ckpt_tools.convert(source, tmp_path / name, to=to)
    assert not (tmp_path / name).exists()
    ckpt_tools.convert(source, tmp_path / "m.pt", to="torch", model_only=True)
    ckpt_tools.reshard(source, tmp_path / "kept", to_ranks=1)
    objects = list(ckpt_tools.inspect(tmp_path / "kept").catalog.objects)
    assert sum(name.endswith((f"{what}.rank_0", f"{what}.rank_1")) for name in objects) == 2


@pytest.mark.parametrize("other", ["rank_1.pth", "rank_01.pt", "rank-1.pt"])
def test_two_files_of_one_rank_are_refused(other: str, tmp_path: Path, ckpt: Run) -> None:
    source = ranks(tmp_path / "x", {"w": torch.ones(2)}, {"w": torch.ones(2)})
    torch.save({"w": torch.full((2,), 7.0)}, source / other)
    for verb in ("verify", "inspect"):
        done = ckpt(verb, source)
        assert done.returncode in (12, 14), (done.returncode, done.stdout, done.stderr)
        assert "two files of one rank" in done.stdout + done.stderr


def test_a_set_of_shards_without_an_index_is_whole_or_refused(tmp_path: Path, ckpt: Run) -> None:
    for number, name in ((1, "a"), (3, "b")):
        save_file({name: torch.ones(2)}, tmp_path / f"model-0000{number}-of-00003.safetensors")
    for status, *words in (
        (14, "verify", tmp_path),
        (12, "merge", tmp_path, tmp_path / "out" / "m.safetensors"),
    ):
        done = ckpt(*words)
        assert done.returncode == status, done
        assert "expected 3 files, got 2" in done.stdout + done.stderr
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    assert ckpt("inspect", tmp_path).returncode == 12
    # one file is read if it is asked for
    assert ckpt("inspect", tmp_path / "model-00003-of-00003.safetensors").returncode == 0


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_half_a_character_in_an_index_is_one_line(index: str, tmp_path: Path, ckpt: Run) -> None:
    if index.startswith("model"):
        save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    else:
        torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    (tmp_path / index).write_text('{"weight_map":{"a":"\\ud800"}}')
    for verb in ("inspect", "verify", "stats"):
        done = ckpt(verb, tmp_path)
        assert done.returncode in (10, 11, 14, 15) and "Traceback" not in done.stderr, done.stderr


# ---- DeepSpeed -----------------------------------------------------------------------------------

Change = Callable[[list[Any], list[Any]], None]


def zero(folder: Path, stage: int, change: Change | None = None) -> Path:
    """ZeRO files of two ranks: `a` and `b`, `c` tied to `b`, `f` frozen, `s` a buffer."""
    shapes = [OrderedDict([("a", torch.Size([3, 4])), ("b", torch.Size([5]))])]
    model = {
        "module": OrderedDict([("s", torch.ones(1))]),
        "buffer_names": ["s"],
        "param_shapes": shapes,
        "shared_params": {"c": "b"},
        "frozen_param_shapes": {"f": torch.Size([2])},
        "frozen_param_fragments": {"f": torch.ones(2 if stage == 2 else 1)},
        "ds_version": "0.19",
        "global_steps": 3,
    }
    moments = {"step": 3, "exp_avg": torch.ones(9), "exp_avg_sq": torch.ones(9)}
    base = {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    state: dict[str, Any] = {"zero_stage": stage, "partition_count": [2] if stage == 2 else 2}
    if stage == 2:
        state |= {"group_paddings": [0], "single_partition_of_fp32_groups": [torch.ones(9)]}
        state["base_optimizer_state"] = base
    else:
        state |= {"fp32_flat_groups": [torch.ones(9)], "optimizer_state_dict": base}
    models = [copy.deepcopy(model) for _ in range(2 if stage == 3 else 1)]
    optims = [copy.deepcopy(state) for _ in range(2)]
    if stage == 2:  # 17 elements: the last one of rank 1 is padding
        optims[1]["group_paddings"] = [1]
        optims[1]["single_partition_of_fp32_groups"] = [torch.ones(8)]
        for key in ("exp_avg", "exp_avg_sq"):
            optims[1]["base_optimizer_state"]["state"][0][key] = torch.ones(8)
    if change:
        change(models, optims)
    folder.mkdir()
    for rank, value in enumerate(models):
        part = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(value, folder / f"{part}mp_rank_00_model_states.pt")
    for rank, value in enumerate(optims):
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": value}, path)
    return folder


def base_of(optim: Any) -> Any:
    return optim.get("base_optimizer_state") or optim["optimizer_state_dict"]


def a_name_in_two_groups(models: list[Any], optims: list[Any]) -> None:
    for model in models:
        model["param_shapes"][0] = OrderedDict([("a", torch.Size([3, 4]))])
        model["param_shapes"].append(OrderedDict([("a", torch.Size([5]))]))
    for optim in optims:
        for values in optim.values():
            if isinstance(values, list) and len(values) == 1:
                values.append(copy.deepcopy(values[0]))
        base_of(optim)["param_groups"] *= 2
        base_of(optim)["state"][1] = copy.deepcopy(base_of(optim)["state"][0])


def a_trained_name_is_frozen(models: list[Any], optims: list[Any]) -> None:
    for model in models:
        model["frozen_param_shapes"]["b"] = torch.Size([5])
        model["frozen_param_fragments"]["b"] = torch.ones(5 if len(models) == 1 else 3)


def a_trained_name_is_a_buffer(models: list[Any], optims: list[Any]) -> None:
    for model in models:
        model["buffer_names"].append("b")
        model["module"]["b"] = torch.ones(5)


def a_tie_leads_nowhere(models: list[Any], optims: list[Any]) -> None:
    for model in models:
        model["shared_params"] = {"c": "zz"}


def ties_in_a_ring(models: list[Any], optims: list[Any]) -> None:
    for model in models:
        model["shared_params"] = {"c": "d", "d": "c"}


def ranks_at_other_steps(models: list[Any], optims: list[Any]) -> None:
    base_of(optims[1])["state"][0]["step"] = 9


def ranks_with_other_options(models: list[Any], optims: list[Any]) -> None:
    base_of(optims[1])["param_groups"][0]["lr"] = 0.2


def ranks_of_other_stages(models: list[Any], optims: list[Any]) -> None:
    optims[1]["zero_stage"] = 1


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "change",
    [
        a_name_in_two_groups,
        a_trained_name_is_frozen,
        a_trained_name_is_a_buffer,
        a_tie_leads_nowhere,
        ties_in_a_ring,
        ranks_at_other_steps,
        ranks_with_other_options,
        ranks_of_other_stages,
    ],
)
def test_contradictions_in_deepspeed_s_files_are_refused(
    change: Change, stage: int, tmp_path: Path
) -> None:
    assert ckpt_tools.inspect(zero(tmp_path / "right", stage)).total.num_tensors > 8
    wrong = zero(tmp_path / "wrong", stage, change)
    with pytest.raises(FormatError):
        ckpt_tools.merge(wrong, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def other_model_steps(models: list[Any], optims: list[Any]) -> None:
    models[1]["global_steps"] = 9


def another_order_of_parameters(models: list[Any], optims: list[Any]) -> None:
    models[1]["param_shapes"] = [OrderedDict(reversed(models[1]["param_shapes"][0].items()))]


def a_missing_model(models: list[Any], optims: list[Any]) -> None:
    del models[1]
    models[0]["frozen_param_fragments"]["f"] = torch.ones(2)


@pytest.mark.parametrize(
    "change", [other_model_steps, another_order_of_parameters, a_missing_model]
)
def test_ranks_of_zero_3_are_of_one_save(change: Change, tmp_path: Path) -> None:
    with pytest.raises((FormatError, CatalogError)):
        ckpt_tools.inspect(zero(tmp_path / "wrong", 3, change))


def test_steps_of_ranks_as_tensors_are_compared_when_they_are_read(tmp_path: Path) -> None:
    def change(models: list[Any], optims: list[Any]) -> None:
        for rank, optim in enumerate(optims):
            base_of(optim)["state"][0]["step"] = torch.tensor(3.0 + rank)

    wrong = zero(tmp_path / "wrong", 2, change)
    with pytest.raises(CheckpointError):
        ckpt_tools.convert(wrong, tmp_path / "m.pt", to="torch")
    assert not (tmp_path / "m.pt").exists()


def test_files_of_two_saves_in_one_tag_are_refused(tmp_path: Path) -> None:
    folder = zero(tmp_path / "z", 2)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (folder / f"bf16_{name}").write_bytes((folder / name).read_bytes())
    with pytest.raises(CatalogError, match="two files of one rank"):
        ckpt_tools.inspect(folder)
    (problem,) = ckpt_tools.verify(folder).problems
    assert "two files of one rank" in problem.what


def universal(folder: Path, change: Callable[[Path, Any], None] | None = None) -> Path:
    """A universal checkpoint: parameters `a` and `b`, `c` tied to `a`, `f` frozen, `s` a buffer."""
    shapes = [OrderedDict([("a", torch.Size([2, 3])), ("b", torch.Size([4]))])]
    model = {
        "module": {"s": torch.ones(1)},
        "buffer_names": ["s"],
        "param_shapes": shapes,
        "shared_params": {"c": "a"},
        "frozen_param_shapes": {"f": torch.Size([2])},
        "frozen_param_fragments": {"f": torch.full((2,), 4.0)},
        "global_steps": 3,
        "lr_scheduler": {"last_epoch": 5},
    }
    for name, shape in shapes[0].items():
        inner = folder / "zero" / name
        inner.mkdir(parents=True)
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"param": torch.ones(shape)}, inner / f"{key}.pt")
        torch.save(torch.tensor(3.0), inner / "step.pt")
    if change:
        change(folder, model)
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    return folder


def test_all_of_a_universal_checkpoint_is_read(tmp_path: Path) -> None:
    def change(folder: Path, model: Any) -> None:
        for name, shape in (("a", (2, 3)), ("b", (4,))):
            value = {"param": torch.ones(shape)}
            torch.save(value, folder / "zero" / name / "momentum_buffer.pt")

    catalog = ckpt_tools.inspect(universal(tmp_path / "u", change)).catalog
    names = {"model.a", "model.b", "model.c", "model.f", "model.s"}
    moments = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")
    names |= {f"optimizer.state.{name}.{key}" for name in "ab" for key in moments}
    assert catalog.tensors.keys() == names
    assert {"global_steps", "lr_scheduler.last_epoch"} <= catalog.objects.keys()
    ckpt_tools.merge(tmp_path / "u", tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert found["f"].tolist() == [4.0, 4.0] and torch.equal(found["a"], found["c"])


def no_folder(folder: Path, model: Any) -> None:
    for path in (folder / "zero" / "b").iterdir():
        path.unlink()
    (folder / "zero" / "b").rmdir()


def no_weight(folder: Path, model: Any) -> None:
    (folder / "zero" / "b" / "fp32.pt").unlink()


def no_moment(folder: Path, model: Any) -> None:
    (folder / "zero" / "b" / "exp_avg.pt").unlink()


def a_number(folder: Path, model: Any) -> None:
    torch.save({"param": 3.0}, folder / "zero" / "b" / "fp32.pt")


def also_a_buffer(folder: Path, model: Any) -> None:
    model["buffer_names"].append("a")
    model["module"]["a"] = torch.ones(2, 3)


def another_part(folder: Path, model: Any) -> None:
    torch.save(model, folder / "mp_rank_01_model_states.pt")


def another_shape(folder: Path, model: Any) -> None:
    other = copy.deepcopy(model)
    other["param_shapes"][0]["a"] = torch.Size([3, 2])
    torch.save(other, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")


@pytest.mark.parametrize(
    "change",
    [no_folder, no_weight, no_moment, a_number, also_a_buffer, another_part, another_shape],
)
def test_a_universal_checkpoint_lacks_nothing_or_is_refused(
    change: Callable[[Path, Any], None], tmp_path: Path
) -> None:
    with pytest.raises((FormatError, CatalogError)):
        ckpt_tools.inspect(universal(tmp_path / "u", change))


def test_a_universal_checkpoint_without_states_of_a_model_is_one_line(
    tmp_path: Path, ckpt: Run
) -> None:
    (universal(tmp_path / "u") / "mp_rank_00_model_states.pt").unlink()
    (tmp_path / "u").rename(tmp_path / "tag")
    (tmp_path / "latest").write_text("tag")
    done = ckpt("inspect", tmp_path)
    assert done.returncode == 12 and "Traceback" not in done.stderr


# ---- bytes in another order, other models beside, ranks without their metadata -------------------


def test_values_in_big_endian_order_are_refused(tmp_path: Path, ckpt: Run) -> None:
    torch.save({"w": torch.arange(4.0)}, tmp_path / "le.pt")
    with zipfile.ZipFile(tmp_path / "le.pt") as le, zipfile.ZipFile(tmp_path / "be.pt", "w") as be:
        for entry in le.infolist():
            data = le.read(entry)
            data = b"big" if entry.filename.endswith("byteorder") else data
            be.writestr(entry.filename, data)
    for verb in ("inspect", "stats", "verify"):
        done = ckpt(verb, tmp_path / "be.pt")
        assert done.returncode in (11, 14) and "big-endian" in done.stdout + done.stderr


@pytest.mark.parametrize("what", ["folder", "file"])
def test_no_other_model_takes_the_place_of_a_sealed_one(
    what: str, tmp_path: Path, ckpt: Run
) -> None:
    save_file({"w": torch.ones(400)}, tmp_path / "m.safetensors")
    sealed = tmp_path / "sealed"
    ckpt_tools.merge(tmp_path / "m.safetensors", sealed, max_shard_bytes=1000)
    other = {"model": {"w": torch.full((400,), 9.0)}}
    if what == "folder":
        dcp.save(other, checkpoint_id=sealed / "pytorch_model_fsdp_0", no_dist=True)
    else:
        torch.save(other["model"], sealed / "pytorch_model_fsdp.bin")
    assert ckpt("verify", sealed).returncode == 14
    for call in (
        lambda: ckpt_tools.merge(sealed, tmp_path / "o.safetensors"),
        lambda: ckpt_tools.load(sealed, {"w": torch.zeros(400)}),
        lambda: ckpt_tools.stats(sealed, read_all=True),
    ):
        with pytest.raises(CheckpointError):
            call()
    assert not (tmp_path / "o.safetensors").exists()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_metadata_of_every_rank_is_there(rank: int, tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for number in range(3):
        own = {f"only{number}": torch.full((3,), float(number))}
        dcp.save(own, checkpoint_id=tmp_path / "own", no_dist=True, use_collectives=False)
        for path in (tmp_path / "own").iterdir():
            name = path.name.replace("__0", f"__{number}", 1)
            path.rename(tmp_path / "all" / name)
    (tmp_path / "all" / f"__{rank}.metadata").unlink()
    with pytest.raises(CheckpointError):
        ckpt_tools.inspect(tmp_path / "all")


def test_files_of_two_parts_have_no_name_in_common(tmp_path: Path) -> None:
    one, two = {"model": {"w": torch.ones(2)}}, {"w": torch.full((2,), 2.0)}
    ranks(tmp_path / "x", one, one)
    ranks(tmp_path / "x", two, two, name="model_rank_{}.pt")
    with pytest.raises(FormatError, match="two entries have one name"):
        ckpt_tools.inspect(tmp_path / "x")
    values = [{"w": torch.ones(2), "a": r, "a.rank_0": "keep"} for r in range(2)]
    with pytest.raises(FormatError, match="two entries have one name"):
        ckpt_tools.inspect(ranks(tmp_path / "y", *values))
    mixed = ranks(tmp_path / "z", one, one, name="model_world_size_2_rank_{}.pt")
    ranks(mixed, *[{"m": torch.ones(2)}] * 4, name="optim_world_size_4_rank_{}.pt")
    with pytest.raises(CatalogError, match="different numbers of ranks"):
        ckpt_tools.inspect(mixed)


def test_equal_numbers_of_other_types_are_not_alike(tmp_path: Path) -> None:
    values = [{"a": [1], "z": 0.0, "n": float("nan")}, {"a": [1.0], "z": -0.0, "n": float("nan")}]
    with_tensor = [value | {"w": torch.ones(1)} for value in values]
    objects = ckpt_tools.inspect(ranks(tmp_path / "x", *with_tensor)).catalog.objects
    assert {"a.rank_0", "a.rank_1", "z.rank_0", "z.rank_1", "n"} == objects.keys()


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(400), "v": torch.ones(400)}, tmp_path / "m.safetensors")
    ckpt_tools.merge(tmp_path / "m.safetensors", tmp_path / "hf", max_shard_bytes=1700)
    next((tmp_path / "hf").glob("ckpt.manifest.*")).unlink()
    save_file({"w": torch.zeros(400), "v": torch.zeros(400)}, tmp_path / "hf/model.safetensors")
    with pytest.raises(FormatError, match="two models"):
        ckpt_tools.inspect(tmp_path / "hf")


# ---- XLA -----------------------------------------------------------------------------------------


def xla(folder: Path, change: Callable[[list[Any]], None]) -> Path:
    def state(rank: int) -> Any:
        shard = {"_orig_size": torch.Size([2, 5]), "_orig_name": "w"}
        told = {"shard_info": {"": {"_fsdp_shard_w": shard}}, "flatten_info": {}}
        model = OrderedDict([("_fsdp_shard_w", torch.ones(5)), ("s", torch.ones(2))])
        return {"model": model, "shard_metadata": {**told, "world_size": 2, "rank": rank}}

    states = [state(0), state(1)]
    change(states)
    return ranks(folder, *states)


def test_contradictions_of_xla_s_ranks_are_refused(tmp_path: Path) -> None:
    def fine(states: list[Any]) -> None:
        pass

    def a_buffer_of_that_name(states: list[Any]) -> None:
        for state in states:
            state["model"]["w"] = torch.ones(2, 5)

    def another_size(states: list[Any]) -> None:
        states[1]["shard_metadata"]["shard_info"][""]["_fsdp_shard_w"]["_orig_size"] = torch.Size(
            [5, 2]
        )

    assert ckpt_tools.inspect(xla(tmp_path / "fine", fine)).total.num_tensors == 2
    for change in (a_buffer_of_that_name, another_size):
        with pytest.raises(FormatError):
            ckpt_tools.inspect(xla(tmp_path / change.__name__, change))


def test_groups_hide_the_order_of_a_model(tmp_path: Path) -> None:
    """torch numbers parameters group by group, so the numbers may mean anything."""

    def state(rank: int) -> Any:
        shard = {k: {"_orig_name": k, "_orig_size": torch.Size([4])} for k in "ab"}
        told = {"shard_info": {"": {f"_fsdp_shard.{k}": v for k, v in shard.items()}}}
        moments = {i: {"exp_avg": torch.full((2,), 100.0 * i + rank)} for i in (0, 1)}
        groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
        return {
            "model": {f"_fsdp_shard.{k}": torch.full((2,), 1.0) for k in "ab"},
            "shard_metadata": {**told, "flatten_info": {}, "world_size": 2, "rank": rank},
            "optimizer": {"state": moments, "param_groups": groups},
        }

    source = ranks(tmp_path / "x", state(0), state(1))
    result = ckpt_tools.convert(source, tmp_path / "o.pt", to="torch")
    assert "numbers its parameters in an order of its own" in " ".join(result.notes)
    assert "optimizer" not in torch.load(tmp_path / "o.pt")


# ---- repetition, overlaps, ranks of adapters -----------------------------------------------------

STATS = "import sys, ckpt_tools; ckpt_tools.stats(sys.argv[1])"


def test_repetition_is_bounded_for_a_whole_checkpoint(tmp_path: Path) -> None:
    expanded = {str(i): torch.zeros(1).expand(1 << 28) for i in range(9)}  # 9 GiB
    torch.save(expanded, tmp_path / "expanded.pt")
    shared = torch.zeros(1 << 20)
    torch.save({str(i): shared for i in range(6000)}, tmp_path / "shared.pt")  # 23 GiB
    for name in ("expanded.pt", "shared.pt"):
        done = limited(STATS, tmp_path / name, seconds=60)
        assert done.returncode and "repeat their elements too often" in done.stderr, done.stderr
    few = {str(i): shared for i in range(60)}  # tied weights
    torch.save(few, tmp_path / "few.pt")
    assert ckpt_tools.inspect(tmp_path / "few.pt").total.num_tensors == 60


def test_arrays_of_an_npz_that_share_bytes_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones(1000), y=np.zeros(1000))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        first, second = archive.infolist()
    at = data.rindex(b"PK\x01\x02")
    data[at + 42 : at + 46] = first.header_offset.to_bytes(4, "little")
    data[at + 16 : at + 20] = first.CRC.to_bytes(4, "little")
    assert second.file_size == first.file_size
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(FormatError):
        ckpt_tools.inspect(tmp_path / "a.npz")


@pytest.mark.parametrize("r", [4, 0, {"rank_pattern": {"lin": 2}}])
def test_matrices_of_another_rank_than_the_config_says_are_refused(
    r: Any, tmp_path: Path, ckpt: Run
) -> None:
    save_file({"lin.weight": torch.ones(3, 3)}, tmp_path / "base.safetensors")
    (tmp_path / "ad").mkdir()
    sides = {"A": torch.ones(1, 3), "B": torch.ones(3, 1)}
    save_file(
        {f"base_model.model.lin.lora_{s}.weight": t for s, t in sides.items()},
        tmp_path / "ad" / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 4}
    path = tmp_path / "ad" / "adapter_config.json"
    words = ("--lora", tmp_path / "ad")
    path.write_text(json.dumps(config | (r if isinstance(r, dict) else {"r": r})))
    done = ckpt("merge", tmp_path / "base.safetensors", tmp_path / "o.safetensors", *words)
    assert done.returncode in (11, 13) and not (tmp_path / "o.safetensors").exists()
    path.write_text(json.dumps(config))
    done = ckpt("merge", tmp_path / "base.safetensors", tmp_path / "o.safetensors", *words)
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(tmp_path / "o.safetensors")["lin.weight"], torch.full((3, 3), 5.0))
