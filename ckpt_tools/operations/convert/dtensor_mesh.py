"""Finds what per-rank files need beyond names: the mesh, the sharded tensors, the scheduler."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.naming import is_norm_buffer
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.base import TargetMesh
from ckpt_tools.formats.pickle.state import Path
from ckpt_tools.formats.torch_save import nested

_MESH = re.compile(r"(?P<device>[a-z]{1,16})(?::(?P<axis>\w{1,64})?)?")
_BUFFERS = ("inv_freq", "position_ids")
_SCHEDULERS: tuple[Path, ...] = (
    ("extra_state", "rank_0", "lr_scheduler"),
    ("lr_scheduler",),
    ("scheduler",),
)
VERL = "cuda:fsdp"


def mesh_of(text: str | None, known: str, sharded: Collection[str]) -> TargetMesh:
    """Returns the mesh of a job with one axis.

    Args:
        text: `DEVICE` or `DEVICE:AXIS`, as the user gave it; None for the source's mesh.
        known: the mesh that the source names. It may have several axes; the last one shards.
        sharded: names of the tensors that are sharded along that axis.

    Raises:
        PlanError: the text has another form.
    """
    if text is None:
        device, _, axes = (known or VERL).partition(":")
        text = f"{device}:{axes.rpartition(',')[2]}"
    match = _MESH.fullmatch(text)
    if not match:
        raise PlanError(
            f"--mesh {printable(text)!r}: expected a device's type and the name of its axis",
            hint=f"as verl has it: {VERL}",
        )
    return TargetMesh(match["device"], match["axis"] or "", frozenset(sharded))


def find_sharded(model: Mapping[str, TensorEntry], trained: Collection[str]) -> set[str]:
    """Returns the names of a model's tensors that FSDP2 shards: its parameters.

    All ranks hold whole buffers.

    A tensor is a parameter if an optimizer has state for it, or if it was sharded. If the saving
    job sharded any tensor, its whole tensors are buffers. If it sharded none, each tensor of a
    floating type counts as a parameter, except for buffers with well-known names.
    """
    cut = {
        name
        for name, entry in model.items()
        if any(box != whole(entry.shape) for box in entry.chunks.kinds())
    }

    def is_parameter(name: str, entry: TensorEntry) -> bool:
        if name in trained or name in cut:
            return True
        is_buffer = is_norm_buffer(name) or name.rpartition(".")[2] in _BUFFERS
        is_number = entry.dtype.is_castable
        if not entry.shape or not is_number or is_buffer:
            return False
        return not cut or entry.shape[0] == 1  # a single row cannot be sharded

    return {name for name, entry in model.items() if is_parameter(name, entry)}


def sharded_state(catalog: Catalog, sharded: Collection[str]) -> set[str]:
    """Returns the sharded names in a catalog of `model.NAME` and numbered optimizer state.

    These are parameters, and state of their shape.
    """
    tensors = catalog.tensors
    names = {f"model.{name}" for name in sharded} & tensors.keys()
    shapes = {tensors[name].shape for name in names}
    return names | {
        name for name, t in tensors.items() if name.startswith("optim.state.") and t.shape in shapes
    }


def scheduler_of(values: Mapping[str, Any], paths: Mapping[str, Path]) -> tuple[Any, list[str]]:
    """Returns a scheduler's state (None without one), and the top-level keys of other values.

    DCP stores nothing for an empty dict, which LambdaLR has for a function without state. So a
    scheduler without own fields is such a LambdaLR.
    """
    mine: dict[str, Path] = {}
    for above in _SCHEDULERS:
        mine = mine or {
            f: path[len(above) :]
            for f, path in paths.items()
            if f in values and path[: len(above)] == above != path
        }
    state = nested({fqn: values[fqn] for fqn in mine}, mine) if mine else None
    if isinstance(state, dict) and "base_lrs" in state and state.keys() <= _OF_ALL:
        state["lr_lambdas"] = [None] * len(state["base_lrs"])
    return state, sorted({str(paths.get(fqn, (fqn,))[0]) for fqn in values if fqn not in mine})


_OF_ALL = {
    "base_lrs",
    "last_epoch",
    "verbose",
    "_step_count",
    "_get_lr_called_within_step",
    "_last_lr",
    "_is_initial",
}
