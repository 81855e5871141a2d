"""Other releases of torch, each in an environment of its own (gigabytes, so only in the long form):
what they save is read, what is written they load.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from tests.jobs import LONG

JOB = Path(__file__).with_name("torch_version_job.py")


def run(torch_of: Path, *words: object) -> str:
    """Runs the job on two ranks of another torch; returns what it said if it failed."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")
    } | {"CUDA_VISIBLE_DEVICES": ""}
    command = [
        torch_of / "bin" / "python",
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        JOB,
    ]
    done = subprocess.run(
        [*map(str, command), *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stderr[-3000:] if done.returncode else ""


@pytest.mark.skipif(not LONG, reason="installs gigabytes: CKPT_LONG=1")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "version", ["2.1.2", "2.3.1", "2.4.1", "2.6.0", "2.8.0", "2.10.0", "2.12.1", "2.15.0"]
)
def test_another_torch(version: str, tmp_path: Path) -> None:
    """DCP and files of DTensors that it saved on two ranks; what is written of them for three, it
    loads on two.
    """
    place = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    done = subprocess.run(
        [place / "bin" / "pip", "install", "-q", f"torch=={version}", "numpy<2"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(
            f"torch {version} cannot be installed here: {done.stderr.strip().splitlines()[-1]}"
        )
    assert run(place, "save", tmp_path) == ""
    want = torch.load(tmp_path / "whole.pt")["model"]
    for kind in ("dcp", "ranks"):
        assert ckpt_tools.verify(tmp_path / kind).problems == []
        ckpt_tools.merge(tmp_path / kind, tmp_path / f"{kind}.safetensors")
        got = load_file(tmp_path / f"{kind}.safetensors")
        assert got.keys() == want.keys() and all(
            torch.equal(got[name], value) for name, value in want.items()
        ), kind
    ckpt_tools.reshard(tmp_path / "dcp", tmp_path / "three", to_ranks=3)
    ckpt_tools.convert(tmp_path / "dcp", tmp_path / "one.pt", to="torch")
    ckpt_tools.convert(tmp_path / "one.pt", tmp_path / "again", to="dcp", ranks=3)
    # they know no StorageMeta, which every later release writes
    if version not in ("2.1.2", "2.3.1"):
        assert run(place, "load", tmp_path / "three", tmp_path / "again") == ""
    code = (
        "import sys, torch; torch.load(sys.argv[1], weights_only=True,"
        " mmap=True)['model']['rows'].sum()"
    )
    subprocess.run(
        [place / "bin" / "python", "-W", "ignore", "-c", code, tmp_path / "one.pt"], check=True
    )
