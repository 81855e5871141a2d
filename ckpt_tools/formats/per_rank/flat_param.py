"""FSDP1's flat parameters, as LOCAL_STATE_DICT saves them.

A flat parameter is one vector of all parameters of a unit, cut into equal parts for the ranks. The
files do not say where each parameter lies. `shapes.json` beside them, or the file of `--shapes`,
gives every parameter's shape in the order of `model.named_parameters()`. With `use_orig_params`,
each rank also has its part of each parameter by name, as a vector.

Source: torch 2.13 `torch/distributed/fsdp/_flat_param.py`, `_state_dict_utils.py`; confirmed on
files that jobs wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt_tools.core.box import Box, flat_range_boxes
from ckpt_tools.core.catalog import Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import FormatError, printable
from ckpt_tools.formats.base import SHAPES
from ckpt_tools.formats.builder import UnreadValues
from ckpt_tools.formats.pickle.state import Path, ShardedTensorShard, TensorView, is_number
from ckpt_tools.storage import Store, read
from ckpt_tools.storage.small_files import parse_json

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
        body = parse_json(read(store, SHAPES))
        if not all(type(n) is int and 0 <= n < 1 << 48 for shape in body.values() for n in shape):
            raise ValueError("expected lists of sizes")
        return {str(name): tuple(shape) for name, shape in body.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{SHAPES} is malformed: {printable(str(error))} ({printable(store.url)})", hint=HINT
        ) from error


def units(flats: Sequence[str], shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the parameters of each flat parameter.

    They are the parameters below its module that belong to no inner unit.
    """
    found: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in flats}
    for fqn, shape in shapes.items():
        module = fqn
        while module:  # from the innermost module outwards
            module = module.rpartition(".")[0]
            owner = f"{module}.{FLAT}" if module else FLAT
            if owner in found:
                found[owner][fqn] = shape
                break
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
        yield TensorEntry(fqn, entry.dtype, shape, ChunkList(chunks))


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
    raw: Raw, shapes: Shapes, num_ranks: int, others: UnreadValues
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
    of_containers: dict[Path, list[str]] = {path[:-1]: [] for path in flats}
    for path in raw:
        if path and path[:-1] in of_containers:
            of_containers[path[:-1]].append(str(path[-1]))
    for container, names in of_containers.items():
        result |= _unfold_container(raw, container, names, shapes, num_ranks, others)
    order = {fqn: number for number, fqn in enumerate(shapes)}
    # in the model's order
    return dict(sorted(result.items(), key=lambda item: order.get(str(item[0][-1]), len(order))))


def _unfold_container(
    raw: Raw,
    container: Path,
    names: Sequence[str],
    shapes: Shapes,
    num_ranks: int,
    others: UnreadValues,
) -> dict[Path, TensorEntry]:
    """Takes the flat parameters of one model, and its optimizers' state, out of the entries."""
    result: dict[Path, TensorEntry] = {}
    parts = units([name for name in names if name.endswith(FLAT)], shapes)
    starts = {}
    for name in parts:
        entry = _vector(name, raw.pop((*container, name)))
        starts[name] = places(parts[name], entry.dtype, entry.shape[0], num_ranks, name)
        result |= {(*container, t.fqn): t for t in unflatten(entry, parts[name], starts[name])}
    covered = {fqn for unit in parts.values() for fqn in unit}
    by_name = {name for name in names if name in shapes}
    for name in by_name & covered:  # a part of a parameter that the vector holds too
        del raw[(*container, name)]
    for name in names if by_name else ():  # a second name of a tied parameter has no shape
        if name not in shapes and name not in parts and _is_cut(raw, container, name):
            others[_TIED] += 1
            others.foreign[(*container, name)] = _TIED
            del raw[(*container, name)]
    if by_name:
        owners = [(dict([item]), {item[0]: 0}) for item in shapes.items() if item[0] in by_name]
    else:
        owners = [(parts[name], starts[name]) for name in names if name in parts]
    for root in optimizers(raw, container):
        if covered.issuperset(by_name):
            result |= unfold_optimizer(raw, root, owners, bool(by_name), others)
        else:  # some parameters are outside of all units
            leave_out(raw, root, others)
    return result


_TIED = "a part of a parameter whose shape is not in shapes.json"


def _is_cut(raw: Raw, container: Path, name: str) -> bool:
    """Tells whether ranks have vectors of different lengths under one name."""
    values = [item.value for item in raw.get((*container, name), {}).values()]
    views = [v for v in values if isinstance(v, TensorView) and len(v.sizes) == 1]
    return len(views) == len(values) and len({v.sizes for v in views}) > 1


def _vector(name: str, held: Mapping[int, RankValue]) -> TensorEntry:
    """Returns a unit's vector from the pieces of all ranks.

    Raises:
        FormatError: a piece is malformed, or a file has the number of another rank.
    """
    chunks, kinds, begun = [], set(), 0
    for _, item in sorted(held.items()):
        if not isinstance(item.value, ShardedTensorShard) or len(item.value.shape) != 1:
            raise FormatError(f"a flat parameter is not a vector: {printable(name)!r}")
        kinds.add((item.value.dtype, item.value.shape))
        for _, box in item.value.parts:
            if box.offsets[0] < begun:
                raise FormatError(
                    f"files of ranks have changed places: {printable(name)!r}",
                    hint="moments would get the places of another rank: give the files their names",
                )
            begun = box.offsets[0]
        chunks += [
            Chunk(box, extent)
            for (_, box), extent in zip(item.value.parts, item.extents, strict=True)
        ]
    if len(kinds) != 1:
        raise FormatError(f"ranks disagree about a flat parameter: {printable(name)!r}")
    ((dtype, shape),) = kinds
    return TensorEntry(name, dtype, shape, ChunkList(chunks))


def optimizers(raw: Raw, container: Path) -> list[Path]:
    """Returns the paths of optimizers beside a model that number flat parameters.

    Such an optimizer has one group, or one group per unit.
    """
    roots = dict.fromkeys(
        path[:-3] for path in raw if len(path) > 2 and path[-3] == "state" and is_number(path[-2])
    )
    return [root for root in roots if root[:-1] == container[:-1] or not container[:-1]]


def leave_out(raw: Raw, root: Path, others: UnreadValues) -> None:
    """Takes an optimizer out of the entries, because its numbers are not known."""
    kind = "optimizer that numbers its parameters in an order of its own"
    others[kind] += 1
    others.foreign[root] = kind
    for path in [p for p in raw if p[: len(root)] == root]:
        del raw[path]


def unfold_optimizer(
    raw: Raw,
    root: Path,
    owners: Sequence[tuple[Shapes, Mapping[str, int]]],
    is_local: bool,
    others: UnreadValues,
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
    # torch numbers parameters group by group, so several groups hide the model's order
    if len(lists) != 1 or numbers != list(range(len(owners))):
        leave_out(raw, root, others)
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
                vector = TensorEntry(fqn, first.dtype, (at,), ChunkList(chunks))
                (result[name],) = unflatten(vector, {fqn: shape}, {fqn: starts[fqn]})
            else:
                # replicas: whoever reads them compares them
                scalars = ChunkList(Chunk(Box((), ()), chunk.extent) for chunk in chunks)
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
