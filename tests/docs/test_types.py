"""A user's script with the common calls passes a strict type checker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT


@pytest.mark.slow
def test_a_users_script_is_clean_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    script = (ROOT / "tests" / "docs" / "user_code.py").read_text()
    (tmp_path / "right.py").write_text(script)
    wrong = script.replace("to_ranks=4", 'to_ranks="4"').replace("max_mbps=100", "mbps=100")
    (tmp_path / "wrong.py").write_text(wrong)
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    env = os.environ | {"MYPYPATH": str(ROOT)}
    cache = tmp_path / "cache"
    found = {}
    for name in ("right.py", "wrong.py"):
        done = subprocess.run(
            [*words, "--cache-dir", str(cache), name],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        found[name] = done.returncode, done.stdout
    shutil.rmtree(cache, ignore_errors=True)
    assert found["right.py"][0] == 0, found["right.py"][1]
    assert found["wrong.py"][0] == 1
    assert 'incompatible type "str"' in found["wrong.py"][1]
    assert 'Unexpected keyword argument "mbps"' in found["wrong.py"][1]
