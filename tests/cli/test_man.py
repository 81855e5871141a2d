"""The man page is that of the code, and a shell completes verbs, options, values and paths."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt_tools import CheckpointManager
from ckpt_tools.cli.help import VERBS
from ckpt_tools.cli.man import page
from tests.jobs import ROOT

PAGE = ROOT / "docs" / "reference" / "ckpt.1"


def test_the_page_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page(), "make man writes it anew"
    for name, about in VERBS.items():
        assert f".SS ckpt {name} " in page()
        assert all(line.replace("-", r"\-") in page() for line in about.examples)


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed")
def test_troff_takes_the_page_without_a_warning() -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", str(PAGE)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert "ckpt reshard run/step-00000500 four --from 8 --to 4" in done.stdout.replace("‐", "-")


def completed(line: str, cwd: Path) -> set[str]:
    """Returns what bash offers at the end of a command line."""
    script = f"""
        eval "$(ckpt --show-completion bash)"
        COMP_WORDS=({line}{' ""' if line.endswith(" ") else ""})
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _ckpt_completion ckpt
        printf '%s\\n' "${{COMPREPLY[@]}}"
        complete -p ckpt >&2
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert "-o default" in done.stderr  # with no words of ours, bash completes paths
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ckpt re", {"report", "reshard"}),
        ("ckpt convert a b --to h", {"hf"}),
        ("ckpt convert a b --to pe", {"peft", "per-rank"}),
        ("ckpt convert a b --map qkv", {"qkv_split", "qkv_fuse"}),
        ("ckpt merge a b --dtype fp", {"fp16", "fp32"} | {"fp64"}),
        ("ckpt report run --value m", {"max"}),
        ("ckpt average a b --schedule c", {"cosine"}),
        ("ckpt prune run --keep-l", {"--keep-last"}),
        ("ckpt inspect run/st", set()),
    ],
)
def test_bash_completes(line: str, words: set[str], tmp_path: Path) -> None:
    assert completed(line, tmp_path) == words


@pytest.mark.parametrize(
    "line", ["ckpt latest run --best ", "ckpt prune run --keep-best 2 --metric "]
)
def test_bash_completes_the_metrics_of_a_run(line: str, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", keep_last=None) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)}, metrics={"loss": 1.0, "accuracy": 0.5})
        checkpoints.save(2, {"w": torch.ones(2)}, metrics={"loss": 1.0})
    assert completed(line, tmp_path) == {"loss", "accuracy"}
    assert completed(f"{line}l", tmp_path) == {"loss"}
    assert completed(line.replace(" run ", " s3://bucket/run "), tmp_path) == set()
