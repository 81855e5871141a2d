"""The table of `docs/convert.md` that says which parts go along to which target: each cell is
tried.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import ckpt_tools
from ckpt_tools.operations.convert.targets import TARGETS
from tests.conftest import HERE

WHERE = {
    "dcp": "out",
    "torch": "out.pt",
    "accelerate": "out",
    "per-rank": "out",
    "deepspeed-universal": "out",
    "safetensors": "out.safetensors",
    "hf": "out",
}


def rows() -> dict[str, list[str]]:
    text = (
        (HERE.parent / "docs" / "convert.md")
        .read_text()
        .partition("## Which parts go along")[2]
        .partition("\n## ")[0]
    )
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    return {name.strip().strip("`"): row[1:] for row in cells for name in row[0].split(",")}


def source(folder: Path) -> Path:
    """A job's directory: model, optimizer, scheduler, progress and other files."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.named_parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    torch.save({"python": 1}, folder / "rng_state.pth")
    return folder


def read_back(to: str, path: Path) -> dict[str, Any]:
    """All values by name, by torch's own readers."""
    if to == "torch":
        return flat(torch.load(path, weights_only=True))
    if to == "dcp":
        state = dict.fromkeys(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
        names = {
            name: (
                torch.zeros(meta.size, dtype=meta.properties.dtype)
                if hasattr(meta, "size")
                else None
            )
            for name, meta in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items()
        }
        dcp.load(state := names, checkpoint_id=path, no_dist=True)
        return state
    report = ckpt_tools.inspect(path)
    return {**report.catalog.tensors, **report.catalog.objects}


def flat(value: Any, above: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            name: item
            for key, inner in value.items()
            for name, item in flat(inner, f"{above}{key}.").items()
        }
    return {above.rstrip("."): value}


def has(names: dict[str, Any], *words: str) -> bool:
    return any(all(word in name for word in words) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("to", WHERE)
def test_the_table_of_parts_is_true(to: str, tmp_path: Path) -> None:
    model, optimizer, scheduler, _, beside = rows()[to]
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    more = (
        {"base": tmp_path / "base"}
        if to == "hf"
        else {"mesh": "cpu:fsdp"}
        if to == "per-rank"
        else {}
    )
    result = ckpt_tools.convert(source(tmp_path / "job"), tmp_path / WHERE[to], to=to, **more)
    names = read_back(to, tmp_path / WHERE[to])
    told = "\n".join([*result.notes, *result.left_out])
    assert has(names, "weight") and model.startswith(("yes", "what is trained"))
    assert has(names, "exp_avg") == optimizer.startswith("yes") or (
        to in ("safetensors", "hf") and "optimizer" in told
    )
    assert optimizer == "no" or optimizer.startswith("yes")
    if scheduler == "yes, as values":
        assert has(names, "scheduler", "step_size") and has(names, "global_step")
    elif to == "accelerate":
        assert (tmp_path / "out" / "scheduler.pt").exists() and (
            tmp_path / "out" / "trainer_state.json"
        ).exists()
    elif scheduler == "the scheduler":
        states = [
            torch.load(p, weights_only=False) for p in (tmp_path / "out").glob("extra_state_*")
        ]
        assert states and all(state["lr_scheduler"]["step_size"] == 7 for state in states)
    elif scheduler == "as client state":
        (path,) = (tmp_path / "out").glob("mp_rank_00_model_states.pt")
        assert "step_size" in str(torch.load(path, weights_only=False))
    else:
        assert scheduler == "no" and not has(names, "step_size")
    if beside == "named":
        assert "rng_state.pth" in told
    elif to == "accelerate":
        assert list((tmp_path / "out").glob("rng_state*"))
    else:
        assert (tmp_path / "out" / "config.json").exists() == (to == "hf")


def test_the_table_has_every_target() -> None:
    assert set(rows()) == set(TARGETS) == {*WHERE, "peft"}


def test_the_help_has_every_target(ckpt: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    shown = ckpt("convert", "--help").stdout.split()
    assert {word.strip(".,│") for word in shown} >= set(TARGETS)
