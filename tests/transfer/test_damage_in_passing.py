"""Damage that a command meets while it does something else is an error, never a wrong result."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import CheckpointManager, IntegrityError, Outages, Writing
from ckpt_tools.loop.steps.retention import prune_steps
from ckpt_tools.publish.step_names import step_name
from ckpt_tools.run.retention import Retention
from ckpt_tools.run.roots import open_root

Run = Callable[..., subprocess.CompletedProcess[str]]
LR = b"G\x3f\xc0" + bytes(6)  # 0.125
OTHER_LR = b"G\x3f\xd0" + bytes(6)  # 0.25
FLIPS = {
    "the storage of a tensor": (b"X\x01\0\0\x001", b"X\x01\0\0\x000"),
    "a plain value": (LR, OTHER_LR),
    "a name": (b"X\x01\0\0\0w", b"X\x01\0\0\0v"),
}


def change(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("what", FLIPS)
def test_a_changed_pickle_of_a_torch_file_is_refused_by_every_verb(
    what: str, is_sealed: bool, tmp_path: Path, ckpt: Run
) -> None:
    path = tmp_path / "x.pt"
    model = {"w": torch.arange(8.0), "u": torch.arange(8.0) + 100}
    torch.save({"model": model, "lr": 0.125}, path)
    if is_sealed:
        ckpt_tools.seal(path)
    change(path, *FLIPS[what])
    for words in (
        ("merge", path, tmp_path / "m.safetensors"),
        ("convert", path, tmp_path / "o.pt", "--to", "torch"),
        ("convert", path, tmp_path / "d", "--to", "dcp"),
        ("reshard", path, tmp_path / "r", "--to", "2"),
        ("copy", path, tmp_path / "c.pt"),
        ("salvage", path, tmp_path / "s"),
    ):
        done = ckpt(*words)
        assert done.returncode == 14 and "damaged" in done.stderr, (words, done.stderr)
        assert not Path(words[2]).exists()
    assert ckpt("verify", path).returncode in (1, 14)
    with pytest.raises(IntegrityError, match="a pickle is damaged"):
        ckpt_tools.load(path, {"model": {name: torch.zeros(8) for name in model}}, strict=False)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_changed_object_of_dcp_does_not_reach_any_target(
    is_sealed: bool, tmp_path: Path, ckpt: Run
) -> None:
    source = tmp_path / "s"
    state = {"model": {"w": torch.arange(8.0)}, "scheduler": {"base_lrs": [0.125], "last_epoch": 7}}
    dcp.save(state, checkpoint_id=source, no_dist=True)
    if is_sealed:
        ckpt_tools.seal(source)
    change(source / "__0_0.distcp", LR, OTHER_LR)
    for target, *more in (
        ("torch",),
        ("accelerate",),
        ("dcp", "--optimizer", "flat"),
        ("per-rank", "--mesh", "cpu:fsdp"),
    ):
        out = tmp_path / (f"out-{target}" + ".pt" * (target == "torch"))
        done = ckpt("convert", source, out, "--to", target, *more)
        assert done.returncode in (13, 14), (target, done.stdout, done.stderr)
        assert not out.exists()
        assert done.returncode == 14 or "optimizer" in done.stderr


# ---- retention -----------------------------------------------------------------------------------


def saved(root: Path, steps: list[int], keep_last: int | None = None) -> None:
    with CheckpointManager(root, keep_last=keep_last) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"w": torch.full((5000,), float(step))}, asynchronous=False)


def damage(root: Path, step: int) -> None:
    path = root / step_name(step) / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_steps_that_resume_passed_over_do_not_count_for_retention(tmp_path: Path) -> None:
    """One flipped bit in the newest step had keep_last=1 remove every good step."""
    saved(tmp_path, [100, 200, 300])
    damage(tmp_path, 300)
    state = {"w": torch.zeros(5000)}
    with CheckpointManager(tmp_path, keep_last=1) as checkpoints:
        assert checkpoints.resume(state) == 200
        for step in (210, 220, 230):
            checkpoints.save(step, {"w": torch.full((5000,), float(step))}, asynchronous=False)
    assert (tmp_path / step_name(230)).is_dir() and not (tmp_path / step_name(220)).exists()
    with CheckpointManager(tmp_path, keep_last=1) as checkpoints:
        assert checkpoints.resume(state) == 230
    assert state["w"][0] == 230


def test_a_job_never_removes_the_step_that_it_has_just_saved(tmp_path: Path) -> None:
    saved(tmp_path / "other", [900])
    with CheckpointManager(tmp_path, keep_last=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": torch.full((5000,), float(step))}, asynchronous=False)
            if step == 1:  # somebody puts a newer one beside it
                (tmp_path / "other" / step_name(900)).rename(tmp_path / step_name(900))
    assert sorted(p.name for p in tmp_path.glob("step-*")) == [step_name(3), step_name(900)]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_prune_leaves_a_sound_step_however_many_of_the_newest_are_damaged(
    keep_last: int, tmp_path: Path
) -> None:
    saved(tmp_path, [1, 2, 3, 4, 5])
    damage(tmp_path, 4)
    damage(tmp_path, 5)
    prune_steps(open_root(tmp_path), Retention(keep_last))
    left = {int(p.name[5:]) for p in tmp_path.glob("step-*")}
    assert left & {1, 2, 3}


def test_a_copy_under_a_higher_number_is_no_reason_to_remove_anything(
    tmp_path: Path, ckpt: Run
) -> None:
    saved(tmp_path, [1, 2, 3])
    assert ckpt("reshard", tmp_path / step_name(1), tmp_path / step_name(900)).returncode in (0, 2)
    ckpt_tools.reshard(tmp_path / step_name(1), tmp_path / step_name(901), to_ranks=1)
    assert ckpt("prune", tmp_path, "--keep-last", "1").returncode == 0
    assert (tmp_path / step_name(3)).is_dir()


def test_a_resharded_step_under_its_own_number_takes_part_in_retention(tmp_path: Path) -> None:
    saved(tmp_path / "a", [1, 2])
    for step in (1, 2):
        ckpt_tools.reshard(
            tmp_path / "a" / step_name(step), tmp_path / "b" / step_name(step), to_ranks=2
        )
    assert [s.number for s in prune_steps(open_root(tmp_path / "b"), Retention(1)).removed] == [1]


def test_folders_with_names_like_those_of_leftovers_stay(tmp_path: Path, ckpt: Run) -> None:
    saved(tmp_path, [1, 2])
    mine = [".tmp.my-notes.20261124", ".trash.photos.20260704", ".tmp.x.backup00"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    assert ckpt("prune", tmp_path, "--keep-last", "1").returncode == 0
    assert [name for name in mine if (tmp_path / name / "notes.txt").exists()] == mine


# ---- two at once, names and streams --------------------------------------------------------------


@pytest.mark.slow
def test_of_two_that_replace_one_file_the_manifest_of_the_last_one_stays(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"w": torch.full((20_000,), float(ord(name)))}, tmp_path / f"{name}.safetensors")
    command = [sys.executable, "-m", "ckpt_tools", "merge"]
    for _ in range(4):
        both = [
            subprocess.Popen(
                [*command, f"{n}.safetensors", "out.safetensors", "--overwrite", "-q"],
                cwd=tmp_path,
            )
            for n in "ab"
        ]
        codes = {process.wait(60) for process in both}
        assert codes in ({0}, {0, 15})  # one may be told that the other was faster
        result = ckpt_tools.verify(tmp_path / "out.safetensors")
        assert not result.problems and result.is_sealed
        assert len(list(tmp_path.glob("out.safetensors.ckpt.manifest.*"))) == 1


def test_a_name_that_is_no_utf_8_works(tmp_path: Path, ckpt: Run) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    odd = tmp_path / "b\udcff.safetensors"
    assert ckpt("merge", tmp_path / "a.safetensors", odd).returncode == 0
    assert ckpt("verify", odd).returncode == 0


@pytest.mark.parametrize("words", [["--help"], ["merge", "--help"], ["--version"], []])
def test_a_closed_pipe_ends_the_help_like_other_commands(words: list[str]) -> None:
    command = [sys.executable, "-m", "ckpt_tools", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # before the first byte
        assert (process.wait(60), process.stderr.read()) == (141, b"")


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_full_stdout_is_exit_15_and_a_closed_pipe_ends_like_other_commands(
    json_flag: list[str], tmp_path: Path
) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    command = [sys.executable, "-m", "ckpt_tools", "verify", "a.safetensors", *json_flag]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 15 and "Traceback" not in done.stderr
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()  # before the first byte
    assert process.wait(60) == 141


@pytest.mark.parametrize(
    "bad",
    [
        lambda root: CheckpointManager(root, writing=Writing(jobs=-1)),
        lambda root: CheckpointManager(root, timeout_s=-1),
        lambda root: CheckpointManager(root, save_every=0),
        lambda root: CheckpointManager(root, retention=Retention(every=0)),
        lambda root: CheckpointManager(root, outages=Outages(retry_s="long")),  # type: ignore[arg-type]
    ],
)
def test_a_manager_refuses_settings_that_mean_nothing(
    bad: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="expected"):
        bad(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_state_that_is_no_dict_is_refused_before_it_is_saved(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(ckpt_tools.PlanError):
        checkpoints.save(1, [1, torch.ones(2)])  # type: ignore[arg-type]
    assert not list(tmp_path.glob("step-*"))


def test_a_square_weight_without_a_bias_follows_no_guess(tmp_path: Path, ckpt: Run) -> None:
    """`fan_in_fan_out` may be that of another module: PEFT keeps one flag for all."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    a, b, name = torch.randn(2, 6), torch.randn(6, 2), "base_model.model.proj."
    save_file(
        {f"{name}lora_A.weight": a, f"{name}lora_B.weight": b},
        adapter / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}
    base = torch.randn(6, 6)
    save_file({"proj.weight": base}, tmp_path / "b.safetensors")
    words = ("merge", tmp_path / "b.safetensors", tmp_path / "o.safetensors", "--lora", adapter)
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"fan_in_fan_out": True}))
    done = ckpt(*words)
    assert done.returncode == 13 and "square" in done.stderr
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert ckpt(*words).returncode == 0
    merged = load_file(tmp_path / "o.safetensors")["proj.weight"]
    assert torch.allclose(merged, base + 2 * (b @ a), atol=1e-5)
    shutil.rmtree(adapter)


def test_wrong_usage_is_json_too(tmp_path: Path, ckpt: Run) -> None:
    for words in (["merge", "a"], ["verify", "a", "--nothing"], ["reshard", "a", "b", "--to", "0"]):
        done = ckpt(*words, "--json", cwd=tmp_path)
        told = json.loads(done.stdout)
        assert done.returncode == 2 and told["exit_code"] == 2 and told["error"] == "UsageError"


def test_an_empty_folder_of_somebody_keeps_its_step(tmp_path: Path) -> None:
    saved(tmp_path, [1, 2])
    (tmp_path / step_name(1) / "hf").mkdir()
    result = prune_steps(open_root(tmp_path), Retention(1))
    assert not result.removed and "hf/" in next(iter(result.kept.values()))
