"""A Python whose possessive quantifiers lose matches (3.11.0 to 3.11.4) reads every checkpoint."""

from __future__ import annotations

import shutil
import site
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpt_tools
from tests.jobs import ROOT
from tests.states import one_step

SYSTEM = "/usr/bin/python3.11"  # of Debian 12: 3.11.2


def is_old() -> bool:
    if not shutil.which(SYSTEM):
        return False
    code = "import sys; print(sys.version_info < (3, 11, 5))"
    return subprocess.run([SYSTEM, "-c", code], capture_output=True, text=True).stdout == "True\n"


@pytest.mark.skipif(not is_old(), reason="no Python 3.11 below 3.11.5")
def test_it_reads_what_was_saved(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer = one_step(model, torch.ones(1, 4))
    state = {"model": model, "optimizer": optimizer}
    ckpt_tools.save(tmp_path / "ours", state)
    ckpt_tools.reshard(tmp_path / "ours", tmp_path / "eight", to_ranks=8)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    torch.save({"model": model.state_dict()}, tmp_path / "one.pt")
    environment = {"PYTHONPATH": f"{ROOT}:{site.getsitepackages()[0]}", "PATH": "/usr/bin:/bin"}
    for name in ("ours", "eight", "stock", "one.pt"):
        for verb in ("inspect", "verify"):
            words = [SYSTEM, "-m", "ckpt_tools", verb, str(tmp_path / name)]
            done = subprocess.run(
                words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, (name, verb, done.stderr)
