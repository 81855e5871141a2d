"""torchrun's summary shows the reason of a failure in one line, and no traceback of a rank."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.jobs import ROOT, torchrun_command


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("-m", "training", "--set", "run.steps=-1"),
            "run.steps = -1: expected greater than or equal to 1",
        ),
        (("-m", "training", "nothing.toml"), "cannot read the configuration"),
        (("-m", "ckpt_tools", "merge", "nothing", "x.safetensors"), "no such path: nothing"),
        (
            ("-m", "training", "--set", "data.train='here.bin'", "--set", "run.dir='a/b'"),
            "here.bin",
        ),
    ],
)
def test_the_summary_has_the_reason(words: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    command = torchrun_command(2, *words, is_forked=False)
    done = subprocess.run(
        command, cwd=tmp_path, env=None, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0
    root_cause = done.stderr.partition("Root Cause")[2]
    (line,) = (line for line in root_cause.splitlines() if line.strip().startswith("traceback :"))
    assert reason in line, done.stderr
    assert "To enable traceback see" not in root_cause
    theirs = [line for line in done.stderr.splitlines() if line.lstrip().startswith('File "')]
    assert not [line for line in theirs if str(ROOT / "training") in line], done.stderr
