"""Moments of few bits, as torchao's optimizers keep them: saved and loaded as plain tensors.

torchao keeps a moment as one tensor that consists of several: codes, a scale for each block of
elements, and for most kinds a table (`qmap`) of the codes' values. A save stores these under the
moment's name, sharded like the parameter. No pickle and no class is in the checkpoint. Imports
torch, and torchao only to make moments.

Source: torchao 0.18, `optim/subclass_8bit.py`, `subclass_4bit.py`, `subclass_fp8.py`, `adam.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt_tools.core.box import Box
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.state.shards import (
    BoxTensor,
    boxes_of_ranks,
    local_part,
    local_shards,
    shared_like,
)

CODES, SCALE, TABLE = "codes", "scale", "qmap"
PARTS = (CODES, SCALE, TABLE)
_NUM_8BIT, _NUM_4BIT = 256, 16  # numbers in a table
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


def parts_of_moment(value: Any, optimizer: Optimizer | None, key: str, for_loading: bool) -> Any:
    """Returns the plain tensors of a moment of few bits by their part; any other value itself.

    They lie in the memory of the moment. If a rank's part of the moment does not end with a block,
    or some rank keeps its part plain, the result is one new tensor of float32, which is exact.

    Args:
        value: of the optimizer's state.
        optimizer: whose it is; None if all ranks are known to have codes of it.
        key: of the value.
        for_loading: a load follows, so only this rank's own form matters.
    """
    kind = _kind_of(value)
    if kind is None:
        return value if for_loading else _as_elsewhere(value, optimizer, key)
    local: Any = local_part(value)
    is_whole = _fits(value, local.block_size) and (for_loading or _is_kept_everywhere(value))
    if not is_whole:
        return shared_like(value, local.dequantize(torch.float32).reshape(local.shape), value.shape)
    return _parts(value, local, kind)


def parts_of_shared_moment(value: torch.Tensor, name: str, for_loading: bool) -> Any:
    """Returns the plain tensors of a moment of few bits without its optimizer; any other itself.

    Args:
        value: of a state dict.
        name: for messages.
        for_loading: a load follows, so the tensors must lie in the memory of the moment.

    Raises:
        PlanError: some rank has no codes of it; or a load would need other memory.
    """
    kind = _kind_of(value)
    if kind is None:
        return value
    local: Any = local_part(value)
    is_everywhere = all(box.numel >= _LEAST_NUMEL for box in boxes_of_ranks(value))
    fits = _fits(value, local.block_size)
    if is_everywhere and (fits or not for_loading):
        return parts_of_moment(value, None, "", for_loading)
    why = "their blocks are cut" if is_everywhere else "some rank's part is kept in full"
    raise PlanError(
        f"dcp keeps no codes of a moment that ranks share: {why} ({printable(name)!r})",
        hint="CheckpointManager and ckpt_tools.save and load can: they know the optimizer",
    )


def _parts(value: torch.Tensor, local: Any, kind: _Kind) -> dict[str, torch.Tensor]:
    """Returns the parts of a moment, given as a whole and as this rank's part."""
    *lead, columns = local_part(value).shape

    def part(found: torch.Tensor, per: int) -> torch.Tensor:
        shape = (*value.shape[:-1], value.shape[-1] // per)
        return shared_like(value, found.reshape(*lead, columns // per), shape)

    parts = {CODES: part(local.codes, kind.per_code), SCALE: part(local.scale, local.block_size)}
    return {**parts, TABLE: local.qmap} if kind.has_table else parts


def _as_elsewhere(value: Any, optimizer: Optimizer | None, key: str) -> Any:
    """Returns a plain moment of this rank in the form that the others give it.

    A rank without elements has empty parts. A short type becomes float32, if another rank has codes
    of a moment that is stored as float32.
    """
    block = getattr(optimizer, "block_size", None)
    is_moment = isinstance(value, DTensor) and value.is_floating_point() and value.dim() > 0
    if not is_moment or type(block) is not int or not is_torchao(optimizer):
        return value
    boxes = [box for box in boxes_of_ranks(value) if box.numel]
    is_each = [box.numel >= _LEAST_NUMEL and box.numel % block == 0 for box in boxes]
    local = local_part(value)
    if boxes and all(is_each) and _fits(value, block) and not local.numel():
        empty = _own_form(optimizer, key, local.device)
        kind = _kind_of(empty)
        assert kind is not None
        empty.codes, empty.scale = empty.codes.reshape(-1)[:0], empty.scale[:0]
        return _parts(value, empty, kind)
    is_short = value.dtype in (torch.bfloat16, torch.float16)
    return value.to(torch.float32) if is_short and any(is_each) else value


def _own_form(optimizer: Any, key: str, device: torch.device) -> Any:
    """Returns a moment of one block, as an optimizer of torchao makes it."""
    room = torch.zeros(optimizer.block_size, device=device)
    return optimizer._subclass_zeros(room, key == "exp_avg", optimizer.block_size)


def are_parts(value: object) -> bool:
    """Tells whether a value has the parts of a moment."""
    return isinstance(value, Mapping) and {CODES, SCALE} <= value.keys() <= {*PARTS}


def is_moment(value: object) -> bool:
    """Tells whether a value of an optimizer's state is a moment of few bits."""
    return _kind_of(value) is not None


def rooms_for(
    parameter: torch.Tensor, stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, torch.Tensor]:
    """Returns memory for the parts of a moment, sharded like its parameter.

    If this job's ranks cut blocks, a rank gets memory for all blocks that it has elements of. For a
    parameter of another shape than the stored one, the memory has another shape, too.

    Args:
        parameter: whose moment it is.
        stored: shape and type of each part.
    """
    per_code = 2 if TABLE in stored and stored[TABLE][0] == (_NUM_4BIT,) else 1
    codes, scale = stored[CODES][0], stored[SCALE][0]
    block = codes[-1] * per_code // scale[-1] if codes and scale and scale[-1] else 0
    local, rooms = local_part(parameter), dict[str, torch.Tensor]()
    is_cut = block > 0 and not _fits(parameter, block)
    fits = bool(codes) and (*codes[:-1], codes[-1] * per_code) == parameter.shape
    for part, (shape, dtype) in stored.items():
        per = {CODES: per_code, SCALE: block}.get(part, 0)
        if per and is_cut and parameter.dim():
            other = (*parameter.shape[:-1], -(-parameter.shape[-1] // per))
            box = _blocks_of(parameter, block, per)
            rooms[part] = BoxTensor(shape if fits else other, box, dtype)
            continue
        if not per or not _fits(parameter, per):
            rooms[part] = torch.zeros(shape, dtype=dtype, device="cpu")
            continue
        sizes = (*local.shape[:-1], local.shape[-1] // per)
        room = torch.zeros(sizes, dtype=dtype, device=local.device)
        rooms[part] = shared_like(
            parameter, room, (*parameter.shape[:-1], parameter.shape[-1] // per)
        )
    return rooms


def _blocks_of(parameter: torch.Tensor, block: int, per: int) -> Box:
    """Returns the box of codes or scales that has all blocks of which this rank has elements.

    Args:
        parameter: whose moment it is.
        block: elements of a block.
        per: elements of a code or a scale.
    """
    own = _own_box(parameter)
    first, stop = own.offsets[-1] // block, -(-own.ends[-1] // block)
    offsets = (*own.offsets[:-1], first * block // per)
    return Box(offsets, (*own.sizes[:-1], (stop - first) * block // per if own.numel else 0))


def _own_box(parameter: torch.Tensor) -> Box:
    """Returns the box of a parameter that this rank has."""
    none = Box((0,) * parameter.dim(), (0,) * parameter.dim())
    return next((shard.box for shard in local_shards({"": parameter})), none)


def is_cut(value: Any) -> bool:
    """Tells whether the parts of a moment were loaded for a rank that cuts their blocks."""
    return are_parts(value) and isinstance(value[SCALE], BoxTensor)


def moment_of_parts(value: Any, parameter: torch.Tensor, optimizer: Optimizer, name: str) -> Any:
    """Returns the moment of which a mapping has the parts; any other value itself.

    It is float32 if this job's ranks cut its blocks.

    Args:
        value: of a loaded optimizer's state.
        parameter: whose moment it is.
        optimizer: whose state it is.
        name: for messages.

    Raises:
        PlanError: the optimizer is not one of torchao's, or the parts make no moment here.
    """
    if not are_parts(value):
        return value
    if not is_torchao(optimizer):
        raise PlanError(
            f"a moment of few bits needs an optimizer of torchao: {printable(name)!r}, and this one"
            f" is a {type(optimizer).__name__}",
            hint="make the optimizer as it was made for the save; or leave it out",
        )
    local, table = local_part(parameter), value.get(TABLE)
    codes, scale = local_part(value[CODES]), local_part(value[SCALE])
    kind = next((k for k in _KINDS if _is_of(k, codes, table)), None)
    if kind is not None and is_cut(value):
        return shared_like(parameter, _own_numbers(value, parameter, kind), parameter.shape)
    if not local.numel():  # torchao keeps nothing of it
        return shared_like(parameter, torch.zeros_like(local), parameter.shape)
    per_code, blocks = kind.per_code if kind else 1, scale.shape[-1] if scale.dim() else 0
    # what is not sharded like the parameter belongs to one of another shape
    is_sharded_alike = all(isinstance(value[part], DTensor) for part in (CODES, SCALE))
    fits = (
        (is_sharded_alike or not isinstance(parameter, DTensor))
        and blocks > 0
        and (*codes.shape[:-1], codes.shape[-1] * per_code) == tuple(local.shape)
        and scale.shape[:-1] == local.shape[:-1]
        and local.shape[-1] % blocks == 0
    )
    if kind is None or not fits:
        raise PlanError(
            f"the parts of a moment of few bits do not fit: {printable(name)!r} has"
            f" codes {codes.dtype} {list(codes.shape)} and scales {list(scale.shape)} on this rank,"
            f" for a parameter of {list(local.shape)}",
            hint="the parameter has another shape, or a part was left out: leave the optimizer out",
        )
    scale = scale.reshape(-1)
    made, how = getattr(importlib.import_module(kind.module), kind.name), {"dtype": parameter.dtype}
    if table is None:
        found = made(codes, scale, **how)
    else:
        table = table.to(local.device)
        more = () if kind.per_code == 1 else (local.shape,)
        codes = codes if kind.per_code == 1 else codes.reshape(-1)
        found = made(codes, scale, table, bool(table.min() < 0), *more, **how)
    return shared_like(parameter, found, parameter.shape)


def _own_numbers(value: Any, parameter: torch.Tensor, kind: _Kind) -> torch.Tensor:
    """Returns this rank's numbers of a moment whose blocks its ranks cut, as float32."""
    codes, scale, own = local_part(value[CODES]), local_part(value[SCALE]), _own_box(parameter)
    local = local_part(parameter)
    if not local.numel():
        return torch.zeros_like(local, dtype=torch.float32)
    if kind.per_code == 2:  # the first of two lies in the upper half
        codes = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(-2)
    values = value[TABLE][codes.int()] if kind.has_table else codes.to(torch.float32)
    block = codes.shape[-1] // scale.shape[-1]
    numbers = values.unflatten(-1, (scale.shape[-1], block)) * scale.unsqueeze(-1)
    numbers = numbers.flatten(-2).narrow(-1, own.offsets[-1] % block, own.sizes[-1])
    found: torch.Tensor = numbers.to(local.device, torch.float32).contiguous()
    return found


def _is_of(kind: _Kind, codes: torch.Tensor, table: torch.Tensor | None) -> bool:
    """Tells whether parts are those of a kind."""
    if table is None:
        return not kind.has_table and codes.dtype is torch.float8_e4m3fn
    numbers = _NUM_4BIT if kind.per_code == 2 else _NUM_8BIT
    return kind.has_table and codes.dtype is torch.uint8 and table.shape == (numbers,)


def notes_on(optimizer: Any, name: str) -> list[str]:
    """Returns a note if the moments of an optimizer differ in kind from those that it makes."""
    if not is_torchao(optimizer) or type(getattr(optimizer, "block_size", None)) is not int:
        return []
    values = [value for state in optimizer.state.values() for value in state.values()]
    moments: list[Any] = [local_part(value) for value in values if is_moment(value)]
    notes = _notes_on_plain(optimizer, values, name)
    found = {f"{type(one).__name__} in blocks of {one.block_size}" for one in moments}
    own = _own_form(optimizer, "", torch.device("cpu")) if found else None
    mine = f"{type(own).__name__} in blocks of {optimizer.block_size}"
    if not found - {mine}:
        return notes
    saved = ", ".join(sorted(found))
    what = f"moments stay as they were saved, {saved}; a new optimizer would have {mine}"
    return [f"{name}: {what}", *notes]


def _notes_on_plain(optimizer: Any, values: Sequence[Any], name: str) -> list[str]:
    """Returns a note on moments of float32 of which a new optimizer would have codes."""
    plain = [
        value
        for value in values
        if isinstance(value, torch.Tensor)
        and value.dim()
        and local_part(value).dtype is torch.float32
        and local_part(value).numel() >= _LEAST_NUMEL
        and local_part(value).numel() % optimizer.block_size == 0
    ]
    if not plain:
        return []
    return [
        f"{name}: {len(plain):,} moments are float32, as they were saved or loaded, and stay so"
    ]


def notes_on_cut(names: Sequence[str], name: str) -> list[str]:
    """Returns a note on the moments of an optimizer whose blocks this job's ranks cut."""
    if not names:
        return []
    some = f"{printable(names[0])}{', …' * (len(names) > 1)}"
    why = f"the ranks of this job cut the blocks of {len(names):,} moments of few bits"
    return [f"{name}: {why}, which are loaded as float32, with the same numbers: {some}"]


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


def is_torchao(optimizer: object) -> bool:
    """Tells whether an optimizer is one of torchao's, which compute with moments of any type."""
    return any(one.__module__.startswith("torchao.") for one in type(optimizer).__mro__)


def _is_kept_everywhere(value: torch.Tensor) -> bool:
    """Tells whether every rank has so many elements of a moment that it keeps codes."""
    return all(not box.numel or box.numel >= _LEAST_NUMEL for box in boxes_of_ranks(value))


def _fits(value: torch.Tensor, block: int) -> bool:
    """Tells whether the last dim of every rank's part begins and ends with a block."""
    return bool(value.dim()) and all(
        box.offsets[-1] % block == 0 and box.sizes[-1] % block == 0 for box in boxes_of_ranks(value)
    )
