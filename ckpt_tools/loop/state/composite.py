"""Weights that consist of several tensors, such as torchao's quantized ones, as plain tensors.

torch calls them traceable wrapper subclasses: one tensor to the outside, codes and scales inside. A
save stores each tensor inside under a name of its own, as torchao names them in safetensors files:
`0.weight` becomes `0._weight_qdata` and `0._weight_scale`. Under `0.weight` lies a description. No
pickle and no class is in the checkpoint. A load fills the tensors inside, where they lie. Imports
torch, and nothing of torchao.

Source: torchao 0.18, `prototype/safetensors/`, `quantization/quantize_/workflows/`,
`prototype/quantized_training/int8.py`.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.state.few_bits import is_moment
from ckpt_tools.loop.state.shards import boxes_of_ranks, is_sharded, local_part, shared_like
from ckpt_tools.loop.state.unchanged import memory_of

# classes whose tensors have the dims of the weight, in elements or in blocks; one that lacks a dim,
# or has size 1 there, is for all of it
_ALIGNED = frozenset(
    {
        "Float8Tensor",
        "Int8QuantizedTrainingLinearWeight",
        "Int8Tensor",
        "IntxUnpackedToInt8Tensor",
    }
)
_CUT = frozenset(
    {"qdata", "int_data", "scale", "zero_point"}
)  # which of their tensors ranks may share
# classes whose tensors are one row of blocks, and those of these tensors that are for all blocks
_FLAT = {"NF4Tensor": frozenset({"scaler_mean", "nf4"})}


class Composite(NamedTuple):
    """A weight that consists of several tensors.

    Attributes:
        value: the live weight.
        parts: its live tensors, by the names that a checkpoint gives them.
        described: its class, and what of it the tensors do not tell, as JSON.
    """

    value: torch.Tensor
    parts: Mapping[str, torch.Tensor]
    described: str


def as_composite(name: str, value: object, is_proved: bool = True) -> Composite | None:
    """Returns the tensors of a weight that consists of several; None for any other value.

    A wrapper around one tensor of the same shape and type is that tensor: it has no composite.

    Args:
        name: of the weight; that of each part is made from it.
        value: of a module's state dict.
        is_proved: copies are compared before they are stored once.

    Raises:
        PlanError: ranks share the weight, and how they cut its tensors is not known.
    """
    if not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter):
        return None
    local = local_part(value) if isinstance(value, DTensor) else value
    if is_sharded(local) or not is_traceable_wrapper_subclass(local) or is_moment(value):
        return None
    inside = {key: getattr(local, key) for key in local.__tensor_flatten__()[0]}
    first = next(iter(inside.values()))
    if len(inside) == 1 and (first.shape, first.dtype) == (local.shape, local.dtype):
        return None
    parts = {
        f"{part_front(name)}{key}": _as_shared(name, value, local, key, one, is_proved)
        for key, one in inside.items()
    }
    return Composite(value, parts, _described(value, local, list(inside)))


def _as_shared(
    name: str, value: torch.Tensor, local: torch.Tensor, key: str, part: Any, is_proved: bool
) -> torch.Tensor:
    """Returns one of the tensors inside a weight, shared among the ranks as the weight is.

    Args:
        name, value: of the weight.
        local: this rank's part of it.
        key, part: the tensor inside, and its name there.
        is_proved: as for `as_composite`.

    Raises:
        PlanError: its place in the whole is not known.
    """
    if type(part) is not torch.Tensor:
        raise PlanError(
            f"a weight consists of tensors that are not plain: {type(local).__name__}.{key} is"
            f" {type(part).__name__} ({printable(name)!r})"
        )
    if not isinstance(value, DTensor):
        return part
    cut = {placed.dim for placed in value.placements if hasattr(placed, "dim")}
    kind = type(local).__name__
    if cut and kind in _FLAT:
        shape, split = _flat(name, value, local, key, part)
    elif not cut or (kind in _ALIGNED and key in _CUT):
        shape, split = _aligned(name, value, local, key, part, cut)
    else:
        raise PlanError(
            f"how ranks cut {key} of a {kind} is not known ({printable(name)!r})",
            hint="give each rank all of it, as DDP does; or save the numbers, in a plain tensor",
        )
    if split != cut and not is_proved and key not in _FLAT.get(kind, ()):
        raise PlanError(
            f"one {key} may be for all ranks, or one rank's own, and copies are not compared here:"
            f" {printable(name)!r}, a {kind}",
            hint="CheckpointManager and ckpt_tools.save compare them",
        )
    placements = [
        placed
        if isinstance(placed, Partial) or getattr(placed, "dim", None) in split
        else Replicate()
        for placed in value.placements
    ]
    return shared_like(value, part, shape, placements)


def _aligned(
    name: str,
    value: torch.Tensor,
    local: torch.Tensor,
    key: str,
    part: torch.Tensor,
    cut: AbstractSet[int],
) -> tuple[list[int], AbstractSet[int]]:
    """Returns the shape of a whole tensor inside, and which of its dims ranks share."""
    shape, split = list(part.shape), set[int]()
    for dim in sorted(cut):
        mine, count = local.shape[dim], part.shape[dim] if dim < part.dim() else 1
        if count == 1 and mine != 1:
            continue  # one for all
        per = mine // count if count else 1  # elements of a block
        borders = {
            edge for box in boxes_of_ranks(value) for edge in (box.offsets[dim], box.ends[dim])
        }
        if per * count != mine or any(edge % per for edge in borders):
            raise PlanError(
                f"the ranks cut blocks of a weight: {printable(name)!r}, {key}"
                f" {list(part.shape)} for {list(local.shape)} on this rank",
                hint="choose a number of ranks that leaves its blocks whole",
            )
        shape[dim] = value.shape[dim] // per
        split.add(dim)
    return shape, split


def _flat(
    name: str, value: torch.Tensor, local: torch.Tensor, key: str, part: torch.Tensor
) -> tuple[list[int], AbstractSet[int]]:
    """Returns the shape of a whole row of blocks, and which of its dims ranks share."""
    if key in _FLAT[type(local).__name__]:
        return list(part.shape), set()
    sizes = {box.sizes for box in boxes_of_ranks(value)}
    rows = [box.sizes[1:] == tuple(value.shape[1:]) for box in boxes_of_ranks(value)]
    if len(sizes) > 1 or not all(rows) or not local.numel() or part.dim() != 1:
        raise PlanError(
            f"ranks have parts of different sizes, or other than rows: {printable(name)!r}, a"
            f" {type(local).__name__}",
            hint="choose a number of ranks that divides its rows",
        )
    return [part.numel() * (value.numel() // local.numel())], {0}


def _described(value: torch.Tensor, local: Any, keys: Sequence[str]) -> str:
    """Returns the class of a weight, its shape and type, and what else its tensors do not tell.

    Of classes that ranks may share, sizes of blocks are left out: the shapes tell them, and a
    rank's may be those of its part. Settings of how to compute with the weight are left out, too.
    """
    context, kind = local.__tensor_flatten__()[1], type(local).__name__
    every = context if isinstance(context, Mapping) else dict(enumerate(_listed(context)))
    is_known = kind in _ALIGNED or kind in _FLAT
    plain = (bool, float, str) if is_known else (bool, float, str, int, list, tuple)
    kept = {str(k): v for k, v in every.items() if isinstance(v, plain) and _is_json(v)}
    told = {**kept, "dtype": str(local.dtype).removeprefix("torch."), "shape": list(value.shape)}
    about = {"_type": kind, "_data": told, "_tensor_data_names": list(keys)}
    return json.dumps(about, sort_keys=True)


def _listed(context: object) -> Sequence[object]:
    return context if isinstance(context, list | tuple) else [context]


def _is_json(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def check_kind(name: str, stored: object, described: str) -> None:
    """Compares the stored description of a weight with that of the state.

    Raises:
        PlanError: the weight is of another class or shape, or its tensors mean something else.
    """
    if stored != described:
        raise PlanError(
            f"a quantized weight is of another kind: {printable(name)!r} was saved as"
            f" {printable(str(stored))}, and the state has {described}",
            hint="quantize the model as it was quantized for the save",
        )


def refuse_names(weight: Composite, others: Container[str]) -> None:
    """Refuses an entry with the name of a part of a weight.

    Raises:
        PlanError: there is one.
    """
    taken = next((part for part in weight.parts if part in others), None)
    if taken is not None:
        raise PlanError(
            "an entry has the name of a part of a weight that consists of several tensors:"
            f" {printable(taken)!r}",
            hint="give the entry another name",
        )


def part_front(name: str) -> str:
    """Returns how the names of a composite weight's parts begin."""
    front, dot, last = name.rpartition(".")
    return f"{front}{dot}_{last}_"


def not_live(
    composites: Mapping[str, Composite], modules: Iterable[torch.nn.Module]
) -> dict[str, Composite]:
    """Returns the composites whose memory is not that of a weight of the modules.

    A hook has made them. The module has to take them back; the others are filled where they lie.
    """
    there = set[object]()
    for module in modules if composites else ():
        for value in (*module.parameters(), *module.buffers()):
            found = as_composite("", value)
            there |= {memory_of(part) for part in found.parts.values()} if found else set()
    return {
        name: found
        for name, found in composites.items()
        if any(memory_of(part) not in there for part in found.parts.values())
    }


def check_parts(
    composites: Mapping[str, Composite],
    taken: Container[str],
    what: str,
    described: Container[str] = (),
) -> None:
    """Refuses to save or load some tensors of a weight, and not all: codes need their scales.

    Args:
        composites: by flat name, with the flat names of their parts.
        taken: names that are saved or loaded.
        what: happens to the others, for the message.
        described: names of weights whose description is loaded: never without the tensors.

    Raises:
        PlanError: with the name of such a tensor.
    """
    for name, found in composites.items():
        lost = [part for part in found.parts if part not in taken]
        if lost and (len(lost) < len(found.parts) or name in described):
            raise PlanError(
                f"a part of a weight {what}: {printable(lost[0])!r} of {printable(name)!r}",
                hint="take all of its parts, or none",
            )
