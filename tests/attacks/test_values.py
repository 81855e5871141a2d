"""Names and numbers that mean nothing end in one clear line."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import (
    CheckpointError,
    CheckpointManager,
    FormatError,
    PlanError,
    UnsafePickleError,
)
from ckpt_tools.formats.pickle import write as pickle_write
from tests.attacks.hostile import (
    Run,
    torch_file,
)


def test_names_and_numbers_that_are_none_are_one_line(tmp_path: Path, ckpt: Run) -> None:
    torch.save({"a\ud800b": torch.ones(2)}, tmp_path / "s.pt")
    for words in (
        ["inspect", "s.pt"],
        ["merge", "s.pt", "m.safetensors"],
        ["verify", "s.pt"],
        ["convert", "s.pt", "d", "--to", "dcp"],
    ):
        done = ckpt(*words, cwd=tmp_path)
        assert done.returncode == (14 if words[0] == "verify" else 11)
        assert "Traceback" not in done.stderr and "is not valid" in done.stdout + done.stderr
    header = (
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 100000000000000000000), }".ljust(118)
        + "\n"
    )
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(12)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", array)
    done = ckpt("inspect", "a.npz", cwd=tmp_path)
    assert done.returncode == 11 and "impossible shape" in done.stderr, done.stdout
    (tmp_path / "run" / "step-１２").mkdir(parents=True)
    assert ckpt("ls", "run", cwd=tmp_path).stdout.startswith("no steps")


def test_a_pickle_s_numbers_are_bounded(tmp_path: Path) -> None:
    torch_file(tmp_path / "s.pt", b"\x80\x02](" + pickle_write.integer(1 << 60) * 20_000 + b"e.")
    with pytest.raises(UnsafePickleError, match="integers of 6 bytes or more"):
        ckpt_tools.inspect(tmp_path / "s.pt")
    with pytest.raises((PlanError, FormatError)):
        ckpt_tools.merge(tmp_path / "s.pt", tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "config",
    [
        {"alpha_pattern": {"(?=a)a": 8}},
        {"alpha_pattern": {"a?" * 3000: 8}},
        {"alpha_pattern": {"(a|b|.{0,200}){0,5}": 8}},
        {"use_rslora": "false"},
        {"alpha_pattern": {"((a{1000}){1000}){1000}": 8}},
        {"alpha_pattern": {"(": 8}},
        {"alpha_pattern": [1]},
        {"alpha_pattern": {"proj": "8"}},
        *({"rank_pattern": pattern} for pattern in ({"(a)\\1": 8}, {"(": 8}, [1], "x")),
        {"lora_alpha": "4"},
        {"lora_alpha": float("nan")},
        {"lora_alpha": 10**400},
    ],
)
def test_the_config_of_an_adapter_is_checked(
    config: dict[str, Any], tmp_path: Path, ckpt: Run
) -> None:
    name = "a" * 40
    save_file({f"{name}.weight": torch.ones(3, 3)}, tmp_path / "b.safetensors")
    (tmp_path / "ad").mkdir()
    sides = {"A": torch.ones(1, 3), "B": torch.ones(3, 1)}
    save_file(
        {f"base_model.model.{name}.lora_{s}.weight": t for s, t in sides.items()},
        tmp_path / "ad" / "adapter_model.safetensors",
    )
    whole = {"peft_type": "LORA", "r": 1, "lora_alpha": 4} | config
    (tmp_path / "ad" / "adapter_config.json").write_text(json.dumps(whole))
    words = ("merge", tmp_path / "b.safetensors", tmp_path / "o.safetensors")
    done = ckpt(*words, "--lora", tmp_path / "ad")
    assert done.returncode == 11 and "Traceback" not in done.stderr, done.stderr


def test_numbers_that_are_infinite_end_no_command(tmp_path: Path, ckpt: Run) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)}, asynchronous=False)
    note = {"ckpt_rollback": 1, "step": "x", "resumed": 1e999, "is_committed": True, "victims": {}}
    note["attempt"] = "aaaaaaaa-0000-4000-8000-000000000000"
    (tmp_path / ".ckpt.rollback.aaaaaaaa.json").write_text(json.dumps(note))
    (tmp_path / "step-00000002").mkdir()
    with open(tmp_path / "step-00000002" / ".metadata", "wb") as file:
        file.truncate(1 << 40)
    with open(tmp_path / "step-00000002" / "ckpt.manifest.aaaaaaaa.json", "wb") as file:
        file.truncate(1 << 40)
    for words in (["ls"], ["latest"], ["prune", "--keep-last", "1"]):
        done = ckpt(words[0], tmp_path, *words[1:])
        assert "Traceback" not in done.stderr and done.returncode == 0, done.stderr
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume({"w": torch.zeros(2)}) == 1


@pytest.mark.parametrize(
    "rules",
    [
        {"rename": [["w", "\\9"]]},
        {"rename": [["w", "\ud800x"]]},
        {"split": [{"match": "w", "into": [1, 2], "parts": [1, 1]}]},
        {"split": [{"match": "w", "into": ["a", "b"], "parts": None}]},
        {"fuse": [{"match": "w", "from": [1], "into": "z"}]},
        {"fuse": [{"match": "w", "from": [], "into": "z"}]},
        {"unstack": [{"match": "w", "into": 3}]},
        {"unstack": [{"match": "s", "into": "z{layer}"}]},
    ],
)
def test_a_key_map_that_means_nothing_is_one_line(
    rules: dict[str, Any], tmp_path: Path, ckpt: Run
) -> None:
    save_file({"w": torch.ones(4, 2), "s": torch.tensor(1.0)}, tmp_path / "b.safetensors")
    (tmp_path / "map.json").write_text(json.dumps(rules))
    out = tmp_path / "out"
    words = ("convert", tmp_path / "b.safetensors", out, "--to", "dcp")
    done = ckpt(*words, "--map", tmp_path / "map.json")
    assert done.returncode == 13 and "Traceback" not in done.stderr and not out.exists()


def test_two_files_of_one_rank_s_names_are_told(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, tmp_path / "v" / "rank_0.pt")
    with pytest.raises(FormatError, match="two entries have one name"):
        ckpt_tools.inspect(tmp_path / "v")


def test_digits_of_other_alphabets_are_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "v" / "rank_\uff10.pt")
    with pytest.raises(CheckpointError):
        ckpt_tools.inspect(tmp_path / "v")
