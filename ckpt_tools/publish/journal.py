"""Notes the finished batches of an attempt, so that a later attempt can continue.

Each process has a file in the staging directory, with a line for each batch. A line has the written
ranges, their checksums, and the notes on the values. It counts only if its own checksum is right,
and its ranges only if their bytes still have theirs.
"""

from __future__ import annotations

import json
import marshal
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ckpt_tools.core.catalog import Extent
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.logs import log
from ckpt_tools.core.plan import Plan, plan_objects
from ckpt_tools.core.tables import is_table
from ckpt_tools.engine.crc_watch import CrcWatch
from ckpt_tools.engine.execute import BatchResult
from ckpt_tools.engine.fingerprints import HashedRange, HashedRanges, TensorHashes
from ckpt_tools.engine.schedule import MIN_TILE_BYTES, Batch
from ckpt_tools.engine.sinks import HashSink, SinkState, WriteSink
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.publish.check_manifest import execute_shared
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage import Store
from ckpt_tools.storage.local import failed
from ckpt_tools.version import __version__

GLOB = ".ckpt.journal.*"
_BATCH = 10_000  # pieces that are proved in one go
_HUGE = 1 << 62
_PRIVATE = 0o700  # the mode of a staging directory until it is published
_LINE_BYTES = 256 << 20  # a longer line is not read


def identify(operation: str, plan: Plan, source: Store, changes: str) -> str:
    """Returns a digest of everything that the bytes of a result depend on.

    Returns "" if a file of the source has no version.

    Args:
        operation: its name.
        plan: what goes where.
        source: where it is read; with a file that is not the same any more the digest is another.
        changes: the changes of values on the way, other than casts.
    """
    from hashlib import sha256  # with OpenSSL

    names: Sequence[str] = ()
    files, digest = set[str](), sha256()

    def take(*values: object) -> None:
        digest.update(repr(values).encode("utf-8", "surrogatepass"))

    take(__version__, operation, changes)
    for tensor in plan.tensors:
        chunks = tensor.chunks
        take(tensor.fqn, tensor.shape, tensor.src_dtype.name, tensor.dst_dtype.name, tensor.slots)
        files |= chunks.file_names()
        if is_table(chunks):
            if chunks.names is not names:  # one table for all tensors
                names = chunks.names
                take(names)
            take(chunks.packing)
            for column in (
                chunks.offsets,
                chunks.sizes,
                chunks.files,
                chunks.starts,
                chunks.nbytes,
            ):
                digest.update(column.tobytes())
        else:
            # plain tuples, in the oldest form that has no references: equal values, equal bytes
            digest.update(marshal.dumps([(*box, *extent) for box, extent in chunks], 2))
    # a million frames have few kinds
    for data in dict.fromkeys(literal.data for literal in plan.target.literals):
        take(len(data))
        digest.update(data)
    versions = [(file, source.version(file)) for file in sorted(files)]
    take(versions)
    return digest.hexdigest() if all(version for _, version in versions) else ""


@dataclass(frozen=True, slots=True)
class DeadAttempt:
    """An attempt at the same work that died.

    Attributes:
        path: its staging directory.
        tiles: how it cut the work, as `schedule.tile_bytes` returns it. Its finished tiles fit no
            other cut.
        nbytes: that it occupies on the disk.
    """

    path: Path
    tiles: tuple[int, int]
    nbytes: int


def find_dead_attempt(dead: Iterable[Path], work: str) -> DeadAttempt | None:
    """Returns the attempt of those that died that was at a piece of work.

    An attempt that may not be this user's own is passed over with a warning, because the result
    would have its bytes.
    """
    for path in dead if work else ():
        with suppress(FileNotFoundError):  # somebody removes it
            journals = sorted(path.glob(GLOB))
            problem = _trust_problem(path) if journals else ""
            heads = [next(_lines(file), None) for file in journals] if not problem else []
            tiles = next((cut for head in heads if (cut := _tiles(head, work))), None)
            # a power cut may have torn the first line of a journal, which is not read then
            if tiles and not all(head is None or _is_made_in(path, head) for head in heads):
                problem = "it is a copy of another directory"
            if problem:
                log.warning("not resumed, since %s: %s", problem, printable(str(path)))
            elif tiles:
                nbytes = sum(f.lstat().st_blocks * 512 for f in path.rglob("*"))
                return DeadAttempt(path, tiles, nbytes)
    return None


def _trust_problem(folder: Path) -> str:
    """Returns why a staging directory may be somebody else's work; "" if it is this user's alone.

    A clone or an archive can bring a directory with a staging directory's name. Its links would
    lead writes elsewhere, and a FIFO in it would block.
    """
    found = folder.lstat()
    if found.st_uid != os.geteuid():
        return f"another user made it (uid {found.st_uid})"
    if found.st_mode & 0o777 != _PRIVATE:
        return "its mode is not that of a staging directory"
    for path in folder.rglob("*"):
        found = path.lstat()
        is_plain = stat.S_ISDIR(found.st_mode) or (
            stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        )
        if not is_plain or found.st_uid != os.geteuid():
            return f"{printable(path.name)} in it is a link, a device, or of another user"
        if stat.S_ISDIR(found.st_mode) and path.match(GLOB):
            return f"{printable(path.name)} in it is a directory"
    return ""


def _tiles(head: object, work: str) -> tuple[int, int] | None:
    """Returns the tile sizes of an attempt, from the first line of its journal; None for other
    work.
    """
    match head:
        case {
            "work": name,
            "tiles": [int(some), int(most)],
        } if name == work and MIN_TILE_BYTES <= some <= most < _HUGE:
            return some, most
    return None


def _is_made_in(folder: Path, head: object) -> bool:
    """Tells whether a journal with this first line was begun in this very directory."""
    return isinstance(head, dict) and head.get("inode") == folder.lstat().st_ino


class Journal:
    """Takes note of every step that this process has finished; the file is there from the first one
    on.
    """

    def __init__(self, path: Path, work: str, tiles: tuple[int, int]) -> None:
        self._path = path
        self._head = {"work": work, "inode": path.parent.stat().st_ino, "tiles": tiles}
        self._fd = -1
        self._lock = threading.Lock()

    def note(self, moved: BatchResult) -> None:
        """Takes a finished step."""
        wrote = moved.wrote
        if wrote is None or not wrote.files:
            return
        line = _line(
            {
                "files": wrote.files,
                "prints": wrote.fingerprints,
                "read": moved.seen,
                "overflowed": moved.overflowed,
            }
        )
        with self._lock:
            try:
                if self._fd < 0:
                    self._fd = os.open(
                        self._path,
                        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC,
                        0o600,
                    )
                    line = _line(self._head) + line
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError as error:
                raise failed("write", self._path, error) from error

    def close(self) -> None:
        """Takes nothing any more; the file stays."""
        fd, self._fd = self._fd, -1  # first, because a signal may follow the close at once
        if fd >= 0:
            os.close(fd)


def remove_journals(folder: Path) -> None:
    """Removes all journals of a staging directory, so that no attempt continues from it."""
    with os.scandir(folder) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(GLOB[:-1])]
    for path in found:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _line(value: object) -> bytes:
    data = json.dumps(value, separators=(",", ":"), default=list).encode()
    return f"{hex64(crc64nvme(data))} ".encode() + data + b"\n"


def _lines(path: Path) -> Iterator[object]:
    """Yields what the lines of a journal hold, as far as they are as they were written."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        while (line := file.readline(_LINE_BYTES)).endswith(b"\n"):
            crc, _, data = line.rstrip(b"\n").partition(b" ")
            if crc.decode("ascii", "replace") == hex64(crc64nvme(data)):
                with suppress(ValueError, RecursionError):  # not one of ours
                    yield json.loads(data)


class FinishedTiles:
    """What earlier tries have finished, as far as the bytes are still there."""

    def __init__(self, batches: Sequence[BatchResult]) -> None:
        self._batches = batches
        self._written: dict[str, dict[tuple[int, int], HashedRange]] = {}
        for batch in batches:
            for name, pieces in batch.wrote.files.items() if batch.wrote else ():
                self._written.setdefault(name, {}).update({(p.start, p.nbytes): p for p in pieces})
        self.nbytes = sum(p.nbytes for pieces in self._written.values() for p in pieces.values())

    def without(self, batches: Iterable[Batch], skipped: Callable[[int], None]) -> Iterator[Batch]:
        """Yields the unfinished batches, and reports the bytes of the finished ones."""
        none: dict[tuple[int, int], HashedRange] = {}
        if not self._written:
            yield from batches
        for batch in batches:
            left = tuple(
                t
                for t in batch.tiles
                if not t.writes
                or any((w.start, w.nbytes) not in self._written.get(w.file, none) for w in t.writes)
            )
            if len(left) < len(batch.tiles):
                skipped(sum(t.dst_nbytes for t in batch.tiles) - sum(t.dst_nbytes for t in left))
            if left:
                yield batch if len(left) == len(batch.tiles) else Batch(left)

    def restore(
        self, sink: WriteSink | None, crc_watch: CrcWatch, overflowed: dict[str, int]
    ) -> None:
        """Passes the notes on: to a sink, if this process completes the files, and to the CRC
        watch.
        """
        for batch in self._batches:
            for piece in batch.seen:
                crc_watch.take(*piece)
            if sink is not None and batch.wrote is not None:
                sink.fingerprints.absorb(batch.wrote.fingerprints)
                for fqn, count in batch.overflowed.items():
                    overflowed[fqn] = overflowed.get(fqn, 0) + count
        if sink is not None:
            sink.absorb(
                SinkState(
                    {name: HashedRanges(pieces.values()) for name, pieces in self._written.items()},
                    TensorHashes({}, {}, {}),
                )
            )


def read_journals(folder: Path, work: str) -> list[BatchResult]:
    """Returns the batches that the journals of a staging directory tell of."""
    batches: list[BatchResult] = []
    for path in sorted(folder.glob(GLOB)):
        lines = _lines(path)
        head = next(lines, None)
        if _tiles(head, work) and _is_made_in(folder, head):
            for line in lines:
                # not one of ours
                with suppress(KeyError, TypeError, ValueError, OverflowError, AttributeError):
                    batches.append(_batch(line))
    return batches


def _batch(line: Any) -> BatchResult:
    pieces, shares, sizes = line["prints"]
    wrote = SinkState(
        _pieces(line["files"]), TensorHashes(_pieces(pieces), _pieces(shares), _numbers(sizes))
    )
    return BatchResult(
        0,
        _numbers(line["overflowed"]),
        [(str(f), int(at), int(n), int(crc)) for f, at, n, crc in line["read"]],
        wrote,
    )


def _numbers(found: Mapping[str, int]) -> dict[str, int]:
    if not all(0 <= int(number) < 1 << 63 for number in found.values()):
        raise ValueError("a number of bytes that no file has")
    return {name: int(number) for name, number in found.items()}


def _pieces(found: Mapping[str, list[list[int]]]) -> dict[str, HashedRanges]:
    return {name: HashedRanges(HashedRange(*p) for p in pieces) for name, pieces in found.items()}


def _size(store: Store, file: str) -> int:
    try:
        return store.size(file)
    except StorageError:
        return -1


def prove_tiles(
    batches: Sequence[BatchResult], store: Store, tiles: tuple[int, int], jobs: int, group: Group
) -> FinishedTiles:
    """Reads again what batches have written, a share by each member of a group.

    Returns the batches of which every byte is there.
    """
    pieces = [
        (n, file, p)
        for n, batch in enumerate(batches)
        if batch.wrote
        for file, ps in batch.wrote.files.items()
        for p in ps
    ]
    sizes = {file: _size(store, file) for file in {file for _, file, _ in pieces}}
    wrong = {n for n, file, p in pieces if p.start + p.nbytes > sizes[file]}
    rest = ((n, file, p) for n, file, p in pieces if n not in wrong and p.nbytes)
    while batch := list(islice(rest, _BATCH)):
        sink = HashSink()
        extents = {str(i): Extent(file, p.start, p.nbytes) for i, (_, file, p) in enumerate(batch)}
        execute_shared(plan_objects(extents), {}, tiles, store, sink, jobs, None, group)
        found = sink.fingerprints.join()
        wrong |= {n for i, (n, _, p) in enumerate(batch) if found.get(str(i)) != p.crc64}
    return FinishedTiles([batch for n, batch in enumerate(batches) if n not in wrong])
