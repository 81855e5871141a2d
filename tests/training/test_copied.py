"""Files that a newcomer copies: an empty project with a ViT has two of them, and nothing else."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.command import run_job
from tests.jobs import torchrun_command
from tests.training.runs import QUIET

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("vit.py")


def train(project: Path, num_ranks: int, name: str) -> dict[str, list[float]]:
    out = project / "losses.json"
    words = torchrun_command(num_ranks, project / "vit.py", project / name, out, is_forked=False)
    done = run_job(words, env=os.environ | QUIET, cwd=project, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def plain_losses(project: Path) -> dict[str, list[float]]:
    """The same training without a mesh or FSDP, in this process."""
    sys.path.insert(0, str(project))
    try:
        vit = importlib.import_module("vit")
        initialize = importlib.import_module("initialize")
    finally:
        sys.path.remove(str(project))
        for name in ("vit", "initialize", "parallel"):
            sys.modules.pop(name, None)
    with torch.device("meta"):
        model = vit.ViT()
    values = initialize.FirstValues(model, vit.fill, 0, torch.device("cpu"))
    for module in model.modules():
        values.materialize(module, torch.device("cpu"))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), {}
    for step in range(1, 7):
        images, labels = vit.images_of(step)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[str(step)] = [loss.item(), norm.item()]
    return losses


def test_a_vit_trains_with_two_copied_files(tmp_path: Path) -> None:
    for path in (ROOT / "training/parallel.py", ROOT / "training/initialize.py", SCRIPT):
        shutil.copy(path, tmp_path)
    ours = train(tmp_path, 2, "run") | train(tmp_path, 1, "run")
    expected = plain_losses(tmp_path)
    assert list(ours) == list(expected) == list("123456")
    for step, pair in expected.items():
        assert ours[step] == pytest.approx(pair, rel=1e-4), step
