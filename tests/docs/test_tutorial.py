"""The tutorial, followed literally."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r'^```(python title="([\w.]+)"|console)\n(.*?)^```$', re.M | re.S)


@pytest.mark.slow
def test_the_tutorial_works_as_it_stands(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    said = ""
    for _, name, text in BLOCK.findall(PAGE.read_text()):
        if name:
            (tmp_path / name).write_text(text)
            continue
        for line in text.splitlines():
            words = line.removeprefix("$ ").split()
            done = subprocess.run(
                words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            said += done.stdout
    for text in ("step 40,", "began at 41", "model.0.weight", "whole"):
        assert text in said
    assert "StoredTensor('model.0.weight', float32, [64, 32])" in said
    assert (tmp_path / "model.safetensors").is_file()
