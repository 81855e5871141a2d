"""Files that are no checkpoint: a page and a picture. Nothing is written through a planted link."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools import CheckpointManager, StorageError
from ckpt_tools.operations.report.plot import plot
from ckpt_tools.operations.report.report import report
from training.files import open_to_append, replace_file

PACKAGE = Path(ckpt_tools.__file__).parent
# where a file is opened for writing or renamed: the disk's store, and publishing
WRITERS = {
    "storage/local.py",
    "storage/stream.py",
    "publish",
    "run",
    "integrations",
    "cli/process.py",
    "ranks/base.py",  # the file that torchrun names
    "files.py",  # of training
    "extras/prepare.py",  # opens a new file only, and renames it
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "run", statistics=True) as checkpoints:
        for step in (1, 2):
            state = {"$x$": torch.full((4,), float(step)), r"$\frac{1}{": torch.ones(2)}
            checkpoints.save(step, state, asynchronous=False)
    return tmp_path / "run"


def write(kind: str, run: Path, output: Path, overwrite: bool) -> None:
    if kind == "page":
        report(run, output=output.with_suffix(".html"), overwrite=overwrite)
    else:
        plot(run, tensor=["*"], output=output.with_suffix(".svg"), overwrite=overwrite)


@pytest.mark.parametrize("kind", ["page", "picture"])
def test_nothing_is_written_through_a_planted_link(kind: str, run: Path, tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("mine")
    out.mkdir()
    name = "page.html" if kind == "page" else "page.svg"
    for planted in (f".tmp.{name}.{os.getpid()}", f".tmp.{name}", f"{name}.new", f"{name}.tmp"):
        (out / planted).symlink_to(victim)
    write(kind, run, out / "page", overwrite=False)
    assert victim.read_text() == "mine" and (out / name).stat().st_size > 1000
    before = (out / name).read_bytes()
    with pytest.raises(StorageError, match="it exists"):
        write(kind, run, out / "page", overwrite=False)
    (out / name).unlink()
    (out / name).symlink_to(victim)
    write(kind, run, out / "page", overwrite=True)
    assert victim.read_text() == "mine" and not (out / name).is_symlink()
    assert len((out / name).read_bytes()) == pytest.approx(len(before), rel=0.1)


def test_names_are_no_formulas_in_a_picture(run: Path, tmp_path: Path) -> None:
    write("picture", run, tmp_path / "picture", overwrite=False)
    assert (tmp_path / "picture.svg").stat().st_size > 1000


@pytest.mark.parametrize("planted", ["out", "half"])
def test_training_writes_through_no_planted_link(planted: str, tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "metrics.jsonl"
    victim.write_text("mine")
    if planted == "out":
        out.symlink_to(victim)
        with pytest.raises(OSError, match="symbolic links"):
            open_to_append(out)
    else:
        (tmp_path / ".metrics.jsonl").symlink_to(victim)
    replace_file(out, "text")
    assert out.read_text() == "text" and not out.is_symlink() and victim.read_text() == "mine"
    with open_to_append(out) as file:
        file.write("more")
    assert out.read_text() == "textmore" and sorted(tmp_path.glob(".*.*.*")) == []


@pytest.mark.parametrize("package", [PACKAGE, PACKAGE.parent / "training"], ids=lambda p: p.name)
def test_no_other_module_writes_files(package: Path) -> None:
    """A write elsewhere would not take the path of the commit."""
    found = []
    for path in package.rglob("*.py"):
        where = path.relative_to(package).as_posix()
        if where in WRITERS or where.split("/")[0] in WRITERS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            words = [a.value for a in node.args if isinstance(a, ast.Constant)]
            of = ast.unparse(node.func).partition(".")[0]
            flags = ast.unparse(node) if of == "os" and name == "open" else ""
            is_write = (
                name in ("write_text", "write_bytes", "symlink_to", "hardlink_to", "tofile")
                or (
                    of in ("torch", "np", "numpy")
                    and name.startswith("save")
                    and ast.unparse(node.args[-1]) != "buffer"  # in memory
                )
                or (of == "shutil" and name.startswith(("copy", "move")))
                or any(flag in flags for flag in ("O_CREAT", "O_WRONLY", "O_RDWR", "O_TRUNC"))
                or (
                    name == "open"
                    and any(
                        isinstance(w, str) and set(w) & set("wax") and len(w) < 4 for w in words
                    )
                )
            )
            if is_write:
                found.append(f"{where}:{node.lineno} {name}")
    assert not found
