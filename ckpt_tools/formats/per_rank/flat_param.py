"""FSDP1's flat parameters, as LOCAL_STATE_DICT saves them.

A flat parameter is one vector of all parameters of a unit, cut into equal parts for the ranks. The
files do not say where each parameter lies. `shapes.json` beside them, or the file of `--shapes`,
gives every parameter's shape in the order of `model.named_parameters()`. With `use_orig_params`,
each rank also has its part of each parameter by name, as a vector.

Source: torch 2.13 `torch/distributed/fsdp/_flat_param.py`, `_state_dict_utils.py`; confirmed on
files that jobs wrote.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt_tools.core.box import Box, flat_range_boxes
from ckpt_tools.core.catalog import Chunk, Extent, TensorEntry
from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import FormatError, printable
from ckpt_tools.formats.base import SHAPES
from ckpt_tools.formats.pickle.state import Path, ShardedTensorShard, TensorView, is_number
from ckpt_tools.storage import Store, read

FLAT = "_flat_param"
_ALIGNMENT_BYTES = 16
_MAX_SHAPES_BYTES = 64 << 20
HINT = (
    f"give --shapes FILE: the config.json of a model that transformers knows, or {SHAPES}, made"
    " where the model can be: json.dump({n: list(p.shape) for n, p in model.named_parameters()},"
    f" open('{SHAPES}', 'w')); on the meta device it needs no memory"
)
Shapes = Mapping[str, tuple[int, ...]]


def read_shapes(store: Store, files: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes from `shapes.json`, in its order; empty without such a file.

    Raises:
        FormatError: the file is malformed.
    """
    if SHAPES not in files:
        return {}
    try:
        if files[SHAPES] > _MAX_SHAPES_BYTES:
            raise ValueError(f"{files[SHAPES]} bytes")
        body = json.loads(read(store, SHAPES))
        if not all(type(n) is int and 0 <= n < 1 << 48 for shape in body.values() for n in shape):
            raise ValueError("expected lists of sizes")
        return {str(name): tuple(shape) for name, shape in body.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{SHAPES} is malformed: {printable(str(error))} ({printable(store.url)})", hint=HINT
        ) from error


def units(flats: Sequence[str], shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the parameters of each flat parameter.

    They are the parameters below its module that belong to no inner unit.
    """
    prefixes = sorted((name.removesuffix(FLAT) for name in flats), key=len, reverse=True)
    found: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in flats}
    for fqn, shape in shapes.items():
        owner = next((p for p in prefixes if fqn.startswith(p)), None)
        if owner is not None:
            found[f"{owner}{FLAT}"][fqn] = shape
    return found


def places(
    shapes: Shapes, dtype: DType, num_elements: int, num_ranks: int, where: str
) -> dict[str, int]:
    """Returns where each parameter begins in the vector of its unit.

    The length of the vector shows whether the parameters are aligned.

    Raises:
        FormatError: the shapes do not add up to this length.
    """
    packed, end = {}, 0
    for fqn, shape in shapes.items():
        packed[fqn] = end
        end += math.prod(shape)
    aligned, at = {}, 0
    unit = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
    for fqn, shape in shapes.items():
        at += -at % unit
        aligned[fqn] = at
        at += math.prod(shape)
    if num_elements == end:
        return packed
    if num_elements in (at, at + -at % num_ranks):
        return aligned
    raise FormatError(
        f"{SHAPES} does not fit: {where} has {num_elements} elements, its {len(shapes)} parameters"
        f" have {end} ({at} with alignment)",
        hint=HINT,
    )


def unflatten(
    entry: TensorEntry, shapes: Shapes, starts: Mapping[str, int]
) -> Iterator[TensorEntry]:
    """Yields the parameters of a vector, with the boxes that its chunks hold."""
    for fqn, shape in shapes.items():
        first, chunks = starts[fqn], []
        last = first + math.prod(shape)
        for box, extent in entry.chunks:
            low, high = max(first, box.offsets[0]), min(last, box.offsets[0] + box.sizes[0])
            if low < high:
                at = extent.start + (low - box.offsets[0]) * entry.dtype.itemsize
                for part in flat_range_boxes(shape, low - first, high - first):
                    nbytes = part.numel * entry.dtype.itemsize
                    chunks.append(Chunk(part, extent._replace(start=at, nbytes=nbytes, crc32=None)))
                    at += nbytes
        yield TensorEntry(fqn, entry.dtype, shape, tuple(chunks))


# ---- the state of a job --------------------------------------------------------------------------


class RankValue(NamedTuple):
    """The entry of one rank: a tensor or a value from the pickle, and the extents of its parts."""

    value: object
    extents: tuple[Extent, ...]


Raw = dict[Path, dict[int, RankValue]]


def has_flats(raw: Raw) -> bool:
    """Tells whether flat parameters are among the entries."""
    return any(path and str(path[-1]).endswith(FLAT) for path in raw)


def unfold_flat_params(
    raw: Raw, shapes: Shapes, num_ranks: int, others: Counter[str]
) -> dict[Path, TensorEntry]:
    """Takes flat parameters, and the optimizers' state for them, out of the entries.

    Returns the parameters, by name.

    Args:
        raw: all entries. Taken entries are removed.
        shapes: of all parameters, in order.
        num_ranks: ranks of the job.
        others: counts optimizers with an unknown numbering of parameters; ckpt leaves them out.

    Raises:
        FormatError: there are no shapes, or they do not fit.
    """
    flats = [path for path in raw if path and str(path[-1]).endswith(FLAT)]
    if not shapes:
        raise FormatError(
            "no shapes for the parts of an FSDP1 flat parameter:"
            f" {printable('.'.join(map(str, flats[0])))!r}",
            hint=HINT,
        )
    result: dict[Path, TensorEntry] = {}
    for container in dict.fromkeys(path[:-1] for path in flats):
        names = [str(path[-1]) for path in raw if path[:-1] == container]
        mine = [name for name in names if name.endswith(FLAT)]
        parts = units(mine, shapes)
        starts = {}
        for name in mine:
            entry = _vector(name, raw.pop((*container, name)))
            starts[name] = places(parts[name], entry.dtype, entry.shape[0], num_ranks, name)
            result |= {(*container, t.fqn): t for t in unflatten(entry, parts[name], starts[name])}
        by_name = [name for name in names if name in shapes]
        for name in by_name:  # these are parts of parameters that the vector holds too
            del raw[(*container, name)]
        for root in optimizers(raw, container):
            if by_name:
                owners = [
                    (dict([item]), {item[0]: 0}) for item in shapes.items() if item[0] in by_name
                ]
            else:
                owners = [(parts[name], starts[name]) for name in names if name in parts]
            result |= unfold_optimizer(raw, root, owners, bool(by_name), others)
    order = {fqn: number for number, fqn in enumerate(shapes)}
    # in the model's order
    return dict(sorted(result.items(), key=lambda item: order.get(str(item[0][-1]), len(order))))


def _vector(name: str, held: Mapping[int, RankValue]) -> TensorEntry:
    """Returns a unit's vector from the pieces of all ranks."""
    chunks, kinds = [], set()
    for item in held.values():
        if not isinstance(item.value, ShardedTensorShard) or len(item.value.shape) != 1:
            raise FormatError(f"a flat parameter is not a vector: {printable(name)!r}")
        kinds.add((item.value.dtype, item.value.shape))
        chunks += [
            Chunk(box, extent)
            for (_, box), extent in zip(item.value.parts, item.extents, strict=True)
        ]
    if len(kinds) != 1:
        raise FormatError(f"ranks disagree about a flat parameter: {printable(name)!r}")
    ((dtype, shape),) = kinds
    return TensorEntry(name, dtype, shape, tuple(chunks))


def optimizers(raw: Raw, container: Path) -> list[Path]:
    """Returns the paths of optimizers beside a model that number flat parameters.

    Such an optimizer has one group, or one group per unit.
    """
    roots = dict.fromkeys(
        path[:-3] for path in raw if len(path) > 2 and path[-3] == "state" and is_number(path[-2])
    )
    return [root for root in roots if root[:-1] == container[:-1] or not container[:-1]]


def unfold_optimizer(
    raw: Raw,
    root: Path,
    owners: Sequence[tuple[Shapes, Mapping[str, int]]],
    is_local: bool,
    others: Counter[str],
) -> dict[Path, TensorEntry]:
    """Takes an optimizer's vectors out of the entries; number n belongs to `owners[n]`.

    The numbers in its groups become names.

    Args:
        raw: all entries.
        root: the optimizer's path.
        owners: for each number, its parameters and their starts in its vector.
        is_local: a rank's vector is its own part of the parameter, not an equal share.
        others: see `unfold_flat_params`.
    """
    lists = [
        path
        for path in raw
        if path[: len(root)] == root and path[-1] == "params" and path[-3:-2] == ("param_groups",)
    ]
    numbers = [n for path in lists for n in _numbers(raw[path])]
    if numbers != list(range(len(owners))):  # several groups in an unknown order
        others["optimizer that numbers its parameters in an order of its own"] += 1
        for path in [p for p in raw if p[: len(root)] == root]:
            del raw[path]
        return {}
    result: dict[Path, TensorEntry] = {}
    for path in [
        p
        for p in raw
        if len(p) > len(root) + 2
        and p[: len(root) + 1] == (*root, "state")
        and is_number(p[-2])
        and int(p[-2]) < len(owners)
    ]:
        (owner, starts), key = owners[int(path[-2])], path[-1]
        held = raw.pop(path)
        first = next(iter(held.values())).value
        if not isinstance(first, TensorView):  # such as a step that is a number
            raw |= {(*root, "state", fqn, key): held for fqn in owner}
            continue
        at, chunks = 0, []
        for rank in sorted(held):
            view = held[rank].value
            if (
                not isinstance(view, TensorView)
                or view.dtype != first.dtype
                or len(view.sizes) != len(first.sizes)
            ):
                raise FormatError(
                    "ranks disagree about an optimizer's state:"
                    f" {printable('.'.join(map(str, path)))!r}"
                )
            numel = math.prod(view.sizes)
            start = at if is_local else rank * numel
            chunks.append(Chunk(Box((start,), (numel,)), held[rank].extents[0]))
            at = start + numel
        for fqn, shape in owner.items():
            name: Path = (*root, "state", fqn, key)
            if first.sizes:
                vector = TensorEntry(fqn, first.dtype, (at,), tuple(chunks))
                (result[name],) = unflatten(vector, {fqn: shape}, {fqn: starts[fqn]})
            else:
                # replicas: whoever reads them compares them
                scalars = tuple(Chunk(Box((), ()), chunk.extent) for chunk in chunks)
                result[name] = TensorEntry(fqn, first.dtype, (), scalars)
    names = [list(owner) for owner, _ in owners]
    for path in lists:
        raw[path] = {
            rank: RankValue([fqn for n in _numbers({rank: held}) for fqn in names[n]], ())
            for rank, held in raw[path].items()
        }
    return result


def _numbers(held: Mapping[int, RankValue]) -> list[int]:
    value = next(iter(held.values())).value
    return [n for n in value if type(n) is int] if isinstance(value, list) else []
