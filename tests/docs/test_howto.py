"""The commands of docs/how-to/runs.md, as they are printed, on a run that has what they name."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tools import CheckpointManager
from tests.command import run_command

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "runs.md"
LINES = [
    line.partition("#")[0].strip()
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    for line in block.splitlines()
    if line.startswith("ckpt ")
]


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    model = torch.nn.ModuleDict({"layers": layers})
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("howto")
    keep = {"keep_last": None, "statistics": True}
    with CheckpointManager(folder / "run", **keep) as checkpoints:  # type: ignore[arg-type]
        for number, step in enumerate(range(500, 6000, 500)):
            checkpoints.save(step, state(step), metrics={"loss": 1 / (number + 1)})
    plain = {n: t.detach().clone() for n, t in state(1)["model"].state_dict().items()}
    save_file(plain, folder / "a.safetensors")
    torch.save(plain, folder / "c.pt")
    for name in ("llama", "tuned-a", "tuned-b"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"hidden_size": 4}))
        save_file(plain, folder / name / "model.safetensors")
    return folder


def test_the_commands_of_a_page_work_as_they_are_printed(work: Path) -> None:
    assert len(LINES) > 15
    said = {}
    for line in LINES:
        _, *words = shlex.split(line)
        done = run_command(*words, cwd=work, env=os.environ | {"COLUMNS": "200"})
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        said[line] = done.stdout
    assert "loss" in said["ckpt ls run --metrics"]
    made = (
        "report.html",
        "step.html",
        "difference.html",
        "weights.png",
        "mean.safetensors",
        "hf-mean",
    )
    assert all((work / name).exists() for name in made)
    assert (
        "thinned" not in said["ckpt ls run --metrics"]
        and "freed" in said["ckpt thin run --keep-full 3"]
    )
