"""The commands of README and of the page on trust, as they are printed and in their order.

Those of the tutorial and of the how-to on runs are in test_tutorial.py and test_howto.py.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import torch

import ckpt_tools
from ckpt_tools import CheckpointManager
from tests.command import run_command
from tests.servers import servers
from tests.states import one_step

ROOT = Path(__file__).parents[2]


def commands(page: str) -> list[list[str]]:
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("$ ckpt ")]
    return [shlex.split(line.partition("#")[0])[2:] for line in lines]


def save_run(root: Path, ranks: int, step: int) -> None:
    """Saves a step, and spreads it over some ranks: `run8/step-00000100`."""
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(8)))
    optimizer = one_step(model, torch.ones(1, 40))
    name = f"step-{step:08d}"
    with CheckpointManager(root / "one") as checkpoints:
        checkpoints.save(step, {"model": model, "optimizer": optimizer}, asynchronous=False)
    ckpt_tools.reshard(root / "one" / name, root / f"run{ranks}" / name, to_ranks=ranks)


def test_those_of_the_readme(tmp_path: Path) -> None:
    save_run(tmp_path, 8, 100)
    found = commands("README.md")
    assert [words[0] for words in found] == ["inspect", "reshard", "merge"]
    for words in found:
        done = run_command(*words, cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr)
    assert ckpt_tools.verify(tmp_path / "run4" / "step-00000100").problems == []


def test_those_on_trust(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    save_run(tmp_path, 4, 500)
    step = tmp_path / "run" / "step-00000500"
    ckpt_tools.reshard(tmp_path / "run4" / step.name, step, to_ranks=2)
    for manifest in step.glob("ckpt.manifest*"):
        manifest.unlink()  # as another tool would have saved it
    with servers.running("moto", tmp_path_factory.mktemp("moto")) as server:
        server.bucket("bucket")
        where = f"s3://bucket/run/{step.name}"
        ckpt_tools.copy(tmp_path / "run4" / step.name, where, to_storage_options=server.options)
        found = commands("docs/trust.md")[:6]
        assert " ".join(words[0] for words in found) == "verify verify verify diff seal salvage"
        for words in found:
            done = run_command(*words, cwd=tmp_path, env=os.environ | server.environment)
            assert done.returncode == 0, (words, done.stdout, done.stderr)
    assert ckpt_tools.verify(tmp_path / "rescued").problems == []
