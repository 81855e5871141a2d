"""Publishes the difference from an earlier version instead of whole files.

The engine writes the files of the earlier version with the new values. This destination compares
them with the old bytes as they pass, and publishes only the changes.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.core.plan import Literal
from ckpt_tools.engine.kernels import Bytes
from ckpt_tools.engine.sinks import empty_bytes
from ckpt_tools.errors import IntegrityError, PlanError, StorageError, printable
from ckpt_tools.formats.deltas.encoding import Encoder, check_size, new_hasher
from ckpt_tools.formats.deltas.layout import DeltaIndex
from ckpt_tools.formats.registry import Source
from ckpt_tools.formats.safetensors import INDEX
from ckpt_tools.publish.base import Attempt, Destination
from ckpt_tools.publish.manifest import SealedTensor
from ckpt_tools.storage import Capabilities, Store, WritableStore, Writer, is_url

_FILE = "model-00001-of-00001.safetensors"
_IN_MEMORY_BYTES = 8 << 20  # of the frame of a tensor in work; longer ones wait on a disk
_WAITING_BYTES = 32 << 20  # of a tensor's tiles that came before their turn
_PATIENCE_S = 2.0  # the thread with the tile before may have failed
_COPY_BYTES = 8 << 20


@dataclass
class DeltaCounts:
    """Counts of a delta: tensors, and bytes before and after.

    Attributes:
        num_tensors, nbytes: of the whole model.
        num_changed, changed_nbytes: tensors and bytes that differ.
        written_nbytes: of the published files.
    """

    num_tensors: int = 0
    nbytes: int = 0
    num_changed: int = 0
    changed_nbytes: int = 0
    written_nbytes: int = 0


class DeltaDestination(Destination):
    """A place for a delta. Those who write here write the files of the complete version."""

    def __init__(
        self,
        inner: Destination,
        before: Source,
        sealed: Mapping[str, SealedTensor],
        index: DeltaIndex,
    ):
        """Takes the version before.

        Args:
            inner: where the delta is published.
            before: the version before, with each tensor in one place.
            sealed: its tensors as its manifest has them, to compare the old bytes with.
            index: what the index will say; its `weight_map` is ignored.
        """
        self._inner, self._before, self._index = inner, before, index
        self._sealed = {name: int(tensor.fingerprint, 16) for name, tensor in sealed.items()}
        self.url = inner.url
        self.counts = DeltaCounts()
        for name, entry in before.catalog.tensors.items():
            check_size(index.encoding, name, entry.nbytes)
        new_hasher(index.checksum)  # its package is there

    def exists(self) -> bool:
        return self._inner.exists()

    @property
    def can_resume(self) -> bool:
        return False

    def check(self, overwrite: bool, known: Container[str] = ()) -> None:
        self._inner.check(overwrite, known)

    def add_note(self, name: str, data: bytes, attempt: str) -> None:
        self._inner.add_note(name, data, attempt)

    def right_files(
        self, attempt: str, files: Mapping[str, int], crcs: Mapping[str, int]
    ) -> set[str]:
        del attempt, files, crcs
        return set()

    def existing_result(self) -> tuple[Store, str]:
        return self._inner.existing_result()

    @contextmanager
    def _staged(self, staged: AbstractContextManager[Attempt]) -> Iterator[Attempt]:
        folder = None if is_url(self.url) else os.path.dirname(os.path.abspath(self.url))
        with (
            staged as attempt,
            _Encoders(self._before, self._sealed, self._index, folder) as encoders,
        ):
            yield _DeltaAttempt(attempt, self, encoders, self._index)

    def stage(
        self,
        attempt: str,
        overwrite: bool = False,
        single: str = "",
        kept_glob: str = "",
        takes_over: Path | None = None,
    ) -> AbstractContextManager[Attempt]:
        del single, kept_glob, takes_over
        return self._staged(self._inner.stage(attempt, overwrite))

    def data_name(self, attempt: str) -> str:
        """Returns the name of the file with the changes."""
        return self._inner.name(_FILE, attempt)

    def join(self, attempt: str, single: str = "", shares_files: bool = False) -> Attempt:
        del attempt, single, shares_files
        raise PlanError("one process publishes a delta", hint="run it without torchrun")


class _DeltaAttempt(Attempt):
    folder = None

    def __init__(
        self, inner: Attempt, place: DeltaDestination, encoders: _Encoders, index: DeltaIndex
    ) -> None:
        self.attempt, self._inner, self._place = inner.attempt, inner, place
        self._encoders, self._index = encoders, index

    @property
    def writable(self) -> WritableStore:
        return self._encoders

    def files(self) -> Store:
        return self._inner.files()

    def sizes(self) -> Mapping[str, int]:
        return self._inner.sizes()

    def sizes_of(self, names: Sequence[str]) -> Mapping[str, int]:
        return self._inner.sizes_of(names)

    def keep_matching(self, files: Mapping[str, int], crcs: Mapping[str, int]) -> set[str]:
        del files, crcs
        return set()

    def publish(
        self, manifest: Literal | None, index: Literal | None, files: Mapping[str, int]
    ) -> list[str]:
        del index, files  # of the complete version: they are not written
        frames, counts = self._encoders.finished(), self._place.counts
        name, written = self._place.data_name(self.attempt), {}
        if frames.table:
            header = frames.header()
            written[name] = len(header) + frames.nbytes
            writer = self._inner.writable.create(name, written[name])
            try:
                writer.write_at(0, header)
                at = len(header)
                for piece in frames.pieces():
                    writer.write_at(at, piece)
                    at += len(piece)
                writer.finish()
            except BaseException:
                writer.abort()
                raise
        about = self._index._replace(weight_map=dict.fromkeys(frames.table, name))
        text = json.dumps(about.render(), indent=1).encode("ascii")
        for key, value in vars(self._encoders.counts).items():
            setattr(counts, key, value)
        counts.written_nbytes = sum(written.values()) + len(text)
        self._inner.sync()
        return self._inner.publish(manifest, Literal(INDEX, 0, text), written)


class _Frames:
    """The finished frames one after the other, in a file without a name."""

    def __init__(self, folder: str | None) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="ckpt-", dir=folder)  # noqa: SIM115  # see `close`
        self._lock = threading.Lock()
        self.table: dict[str, tuple[int, int, str]] = {}  # start, end and checksum by tensor
        self.nbytes = 0

    def add(self, name: str, frame: IO[bytes], checksum: str) -> None:
        """Adds the frame of a tensor."""
        frame.seek(0)
        with self._lock:
            start = self.nbytes
            while piece := frame.read(_COPY_BYTES):
                self._file.write(piece)
                self.nbytes += len(piece)
            self.table[name] = start, self.nbytes, checksum

    def header(self) -> bytes:
        """Returns the header of a safetensors file with these frames."""
        about = {
            name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
            for name, (start, end, _) in self.table.items()
        }
        checksums = {name: checksum for name, (*_, checksum) in self.table.items()}
        text = json.dumps({"__metadata__": checksums, **about}).encode("ascii")
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def pieces(self) -> Iterator[bytes]:
        """Yields all frames."""
        self._file.seek(0)
        while piece := self._file.read(_COPY_BYTES):
            yield piece

    def close(self) -> None:
        """Gives up the room."""
        self._file.close()


class _Tensor:
    """A tensor in work. Its tiles may come in another order, and wait for their turn."""

    def __init__(
        self, name: str, start: int, nbytes: int, index: DeltaIndex, folder: str | None
    ) -> None:
        self.name, self.start, self.nbytes = name, start, nbytes
        self.changed = threading.Condition()
        self.is_busy = False
        self.waiting: dict[int, bytes] = {}
        self.waiting_nbytes = self.old_crc64 = 0
        self.frame = tempfile.SpooledTemporaryFile(  # noqa: SIM115  # closed by `close`
            _IN_MEMORY_BYTES, prefix="ckpt-", dir=folder
        )
        self.encoder = Encoder(index.encoding, nbytes, new_hasher(index.checksum), folder)

    def close(self) -> None:
        """Gives up the room."""
        self.frame.close()
        self.encoder.close()


class _Encoders:
    """Takes the files of the complete version, in pieces, and keeps what differs from before."""

    capabilities = Capabilities(can_write_anywhere=True)

    def __init__(
        self,
        before: Source,
        sealed: Mapping[str, int],
        index: DeltaIndex,
        folder: str | None,
    ) -> None:
        self._before, self._sealed, self._index = before, sealed, index
        catalog = before.catalog
        self._folder = folder
        self._frames, self._lock, self._own = _Frames(folder), threading.Lock(), threading.local()
        self.counts = DeltaCounts()
        self._work: dict[str, _Tensor] = {}
        self._places: dict[str, list[tuple[int, int, str]]] = {}
        for name, entry in catalog.tensors.items():
            extent = entry.chunks[0].extent
            if extent.nbytes:
                place = extent.start, extent.nbytes, name
                self._places.setdefault(extent.file, []).append(place)
        for places in self._places.values():
            places.sort()
        self._left = {name for places in self._places.values() for *_, name in places}
        self.counts.num_tensors, self.counts.nbytes = (
            len(catalog.tensors),
            sum(entry.nbytes for entry in catalog.tensors.values()),
        )

    def __enter__(self) -> _Encoders:
        return self

    def __exit__(self, *_: object) -> None:
        for tensor in self._work.values():
            tensor.close()
        self._frames.close()

    def create(self, path: str, nbytes: int) -> Writer:
        del nbytes
        return _DeltaWriter(self, path)

    def finished(self) -> _Frames:
        """Returns the frames.

        Raises:
            StorageError: some bytes never came.
        """
        if self._left:
            raise StorageError(f"a tensor is not complete: {printable(min(self._left))!r}")
        return self._frames

    def put(self, file: str, start: int, data: memoryview) -> None:
        """Takes a range of a file. What is no tensor's is as before, and passes by."""
        places = self._places.get(file, [])
        at = max(0, bisect_right(places, (start, 1 << 62)) - 1)
        for first, nbytes, name in places[at:]:
            if first >= start + len(data):
                return
            low, high = max(start, first), min(start + len(data), first + nbytes)
            if low < high:
                self._add(file, first, nbytes, name, low - first, data[low - start : high - start])

    def _add(
        self, file: str, first: int, nbytes: int, name: str, start: int, data: memoryview
    ) -> None:
        with self._lock:
            tensor = self._work.get(name)
            if tensor is None:
                tensor = self._work[name] = _Tensor(name, first, nbytes, self._index, self._folder)
        with tensor.changed:
            tensor.changed.wait_for(
                lambda: (
                    (start == tensor.encoder.at and not tensor.is_busy)
                    or tensor.waiting_nbytes < _WAITING_BYTES
                ),
                _PATIENCE_S,
            )
            if tensor.is_busy or start != tensor.encoder.at:
                tensor.waiting[start] = bytes(data)
                tensor.waiting_nbytes += len(data)
                return
            tensor.is_busy = True
        piece: memoryview | bytes | None = data
        while piece is not None:
            self._encode(file, tensor, piece)
            with tensor.changed:
                piece = tensor.waiting.pop(tensor.encoder.at, None)
                tensor.waiting_nbytes -= len(piece) if piece is not None else 0
                tensor.is_busy = piece is not None
                is_last = tensor.encoder.at == nbytes
                tensor.changed.notify_all()
        if is_last:
            self._done(tensor)

    def _encode(self, file: str, tensor: _Tensor, data: memoryview | bytes) -> None:
        new = np.frombuffer(data, np.uint8)
        old = self._room(len(new))
        self._before.store.read_into(file, tensor.start + tensor.encoder.at, old.data)
        tensor.old_crc64 = crc64nvme(old.data, tensor.old_crc64)
        tensor.frame.write(tensor.encoder.add(new, old))

    def _room(self, nbytes: int) -> Bytes:
        """Returns memory of this thread, which its next call returns again."""
        found: Bytes | None = getattr(self._own, "memory", None)
        if found is None or len(found) < nbytes:
            found = self._own.memory = empty_bytes(nbytes)
        return found[:nbytes]

    def _done(self, tensor: _Tensor) -> None:
        if self._sealed.get(tensor.name, tensor.old_crc64) != tensor.old_crc64:
            raise IntegrityError(
                f"a tensor of the version before is not what was sealed: {printable(tensor.name)!r}"
                f" ({printable(self._before.path)})",
                hint="restore it, or publish a complete version: --full",
            )
        if number := tensor.encoder.num_changed:
            for piece in tensor.encoder.finish():
                tensor.frame.write(piece)
            self._frames.add(tensor.name, tensor.frame, tensor.encoder.checksum)
        with self._lock:
            self.counts.num_changed += bool(number)
            self.counts.changed_nbytes += number
            self._left.discard(tensor.name)
            del self._work[tensor.name]
        tensor.close()


class _DeltaWriter:
    def __init__(self, encoders: _Encoders, file: str) -> None:
        self._encoders, self._file = encoders, file

    def write_at(self, start: int, data: memoryview | bytes) -> None:
        try:
            self._encoders.put(self._file, start, memoryview(data).cast("B"))
        except OSError as error:
            raise StorageError(
                f"cannot keep the changes until they are published: {error.strerror}",
                hint="they wait in ROOT, or for a bucket in TMPDIR: make room there",
            ) from error

    def view(self, start: int, nbytes: int) -> memoryview | None:
        del start, nbytes
        return None

    def finish(self) -> None:
        """Does nothing: the changes are written when all are there."""

    def abort(self) -> None:
        """Does nothing: the attempt gives up its room."""
