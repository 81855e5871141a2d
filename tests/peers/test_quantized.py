"""Weights that bitsandbytes has quantized, with transformers as the oracle."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests import jobs
from tests.jobs import PYTHON_PATH
from tests.peers.environments import JOBS, python_of


def test_a_cast_leaves_the_weights_of_bitsandbytes_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [python_of("quantized"), JOBS / "quantized_job.py", tmp_path],
        env=os.environ | {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=jobs.ROOT,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
