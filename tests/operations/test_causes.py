"""An error names its cause: a file that is no checkpoint says what it is, and what to do."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import CheckpointManager

Run = Callable[..., subprocess.CompletedProcess[str]]
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
KINDS = {
    "empty": ("", "is empty"),
    "lfs": (LFS, "a pointer of Git LFS"),
    "html": ("<!DOCTYPE html>\n<html><body>Log in</body></html>", "an HTML page"),
    "page": ("  <HTML><head/>", "an HTML page"),
    "xml": ('<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "an XML page"),
}


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.gguf"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind_is_named(kind: str, name: str, tmp_path: Path, ckpt: Run) -> None:
    text, cause = KINDS[kind]
    (tmp_path / name).write_text(text)
    for words in (("inspect",), ("merge", tmp_path / "o.safetensors")):
        done = ckpt(words[0], tmp_path / name, *words[1:])
        assert done.returncode == 11 and cause in done.stderr, done.stderr
        assert f"{name} is" in done.stderr and "hint: " in done.stderr


def test_a_pointer_among_shards_is_named(tmp_path: Path, ckpt: Run) -> None:
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    save_file({"a": torch.ones(2)}, tmp_path / names[0])
    (tmp_path / names[1]).write_text(LFS)
    done = ckpt("inspect", tmp_path)
    assert done.returncode == 11 and f"{names[1]} is a pointer of Git LFS" in done.stderr
    assert "git lfs pull" in done.stderr
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    done = ckpt("verify", tmp_path)
    assert done.returncode == 14 and "a pointer of Git LFS" in done.stdout, done.stdout
    assert "1 of 2 entries can still be read" in done.stdout


def test_a_config_that_is_a_pointer_is_named(tmp_path: Path, ckpt: Run) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(LFS)
    done = ckpt(
        "convert",
        tmp_path / "m.safetensors",
        tmp_path / "o",
        "--to",
        "hf",
        "--base",
        tmp_path / "base",
    )
    assert done.returncode == 13 and "config.json is a pointer of Git LFS" in done.stderr
    assert "hint: run: git lfs pull" in done.stderr


def test_a_link_that_leads_to_nothing_is_named(tmp_path: Path, ckpt: Run) -> None:
    (tmp_path / "model.safetensors").symlink_to("blobs/abc")
    done = ckpt("inspect", tmp_path)
    assert done.returncode == 15 and "or nowhere: model.safetensors -> blobs/abc" in done.stderr
    done = ckpt("inspect", tmp_path / "model.safetensors")
    assert done.returncode == 10 and "leads to nothing: blobs/abc" in done.stderr


def test_the_parent_of_runs_is_named(tmp_path: Path, ckpt: Run) -> None:
    for name in ("runA", "runB"):
        with CheckpointManager(tmp_path / name) as checkpoints:
            checkpoints.save(1, {"w": torch.ones(2)}, asynchronous=False)
    with CheckpointManager(tmp_path / "deep" / "runC") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)}, asynchronous=False)
    (tmp_path / "other").mkdir()
    done = ckpt("ls", tmp_path)
    assert done.returncode == 0
    rows = [line.split(maxsplit=4) for line in done.stdout.splitlines()[2:]]
    sizes = [row.pop(2) for row in rows]
    assert rows == [
        ["deep/", "folder", "KB", "runs lie below: runC"],
        ["other/", "folder", "B", "empty"],
        ["runA/", "run", "KB", "1 step, the newest is 1"],
        ["runB/", "run", "KB", "1 step, the newest is 1"],
    ]
    listed = json.loads(ckpt("ls", tmp_path, "--json").stdout)
    assert [(e["path"], e["kind"], e["step"], e["about"]) for e in listed] == [
        (f"{tmp_path}/{name.removesuffix('/')}", kind, None, about) for name, kind, _, about in rows
    ]
    assert json.loads(ckpt("ls", tmp_path / "other", "--json").stdout) == []
    stored = sum(path.stat().st_size for path in (tmp_path / "runA").rglob("*") if path.is_file())
    assert sizes[1] == "0" and abs(float(sizes[2]) - stored / 1e3) < 0.2, (sizes, stored)
    assert abs(float(sizes[0]) - stored / 1e3) < 0.2, "with what lies below"
    more = (("latest",), ("prune", "--keep-last", "1"))
    for words in (("ls", "--bytes"), ("check",), ("thin", "--keep-full", "1"), *more):
        done = ckpt(words[0], tmp_path, *words[1:])
        assert done.returncode == 10 and "runs lie below: runA, runB" in done.stderr, words
        done = ckpt(words[0], tmp_path / "nothing", *words[1:])
        assert done.returncode == 10 and "no such directory: " in done.stderr, words
        done = ckpt(words[0], __file__, *words[1:])
        assert done.returncode == 10, words
        assert done.stderr.startswith("error: not a directory: "), (words, done.stderr)
        assert "ckpt inspect shows a file" in done.stderr, words


def test_a_folder_with_two_sealed_files_is_not_empty(tmp_path: Path, ckpt: Run) -> None:
    (tmp_path / "two").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "two/a.safetensors")
    ckpt_tools.merge(tmp_path / "two/a.safetensors", tmp_path / "two/b.safetensors")
    (entry,) = json.loads(ckpt("ls", tmp_path, "--json").stdout)
    assert entry["about"] == "files of checkpoints: a.safetensors, b.safetensors", entry
    (tmp_path / "two/a.safetensors").unlink()
    os.truncate(tmp_path / "two/b.safetensors", 50)
    (entry,) = json.loads(ckpt("ls", tmp_path, "--json").stdout)
    assert entry["about"].startswith("not read: "), entry


def test_a_dry_run_tells_that_the_destination_exists(tmp_path: Path, ckpt: Run) -> None:
    ckpt_tools.save(tmp_path / "s", {"w": torch.ones(2)})
    for out, words in (("m.safetensors", ["merge"]), ("two", ["reshard", "--to", "2"])):
        command = [words[0], tmp_path / "s", tmp_path / out, *words[1:]]
        before = ckpt(*command, "--dry-run")
        assert before.returncode == 0 and "would fail" not in before.stdout
        assert ckpt(*command).returncode == 0
        again = ckpt(*command, "--dry-run")
        assert again.returncode == 0 and "this would fail: the destination exists" in again.stdout
        again = ckpt(*command, "--dry-run", "--overwrite")
        assert again.returncode == 0 and "would fail" not in again.stdout
        assert ckpt(*command).returncode == 15


def test_layouts_and_ranks_are_not_mixed_up(tmp_path: Path, ckpt: Run) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    words = (tmp_path / "m.safetensors", tmp_path / "o", "--to")
    done = ckpt("reshard", *words, "hf")
    assert done.returncode == 2 and "convert --to hf" in " ".join(
        done.stderr.replace("│", " ").split()
    )
    done = ckpt("convert", *words, "4")
    assert done.returncode == 13 and "ckpt reshard --to 4" in done.stderr
