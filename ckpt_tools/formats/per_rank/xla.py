"""PyTorch/XLA's FSDP: each rank's file has shards under `model`, and `shard_metadata`.

`shard_metadata` has the shape and name of each sharded parameter. A parameter is flattened (or
kept, and cut along dim 0), padded, and cut into equal parts. Either way, each rank has a contiguous
range of its row-major order. With `flatten_parameters`, a flattened parameter holds many original
parameters in a row.

Source: torch_xla 2.9 `distributed/fsdp/xla_fully_sharded_data_parallel.py`, `state_dict_utils.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from ckpt_tools.core.box import Box, row_major_strides
from ckpt_tools.core.catalog import Chunk, ChunkList, TensorEntry
from ckpt_tools.errors import FormatError, printable
from ckpt_tools.formats.builder import UnreadValues
from ckpt_tools.formats.per_rank.flat_param import (
    RankValue,
    Raw,
    optimizers,
    unflatten,
    unfold_optimizer,
)
from ckpt_tools.formats.pickle.state import Path, TensorView

_METADATA, _MARK = "shard_metadata", "_fsdp_shard"
_WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")
# parameters with their shapes, and the start of each
Cut = tuple[dict[str, tuple[int, ...]], dict[str, int]]


def has_shards(raw: Raw) -> bool:
    """Tells whether the entries are of PyTorch/XLA's FSDP."""
    return any(path[-2:] == (_METADATA, "world_size") for path in raw)


def unfold_xla_shards(raw: Raw, num_ranks: int, others: UnreadValues) -> dict[Path, TensorEntry]:
    """Takes shards, and the optimizer's state for them, out of the entries.

    Returns the parameters, by name.

    Args:
        raw: all entries. Taken entries are removed; the others get the names of a model without
            wrappers.
        num_ranks: ranks of the job.
        others: counts optimizers with an unknown numbering of parameters; ckpt leaves them out.

    Raises:
        FormatError: the metadata does not fit.
    """
    root = next(path[:-2] for path in raw if path[-2:] == (_METADATA, "world_size"))
    # the part name in the files' names carries no information
    for path in [p for p in raw if root and p[: len(root)] == root]:
        raw[path[len(root) :]] = raw.pop(path)
    told = {path[1:]: raw.pop(path) for path in [p for p in raw if p[:1] == (_METADATA,)]}
    ranks = (
        [(rank, held.value) for rank, held in told["rank",].items()] if ("rank",) in told else []
    )
    if any(h.value != num_ranks for h in told["world_size",].values()) or any(
        rank != value for rank, value in ranks
    ):
        raise FormatError(
            f"files of other ranks than {_METADATA} says: expected rank 0 to {num_ranks - 1} of"
            f" {num_ranks}"
        )
    values = {path: held[min(held)].value for path, held in told.items()}
    _check_alike(told, values)
    result: dict[Path, TensorEntry] = {}
    cuts: list[Cut] = []
    model = ("model",)
    for path in [p for p in raw if p[:-1] == model]:
        name = str(path[-1])
        if not any(part.startswith(_MARK) for part in name.split(".")):
            # a buffer: it may differ by rank, and torch_xla's own tool also takes rank 0's
            held = raw.pop(path)
            raw[*model, _clean(name)] = {min(held): held[min(held)]}
            continue
        cuts.append(_cut(name, values))
        for tensor in unflatten(_vector(name, raw.pop(path), cuts[-1]), *cuts[-1]):
            if (*model, tensor.fqn) in result:
                raise FormatError(f"two parameters have one name: {printable(tensor.fqn)!r}")
            result[*model, tensor.fqn] = tensor
    if both := [path for path in result if path in raw]:
        raise FormatError(
            f"a parameter and a buffer have one name: {printable('.'.join(map(str, both[0])))!r}"
        )
    for optimizer in optimizers(raw, model):
        result |= unfold_optimizer(raw, optimizer, cuts, False, others)
    return result


def _check_alike(told: Raw, values: Mapping[Path, Any]) -> None:
    """Refuses shards whose ranks tell different shapes or names."""
    for path, held in told.items():
        is_alike = all(item.value == values[path] for item in held.values())
        if path[0] in ("shard_info", "flatten_info") and not is_alike:
            raise FormatError(
                f"ranks disagree about a shard: {printable('.'.join(map(str, path)))!r}"
            )


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _cut(name: str, told: Mapping[Path, Any]) -> Cut:
    """Returns the parameters that a shard's whole vector consists of."""
    parts = name.split(".")
    at = next(i for i, part in enumerate(parts) if part.startswith(_MARK))
    info = ("shard_info", ".".join(parts[:at]), ".".join(parts[at:]))
    try:
        full = ".".join([*parts[:at], told[*info, "_orig_name"]])
        shapes = {full: _shape(told[*info, "_orig_size"])}
        if ("flatten_info", full) in told:
            names, inner, _ = told["flatten_info", full]
            above = full.split(".")[:-1]
            numel = math.prod(shapes[full])
            shapes = {".".join([*above, n]): _shape(s) for n, s in zip(names, inner, strict=True)}
            if len(shapes) != len(names) or sum(map(math.prod, shapes.values())) != numel:
                raise ValueError(f"{len(names)} parameters are not {numel} elements")
    except (KeyError, ValueError, TypeError) as error:
        raise FormatError(
            f"{_METADATA} does not tell what a shard is of: {printable(str(error))}"
            f" ({printable(name)!r})"
        ) from error
    shapes = {_clean(fqn): shape for fqn, shape in shapes.items()}
    return shapes, dict(
        zip(shapes, accumulate(map(math.prod, shapes.values()), initial=0), strict=False)
    )


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(
        type(n) is int and 0 <= n < 1 << 48 for n in value
    ):
        raise ValueError(f"not a shape: {value!r}")
    return tuple(value)


def _vector(name: str, held: Mapping[int, RankValue], cut: Cut) -> TensorEntry:
    """Returns the vector of all ranks' shards in a row, with the padding at its end."""
    views = [held[rank].value for rank in sorted(held)]
    first = views[0]
    if sorted(held) != list(range(len(held))) or not isinstance(first, TensorView):
        raise FormatError(f"a shard is missing on some ranks, or no tensor: {printable(name)!r}")
    numel = math.prod(first.sizes)
    for view in views:
        if (
            not isinstance(view, TensorView)
            or (view.dtype, view.sizes) != (first.dtype, first.sizes)
            or not _is_plain(view)
        ):
            raise FormatError(f"ranks disagree about a shard: {printable(name)!r}")
    if sum(map(math.prod, cut[0].values())) > numel * len(views):
        raise FormatError(
            f"shards are too short: {numel} elements on each of {len(views)} ranks"
            f" ({printable(name)!r})"
        )
    chunks = ChunkList(
        Chunk(Box((rank * numel,), (numel,)), held[rank].extents[0]) for rank in sorted(held)
    )
    return TensorEntry(name, first.dtype, (numel * len(views),), chunks)


def _is_plain(view: TensorView) -> bool:
    return tuple(view.strides) == row_major_strides(view.sizes) or math.prod(view.sizes) <= 1
