"""Weights that peers have quantized, with their own readers and transformers as the oracles."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import jobs
from tests.jobs import PYTHON_PATH
from tests.peers.environments import JOBS, python_of


@pytest.mark.parametrize("job", ["quantized_job.py", "packed_job.py", "quantize_job.py"])
def test_numbers_are_those_of_the_own_readers(job: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [python_of("quantized"), JOBS / job, tmp_path],
        env=os.environ | {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        cwd=jobs.ROOT,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
