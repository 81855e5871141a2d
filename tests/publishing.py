"""A model that changes from step to step, and the versions of it that are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ckpt_tools import publish_version
from tests.versions import INDEX, State


def first_state() -> State:
    torch.manual_seed(0)
    return {
        **{f"layers.{i}.w": torch.randn(70, 513).bfloat16() for i in range(4)},
        "norm": torch.ones(7).bfloat16(),
        "head": torch.randn(300, 1001).bfloat16(),
        "none": torch.zeros(0, 4).bfloat16(),
        "count": torch.tensor(5),
    }


def next_state(state: State, part: float = 0.02) -> State:
    """Changes a part of all values but those of layer 2."""
    found = {name: values.clone() for name, values in state.items()}
    for name, values in found.items():
        if values.is_floating_point() and "layers.2" not in name:
            where = torch.rand(values.shape) < part
            values[where] = torch.randn(int(where.sum())).to(values.dtype)
    found["count"] += 1
    return found


def model_directory(folder: Path, state: State) -> Path:
    """A Hugging Face directory of two shards."""
    folder.mkdir()
    weight_map = {}
    for number in (1, 2):
        name = f"model-{number:05d}-of-00002.safetensors"
        part = {n: v for i, (n, v) in enumerate(state.items()) if i % 2 == number - 1}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"architectures": ["Mine"]}')
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


class Publisher:
    """A directory with a base, and the versions that were published, with their states."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.root, self.base = folder, folder / "root", folder / "base"
        self.states = [first_state()]
        model_directory(self.base, self.states[0])

    def publish(self, state: State | None = None, **how: Any) -> Any:
        self.states.append(next_state(self.states[-1]) if state is None else state)
        source = self.folder / f"source{len(self.states)}.safetensors"
        save_file(self.states[-1], source)
        if not (self.root / "weight_v000001").exists():
            how.setdefault("base", self.base)
        return publish_version(source, how.pop("root", self.root), partial=True, **how)


def version(root: Path, number: int) -> Path:
    return root / f"weight_v{number:06d}"
