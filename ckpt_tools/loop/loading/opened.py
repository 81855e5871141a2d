"""Opens checkpoints to read from them, and remembers the catalogs of the last ones.

A catalog of a thousand tensors takes far longer to read than a row, and a notebook or a data loader
opens one checkpoint again and again. Imports torch indirectly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.formats.registry import Format, Source
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.sealed_source import open_sealed
from ckpt_tools.run.base import Looks
from ckpt_tools.storage import LocalStore
from ckpt_tools.storage.local import snapshot

_MOST_CHUNKS = 20_000  # of all catalogs


class _Opened(NamedTuple):
    """A sealed checkpoint as it was opened before."""

    path: str
    format: Format
    catalog: Catalog
    manifest: Manifest


_KNOWN = Looks(_MOST_CHUNKS)


def open_again(
    path: str | os.PathLike[str], options: Mapping[str, Any] | None
) -> tuple[Source, Manifest | None]:
    """Opens a checkpoint, as `open_sealed` does.

    The catalog of a sealed one in a local directory is that of an earlier call, if no file has
    changed since.
    """
    where = os.fspath(path)
    if not isinstance(where, str) or not os.path.isdir(where):
        return open_sealed(path, options)
    real, before = os.path.realpath(where), snapshot(where)
    known: _Opened | None = None if before is None else _KNOWN.get(real, before)
    if known is not None and known.path == where:
        return Source(where, LocalStore(where), known.format, known.catalog), known.manifest
    source, manifest = open_sealed(path, options)
    is_plain = type(source.store) is LocalStore and source.path == where
    if manifest is not None and is_plain and before is not None and before == snapshot(where):
        opened = _Opened(where, source.format, source.catalog, manifest)
        size = sum(max(1, len(entry.chunks)) for entry in source.catalog.tensors.values())
        if size <= _MOST_CHUNKS and not _KNOWN.add(real, before, opened, size):
            _KNOWN.keep(())  # others make room
            _KNOWN.add(real, before, opened, size)
    return source, manifest
