"""Compares the names, sizes and checksums of files with a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools.core.catalog import Payloads
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.plan import Plan, plan_files
from ckpt_tools.core.threads import num_threads
from ckpt_tools.errors import (
    CheckpointError,
    IntegrityError,
    StorageError,
    is_unreadable,
    printable,
)
from ckpt_tools.formats.registry import refuse_strays
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.ranks.base import ALONE, Group
from ckpt_tools.storage import Store, read
from ckpt_tools.storage.retries import read_again_if_wrong

if TYPE_CHECKING:  # the engine needs NumPy, and `ckpt ls` starts without
    from ckpt_tools.engine.sinks import HashSink

MISSING = "is missing"


class Problem(NamedTuple):
    """The problem of a file, or of the part of it that holds an entry.

    Attributes:
        file: its name.
        what: a predicate: "is missing".
        fqn: of the tensor or object that it concerns, "" for the file as such.
        start, nbytes: which bytes, where that is known.
        rank: that wrote the file, where that is known.
    """

    file: str
    what: str
    fqn: str = ""
    start: int | None = None
    nbytes: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        return f"{printable(self.file)} {self.what}"


def list_sealed(
    manifest: Manifest, store: Store, known: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Returns the files beside a manifest, and those in folders that it lists, with their bytes.

    Args:
        manifest: of the directory.
        store: the directory.
        known: its listing, if that is known.
    """
    has_folders = any("/" in name for name in manifest.files)
    files = dict(store.list_files(has_folders) if known is None or has_folders else known)
    for name in manifest.files:
        if name.count("/") > 1:  # deeper than a listing goes
            try:
                files[name] = store.size(name)
            except StorageError as error:
                if not error.is_missing:
                    raise
    return files


def compare_names(
    manifest: Manifest, store: Store, known: Mapping[str, int] | None = None
) -> Iterator[Problem]:
    """Yields the problems with names and sizes, and with the index, which is small and read.

    Args:
        manifest, store, known: as for `list_sealed`.

    Raises:
        StorageError: a file cannot be read, so nothing is known about it.
    """
    files = list_sealed(manifest, store, known)
    needed = {*manifest.files, *(manifest.index or ())[:1]}
    if not needed <= files.keys():
        refuse_strays(store, needed)
    for name, sealed in manifest.files.items():
        if name not in files:
            yield Problem(name, MISSING)
        elif files[name] != sealed.nbytes:
            yield Problem(name, f"has {files[name]} bytes, the manifest says {sealed.nbytes}")
    if manifest.index is not None:
        name, sealed = manifest.index
        if name not in files:
            yield Problem(name, MISSING)
        elif hex64(crc64nvme(read(store, name))) != sealed.crc64nvme:
            yield damaged(name)


def damaged(file: str) -> Problem:
    """Returns the problem of a file whose checksum is wrong."""
    return Problem(file, "is damaged: its checksum is not what the manifest says")


def compare_bytes(manifest: Manifest, crcs: Mapping[str, int | None]) -> Iterator[Problem]:
    """Yields the problems with checksums, as far as these are known."""
    for name, crc in crcs.items():
        if crc is not None and hex64(crc) != manifest.files[name].crc64nvme:
            yield damaged(name)


def hash_files(
    store: Store,
    files: Mapping[str, int],
    jobs: int | None = None,
    memory: int | None = None,
    advance: Callable[[int], None] | None = None,
    group: Group = ALONE,
) -> dict[str, int]:
    """Reads files and returns their CRC-64/NVME.

    Args:
        store: where they are.
        files: how many bytes each has.
        jobs, memory: threads, and bytes of all buffers; the defaults where None.
        advance: called with bytes done.
        group: reads a share each, and all of it becomes known to all.
    """
    from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, tile_bytes
    from ckpt_tools.engine.sinks import HashSink

    jobs, sink = num_threads(jobs), HashSink()
    execute_shared(
        plan_files(files),
        {},
        tile_bytes(memory or DEFAULT_MEMORY_BYTES, jobs),
        store,
        sink,
        jobs,
        advance,
        group,
    )
    return {**dict.fromkeys(files, 0), **sink.fingerprints.join()}  # that of no bytes is 0


def execute_shared(
    plan: Plan,
    located: Payloads,
    tiles: tuple[int, int],
    store: Store,
    sink: HashSink,
    jobs: int,
    advance: Callable[[int], None] | None,
    group: Group,
) -> None:
    """Hashes what a plan reads, a share by each member of a group; all fingerprints are then known
    to all.
    """
    from ckpt_tools.engine.execute import execute_batches
    from ckpt_tools.engine.schedule import schedule, shares

    with group.phase("read"):
        execute_batches(
            schedule(plan, located, *tiles, shares(plan, group.size)[group.rank]),
            store,
            sink,
            jobs,
            advance,
        )
    if group.size > 1:
        for found in sink.found:
            found.share(group)


def first_problem(
    manifest: Manifest,
    store: Store,
    reads_all: bool = False,
    known: Mapping[str, int] | None = None,
    jobs: int | None = None,
) -> str:
    """Returns the first problem; "" if there is none. Wrong bytes of a remote store are read again.

    Args:
        manifest: of the checkpoint.
        store: its files.
        reads_all: also read every byte.
        known: the listing, if that is known.
        jobs: threads that read.

    Raises:
        StorageError: it cannot be read, so nothing is known.
    """

    def check() -> None:
        found = next(compare_names(manifest, store, known), None)
        if found is None and reads_all:
            files = {name: sealed.nbytes for name, sealed in manifest.files.items()}
            found = next(compare_bytes(manifest, hash_files(store, files, jobs)), None)
        if found is not None:
            raise IntegrityError(str(found))

    try:
        read_again_if_wrong(store, check)
    except CheckpointError as error:
        if is_unreadable(error):
            raise
        return str(error)
    return ""
