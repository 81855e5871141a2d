"""A job's directory in parts, as the Transformers Trainer and Accelerate leave it. They wrote it,
and they read what comes of it.
"""

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
from tests.stock import assert_stock_torch_reads

Run = Callable[..., Any]
Shared = Callable[[str, Callable[[Path], object]], Path]
SIDE = {
    "config.json",
    "generation_config.json",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "training_args.bin",
}


@pytest.fixture
def trainer(shared: Shared) -> Path:
    """Two ranks' run of the Trainer without FSDP: `checkpoint-2`, and its moments by name."""
    return shared("trainer", lambda folder: torchrun(2, "trainer_job.py", str(folder), "2"))


@pytest.fixture
def accelerated(shared: Shared) -> Path:
    """Two ranks' save by Accelerate: `saved` with sharded state, `full` with full state, and
    `whole.pt`.
    """
    return shared("accelerate", lambda folder: torchrun(2, "accelerator.py", str(folder), "save"))


def moments_of(run: Path) -> dict[str, torch.Tensor]:
    moments = torch.load(run / "moments.pt")["moments"]
    return {
        f"optimizer.state.{name}.{key}": value
        for name, values in moments.items()
        for key, value in values.items()
    }


def assert_has(checkpoint: Path, wanted: dict[str, torch.Tensor]) -> None:
    got = {name: torch.full_like(value, -1.0) for name, value in wanted.items()}
    dcp.load(got, checkpoint_id=checkpoint, no_dist=True)
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_all_parts_are_shown_and_the_rest_is_named(trainer: Path, ckpt: Run) -> None:
    report = ckpt_tools.inspect(trainer / "checkpoint-2")
    stored = torch.load(trainer / "checkpoint-2" / "optimizer.pt")
    names = {
        f"optimizer.state.{number}.{key}"
        for number, state in stored["state"].items()
        for key in state
    }
    model = load_file(trainer / "checkpoint-2" / "model.safetensors")
    assert report.catalog.tensors.keys() == names | {f"model.{name}" for name in model}
    assert {"scheduler.last_epoch", "trainer_state.global_step"} <= report.catalog.objects.keys()
    assert set(report.catalog.beside) == SIDE
    assert f"beside: {', '.join(sorted(SIDE))}" in ckpt("inspect", trainer / "checkpoint-2").stdout


@pytest.mark.slow
def test_an_optimizer_beside_the_model_goes_along(trainer: Path, tmp_path: Path, ckpt: Run) -> None:
    """Its groups number matrices first; the file of the model has its tensors sorted by name: only
    the config tells their order.
    """
    source = trainer / "checkpoint-2"
    done = ckpt(
        "convert",
        source,
        tmp_path / "dcp",
        "--to",
        "dcp",
        "--param-order",
        "model",
        "--shapes",
        source / "config.json",
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"files beside the checkpoint stay behind: {', '.join(sorted(SIDE))}"
        in done.stderr + done.stdout
    )
    assert_has(tmp_path / "dcp", moments_of(trainer))
    assert_stock_torch_reads(tmp_path / "dcp")
    assert_has(
        tmp_path / "dcp",
        {f"model.{name}": value for name, value in load_file(source / "model.safetensors").items()},
    )
    got: dict[str, Any] = {"trainer_state": {"global_step": 0}, "scheduler": {"last_epoch": 0}}
    dcp.load(got, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert got == {"trainer_state": {"global_step": 2}, "scheduler": {"last_epoch": 2}}
    with pytest.raises(
        PlanError, match="files of this format do not keep the order of the parameters"
    ) as caught:
        ckpt_tools.convert(source, tmp_path / "no", to="dcp", param_order="model")
    assert "--shapes and the model's config.json" in (caught.value.hint or "")


def test_merge_takes_the_model_and_says_what_it_left(
    trainer: Path, tmp_path: Path, ckpt: Run
) -> None:
    done = ckpt("merge", trainer / "checkpoint-2", tmp_path / "m.safetensors")
    assert done.returncode == 0 and "optimizer" in done.stdout
    got, want = (
        load_file(tmp_path / "m.safetensors"),
        load_file(trainer / "checkpoint-2" / "model.safetensors"),
    )
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("verb", ["salvage", "reshard"])
def test_what_is_written_anew_has_the_optimizer(
    verb: str, trainer: Path, tmp_path: Path, ckpt: Run
) -> None:
    more = ["--to", "3"] if verb == "reshard" else []
    done = ckpt(verb, trainer / "checkpoint-2", tmp_path / "out", *more)
    assert done.returncode == 0 and "files beside the checkpoint stay behind" in done.stdout, (
        done.stderr
    )
    stored = torch.load(trainer / "checkpoint-2" / "optimizer.pt")["state"]
    assert_has(
        tmp_path / "out",
        {
            f"optimizer.state.{n}.{key}": value
            for n, state in stored.items()
            for key, value in state.items()
        },
    )


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors"])
def test_a_flipped_bit_is_found_where_there_is_a_checksum_and_the_rest_is_named(
    name: str, trainer: Path, tmp_path: Path
) -> None:
    shutil.copytree(trainer / "checkpoint-2", tmp_path / "c")
    assert ckpt_tools.verify(tmp_path / "c").problems == []
    data = bytearray((tmp_path / "c" / name).read_bytes())
    data[len(data) // 2] ^= 4
    (tmp_path / "c" / name).write_bytes(data)
    report = ckpt_tools.verify(tmp_path / "c")
    if name == "optimizer.pt":
        assert {problem.file for problem in report.problems} == {name}
    else:
        assert report.problems == [] and name in report.unknown  # safetensors has no checksums


def as_fsdp(trainer: Path, accelerated: Path, folder: Path) -> Path:
    """A Trainer's directory of an FSDP job: Accelerate's parts beside the Trainer's own files."""
    shutil.copytree(
        accelerated / "saved",
        folder,
        ignore=shutil.ignore_patterns("scheduler.bin", "random_states*", "*.pkl"),
    )
    for name in SIDE | {"scheduler.pt", "trainer_state.json"}:
        shutil.copy(trainer / "checkpoint-2" / name, folder / name)
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_a_trainer_resumes_from_goes_along_to_other_ranks(
    ranks: int, trainer: Path, accelerated: Path, tmp_path: Path
) -> None:
    source = as_fsdp(trainer, accelerated, tmp_path / "checkpoint-2")
    result = ckpt_tools.convert(source, tmp_path / "out", to="accelerate", ranks=ranks)
    files = {
        path.name: path.read_bytes()
        for path in (tmp_path / "out").iterdir()
        if path.is_file() and "manifest" not in path.name
    }
    states = {
        1: {"rng_state.pth"},
        2: {"rng_state_0.pth", "rng_state_1.pth"},
        3: {"rng_state_0.pth", "rng_state_1.pth"},
    }[ranks]
    same = {
        "config.json",
        "generation_config.json",
        "training_args.bin",
        "scheduler.pt",
        "trainer_state.json",
    }
    assert files.keys() == same | states
    assert all(files[name] == (source / name).read_bytes() for name in same)
    assert files[min(states)] == (source / "rng_state_0.pth").read_bytes()
    said = {
        1: "left behind: rng_state_1.pth",
        2: "",
        3: "no random states for rank 2: the source has those of 2",
    }[ranks]
    assert (not said and not result.notes) or any(said in note for note in result.notes), (
        result.notes
    )
    assert ckpt_tools.diff(source, tmp_path / "out").is_same
    assert ckpt_tools.verify(tmp_path / "out").problems == []


def test_the_trainer_reads_the_files_that_went_along(
    trainer: Path, accelerated: Path, tmp_path: Path
) -> None:
    """FSDP itself wants an accelerator; its scheduler, progress and random states are read by
    methods of their own.
    """
    from transformers.trainer_callback import TrainerState

    from tests.dist.trainer_job import make

    ckpt_tools.convert(
        as_fsdp(trainer, accelerated, tmp_path / "checkpoint-2"),
        tmp_path / "out",
        to="accelerate",
        ranks=1,
    )
    job = make(str(tmp_path / "run"), 2)
    job.create_optimizer_and_scheduler(2)
    torch.manual_seed(99)
    job._load_rng_state(str(tmp_path / "out"))
    stored = torch.load(trainer / "checkpoint-2" / "rng_state_0.pth", weights_only=False)
    assert torch.equal(torch.get_rng_state(), stored["cpu"])
    assert (
        TrainerState.load_from_json(str(tmp_path / "out" / "trainer_state.json")).global_step == 2
    )
    job.lr_scheduler.load_state_dict(torch.load(tmp_path / "out" / "scheduler.pt"))
    assert job.lr_scheduler.last_epoch == 2


# ---- Accelerate ----------------------------------------------------------------------------------


def test_the_full_state_of_fsdp_is_the_sharded_one(accelerated: Path, tmp_path: Path) -> None:
    parts = ["model.*", "optimizer.*"]
    assert ckpt_tools.diff(accelerated / "full", accelerated / "saved", select=parts).is_same
    assert ckpt_tools.verify(accelerated / "full").problems == []
    shutil.copytree(accelerated / "full", tmp_path / "full")
    shutil.copy(accelerated / "saved" / "scheduler.bin", tmp_path / "full" / "scheduler.bin")
    ckpt_tools.convert(tmp_path / "full", tmp_path / "acc", to="accelerate", ranks=2)
    assert ckpt_tools.diff(tmp_path / "acc", accelerated / "saved").is_same
    shutil.copy(accelerated / "whole.pt", tmp_path / "whole.pt")
    torchrun(2, "accelerator.py", str(tmp_path), "load", str(tmp_path / "acc"))


def test_one_process_of_accelerate_with_two_models_is_read(tmp_path: Path) -> None:
    """In a process of its own: an Accelerator leaves traces in the process."""
    script = tmp_path / "job.py"
    script.write_text(f"""
import torch
from accelerate import Accelerator
from torch import nn
torch.manual_seed(0)
job = Accelerator(cpu=True)
models = nn.Linear(3, 4), nn.Linear(5, 2)
optimizers = [torch.optim.AdamW(model.named_parameters()) for model in models]
one, two, first, second = job.prepare(*models, *optimizers)
(one(torch.ones(1, 3)).sum() + two(torch.ones(1, 5)).sum()).backward()
first.step(), second.step()
job.save_state({str(tmp_path / "state")!r})
""")
    torchrun(1, str(script))
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert {
        "model.safetensors",
        "model_1.safetensors",
        "optimizer.bin",
        "optimizer_1.bin",
        "random_states_0.pkl",
    } <= names
    report = ckpt_tools.inspect(tmp_path / "state")
    for number, suffix in enumerate(("", "_1")):
        model = load_file(tmp_path / "state" / f"model{suffix}.safetensors")
        got = {f"model{suffix}.{name}": torch.zeros_like(value) for name, value in model.items()}
        ckpt_tools.load(tmp_path / "state", got)
        assert all(
            torch.equal(got[f"model{suffix}.{name}"], value) for name, value in model.items()
        )
        state = torch.load(tmp_path / "state" / f"optimizer{suffix}.bin")["state"]
        assert {
            f"optimizer{suffix}.state.{n}.exp_avg" for n in state
        } <= report.catalog.tensors.keys(), number
    result = ckpt_tools.reshard(tmp_path / "state", tmp_path / "out", to_ranks=2)
    assert ckpt_tools.diff(tmp_path / "state", tmp_path / "out").is_same
    assert any("random_states_0.pkl" in note for note in result.notes)


def test_a_directory_of_bin_files_is_read_and_one_with_the_model_alone_stays_what_it_was(
    trainer: Path, tmp_path: Path
) -> None:
    model = load_file(trainer / "checkpoint-2" / "model.safetensors")
    (tmp_path / "bin").mkdir()
    torch.save(model, tmp_path / "bin" / "pytorch_model.bin")
    shutil.copy(trainer / "checkpoint-2" / "optimizer.pt", tmp_path / "bin" / "optimizer.bin")
    report = ckpt_tools.inspect(tmp_path / "bin")
    assert (
        report.format == "accelerate"
        and {"model.lm_head.weight", "optimizer.state.0.exp_avg"} <= report.catalog.tensors.keys()
    )
    (tmp_path / "bin" / "optimizer.bin").unlink()
    assert ckpt_tools.inspect(tmp_path / "bin").format == "torch_save"
    (tmp_path / "alone").mkdir()
    for name in ("model.safetensors", "config.json"):
        shutil.copy(trainer / "checkpoint-2" / name, tmp_path / "alone" / name)
    assert ckpt_tools.inspect(tmp_path / "alone").format == "safetensors"


def test_shards_with_an_index_beside_an_optimizer(trainer: Path, tmp_path: Path) -> None:
    source = tmp_path / "c"
    ckpt_tools.merge(trainer / "checkpoint-2", source, max_shard_bytes=20_000)
    for name in ("optimizer.pt", "trainer_state.json"):
        shutil.copy(trainer / "checkpoint-2" / name, source / name)
    report = ckpt_tools.inspect(source)
    assert report.format == "accelerate" and len(list(source.glob("*.safetensors"))) > 2
    assert ckpt_tools.diff(
        trainer / "checkpoint-2", source, select=["model.*", "optimizer.*", "trainer_state.*"]
    ).is_same
    index = json.loads((source / "model.safetensors.index.json").read_text())
    (source / next(iter(index["weight_map"].values()))).unlink()
    with pytest.raises(ckpt_tools.CheckpointError, match="a data file is missing"):
        ckpt_tools.inspect(source)
    report = ckpt_tools.verify(source)
    gone = {
        f"model.{name}"
        for name, file in index["weight_map"].items()
        if not (source / file).exists()
    }
    assert gone and set(report.lost) == gone
    assert set(ckpt_tools.salvage(source, tmp_path / "saved").lost) == gone
    assert "optimizer.state.0.exp_avg" in ckpt_tools.inspect(tmp_path / "saved").catalog.tensors


def test_a_full_model_beside_a_sharded_optimizer(accelerated: Path, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    shutil.copy(
        accelerated / "full" / "pytorch_model_fsdp.bin", tmp_path / "c" / "pytorch_model_fsdp.bin"
    )
    shutil.copytree(accelerated / "saved" / "optimizer_0", tmp_path / "c" / "optimizer_0")
    assert ckpt_tools.diff(
        tmp_path / "c", accelerated / "saved", select=["model.*", "optimizer.*"]
    ).is_same
    assert ckpt_tools.inspect(tmp_path / "c").world_size == 2


def test_an_adapter_that_a_job_saved_with_its_optimizer_is_merged(
    trainer: Path, tmp_path: Path
) -> None:
    torch.save({"q.weight": torch.zeros(4, 4)}, tmp_path / "base.pt")
    sides = {"A": torch.ones(2, 4), "B": torch.ones(4, 2)}
    for folder in ("alone", "job"):
        (tmp_path / folder).mkdir()
        save_file(
            {f"base_model.model.q.lora_{s}.weight": m for s, m in sides.items()},
            tmp_path / folder / "adapter_model.safetensors",
        )
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q"]}
        (tmp_path / folder / "adapter_config.json").write_text(json.dumps(config))
    shutil.copy(trainer / "checkpoint-2" / "optimizer.pt", tmp_path / "job" / "optimizer.pt")
    for folder in ("alone", "job"):
        ckpt_tools.merge(
            tmp_path / "base.pt", tmp_path / f"{folder}.safetensors", lora=tmp_path / folder
        )
        assert torch.equal(
            load_file(tmp_path / f"{folder}.safetensors")["q.weight"], sides["B"] @ sides["A"]
        )
