"""Accelerate's (and the Transformers Trainer's) checkpoint: DCP directories side by side, one for each model and optimizer.

`checkpoint-100/pytorch_model_fsdp_0/` and `checkpoint-100/optimizer_0/` become one catalog. Where several models stand side by
side, those after the first go by the name of their directory. May import levels 0 to 2, formats.base and formats.dcp.

Source: accelerate 1.15 `utils/fsdp_utils.py`; confirmed on directories that it wrote.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.catalog import Catalog
from ckpt_tools.errors import FormatError, printable
from ckpt_tools.formats import dcp
from ckpt_tools.formats.base import Request, below
from ckpt_tools.formats.made import Made
from ckpt_tools.formats.state_pickle import Path, is_value, leaves
from ckpt_tools.formats.torch_save import join, read_leaves, told
from ckpt_tools.plan import Literal, Target
from ckpt_tools.storage import Store, read

NAME = "accelerate"
LOOKS_FOR = "pytorch_model_fsdp_0/"
_PART = re.compile(r"(?:pytorch_model_fsdp|optimizer)_(\d+)")
locate, guess = dcp.locate, dcp.guess


def recognise(files: Mapping[str, int]) -> bool:
    """Tells whether the metadata of a model's directory is among the files below."""
    return any(name.startswith("pytorch_model_fsdp_") and name.endswith("/.metadata") for name in files)


def read_catalog(store: Store) -> Catalog:
    """Reads the metadata of every part; see `Format.read_catalog`."""
    files = store.list_files(below=True)
    folders = sorted({name.partition("/")[0] for name in files if name.endswith("/.metadata")})
    joined: dict[str, Any] = {"tensors": {}, "objects": {}, "paths": {}, "file_sizes": {}, "ranks": {}}
    world_size = 0
    for folder in folders:
        match = _PART.fullmatch(folder)
        if not match:
            continue
        inner = store.enter(folder)
        try:
            part = dcp.read_catalog(inner)
        finally:
            inner.close()
        beside = "" if int(match[1]) == 0 else f"{folder}."
        moved = below(part, folder, beside)
        for name, table in joined.items():
            both = table.keys() & getattr(moved, name).keys()
            if both:
                raise FormatError(f"two parts hold {printable(next(iter(both)))!r} ({folder})")
            table |= getattr(moved, name)
        world_size = max(world_size, part.world_size or 0)
    made, unknown = Made(), Counter[str]()
    for path, value in _values(store, files, unknown):
        fqn = join(path)
        if fqn not in joined["tensors"]:
            joined["objects"][fqn], joined["paths"][fqn] = made.value(fqn, value), path
    others = sorted(name for name in files if "/" not in name and name not in _VALUES)
    extras = ({"beside": ", ".join(map(printable, others))} if others else {}) | told(unknown)
    return Catalog(NAME, **joined, world_size=world_size, extras=extras, made=made.files)


_VALUES = {"scheduler.bin": "scheduler", "scheduler.pt": "scheduler", "trainer_state.json": "trainer_state"}
_MAX_JSON_BYTES = 64 << 20


def _values(store: Store, files: Mapping[str, int], unknown: Counter[str]) -> Iterator[tuple[Path, object]]:
    """Yields the plain values that stand beside the parts: schedulers, the Trainer's progress."""
    for name, key in _VALUES.items():
        if name not in files:
            continue
        if not name.endswith(".json"):
            yield from (((key, *path), value) for path, value, extents in read_leaves(store, name, files[name], unknown) if not extents)
            continue
        try:
            if files[name] > _MAX_JSON_BYTES:
                raise ValueError(f"{files[name]} bytes")
            yield from (((key, *path), value) for path, value in leaves(json.loads(read(store, name)), name) if is_value(value))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"malformed: {printable(str(error))} ({name})") from error


def lay_out(request: Request) -> Target:
    """Lays the model and each optimizer out as DCP in a folder of its own; see `Format.lay_out`.

    The model's metadata is the index; the optimizers' stand among the data files, and `request.files` beside the folders.
    """
    targets = {folder: _lay_out_part(request, folder) for folder in sorted({_folder(t.fqn) for t in request.tensors})}
    first = targets.pop(_MODEL, None) or targets.pop(min(targets))
    beside = {name: len(data) for name, data in request.files.items()}
    merged: dict[str, Any] = {"file_sizes": {**first.file_sizes, **beside}, "slots": dict(first.slots)}
    literals = [*first.literals, *(Literal(name, 0, data) for name, data in request.files.items())]
    trailers = list(first.trailers)
    for part in targets.values():
        assert part.index is not None
        merged["file_sizes"] |= {**part.file_sizes, part.index.file: len(part.index.data)}
        merged["slots"] |= part.slots
        literals += [*part.literals, part.index]
        trailers += part.trailers
    return Target(NAME, **merged, literals=tuple(literals), trailers=tuple(trailers), index=first.index, world_size=request.world_size)


_MODEL = "pytorch_model_fsdp_0"


def _folder(fqn: str) -> str:
    """Returns the folder of an entry: `optimizer.…` of the first optimizer, `optimizer_1.optimizer.…` of the second."""
    match = re.match(r"optimizer(?:_(\d+))?\.", fqn)
    return f"optimizer_{match[1] or 0}" if match else _MODEL


def _lay_out_part(request: Request, folder: str) -> Target:
    """Lays the entries of one folder out; the names in its metadata are those within it."""

    def mine(fqn: str) -> bool:
        return _folder(fqn) == folder

    def inner(fqn: str) -> str:
        return fqn.partition(".")[2] if re.match(r"optimizer_\d+\.", fqn) else fqn

    own = replace(
        request,
        tensors=[replace(t, fqn=inner(t.fqn)) for t in request.tensors if mine(t.fqn)],
        objects={inner(n): size for n, size in request.objects.items() if mine(n)},
        paths={inner(n): path[1:] if inner(n) != n else path for n, path in request.paths.items() if mine(n)},
    )
    part = dcp.lay_out(own)
    outer = {inner(n): n for n in (*(t.fqn for t in request.tensors), *request.objects) if mine(n)}
    assert part.index is not None

    def at(name: str) -> str:
        return f"{folder}/{name}"

    return replace(
        part,
        file_sizes={at(n): size for n, size in part.file_sizes.items()},
        slots={outer[n]: tuple(slot._replace(file=at(slot.file)) for slot in slots) for n, slots in part.slots.items()},
        literals=tuple(literal._replace(file=at(literal.file)) for literal in part.literals),
        trailers=tuple(trailer._replace(file=at(trailer.file)) for trailer in part.trailers),
        index=part.index._replace(file=at(part.index.file)),
    )
