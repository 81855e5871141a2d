"""Compares files of a Hugging Face cache with the hashes in the names of their blobs.

A hash is a SHA-256, or git's SHA-1 for a small file.

Source: the layout of huggingface_hub's cache, `snapshots/REVISION/NAME -> ../../blobs/HASH`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ckpt_tools.storage import Store

_BLOCK_BYTES = 4 << 20


def find_damaged(
    store: Store, files: Iterable[str], jobs: int, advance: Callable[[int], None]
) -> dict[str, bool]:
    """Returns for each file with a hash in its blob's name whether its bytes have another hash.

    Args:
        store: the directory of the files.
        files: their names. Files that are not links to a blob are left out.
        jobs: how many files are read at the same time.
        advance: called with the number of bytes after each read.
    """
    named = {name: blob for name in files if (blob := store.blob_name(name)) and _new_hash(blob, 0)}
    with ThreadPoolExecutor(jobs, "ckpt-hash") as pool:
        found = pool.map(
            lambda file: _digest(store, file, named[file], advance) != named[file], named
        )
        return dict(zip(named, found, strict=True))


def _new_hash(blob: str, nbytes: int) -> Any:
    import hashlib  # with OpenSSL, and few files are in the Hub's cache

    if len(blob) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False) if len(blob) == 40 else None


def _digest(store: Store, file: str, blob: str, advance: Callable[[int], None]) -> str:
    nbytes, buffer = store.size(file), memoryview(bytearray(_BLOCK_BYTES))
    found = _new_hash(blob, nbytes)
    for start in range(0, nbytes, _BLOCK_BYTES):
        part = buffer[: min(_BLOCK_BYTES, nbytes - start)]
        store.read_into(file, start, part)
        found.update(part)
        advance(len(part))
    return str(found.hexdigest())
