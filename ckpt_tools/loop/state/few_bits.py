"""Moments of few bits, as torchao's optimizers keep them: saved and loaded as plain tensors.

torchao keeps a moment as one tensor that consists of several: codes, a scale for each block of
elements, and for most kinds a table (`qmap`) of the codes' values. A save stores these under the
moment's name, sharded like the parameter. No pickle and no class is in the checkpoint. Imports
torch, and torchao only to make moments.

Source: torchao 0.18, `optim/subclass_8bit.py`, `subclass_4bit.py`, `subclass_fp8.py`, `adam.py`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim import Optimizer

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.placements import (
    Placement,
    ReplicatePlacement,
    ShardPlacement,
    StridedShardPlacement,
    rank_boxes,
)
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.state.shards import local_part

CODES, SCALE, TABLE = "codes", "scale", "qmap"
PARTS = (CODES, SCALE, TABLE)
_LEAST_NUMEL = 4096  # torchao keeps the moments of smaller parts of parameters plain


class _Kind(NamedTuple):
    """A class of torchao: its module, and how many elements one stored code has."""

    module: str
    name: str
    per_code: int
    has_table: bool


_KINDS = (
    _Kind("torchao.optim.subclass_8bit", "OptimState8bit", 1, True),
    _Kind("torchao.optim.subclass_4bit", "OptimState4bit", 2, True),
    _Kind("torchao.optim.subclass_fp8", "OptimStateFp8", 1, False),
)


def _kind_of(value: object) -> _Kind | None:
    """Returns the kind of a moment, or of this rank's part of it; None for a plain tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    found = type(local_part(value))
    where = (found.__module__, found.__name__)
    return next((kind for kind in _KINDS if (kind.module, kind.name) == where), None)


def take_apart(value: Any, optimizer: Optimizer) -> Any:
    """Returns the plain tensors of a moment of few bits by their part; any other value itself.

    They lie in the memory of the moment. If a rank's part of the moment does not end with a block,
    or some rank keeps its part plain, the result is one new tensor of float32, which is exact.

    Args:
        value: of the optimizer's state.
        optimizer: whose it is.
    """
    kind = _kind_of(value)
    if kind is None:
        return value.to(torch.float32) if _has_codes_elsewhere(value, optimizer) else value
    local: Any = local_part(value)
    if not _is_aligned(value, local.block_size):
        return _like(value, local.dequantize(torch.float32).reshape(local.shape), value.shape)

    def part(found: torch.Tensor, per: int) -> torch.Tensor:
        *lead, columns = local.shape
        shape = (*value.shape[:-1], value.shape[-1] // per)
        return _like(value, found.reshape(*lead, columns // per), shape)

    parts = {CODES: part(local.codes, kind.per_code), SCALE: part(local.scale, local.block_size)}
    return {**parts, TABLE: local.qmap} if kind.has_table else parts


def is_moment(value: object) -> bool:
    """Tells whether a value of an optimizer's state is a moment of few bits."""
    return _kind_of(value) is not None


def room_for(
    parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str
) -> torch.Tensor | None:
    """Returns memory for a part of a moment, sharded like its parameter; None for a table.

    Args:
        parameter: whose moment it is.
        shape, dtype: of the stored part.
        name: of the stored part.

    Raises:
        PlanError: the ranks of this job cut its blocks.
    """
    if shape[:-1] != tuple(parameter.shape[:-1]) or len(shape) != parameter.dim() or not shape:
        return None
    per = parameter.shape[-1] // max(1, shape[-1])
    if not per or parameter.shape[-1] != per * shape[-1]:
        return None
    if not _fits(parameter, per):
        raise PlanError(
            f"the ranks of this job cut blocks of a moment of few bits: {printable(name)!r},"
            f" {list(parameter.shape)} in blocks of {per}",
            hint="load it on as many ranks as have saved it, or a number that divides its rows"
            " evenly; or leave the optimizer out",
        )
    local = local_part(parameter)
    room = torch.zeros(
        (*local.shape[:-1], local.shape[-1] // per), dtype=dtype, device=local.device
    )
    return _like(parameter, room, shape)


def put_together(value: Any, parameter: torch.Tensor, name: str) -> Any:
    """Returns the moment of which a mapping has the parts; any other value itself.

    Args:
        value: of a loaded optimizer's state.
        parameter: whose moment it is.
        name: for messages.

    Raises:
        PlanError: torchao is not installed, or the parts make no moment.
    """
    if not isinstance(value, Mapping) or not {CODES, SCALE} <= value.keys() <= {*PARTS}:
        return value
    table = value.get(TABLE)
    kind = _KINDS[2] if table is None else _KINDS[0 if table.numel() == 256 else 1]
    try:
        made = getattr(importlib.import_module(kind.module), kind.name)
    except ImportError:
        raise PlanError(
            f"a moment of few bits needs torchao: {printable(name)!r} is a {kind.name}",
            hint="pip install torchao; or leave the optimizer out",
        ) from None
    local = local_part(parameter)
    codes, scale = local_part(value[CODES]), local_part(value[SCALE]).reshape(-1)
    how = {"dtype": parameter.dtype}
    if table is None:
        found = made(codes, scale, **how)
    else:
        table = table.to(local.device)
        more = () if kind.per_code == 1 else (local.shape,)
        codes = codes if kind.per_code == 1 else codes.reshape(-1)
        found = made(codes, scale, table, bool(table.min() < 0), *more, **how)
    return _like(parameter, found, parameter.shape)


def keep_float32(optimizer: Optimizer, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
    """Puts back moments of float32 that torch has cast to the type of their parameters.

    torchao's optimizers compute with moments of any type. Theirs are float32 where a save could not
    keep the blocks.
    """
    if not is_torchao(optimizer):
        return
    for parameter, values in state.items():
        for key, value in values.items():
            now = optimizer.state[parameter].get(key)
            is_cast = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
            if is_cast and value.dtype is torch.float32 and now.dtype is not torch.float32:
                optimizer.state[parameter][key] = value.to(now.device)


def is_torchao(optimizer: Optimizer) -> bool:
    """Tells whether an optimizer is one of torchao's, which compute with moments of any type."""
    return type(optimizer).__module__.startswith("torchao.")


def _has_codes_elsewhere(value: Any, optimizer: Optimizer) -> bool:
    """Tells whether another rank keeps codes of a moment that this rank keeps in a short type."""
    block = getattr(optimizer, "block_size", None)
    is_short = isinstance(value, DTensor) and value.dtype in (torch.bfloat16, torch.float16)
    if not is_short or not is_torchao(optimizer) or type(block) is not int:
        return False
    return any(b.numel >= _LEAST_NUMEL and b.numel % block == 0 for b in _boxes(value))


def _like(model: torch.Tensor, local: torch.Tensor, shape: Any) -> torch.Tensor:
    """Returns a tensor of this rank's part, with the mesh and the placements of another tensor."""
    if not isinstance(model, DTensor):
        return local
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local,
        model.device_mesh,
        model.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def _is_aligned(value: torch.Tensor, block: int) -> bool:
    """Tells whether every rank has whole blocks, and so many elements that it keeps codes."""
    return _fits(value, block) and all(
        not box.numel or box.numel >= _LEAST_NUMEL for box in _boxes(value)
    )


def _fits(value: torch.Tensor, block: int) -> bool:
    """Tells whether the last dim of every rank's part begins and ends with a block."""
    return bool(value.dim()) and all(
        box.offsets[-1] % block == 0 and box.sizes[-1] % block == 0 for box in _boxes(value)
    )


def _boxes(value: torch.Tensor) -> list[Box]:
    if not isinstance(value, DTensor):
        return [whole(value.shape)]
    mesh = value.device_mesh
    placements = [_placement(one) for one in value.placements]
    return [box for boxes in rank_boxes(value.shape, mesh.shape, placements) for box in boxes]


def _placement(placed: Any) -> Placement:
    if isinstance(placed, Replicate | Partial):
        return ReplicatePlacement()
    # torch's strided shard may be a subclass of the plain one, or not
    if type(placed) is Shard:
        return ShardPlacement(placed.dim)
    return StridedShardPlacement(placed.dim)
