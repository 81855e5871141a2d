"""`ckpt convert`: other layouts of the same state, with torch, transformers and Accelerate as
readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager, PlanError
from tests.conftest import torchrun
from tests.states import one_step
from tests.stock import assert_stock_torch_reads
from tests.stock_jobs import assert_same

Run = Callable[..., Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def trained() -> tuple[nn.Sequential, torch.optim.AdamW]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def state(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    model, optimizer = trained()
    whole = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "history": [1.5, 2.5],
        "note": "é",
    }
    torch.save(whole, tmp_path / "state.pt")
    return tmp_path / "state.pt", whole


# ---- torch.save and DCP, and the three namings of an optimizer -----------------------------------


@pytest.mark.parametrize("form", ["groups", "flat", "ids"])
def test_there_and_back_through_every_naming(
    form: str, state: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, whole = state
    ckpt_tools.convert(
        path, tmp_path / "dcp", to="dcp", ranks=3, optimizer=form, param_order="model"
    )
    again = None if form == "groups" else [name for name, _ in net().named_parameters()]
    ckpt_tools.convert(
        tmp_path / "dcp", tmp_path / "back.pt", to="torch", optimizer="ids", param_order=again
    )
    back = torch.load(tmp_path / "back.pt", weights_only=True, mmap=True)
    assert_same(back, whole)
    assert_stock_torch_reads(tmp_path / "dcp")
    optimizer = torch.optim.AdamW(net().parameters())
    optimizer.load_state_dict(back["optimizer"])
    assert (
        ckpt_tools.verify(tmp_path / "dcp").problems
        == ckpt_tools.verify(tmp_path / "back.pt").problems
        == []
    )


@pytest.mark.parametrize("model", [{}, {"model": {"w": torch.ones(2)}}])
def test_lists_and_dicts_keep_their_places(model: dict[str, Any], tmp_path: Path) -> None:
    """Those of DCP and of torch.save, in both directions, beside a model and without one."""
    state = {"l": [3, torch.ones(2), "x"], "n": {"a": [{"b": torch.ones(1)}, 4]}, **model}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(state, tmp_path / "s.pt")
    ckpt_tools.convert(tmp_path / "dcp", tmp_path / "one.pt", to="torch")
    assert_same(torch.load(tmp_path / "one.pt"), state)
    ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "again", to="dcp", ranks=2)
    assert_same(assert_stock_torch_reads(tmp_path / "again"), state)


def test_a_model_with_adapters_inside_is_not_written_for_transformers(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    inside = {
        f"{name}.lora_A.default.weight": torch.ones(2, 4),
        f"{name}.lora_B.default.weight": torch.ones(4, 2),
    }
    torch.save(
        {"model": {f"{name}.base_layer.weight": torch.ones(4, 4), **inside}}, tmp_path / "s.pt"
    )
    with pytest.raises(
        PlanError,
        match="the model has adapters of PEFT inside, and no program loads such names",
    ) as caught:
        ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "hf", to="hf")
    assert "--to peft" in (caught.value.hint or "") and "--lora" in (caught.value.hint or "")
    assert not (tmp_path / "hf").exists()


def test_a_training_state_resumes_after_it_became_dcp(
    state: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, whole = state
    ckpt_tools.convert(path, tmp_path / "run" / "step-3", to="dcp", ranks=4)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    live = {"model": model, "optimizer": optimizer, "epoch": 0, "history": [], "note": ""}
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.resume(live) == 3
    assert_same(model.state_dict(), whole["model"])
    assert_same(optimizer.state_dict(), whole["optimizer"])
    assert (live["epoch"], live["history"], live["note"]) == (3, [1.5, 2.5], "é")


def test_stock_dcp_loads_what_torchtitan_would_name_so(
    state: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, whole = state
    ckpt_tools.convert(path, tmp_path / "dcp", to="dcp", optimizer="flat", param_order="model")
    names = [n for n, _ in net().named_parameters()]
    got = {
        "optimizer": (
            {f"state.{n}.exp_avg": torch.zeros_like(whole["model"][n]) for n in names}
            | {f"param_groups.{names[0]}.lr": 0.0}
        )
    }
    dcp.load(got, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert got["optimizer"][f"param_groups.{names[0]}.lr"] == 1e-3
    for number, name in enumerate(names):
        assert torch.equal(
            got["optimizer"][f"state.{name}.exp_avg"],
            whole["optimizer"]["state"][number]["exp_avg"],
        )


@pytest.mark.parametrize("name", ["../out", "a/../../b", "a/b", "x" * 300])
def test_a_parameter_whose_name_would_be_a_path_has_no_folder(name: str, tmp_path: Path) -> None:
    optimizer = {
        "state": {name: {"exp_avg": torch.ones(2)}},
        "param_groups": [{"lr": 1.0, "params": [name]}],
    }
    torch.save({"model": {name: torch.ones(2)}, "optimizer": optimizer}, tmp_path / "one.pt")
    with pytest.raises(PlanError, match="this cannot be a folder's name"):
        ckpt_tools.convert(tmp_path / "one.pt", tmp_path / "run" / "tag", to="deepspeed-universal")
    assert [p.name for p in tmp_path.iterdir()] == ["one.pt"]


def test_names_that_would_meet_are_refused_in_optimizers_and_key_maps_too(tmp_path: Path) -> None:
    state = {n: {"exp_avg": torch.ones(2)} for n in ("a.w", "b.w")}
    torch.save(
        {"optimizer": {"state": state, "param_groups": [{"lr": 1.0, "params": list(state)}]}},
        tmp_path / "only.pt",
    )
    with pytest.raises(PlanError, match="two parameters of optimizer would get one name"):
        ckpt_tools.convert(tmp_path / "only.pt", tmp_path / "no", to="dcp", rename=["^[ab]=c"])
    save_file(
        {"l.qkv_proj.weight": torch.ones(16, 2), "l.q_proj.weight": torch.ones(8, 2)},
        tmp_path / "m.safetensors",
    )
    with pytest.raises(PlanError, match="'l.q_proj.weight' is there already"):
        ckpt_tools.convert(
            tmp_path / "m.safetensors",
            tmp_path / "no",
            to="dcp",
            key_map="qkv_split",
            settings={"heads": 4, "kv_heads": 2},
        )
    assert not (tmp_path / "no").exists()


def test_what_a_job_saved_becomes_a_file_and_what_accelerate_resumes(tmp_path: Path) -> None:
    torchrun(2, "accelerator.py", str(tmp_path), "save")
    ckpt_tools.convert(tmp_path / "saved", tmp_path / "one.pt", to="torch", optimizer="ids")
    assert_same(
        torch.load(tmp_path / "one.pt")["optimizer"]["state"],
        torch.load(tmp_path / "whole.pt")["state"],
    )
    result = ckpt_tools.convert(
        tmp_path / "one.pt", tmp_path / "acc", to="accelerate", ranks=3, param_order="model"
    )
    assert set(result.files) == {
        f"{f}/{n}"
        for f in ("pytorch_model_fsdp_0", "optimizer_0")
        for n in (".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp")
    } | {"scheduler.bin"}
    assert (
        ckpt_tools.verify(tmp_path / "acc").problems == []
        and ckpt_tools.diff(tmp_path / "acc", tmp_path / "saved").is_same
    )
    torchrun(2, "accelerator.py", str(tmp_path), "load", str(tmp_path / "acc"))
    assert ckpt_tools.diff(
        tmp_path / "acc", tmp_path / "ranks", select=["model.*", "optimizer.*"]
    ).is_same  # as large jobs save, without DCP
    ckpt_tools.convert(tmp_path / "acc", tmp_path / "dcp", to="dcp")
    dcp.load(rest := {"scheduler": {"last_epoch": 0}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert rest["scheduler"]["last_epoch"] == 2
    ckpt_tools.convert(tmp_path / "dcp", tmp_path / "again", to="accelerate", ranks=2)
    torchrun(2, "accelerator.py", str(tmp_path), "load", str(tmp_path / "again"))
    scheduler = torch.load(tmp_path / "saved" / "scheduler.bin")  # DCP leaves an empty dict out
    dcp.save(
        {"model": {"w": torch.ones(3)}, "lr_scheduler": scheduler},
        checkpoint_id=tmp_path / "stock",
        no_dist=True,
    )
    ckpt_tools.convert(tmp_path / "stock", tmp_path / "third", to="accelerate")
    assert scheduler.pop("lr_lambdas") == [{}]
    assert torch.load(tmp_path / "third" / "scheduler.bin") == scheduler | {"lr_lambdas": [None]}


def test_objects_with_tensors_and_unknown_types(tmp_path: Path) -> None:
    dcp.save(
        {
            "model": net().state_dict(),
            "rng": {"cpu": torch.arange(9), "pair": (1, 2.5)},
            "odd": Path("x"),
        },
        checkpoint_id=tmp_path / "dcp",
        no_dist=True,
    )
    result = ckpt_tools.convert(tmp_path / "dcp", tmp_path / "x.pt", to="torch")
    got = torch.load(tmp_path / "x.pt", weights_only=True)
    assert_same(
        got, {"model": dict(net().state_dict()), "rng": {"cpu": torch.arange(9), "pair": (1, 2.5)}}
    )
    assert "values of types that are not known stay behind: odd" in result.notes[-1]


def test_select_rename_dtype_and_model_only(
    state: tuple[Path, dict[str, Any]], tmp_path: Path, ckpt: Run
) -> None:
    path, whole = state
    done = ckpt(
        "convert",
        path,
        tmp_path / "m.pt",
        "--to",
        "torch",
        "--model-only",
        "--rename",
        r"^(\d)\.=layers.\1.",
        "--dtype",
        "bf16",
        "--keep-dtype",
        "*running*",
    )
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "m.pt")["model"]
    want = {
        f"layers.{n}": v if "running" in n or not v.is_floating_point() else v.bfloat16()
        for n, v in whole["model"].items()
    }
    assert_same(got, want)
    ckpt_tools.convert(
        path,
        tmp_path / "d",
        to="dcp",
        param_order="model",
        rename=[r"^(\d)\.=layers.\1."],
        select=["*layers.0*", "epoch"],
    )
    report = ckpt_tools.inspect(tmp_path / "d")
    assert {
        "model.layers.0.weight",
        "optimizer.state.layers.0.weight.exp_avg",
    } <= report.catalog.tensors.keys() and set(report.catalog.objects) == {"epoch"}
    ckpt_tools.convert(path, tmp_path / "m.safetensors", to="safetensors", dtype="fp16")
    assert load_file(tmp_path / "m.safetensors")["0.weight"].dtype == torch.float16


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["x", "--to", "npz"], 13, "cannot write 'npz': expected one of dcp"),
        (["x.bad", "--to", "torch"], 13, "torch is one file: expected a name that ends in .pt"),
        (["x", "--to", "dcp", "--rename", "(="], 13, "--rename '(='"),
        (["x", "--to", "dcp", "--rename", r"0.weight=\9"], 13, "--rename"),
        (["x", "--to", "dcp", "--rename", "weight|bias=one"], 13, "two tensors would get one name"),
        (["x", "--to", "dcp", "--select", "nothing*"], 13, "--select matches none of"),
        (["x", "--to", "hf", "--base", "/nowhere"], 13, "no readable config.json in /nowhere"),
        (
            ["x", "--to", "dcp", "--map", "llama"],
            13,
            "maps that come along: deepseek_v3_hf_to_titan",
        ),
        (["x", "--to", "dcp", "--optimizer", "names"], 13, "one of groups, flat, ids"),
        (
            ["x.pt", "--to", "torch", "--ranks", "2"],
            13,
            "--ranks is for --to dcp, accelerate and per-rank",
        ),
        (["x", "--to", "dcp", "--check"], 13, "--check is for --to hf"),
        (["x", "--to", "hf", "--check"], 13, "--check needs --base DIR"),
        (["x", "--to", "dcp", "--set", "heads"], 2, "expected NAME=N"),
        (["s3://bucket/x", "--to", "accelerate"], 13, "are written on a disk"),
        (
            ["x", "--to", "per-rank", "--mesh", "cuda 0"],
            13,
            "--mesh 'cuda 0': expected a device's type",
        ),
    ],
)
def test_a_request_that_does_not_fit_is_told_and_leaves_nothing(
    arguments: list[str],
    code: int,
    message: str,
    state: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    ckpt: Run,
) -> None:
    done = ckpt("convert", state[0], *arguments, cwd=tmp_path)
    assert done.returncode == code and message in done.stderr, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


# ---- what stands beside, and what is overwritten -------------------------------------------------


def test_schedulers_and_progress_beside_accelerates_parts_are_resumed(tmp_path: Path) -> None:
    """As `Accelerator.save_state` and the Transformers Trainer leave them: a scheduler in a file of
    torch.save, the progress as JSON.
    """
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    optimizer.step()
    scheduler.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "s.pt"
    )
    ckpt_tools.convert(
        tmp_path / "s.pt", tmp_path / "checkpoint-7", to="accelerate", ranks=2, param_order="model"
    )
    torch.save(scheduler.state_dict(), tmp_path / "checkpoint-7" / "scheduler.pt")
    progress = {
        "global_step": 7,
        "epoch": 0.5,
        "log_history": [{"loss": 1.0, "step": 5}],
        "best_metric": None,
    }
    (tmp_path / "checkpoint-7" / "trainer_state.json").write_text(json.dumps(progress))
    fresh, other = trained()
    again = torch.optim.lr_scheduler.CosineAnnealingLR(other, 10)
    live = {"model": fresh, "optimizer": other, "scheduler": again, "trainer_state": {}}
    ckpt_tools.load(tmp_path / "checkpoint-7", live)
    assert again.state_dict() == scheduler.state_dict() and live["trainer_state"] == progress
    for path in (tmp_path / "checkpoint-7").glob("ckpt.manifest.*"):
        path.unlink()
    assert ckpt_tools.verify(tmp_path / "checkpoint-7", deep=True).problems == []
    assert ckpt_tools.salvage(tmp_path / "checkpoint-7", tmp_path / "saved").lost == []
    # with what was read of scheduler and progress
    assert ckpt_tools.diff(tmp_path / "checkpoint-7", tmp_path / "saved").is_same
    (tmp_path / "checkpoint-7" / "trainer_state.json").write_text("{")
    with pytest.raises(ckpt_tools.FormatError, match=r"malformed: .* \(trainer_state.json\)"):
        ckpt_tools.inspect(tmp_path / "checkpoint-7")


@pytest.mark.slow
def test_what_convert_wrote_can_be_replaced_and_other_files_cannot(
    state: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, _ = state
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    for to, name in (("torch", "x.pt"), ("accelerate", "acc"), ("hf", "hf")):
        for _ in range(2):
            base, order = (tmp_path / "base", None) if to == "hf" else (None, "model")
            ckpt_tools.convert(
                path, tmp_path / name, to=to, base=base, overwrite=True, param_order=order
            )
        assert ckpt_tools.verify(tmp_path / name).problems == []
    (tmp_path / "hf" / "diary.txt").write_text("mine")
    torch.save({}, tmp_path / "own.pt")
    for to, name in (("torch", "own.pt"), ("hf", "hf")):
        with pytest.raises(
            ckpt_tools.StorageError,
            match="holds files that --overwrite never replaces|diary.txt|own.pt",
        ):
            ckpt_tools.convert(path, tmp_path / name, to=to, overwrite=True)
    assert (tmp_path / "hf" / "diary.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("merge", "{src}", "{out}.safetensors", "--select", "*", "--select", "optimizer*"),
            "--select matches none of",
        ),
        (
            ("merge", "{src}", "{out}.safetensors", "--keep-dtype", "*"),
            "--keep-dtype means nothing without --dtype",
        ),
        (
            ("merge", "{src}", "{out}.safetensors", "--dtype", "bf16", "--keep-dtype", "*exp_avg*"),
            "--keep-dtype matches none of",
        ),
        (
            ("convert", "{src}", "{out}", "--to", "dcp", "--select", "*", "--select", "zz"),
            "--select matches none of",
        ),
        (
            ("convert", "{src}", "{out}", "--to", "dcp", "--dtype", "bf16", "--keep-dtype", "zz"),
            "--keep-dtype matches none of",
        ),
        (
            ("convert", "{src}", "{out}", "--to", "dcp", "--rename", "zz=y"),
            "--rename 'zz=y' changes no name",
        ),
        (("diff", "{src}", "{src}", "--select", "*", "--select", "zz"), "--select matches none of"),
    ],
)
def test_an_option_that_matches_nothing_is_an_error_and_writes_nothing(
    words: tuple[str, ...],
    message: str,
    saved: Callable[[int], Path],
    tmp_path: Path,
    ckpt: Callable[..., Any],
) -> None:
    done = ckpt(*(word.format(src=saved(4) / "adamw", out=tmp_path / "out") for word in words))
    assert done.returncode == 13 and message in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_names_are_swapped_by_a_third_and_none_becomes_empty(tmp_path: Path) -> None:
    torch.save({"model": {"a.w": torch.zeros(2), "b.w": torch.ones(2)}}, tmp_path / "src.pt")
    with pytest.raises(PlanError, match="two tensors would get one name") as caught:
        ckpt_tools.convert(
            tmp_path / "src.pt", tmp_path / "no.pt", to="torch", rename=["^a=b", "^b=a"]
        )
    assert "a=TMP" in (caught.value.hint or "")
    ckpt_tools.convert(
        tmp_path / "src.pt", tmp_path / "dst.pt", to="torch", rename=["^a=TMP", "^b=a", "^TMP=b"]
    )
    got = torch.load(tmp_path / "dst.pt")["model"]
    assert got["a.w"].tolist() == [1.0, 1.0] and got["b.w"].tolist() == [0.0, 0.0]
    with pytest.raises(PlanError, match="nothing is left of a name: 'a.w'"):
        ckpt_tools.convert(tmp_path / "src.pt", tmp_path / "no.pt", to="torch", rename=[r"^a\.w="])
    state = {"model": {"a.w": torch.full((2,), 9.0), "b.w": torch.full((2,), 9.0)}}
    with pytest.raises(PlanError, match="rename gives two entries one name"):
        ckpt_tools.load(
            tmp_path / "src.pt", state, rename={r"^model\.a": "model.b", r"^model\.b": "model.a"}
        )
    ckpt_tools.load(
        tmp_path / "src.pt", state, rename={r"\.a": ".TMP", r"\.b": ".a", r"\.TMP": ".b"}
    )
    assert state["model"]["a.w"].tolist() == [1.0, 1.0] and state["model"]["b.w"].tolist() == [
        0.0,
        0.0,
    ]
    with pytest.raises(PlanError, match="rename leaves nothing"):
        ckpt_tools.load(tmp_path / "src.pt", state, rename={r"model\.a\.w": ""})


def test_an_adapter_of_a_model_whose_names_all_begin_with_one_key(tmp_path: Path) -> None:
    """A Llama with tied embeddings has no `lm_head`; its names stay as they are."""
    torch.manual_seed(0)
    weight, a, b = torch.randn(6, 8), torch.randn(2, 8), torch.randn(6, 2)
    names = ("model.embed_tokens.weight", "model.layers.0.q_proj.weight")
    save_file({names[0]: torch.ones(3, 8), names[1]: weight}, tmp_path / "base.safetensors")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    prefix = "base_model.model.model.layers.0.q_proj"
    parts = {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    save_file(parts, adapter / "adapter_model.safetensors")
    out = tmp_path / "out.safetensors"
    ckpt_tools.merge(tmp_path / "base.safetensors", out, lora=adapter)
    merged = load_file(out)
    assert torch.allclose(merged[names[1]], weight + 3 * b @ a, atol=1e-5)
    other = "base_model.model.other.layers.1.q_proj"
    parts |= {f"{other}.lora_A.weight": a.clone(), f"{other}.lora_B.weight": b.clone()}
    save_file(parts, adapter / "adapter_model.safetensors")
    with pytest.raises(PlanError, match="changes a weight that is not there"):
        ckpt_tools.merge(tmp_path / "base.safetensors", out, lora=adapter, overwrite=True)


@pytest.mark.parametrize(
    ("stored", "hint"),
    [
        ("model.layers.0.qkv_proj.weight", "fused weights there"),
        ("model.layers.0.q_proj.qweight", "quantized or split there"),
    ],
)
def test_an_adapter_on_fused_or_quantized_weights_has_a_hint_that_can_help(
    stored: str, hint: str, tmp_path: Path
) -> None:
    save_file({stored: torch.ones(12, 8)}, tmp_path / "base.safetensors")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    prefix = "base_model.model.model.layers.0.q_proj"
    parts = {f"{prefix}.lora_A.weight": torch.ones(2, 8)}
    parts[f"{prefix}.lora_B.weight"] = torch.ones(4, 2)
    save_file(parts, adapter / "adapter_model.safetensors")
    with pytest.raises(PlanError, match="weight that is not there") as caught:
        ckpt_tools.merge(tmp_path / "base.safetensors", tmp_path / "o.safetensors", lora=adapter)
    assert hint in caught.value.hint and "merge_and_unload" in caught.value.hint
    assert "ckpt convert --rename" not in caught.value.hint


def test_an_adapter_with_one_of_two_matrices_says_so(tmp_path: Path) -> None:
    save_file({"a.q_proj.weight": torch.ones(4, 8)}, tmp_path / "base.safetensors")
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    parts = {"base_model.model.a.q_proj.lora_A.weight": torch.ones(2, 8)}
    save_file(parts, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(PlanError, match="with one of its two matrices, A: 'a.q_proj'"):
        ckpt_tools.merge(
            tmp_path / "base.safetensors", tmp_path / "o.safetensors", lora=tmp_path / "adapter"
        )


def test_a_child_called_module_keeps_its_name_in_every_verb(tmp_path: Path) -> None:
    """Without the prefix, its weight would take the name of the model's own."""
    state = {"module.weight": torch.ones(2), "weight": torch.zeros(2)}
    torch.save({"model": state, "step": 3}, tmp_path / "a.pt")
    for name in ("merged", "converted"):
        out = tmp_path / f"{name}.safetensors"
        if name == "merged":
            ckpt_tools.merge(tmp_path / "a.pt", out)
        else:
            ckpt_tools.convert(tmp_path / "a.pt", out, to="safetensors")
        found = {key.removeprefix("model."): value for key, value in load_file(out).items()}
        assert all(torch.equal(found[key], value) for key, value in state.items()), name


def test_files_in_folders_of_folders_are_published(tmp_path: Path) -> None:
    """A universal checkpoint has a folder for each parameter, below `zero`."""
    model = torch.nn.Linear(4, 4)
    optimizer = one_step(model, torch.ones(4))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "s.pt")
    out = tmp_path / "u"
    ckpt_tools.convert(tmp_path / "s.pt", out, to="deepspeed-universal", param_order="model")
    for name, value in model.state_dict().items():
        saved = torch.load(next(out.rglob(f"{name}/fp32.pt")))
        assert torch.equal(saved["param"] if isinstance(saved, dict) else saved, value)
