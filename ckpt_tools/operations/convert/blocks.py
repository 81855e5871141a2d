"""Cuts and joins the scales of quantized weights as their codes are cut and joined.

A scale belongs to a block of codes. While names and layouts change, the scales are held back, and
the codes go the way of plain numbers. Then each relation between stored codes and new ones is
written down in blocks, and so relates the scales. Where a relation cuts a block, nothing fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckpt_tools.core.box import row_major_strides
from ckpt_tools.core.catalog import ChunkList, QuantizedWeight, TensorEntry
from ckpt_tools.core.grid import GridPlace, Relation
from ckpt_tools.core.quantized import weights_in
from ckpt_tools.core.relations import SourceIndexes, assemble, check_used_once
from ckpt_tools.engine.formulas import Rows
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.convert.map_file import KeyMap
from ckpt_tools.operations.convert.training_state import TrainingState
from ckpt_tools.operations.formulas_of import DEEPSEEK, DEEPSEEK_BLOCK, FormulaFinder
from ckpt_tools.operations.quantization_config import ToldByConfig

_BITS = 8  # of a code that is an element


@dataclass(frozen=True, slots=True)
class _Held:
    """A quantized weight with one scale for each block of its codes.

    Attributes:
        weight: as it is stored.
        codes, scales: its tensors, as they are stored.
        blocks: elements of a block along each dim.
        sizes: those that the scheme prescribes; 0 for none, as along a row with one scale.
        ending: of the name of the scales, which begins with the name of the codes.
    """

    weight: QuantizedWeight
    codes: TensorEntry
    scales: TensorEntry
    blocks: tuple[int, ...]
    sizes: tuple[int, ...]
    ending: str


@dataclass(frozen=True, slots=True)
class HeldScales:
    """A training state without the scales of its quantized weights, and these."""

    parts: TrainingState
    held: dict[str, _Held]  # by the stored name of the codes

    def put_back(self, parts: TrainingState, source: Source) -> TrainingState:
        """Returns a training state with the scales beside their codes.

        Args:
            parts: `self.parts`, with other names and layouts.
            source: where the tensors lie.

        Raises:
            PlanError: blocks of codes are cut, or a scale would have the name of another tensor.
        """
        if not self.held:
            return parts
        taken = [self.held[name].scales for name in _cut_codes(parts, self.held)]
        found = source.format.locate(source.store, taken)
        stored = {
            entry.stored_name: replace(
                entry,
                chunks=ChunkList(
                    c._replace(extent=found.get(c.extent, c.extent)) for c in entry.chunks
                ),
            )
            for entry in taken
        }
        model, indexes = dict[str, TensorEntry](), SourceIndexes()
        every, shapes = list[Relation](), {name: entry.shape for name, entry in stored.items()}
        for name, entry in parts.model.items():
            held = self._held_of(entry)
            if held is None:
                model[name] = entry
                continue
            scales = f"{name}{held.ending}"
            if scales in parts.model:
                raise PlanError(
                    f"two tensors would get one name: {printable(scales)!r}, the scales of a"
                    " quantized weight, and another"
                )
            if entry.relations:
                relations, shape = self._in_blocks(entry, scales)
                every += relations
                made = assemble(scales, shape, relations, stored, indexes)
            else:
                made = held.scales.named(scales)
            codes = entry.stored_name
            parts_of = (codes, made.stored_name)
            weight = QuantizedWeight(codes, held.weight.scheme, held.weight.bits, parts_of)
            model[name] = replace(entry, quantized=weight)
            model[scales] = replace(made, quantized=weight)
        check_used_once(every, shapes)
        return replace(parts, model=model, used=parts.used | stored.keys())

    def _held_of(self, entry: TensorEntry) -> _Held | None:
        """Returns the stored weight of which a tensor has codes; the first of several."""
        names = [relation.left.name for relation in entry.relations] or [entry.stored_name]
        return next((self.held[name] for name in names if name in self.held), None)

    def _in_blocks(self, entry: TensorEntry, scales: str) -> tuple[list[Relation], tuple[int, ...]]:
        """Returns the relations of scales, and their shape.

        Raises:
            PlanError: blocks are cut, or the tensor is made of codes and of other tensors.
        """
        found, blocks = list[Relation](), set[tuple[int, ...]]()
        for relation in entry.relations:
            held = self.held.get(relation.left.name)
            if held is None:
                raise PlanError(
                    f"{printable(entry.fqn)!r} would consist of a quantized weight, and of another"
                    f" tensor: {printable(relation.left.name)!r}",
                    hint="--dtype bf16 in the same command writes numbers",
                )
            made = _coarser(relation, held, entry.shape, scales)
            if made is None:
                raise PlanError(
                    f"a part of a quantized weight ({held.weight.scheme}) cannot be cut, joined or"
                    f" reordered here, since its blocks do not allow it:"
                    f" {printable(relation.left.name)!r}, to make {printable(entry.fqn)!r}",
                    hint="--dtype bf16 in the same command writes numbers; or convert the model"
                    " before you quantize it",
                )
            found.append(made[0])
            blocks.add(made[1])
        if len(blocks) != 1:
            raise PlanError(
                "quantized weights with blocks of different sizes cannot become one:"
                f" {printable(entry.fqn)!r}",
                hint="--dtype bf16 in the same command writes numbers",
            )
        (block,) = blocks
        return found, tuple(-(-d // b) for d, b in zip(entry.shape, block, strict=True))


def hold_scales(
    parts: TrainingState, source: Source, told: ToldByConfig, keys: KeyMap | None
) -> HeldScales:
    """Takes the scales of blocks out of a model. Its codes look like plain numbers then.

    The formula of a weight must be known for sure, and its scales must have no rules of their own.

    Args:
        parts: the training state.
        source: where it is stored.
        told: what a config tells of its codes.
        keys: the user's map, if there is one.
    """
    finder, held = FormulaFinder(source.catalog.tensors, told), dict[str, _Held]()
    by_stored = {entry.stored_name: entry for entry in parts.model.values()}
    with_state = {name for optimizer in parts.optimizers for name in optimizer.state}
    for weight in weights_in(parts.model.values()):
        if len(weight.parts) != 2 or not all(part in by_stored for part in weight.parts):
            continue
        codes, scales = (by_stored[part] for part in weight.parts)
        found = finder.find(weight, {})
        formula = None if isinstance(found, str) else found.formula
        if type(formula) is not Rows or formula.code.bits != _BITS or formula.zeros is not None:
            continue
        is_one = len(codes.shape) == len(scales.shape) > 1 and math.prod(codes.shape) > 0
        ending = scales.fqn.removeprefix(codes.fqn)
        if is_one and ending not in ("", scales.fqn) and scales.fqn not in with_state:
            sizes = _sizes_of(told, scales.fqn, len(codes.shape))
            held[codes.stored_name] = _Held(
                weight, codes, scales, formula.scales.blocks, sizes, ending
            )
    if keys is not None and any(_names_scales(keys, one) for one in held.values()):
        held = {}
    if not held:
        return HeldScales(parts, {})
    gone = {one.scales.stored_name for one in held.values()}
    model = {
        name: replace(entry, quantized=None) if entry.stored_name in held else entry
        for name, entry in parts.model.items()
        if entry.stored_name not in gone
    }
    return HeldScales(replace(parts, model=model), held)


def _sizes_of(told: ToldByConfig, scales: str, num_dims: int) -> tuple[int, ...]:
    """Returns the sizes of blocks that a scheme has along each dim; 0 for no fixed one."""
    blocks = told.blocks
    if not told.said and scales.endswith(DEEPSEEK):
        blocks = (DEEPSEEK_BLOCK,) * min(2, num_dims)
    return (0,) * (num_dims - len(blocks)) + blocks if len(blocks) <= num_dims else (0,) * num_dims


def _names_scales(keys: KeyMap, held: _Held) -> bool:
    """Tells whether a rule of a map is for the scales alone: then they follow the rules."""
    codes, scales = held.codes.fqn, held.scales.fqn
    whole = [rule["match"] for rule in keys.transforms] + [*keys.drop]
    found = any(p.fullmatch(scales) and not p.fullmatch(codes) for p in whole)
    return found or any(p.search(scales) and not p.search(codes) for p, *_ in keys.rename)


def _cut_codes(parts: TrainingState, held: dict[str, _Held]) -> list[str]:
    """Returns the stored names of the codes that are cut, joined or reordered."""
    names = (r.left.name for entry in parts.model.values() for r in entry.relations)
    return [name for name in dict.fromkeys(names) if name in held]


def _coarser(
    relation: Relation, held: _Held, shape: Sequence[int], scales: str
) -> tuple[Relation, tuple[int, ...]] | None:
    """Returns a relation of codes in blocks, and the sizes of the new blocks; None if it cuts any.

    Args:
        relation: of stored codes (left) with new ones (right).
        held: the stored weight.
        shape: of the new codes.
        scales: the name of the new scales.
    """
    left, right = _Side(relation.left, held.codes.shape), _Side(relation.right, shape)
    if left.has_no_dims(relation) or right.has_no_dims(relation):
        return None
    wanted = dict[int, int]()  # blocks along dims of the new codes
    sizes = list(relation.sizes)
    for dim, block in enumerate(held.blocks):
        axes = [axis for axis in left.axes_on(dim) if sizes[axis] > 1]
        if block == 1:
            if any(wanted.setdefault(right.dims[axis], 1) != 1 for axis in axes):
                return None
            continue
        length = held.codes.shape[dim]
        inner = next((axis for axis in axes if left.steps[axis] == 1), None)
        if inner is None:  # of a dim with several blocks or rows, one index is no block
            return None
        across = right.dims[inner]
        is_all = sizes[inner] == length == shape[across]
        # one scale for all of a dim: a result with two of them would be another scheme
        is_fixed = held.scales.shape[dim] > 1 or block == held.sizes[dim]
        is_fitting = is_all or (is_fixed and sizes[inner] % block == 0)
        if right.steps[inner] != 1 or not is_fitting:
            return None
        if wanted.setdefault(across, block) != block:
            return None
        # the other axes jump from block to block, along this dim or along one of their own
        others = [axis for axis in axes if axis != inner]
        along = [axis for axis in others if right.dims[axis] == across]
        jumps = [left.starts[dim], right.starts[across]]
        jumps += [left.steps[axis] for axis in others] + [right.steps[axis] for axis in along]
        apart = [right.dims[axis] for axis in others if axis not in along]
        if any(jump % block for jump in jumps) or any(wanted.setdefault(d, 1) != 1 for d in apart):
            return None
        if not is_all and (length % block or shape[across] % block):
            return None  # a block at the end is shorter
        sizes[inner] = -(-sizes[inner] // block)
        left.coarsen(dim, block, inner)
        right.coarsen(across, block, inner)
    blocks = tuple(wanted.get(dim, 1) for dim in range(len(shape)))
    whole = [-(-d // b) for d, b in zip(shape, blocks, strict=True)]
    made = Relation(
        tuple(sizes),
        left.place(held.scales.stored_name, held.scales.shape),
        right.place(scales, whole),
    )
    return made, blocks


class _Side:
    """Where the axes of a relation lie in a tensor: the dim of each, and its step there."""

    def __init__(self, place: GridPlace, shape: Sequence[int]) -> None:
        """Takes a place, and the shape of its tensor."""
        self._shape, strides = tuple(shape), row_major_strides(tuple(shape))
        self.starts, rest = list[int](), place.offset
        for stride in strides:
            start, rest = divmod(rest, max(stride, 1))
            self.starts.append(start)
        self.dims, self.steps = list[int](), list[int]()
        for stride in place.strides:
            dim = next((d for d, s in enumerate(strides) if 0 < s <= stride), -1)
            self.dims.append(dim)
            self.steps.append(stride // strides[dim] if dim >= 0 else 0)
        self._is_even = [s % strides[d] == 0 for s, d in zip(place.strides, self.dims, strict=True)]

    def has_no_dims(self, relation: Relation) -> bool:
        """Tells whether some axis does not stay within one dim."""
        return any(
            size > 1
            and (dim < 0 or not is_even or self.starts[dim] + step * (size - 1) >= self._shape[dim])
            for size, dim, step, is_even in zip(
                relation.sizes, self.dims, self.steps, self._is_even, strict=True
            )
        )

    def axes_on(self, dim: int) -> list[int]:
        """Returns the axes that lie along a dim."""
        return [axis for axis, found in enumerate(self.dims) if found == dim]

    def coarsen(self, dim: int, block: int, inner: int) -> None:
        """Counts blocks along a dim, where `inner` is the axis of neighbours."""
        self.starts[dim] //= block
        for axis in self.axes_on(dim):
            self.steps[axis] = 1 if axis == inner else self.steps[axis] // block

    def place(self, name: str, shape: Sequence[int]) -> GridPlace:
        """Returns the place in a tensor of another shape with the same dims."""
        strides = row_major_strides(tuple(shape))
        offset = sum(start * stride for start, stride in zip(self.starts, strides, strict=True))
        return GridPlace(
            name,
            offset,
            tuple(step * strides[dim] for step, dim in zip(self.steps, self.dims, strict=True)),
        )
