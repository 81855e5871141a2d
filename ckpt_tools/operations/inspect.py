"""Summarises a checkpoint from its metadata alone."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tools.core.catalog import Catalog, other_names
from ckpt_tools.core.naming import find_optimizers, is_optimizer_state, key_path
from ckpt_tools.core.quantized import described, weights_in
from ckpt_tools.errors import printable, redacted
from ckpt_tools.formats.registry import open_source
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.convert.families import naming_of
from ckpt_tools.operations.convert.flat_shapes import check_needed, lay_beside
from ckpt_tools.operations.folder import others_at
from ckpt_tools.storage.base import Traffic

if TYPE_CHECKING:
    from ckpt_tools.operations.presence import Presence

# the naming of Megatron-Core
_KEY_FIRST = re.compile(r"\bstate\.(exp_avg|exp_avg_sq|fp32_param|momentum_buffer)\.")


class Total(NamedTuple):
    """A count of tensors and objects and the bytes that they take."""

    num_tensors: int
    num_objects: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileReport:
    """One data file: the rank that wrote it, its bytes, and its content.

    `rank` is None if the format does not store it.
    """

    name: str
    rank: int | None
    nbytes: int
    num_chunks: int
    payload_nbytes: int
    num_objects: int


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `inspect`.

    Attributes:
        path, format, world_size, extras: of the checkpoint.
        catalog: every tensor with dtype, shape and chunks; every object by name.
        total, by_dtype, by_key: sums, also per element type and per top-level key.
        optimizer_states: sums per name of an optimizer's state: `exp_avg`, `step`, ….
        files: every data file with its content.
        presence: how it differs from the model of `base`; None without `base`.
    """

    path: str
    format: str
    world_size: int | None
    extras: Mapping[str, str]
    catalog: Catalog = field(repr=False)
    total: Total
    by_dtype: Mapping[str, Total]
    by_key: Mapping[str, Total] = field(repr=False)
    optimizer_states: Mapping[str, Total] = field(repr=False)
    files: Sequence[FileReport] = field(repr=False)
    presence: Presence | None = field(default=None, repr=False)
    traffic: Traffic | None = field(default=None, repr=False)


_SHOWN = 12
_TIED = 3  # names that are shown
_MODEL_KEY = "model"  # above the names of a model in the steps of many jobs


@checked()
def inspect(
    src: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    shapes: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
) -> Report:
    """Reads a checkpoint's metadata, checks that the structure is complete, and summarises it.

    Args:
        src: a checkpoint, or a directory with one below; a path or a URL.
        storage_options: of the object store, as fsspec takes them. Others come from the store's own
            configuration.
        shapes: a file with the parameters' shapes. FSDP1's flat parameters need it, because they
            lack shapes; see `lay_beside`.
        base: a local directory with a model's `config.json`, to compare names and shapes with.

    Raises:
        CheckpointError: see the tree in `errors`.
    """
    source = open_source(src, storage_options, lay_beside(shapes))
    catalog = source.catalog
    check_needed(shapes, catalog)
    source.store.close()
    presence = None
    if base is not None:
        from ckpt_tools.operations.presence import find_presence  # and the path of conversions

        presence = find_presence(catalog, base)
    by_dtype: dict[str, Total] = {}
    by_key: dict[str, Total] = {}
    states: dict[str, Total] = {}
    roots, of_model = find_optimizers(catalog), list[str]()
    tied = other_names(catalog)
    for fqn, entry in catalog.tensors.items():
        nbytes = 0 if fqn in tied else entry.nbytes
        _add(by_dtype, entry.dtype.name, 1, 0, nbytes)
        path = key_path(catalog, fqn)
        _add(by_key, path[0], 1, 0, nbytes)
        key = fqn.rpartition(".")[2]
        is_state = any(path[: len(root) + 1] == (*root, "state") for root in roots)
        if is_state or is_optimizer_state(fqn):
            first = _KEY_FIRST.search(fqn)
            _add(states, first[1] if first else key, 1, 0, nbytes)
        else:
            has_key = bool(catalog.paths) and path[0] == _MODEL_KEY
            of_model.append(fqn.removeprefix(f"{_MODEL_KEY}.") if has_key else fqn)
    for fqn, item in catalog.objects.items():
        _add(by_key, key_path(catalog, fqn)[0], 0, 1, item.extent.nbytes)
    nbytes = sum(total.nbytes for total in by_dtype.values())
    total = Total(len(catalog.tensors), len(catalog.objects), nbytes)
    extras = dict(catalog.extras)
    if weights := weights_in(catalog.tensors.values()):
        extras["quantized"] = f"{described(weights)} (weights)"
    if naming := naming_of(of_model):
        extras["names"] = naming
    if tied:
        some = ", ".join(f"{printable(n)} is {printable(o)}" for n, o in list(tied.items())[:_TIED])
        extras["stored once"] = some + f", and {len(tied) - _TIED} more" * (len(tied) > _TIED)
    if others := others_at(src, source.store):
        extras["also here"] = (
            f"{', '.join(map(printable, others[:_SHOWN]))}{' …' if len(others) > _SHOWN else ''};"
            " give the path of one"
        )
    return Report(
        redacted(str(source.path)),
        catalog.format,
        catalog.world_size,
        extras,
        catalog,
        total,
        by_dtype,
        by_key,
        states,
        _files(catalog, tied),
        presence,
        source.store.traffic,
    )


def _add(
    table: dict[str, Total], key: str, num_tensors: int, num_objects: int, nbytes: int
) -> None:
    old = table.get(key, Total(0, 0, 0))
    table[key] = Total(
        old.num_tensors + num_tensors, old.num_objects + num_objects, old.nbytes + nbytes
    )


def _files(catalog: Catalog, tied: Collection[str]) -> list[FileReport]:
    counts, payloads, objects = (dict.fromkeys(catalog.file_sizes, 0) for _ in range(3))
    for fqn, entry in catalog.tensors.items():
        for file, (num_chunks, nbytes) in entry.chunks.nbytes_by_file(entry.dtype.itemsize).items():
            if file in counts and fqn not in tied:
                counts[file] += num_chunks
                payloads[file] += nbytes
    for item in catalog.objects.values():
        if item.extent.file in objects:
            objects[item.extent.file] += 1
    order = sorted(catalog.file_sizes, key=lambda name: (catalog.ranks.get(name, 0), name))
    return [
        FileReport(
            n, catalog.ranks.get(n), catalog.file_sizes[n], counts[n], payloads[n], objects[n]
        )
        for n in order
    ]
