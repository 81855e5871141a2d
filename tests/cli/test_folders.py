"""A folder is no dead end: what lies there, what each thing is, and why the rest is not read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.operations import folder
from ckpt_tools.operations.folder import entries_of
from tests.command import run_command
from tests.servers.servers import Server


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder of everything that people keep beside each other."""
    folder = tmp_path / "mixed"
    for number in (9, 10):
        ckpt_tools.save(folder / "run" / f"step-{number}", {"w": torch.ones(4)})
    ckpt_tools.save(folder / "deep" / "below" / "step-3", {"w": torch.ones(4)})
    ckpt_tools.save(folder / "alone", {"w": torch.ones(4), "b": torch.ones(2)})
    (folder / "step-7").mkdir()
    (folder / "step-7" / "__0_0.distcp").write_bytes(b"x" * 10)
    (folder / "logs").mkdir()
    (folder / "logs" / "events.txt").write_text("hello")
    (folder / "nothing").mkdir()
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")
    torch.save({"w": torch.ones(4)}, folder / "old.pt")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 5\n"
    (folder / "lfs.safetensors").write_text(pointer)
    (folder / "page.safetensors").write_text("<!DOCTYPE html><html></html>")
    (folder / "empty.pt").touch()
    (folder / "gone.pt").symlink_to("/nowhere/x.pt")
    (folder / "here").symlink_to("there")
    (folder / "there").symlink_to("here")
    os.mkfifo(folder / "pipe.pt")
    (folder / "loose").mkdir()
    torch.save({"w": torch.ones(4)}, folder / "loose" / "m.pt")
    (folder / "README.md").write_text("hi")
    return folder


ABOUT = {
    "run/": ("run", "2 steps, the newest is 10"),
    "deep/": ("folder", "runs lie below: below"),
    "alone/": ("dcp", "2 tensors"),
    "step-7/": ("step", "the save was never finished"),
    "logs/": ("folder", "no checkpoint in it, three levels down"),
    "nothing/": ("folder", "empty"),
    "model.safetensors": ("safetensors", "1 tensor"),
    "old.pt": ("torch_save", "1 tensor"),
    "lfs.safetensors": ("file", "not read: is a pointer of Git LFS"),
    "page.safetensors": ("file", "not read: is an HTML page"),
    "empty.pt": ("file", "not read: is empty"),
    "gone.pt": ("link", "/nowhere/x.pt"),
    "here": ("link", "in a circle: there"),
    "there": ("link", "in a circle: here"),
    "pipe.pt": ("file", "not read: no regular file, such as a pipe or a device"),
    "loose/": ("folder", "files of checkpoints: m.pt"),
    "README.md": ("file", ""),
}


def test_each_thing_is_told_and_none_hides_another(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {one.name: one for one in entries_of(mixed)}
    assert set(found) == set(ABOUT)
    for name, (kind, about) in ABOUT.items():
        assert found[name].kind == kind and about in found[name].about, found[name]
    (mixed / "run" / "link").hardlink_to(mixed / "model.safetensors")
    (mixed / "run" / "again").hardlink_to(mixed / "model.safetensors")
    found["run/"] = next(one for one in entries_of(mixed) if one.name == "run/")
    sizes = {p.stat().st_ino: p.stat().st_size for p in (mixed / "run").rglob("*") if p.is_file()}
    assert found["run/"].nbytes == sum(sizes.values()), "each file counts once"
    monkeypatch.setattr(folder, "_MOST_FILES", 3)
    few = {one.name: one.nbytes for one in entries_of(mixed)}
    assert few["run/"] is None and few["alone/"] == found["alone/"].nbytes
    readable = {"run/", "deep/", "alone/", "loose/", "model.safetensors", "old.pt"}
    assert {name for name, one in found.items() if one.is_readable} == readable
    assert found["model.safetensors"].nbytes == (mixed / "model.safetensors").stat().st_size


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_verb_for_one_checkpoint_lists_the_folder_before_its_error(
    verb: str, mixed: Path
) -> None:
    done = run_command(verb, mixed)
    assert done.returncode == 10
    assert done.stderr.startswith("error: ") and "give the path of one" in done.stderr
    for name, (kind, about) in ABOUT.items():
        if name != "README.md":
            (line,) = (line for line in done.stdout.splitlines() if line.split()[0] == name)
            assert kind in line and about in line
    assert "other files: README.md" in done.stdout
    as_json = run_command(verb, mixed, "--json")
    assert as_json.returncode == 10 and json.loads(as_json.stdout)["exit_code"] == 10


def test_ls_of_a_folder_without_steps_lists_it(mixed: Path, tmp_path: Path) -> None:
    done = run_command("ls", mixed / "deep" / "below" / "step-3")
    assert done.returncode == 0 and "a checkpoint itself: see ckpt inspect" in done.stdout
    (mixed / "alone" / "__0_0.distcp").unlink()
    done = run_command("ls", mixed / "alone")
    assert (
        done.returncode == 0 and done.stdout == "no steps; a checkpoint itself: see ckpt inspect\n"
    )
    done = run_command("ls", mixed / "model.safetensors")
    assert done.returncode == 10 and "ckpt inspect" in done.stderr
    (mixed / "step-7" / "__0_0.distcp").unlink()
    (mixed / "step-7").rmdir()
    done = run_command("ls", mixed)
    assert done.returncode == 0 and done.stdout.startswith("no steps\n")
    assert "2 steps, the newest is 10" in done.stdout and "/nowhere/x.pt" in done.stdout
    (tmp_path / "new").mkdir()
    assert "nothing lies here" in run_command("ls", tmp_path / "new").stdout


def test_only_the_first_hundred_are_opened_and_the_rest_is_counted(tmp_path: Path) -> None:
    for number in range(130):
        save_file({"w": torch.ones(1)}, tmp_path / f"{number}.safetensors")
    assert sum(one.is_opened for one in entries_of(tmp_path)) == 100
    done = run_command("ls", tmp_path)
    assert "… and 30 more, which were not opened" in done.stdout
    rows = [line.split()[0] for line in done.stdout.splitlines()[2:-1]]
    assert rows == [f"{number}.safetensors" for number in range(100)]


def test_a_folder_of_a_bucket_is_listed(server: Server, tmp_path: Path) -> None:
    server.bucket("mixed")
    for name in ("a/step-1", "a/step-2", "b/step-5"):
        ckpt_tools.save(
            f"s3://mixed/runs/{name}", {"w": torch.ones(4)}, storage_options=server.options
        )
    save_file({"w": torch.ones(4)}, tmp_path / "m.safetensors")
    ckpt_tools.copy(
        tmp_path / "m.safetensors",
        "s3://mixed/runs/m.safetensors",
        to_storage_options=server.options,
    )
    found = {one.name: one.about for one in entries_of("s3://mixed/runs", server.options)}
    assert found == {
        "a/": "2 steps, the newest is 2",
        "b/": "1 step, the newest is 5",
        "m.safetensors": "1 tensor",
    }


def test_threads_are_for_verbs_that_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ckpt_tools.CheckpointManager(run) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(4)})
    for verb in ("check", "latest"):
        done = run_command(verb, run, "-j", 2)
        assert done.returncode == 2 and "--jobs needs --verify" in done.stderr
        assert run_command(verb, run, "-j", 2, "--verify").returncode == 0
    assert run_command("prune", run, "--keep-last", 1, "-j", 2, "--verify").returncode == 0
