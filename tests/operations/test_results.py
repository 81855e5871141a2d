"""What a result looks like on a disk: modes, long names, what is told of files that are no part of
it, and that a second run gives the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tools
from ckpt_tools import CheckpointManager, PlanError

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def src(tmp_path: Path) -> Path:
    state = {"model": {"a": torch.arange(3000.0).reshape(100, 30), "b": torch.ones(7)}, "step": 5}
    dcp.save(state, checkpoint_id=tmp_path / "src", no_dist=True)
    return tmp_path / "src"


def access(path: Path) -> str:
    """Mode, group and access list, as the system's own tools tell them."""
    listed = (
        subprocess.run(["getfacl", "-c", "-p", path], capture_output=True, text=True).stdout
        if shutil.which("getfacl")
        else ""
    )
    return f"{path.stat().st_mode:o} {path.stat().st_gid} {listed}"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("kind", ["plain", "setgid", "acl"])
def test_a_new_directory_has_the_mode_that_mkdir_gives(
    kind: str, umask: int, src: Path, tmp_path: Path
) -> None:
    above = tmp_path / "above"
    above.mkdir(0o755)
    if kind == "setgid":
        os.chown(above, -1, 12345)
        above.chmod(0o2775)
    if kind == "acl":
        if shutil.which("setfacl") is None:
            pytest.skip("no setfacl")
        subprocess.run(["setfacl", "-d", "-m", "u:12345:rwx,g::rwx,m::rwx", above], check=True)
    old = os.umask(umask)
    try:
        (above / "made").mkdir()
        ckpt_tools.reshard(src, above / "two", to_ranks=2)
        with CheckpointManager(above / "run") as checkpoints:
            checkpoints.save(1, {"w": torch.ones(3)}, asynchronous=False)
        (above / "run" / "made").mkdir()
    finally:
        os.umask(old)
    assert access(above / "two") == access(above / "made")
    assert access(above / "run" / "step-00000001") == access(above / "run" / "made")


@pytest.mark.parametrize("length", [200, 201, 222, 243, 255])
def test_names_as_long_as_a_file_system_takes(
    length: int, src: Path, tmp_path: Path, ckpt: Run
) -> None:
    for letter in ("x", "ä"):
        name = letter * ((length - len(".safetensors")) // len(letter.encode())) + ".safetensors"
        assert ckpt("merge", src, name, cwd=tmp_path).returncode == 0
        assert ckpt_tools.verify(tmp_path / name).is_sealed
        assert (
            ckpt("merge", src, name, "--overwrite", "--dtype", "bf16", cwd=tmp_path).returncode == 0
        )
        assert (
            ckpt_tools.verify(tmp_path / name).problems == []
            and len(list(tmp_path.glob(f"{letter}*.json"))) == 1
        )
    folder = "d" * length
    assert ckpt("reshard", src, folder, "--to", 2, cwd=tmp_path).returncode == 0
    assert ckpt("reshard", src, folder, "--to", 3, "--overwrite", cwd=tmp_path).returncode == 0
    assert ckpt_tools.verify(tmp_path / folder).problems == [] and not list(tmp_path.glob(".*"))


def test_two_long_names_with_one_beginning_have_manifests_of_their_own(
    src: Path, tmp_path: Path
) -> None:
    names = [f"{'x' * 230}{end}.safetensors" for end in "ab"]
    for name, dtype in zip(names, ("bf16", "fp32"), strict=True):
        ckpt_tools.merge(src, tmp_path / name, dtype=dtype)
    assert all(
        ckpt_tools.verify(tmp_path / name).is_sealed
        and not ckpt_tools.verify(tmp_path / name).problems
        for name in names
    )


def test_the_name_of_a_file_is_no_directory_of_shards(src: Path, tmp_path: Path, ckpt: Run) -> None:
    done = ckpt("merge", src, "m.safetensors", "--max-shard-size", "1kB", cwd=tmp_path)
    assert (
        done.returncode == 13
        and "hint: name the directory without .safetensors" in done.stderr
        and not (tmp_path / "m.safetensors").exists()
    )


def test_a_file_that_was_renamed_is_compared_with_the_manifest_beside_its_old_name(
    src: Path, tmp_path: Path, ckpt: Run
) -> None:
    ckpt_tools.merge(src, tmp_path / "old.safetensors")
    (tmp_path / "old.safetensors").rename(tmp_path / "new.safetensors")
    done = ckpt("verify", tmp_path / "new.safetensors")
    assert (
        done.returncode == 0
        and "it was renamed: old.safetensors.ckpt.manifest" in done.stdout
        and ": whole" in done.stdout
    )
    data = bytearray((tmp_path / "new.safetensors").read_bytes())
    data[9000] ^= 1
    (tmp_path / "new.safetensors").write_bytes(data)
    done = ckpt("verify", tmp_path / "new.safetensors")
    assert (
        "or of this one before it changed" in done.stdout
        and "not compared: the bytes of 1 file" in done.stdout
        and ": whole" not in done.stdout
    )


def test_files_that_no_save_wrote_are_named_by_verify(src: Path, tmp_path: Path, ckpt: Run) -> None:
    ckpt_tools.reshard(src, tmp_path / "two", to_ranks=2)
    (tmp_path / "two" / "eval.json").write_text("{}")
    (tmp_path / "two" / "hf").mkdir()
    (tmp_path / "two" / "hf" / "config.json").write_text("{}")
    done = ckpt("verify", tmp_path / "two")
    assert (
        done.returncode == 0
        and "2 files that no save wrote: eval.json, hf/config.json" in done.stdout
    )
    assert json.loads(ckpt("verify", tmp_path / "two", "--json").stdout)["extra"] == [
        "eval.json",
        "hf/config.json",
    ]
    (tmp_path / "two" / "__7_0.distcp").write_bytes(b"x")
    assert ckpt("verify", tmp_path / "two").returncode == 14  # it looks like a part


def test_ls_names_what_is_no_step(tmp_path: Path, ckpt: Run) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, asynchronous=False)
    for name in ("last.ckpt", "ep0-ba10.pt"):
        (tmp_path / "run" / name).write_bytes(b"x")
    (tmp_path / "run" / "ep1-ba20").mkdir()
    (tmp_path / "run" / "notes.txt").write_bytes(b"x")
    _, _, rest = ckpt("ls", tmp_path / "run").stdout.partition("not steps:\n")
    lines = {line.split()[0]: line for line in rest.splitlines()}
    assert lines["ep1-ba20/"].split() == ["ep1-ba20/", "folder", "0", "B", "empty"]
    assert "not read: " in lines["last.ckpt"] and "not read: " in lines["ep0-ba10.pt"]
    assert "  other files: notes.txt" in rest and "step-00000001" not in rest
    done = ckpt("ls", tmp_path / "run", "--json")
    assert "not steps: ep0-ba10.pt" in done.stderr and len(json.loads(done.stdout)) == 1


@pytest.mark.parametrize(
    "words", [["reshard", "--to", "3"], ["convert", "--to", "dcp", "--ranks", "2"]]
)
def test_a_second_run_gives_the_same_bytes(
    words: list[str], src: Path, tmp_path: Path, ckpt: Run
) -> None:
    for name in ("one", "two"):
        assert ckpt(words[0], src, tmp_path / name, *words[1:]).returncode == 0
    files = {
        p.name: p.read_bytes() for p in (tmp_path / "one").iterdir() if "manifest" not in p.name
    }
    assert (
        files
        == {
            p.name: p.read_bytes() for p in (tmp_path / "two").iterdir() if "manifest" not in p.name
        }
        and ".metadata" in files
    )


def test_directories_have_no_names_of_files(src: Path, tmp_path: Path) -> None:
    calls: list[Callable[[Path], object]] = [
        lambda dst: ckpt_tools.merge(src, dst, max_shard_bytes=1000),
        lambda dst: ckpt_tools.reshard(src, dst, to_ranks=2),
        lambda dst: ckpt_tools.convert(src, dst, to="dcp"),
        lambda dst: ckpt_tools.convert(src, dst, to="hf"),
        lambda dst: ckpt_tools.save(dst, {"a": 1}),
    ]
    for number, call in enumerate(calls):
        for suffix in (".safetensors", ".pt", ".npz"):
            with pytest.raises(PlanError, match="a directory is written, got the name of a file"):
                call(tmp_path / f"{number}{suffix}")
    assert not [p for p in tmp_path.iterdir() if p.suffix]
    for call in (calls[1], calls[4]):
        call(tmp_path / f"{calls.index(call)}.ckpt")  # as Lightning names its directories
    assert all((tmp_path / name / ".metadata").exists() for name in ("1.ckpt", "4.ckpt"))


def test_inspect_names_all_that_lies_there(src: Path, tmp_path: Path, ckpt: Run) -> None:
    both = tmp_path / "both"
    ckpt_tools.reshard(src, both / "step-1", to_ranks=1)
    (both / "last.ckpt").write_bytes(b"x")
    assert "also here: last.ckpt; give the path of one" in ckpt("inspect", both).stdout
    ckpt_tools.merge(src, both / "model.safetensors")
    assert "also here: step-1/; give the path of one" in ckpt("inspect", both).stdout
    (both / "model.safetensors").unlink()
    for path in both.glob("*.json"):
        path.unlink()
    shutil.copytree(both / "step-1", both / "step-2")
    done = ckpt("inspect", both)
    assert done.returncode == 10 and all(
        name in done.stdout for name in ("step-1/", "step-2/", "last.ckpt")
    )


@pytest.mark.parametrize("path", [".", "./", "..", "/"])
def test_a_destination_without_a_name_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The staging directory lay inside of it, and was taken for somebody's file."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="the destination has no name"):
        ckpt_tools.save(path, {"w": torch.ones(2)}, overwrite=True)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_there_keeps_its_name(tmp_path: Path) -> None:
    ckpt_tools.save(tmp_path / "x", {"w": torch.ones(2)})
    (tmp_path / "x").rename(tmp_path / "x.bin")
    ckpt_tools.save(tmp_path / "x.bin", {"w": torch.zeros(2)}, overwrite=True)
    assert ckpt_tools.open(tmp_path / "x.bin")["w"].torch().tolist() == [0.0, 0.0]


def test_a_load_that_is_not_strict_names_what_it_leaves_out(tmp_path: Path) -> None:
    ckpt_tools.save(tmp_path / "x", {"model": torch.nn.Linear(2, 2)})
    report = ckpt_tools.load(
        tmp_path / "x", {"model": torch.nn.Linear(2, 2, bias=False)}, strict=False
    )
    assert any("not in the state" in n and "model.bias" in n for n in report.notes), report.notes


def test_what_a_merge_leaves_out_has_its_own_name(tmp_path: Path) -> None:
    """A part of the model is not told as the whole of it."""
    model = {"l": {"w": torch.ones(3)}, "_extra_state": {"a": 1}, "frozen": torch.ones(5)}
    state = {"model": model, "optimizer": {"state": {"m": torch.ones(2)}, "param_groups": [1]}}
    ckpt_tools.save(tmp_path / "s", state)
    done = ckpt_tools.merge(tmp_path / "s", tmp_path / "m.safetensors", exclude=["frozen"])
    assert set(done.left_out) == {"model._extra_state", "model.frozen", "optimizer"}
