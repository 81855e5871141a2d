"""Accelerate's (and the Transformers Trainer's) checkpoint: DCP directories side by side, one for each model and optimizer.

`checkpoint-100/pytorch_model_fsdp_0/` and `checkpoint-100/optimizer_0/` become one catalog. Where several models stand side by
side, those after the first go by the name of their directory. May import levels 0 to 2, formats.base and formats.dcp.

Source: accelerate 1.15 `utils/fsdp_utils.py`; confirmed on directories that it wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.catalog import BytesEntry, Catalog, Chunk, Extent
from ckpt_tools.errors import FormatError, PlanError, printable
from ckpt_tools.formats import dcp
from ckpt_tools.formats.base import Request
from ckpt_tools.plan import Target
from ckpt_tools.storage import Store

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
        moved = _move(part, folder, beside)
        for name, table in joined.items():
            both = table.keys() & getattr(moved, name).keys()
            if both:
                raise FormatError(f"two parts hold {printable(next(iter(both)))!r} ({folder})")
            table |= getattr(moved, name)
        world_size = max(world_size, part.world_size or 0)
    others = sorted(name for name in files if "/" not in name)
    extras = {"beside": ", ".join(map(printable, others))} if others else {}
    return Catalog(NAME, **joined, world_size=world_size, extras=extras)


def lay_out(request: Request) -> Target:
    """Not yet: what is written from one of these is plain DCP.

    Raises:
        PlanError: always.
    """
    raise PlanError(f"Accelerate's layout is read only so far ({len(request.tensors)} tensors)", hint="write DCP")


def _move(part: Catalog, folder: str, prefix: str) -> Catalog:
    """Returns a part's catalog as seen from above: files in the folder, names behind the prefix."""

    def at(extent: Extent) -> Extent:
        return extent._replace(file=f"{folder}/{extent.file}")

    return replace(
        part,
        tensors={
            prefix + n: replace(t, fqn=prefix + n, chunks=tuple(Chunk(c.box, at(c.extent)) for c in t.chunks))
            for n, t in part.tensors.items()
        },
        objects={prefix + n: BytesEntry(prefix + n, at(o.extent), tuple(map(at, o.replicas))) for n, o in part.objects.items()},
        paths={prefix + n: (prefix.rstrip("."), *path) if prefix else path for n, path in part.paths.items()},
        file_sizes={f"{folder}/{f}": size for f, size in part.file_sizes.items()},
        ranks={f"{folder}/{f}": rank for f, rank in part.ranks.items()},
    )
