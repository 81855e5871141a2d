"""Tells tables of chunks from lists of them without NumPy, since `inspect` starts without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from ckpt_tools.core.catalog import Chunks
    from ckpt_tools.core.chunk_table import ChunkTable


def is_table(chunks: Chunks) -> TypeGuard[ChunkTable]:
    """Tells whether chunks are a table of columns."""
    return chunks.has_columns
