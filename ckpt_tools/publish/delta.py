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
from typing import NamedTuple

import numpy as np

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.plan import Literal, Target
from ckpt_tools.engine.kernels import Bytes
from ckpt_tools.engine.sinks import WriteSink, empty_bytes
from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.formats.deltas.encoding import Encoder, check_size, new_hasher
from ckpt_tools.formats.deltas.layout import (
    MANIFEST_JSON,
    ChangedBytes,
    DeltaIndex,
    Layout,
    manifest_json,
)
from ckpt_tools.formats.registry import Source
from ckpt_tools.publish.base import Attempt, Destination
from ckpt_tools.publish.delta_changes import Baseline, ChangeFinder, ChangeSink
from ckpt_tools.publish.delta_frames import FrameFile, parts_of, told_if_full, wrong_before
from ckpt_tools.publish.delta_join import ChangeJoiner
from ckpt_tools.publish.find_manifest import find_manifest, hash_file
from ckpt_tools.publish.manifest import SealedFile, SealedTensor
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage import (
    Capabilities,
    Store,
    WritableStore,
    Writer,
    is_url,
)

_FILE = "model-{:05d}-of-{:05d}.safetensors"  # rank, and number of ranks
_IN_MEMORY_BYTES = 8 << 20  # of the frame of a tensor in work; longer ones wait on a disk
_WAITING_BYTES = 32 << 20  # of a tensor's tiles that came before their turn
_COPY_BYTES = 8 << 20
_PATIENCE_S = 2.0  # the thread with the tile before may have failed


def wrong_files(store: Store) -> dict[str, str]:
    """Returns the files of a delta that are not as they were written, with the reason.

    It reads them as a whole. Without a manifest of ours, it knows of none.

    Raises:
        CheckpointError: one cannot be read, or the manifest is malformed.
    """
    manifest, found = find_manifest(store), {}
    told = {} if manifest is None else manifest.delta_files
    for name, (nbytes, expected) in told.items():
        sizes = store.list_files()
        if sizes.get(name) != nbytes:
            found[name] = f"expected {nbytes:,} bytes, got {sizes.get(name, 'no file')}"
        elif (crc := hash_file(store, name)) != expected:
            found[name] = f"its bytes are not those that were published: CRC-64 is {crc}"
    return found


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

    @classmethod
    def of(cls, catalog: Catalog) -> DeltaCounts:
        """Returns the counts of a model of which nothing has changed."""
        tensors = catalog.tensors.values()
        return cls(len(tensors), sum(entry.nbytes for entry in tensors))

    def add(self, counts: DeltaCounts) -> None:
        """Adds the changes that another rank has found in the same model."""
        self.num_tensors, self.nbytes = counts.num_tensors, counts.nbytes
        self.num_changed += counts.num_changed
        self.changed_nbytes += counts.changed_nbytes


class DeltaJob(NamedTuple):
    """The ranks of a job that publish together.

    Attributes:
        group: all ranks.
        baseline: this rank's bytes of the version before; None to read them each time.
        jobs: threads of this rank.
    """

    group: Group
    baseline: Baseline | None
    jobs: int


class DeltaDestination(Destination):
    """A place for a delta. Those who write here write the files of the complete version."""

    _attempt: _DeltaAttempt | None = None
    takes_boxes = True
    written: dict[str, SealedFile]  # on rank 0, after `finish`
    index: Literal | None = None  # the same

    def __init__(
        self,
        inner: Destination,
        before: Source,
        sealed: Mapping[str, SealedTensor],
        index: DeltaIndex,
        layout: Layout,
        job: DeltaJob | None = None,
    ):
        """Takes the version before.

        Args:
            inner: where the delta is published.
            before: the version before, with each tensor in one place.
            sealed: its tensors as its manifest has them, to compare the old bytes with.
            index: the contents of the index; its `weight_map` is ignored.
            layout: for whose receivers the delta is.
            job: the ranks, if each has a part of the new bytes.
        """
        self._job, self.written = job, {}
        self._inner, self._before, self._index, self._layout = inner, before, index, layout
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
        with staged as attempt, self._encoders() as encoders:
            yield self._begun(attempt, encoders)

    def _encoders(self) -> _Encoders | _JobEncoders:
        folder = None if is_url(self.url) else os.path.dirname(os.path.abspath(self.url))
        if self._job is None:
            return _Encoders(self._before, self._sealed, self._index, folder)
        return _JobEncoders(self._before, self._sealed, self._index, folder, self._job)

    def _begun(self, inner: Attempt, encoders: _Encoders | _JobEncoders) -> _DeltaAttempt:
        self._attempt = attempt = _DeltaAttempt(inner, self, encoders, self._index)
        return attempt

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

    def add_index(self, index: DeltaIndex, frames: Mapping[str, ChangedBytes]) -> None:
        """Takes what a delta changes, for the file that tells it. It is written last."""
        text = (
            manifest_json(index, frames, self._before.catalog)
            if self._layout.index_file == MANIFEST_JSON
            else json.dumps(index.render(), indent=1).encode("ascii")
        )
        self.index = Literal(self._layout.index_file, 0, text)

    @property
    def sealed_files(self) -> dict[str, tuple[int, str]]:
        """Returns bytes and CRC-64 of the delta's own files, for its manifest."""
        found = {name: (file.nbytes, file.crc64nvme) for name, file in self.written.items()}
        if self.index is not None:
            data = self.index.data
            found[self.index.file] = len(data), hex64(crc64nvme(data))
        return found

    def data_name(self, attempt: str, group: Group) -> str:
        """Returns the name of the file with this rank's frames."""
        return self._inner.name(_FILE.format(group.rank + 1, group.size), attempt)

    def join(self, attempt: str, single: str = "", shares_files: bool = False) -> Attempt:
        del single, shares_files  # each rank has a file of its own
        if self._job is None:
            raise PlanError("one process publishes a delta", hint="run it without torchrun")
        return self._begun(self._inner.join(attempt), self._encoders())

    def finish(self, group: Group) -> str:
        """Makes the frames and writes them, when all bytes have come. All ranks call it.

        Returns:
            The id of the attempt.
        """
        assert self._attempt is not None
        self._attempt.finish(group)
        return self._attempt.attempt


class _DeltaAttempt(Attempt):
    folder = None

    def __init__(
        self,
        inner: Attempt,
        place: DeltaDestination,
        encoders: _Encoders | _JobEncoders,
        index: DeltaIndex,
    ) -> None:
        self.attempt, self._inner, self._place = inner.attempt, inner, place
        self._encoders, self._index = encoders, index

    @property
    def writable(self) -> WritableStore:
        return self._encoders.writable(self._inner)

    def sink(self, target: Target) -> WriteSink | None:
        return self._encoders.sink(self._inner, target)

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
        place = self._place
        written = {name: file.nbytes for name, file in place.written.items()}
        place.counts.written_nbytes = sum(nbytes for nbytes, _ in place.sealed_files.values())
        return self._inner.publish(manifest, place.index, written)

    def finish(self, group: Group) -> None:
        """Makes this rank's frames and writes them. Rank 0 notes those of all ranks."""
        self._encoders.finish(group)
        with group.phase("write the changes"):
            frames, name = self._encoders.frames, self._place.data_name(self.attempt, group)
            written = frames.write(self._inner.writable, name)
            self._inner.sync()
        frames.close()
        mine = written, dict(frames.table), self._encoders.counts
        weight_map, changed = dict[str, str](), dict[str, ChangedBytes]()
        told = group.gather(mine, "gather the changes")
        for files, table, counts in told:
            self._place.written |= files
            weight_map |= dict.fromkeys(table, next(iter(files), ""))
            self._place.counts.add(counts)
            changed |= {n: ChangedBytes(end - at, crc) for n, (at, end, crc) in table.items()}
        if told:
            about = self._index._replace(weight_map=dict(sorted(weight_map.items())))
            self._place.add_index(about, changed)


class _TensorPlaces:
    """Finds the tensors in a range of a file. Each tensor lies in one place."""

    def __init__(self, catalog: Catalog) -> None:
        self._places: dict[str, list[tuple[int, int, str]]] = {}
        for name, entry in catalog.tensors.items():
            extent = entry.chunks[0].extent
            if extent.nbytes:
                place = extent.start, extent.nbytes, name
                self._places.setdefault(extent.file, []).append(place)
        for places in self._places.values():
            places.sort()

    def names(self) -> set[str]:
        """Returns the tensors that have bytes."""
        return {name for places in self._places.values() for *_, name in places}

    def find(
        self, file: str, start: int, data: memoryview
    ) -> Iterator[tuple[str, int, int, int, memoryview]]:
        """Yields the parts of a range that belong to tensors.

        Yields:
            The tensor, its first byte in the file, its bytes, and the part: its first byte in the
            tensor, and its data.
        """
        places = self._places.get(file, [])
        at = max(0, bisect_right(places, (start, 1 << 62)) - 1)
        for first, nbytes, name in places[at:]:
            if first >= start + len(data):
                return
            low, high = max(start, first), min(start + len(data), first + nbytes)
            if low < high:
                yield name, first, nbytes, low - first, data[low - start : high - start]


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
        self.frames, self._lock, self._own = FrameFile(folder), threading.Lock(), threading.local()
        self.counts = DeltaCounts.of(catalog)
        self._work: dict[str, _Tensor] = {}
        self._places = _TensorPlaces(catalog)
        self._left = self._places.names()

    def __enter__(self) -> _Encoders:
        return self

    def __exit__(self, *_: object) -> None:
        for tensor in self._work.values():
            tensor.close()
        self.frames.close()

    def writable(self, inner: Attempt) -> WritableStore:
        del inner  # files of the complete version come here
        return self

    def sink(self, inner: Attempt, target: Target) -> WriteSink | None:
        del inner, target
        return None

    def create(self, path: str, nbytes: int) -> Writer:
        del nbytes
        return _DeltaWriter(self, path)

    def finish(self, group: Group) -> None:
        """Makes sure that all bytes have come.

        Raises:
            StorageError: some never came.
        """
        del group  # this process alone
        if self._left:
            raise StorageError(f"a tensor is not complete: {printable(min(self._left))!r}")

    def put(self, file: str, start: int, data: memoryview) -> None:
        """Takes a range of a file. What is no tensor's is as before, and passes by."""
        for name, first, nbytes, low, part in self._places.find(file, start, data):
            self._add(file, first, nbytes, name, low, part)

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
            raise wrong_before(tensor.name, self._before)
        if number := tensor.encoder.num_changed:
            for piece in tensor.encoder.finish():
                tensor.frame.write(piece)
            self.frames.add(tensor.name, parts_of(tensor.frame), tensor.encoder.checksum)
        with self._lock:
            self.counts.num_changed += bool(number)
            self.counts.changed_nbytes += number
            self._left.discard(tensor.name)
            del self._work[tensor.name]
        tensor.close()


class _JobEncoders:
    """Takes this rank's part of the new version, and joins the changes of all ranks."""

    def __init__(
        self,
        before: Source,
        sealed: Mapping[str, int],
        index: DeltaIndex,
        folder: str | None,
        job: DeltaJob,
    ) -> None:
        self._sealed, self.counts = sealed, DeltaCounts.of(before.catalog)
        self._finder, self.frames = ChangeFinder(before, job.baseline), FrameFile(folder)
        self._joiner = ChangeJoiner(before, sealed, index, folder, job.jobs, self.frames)

    def __enter__(self) -> _JobEncoders:
        return self

    def __exit__(self, *_: object) -> None:
        self.frames.close()

    def writable(self, inner: Attempt) -> WritableStore:
        return inner.writable

    def sink(self, inner: Attempt, target: Target) -> WriteSink | None:
        return ChangeSink(target, inner.writable, self._finder)

    def finish(self, group: Group) -> None:
        """Compares the old bytes with their fingerprints, and makes the frames."""
        with group.phase("prove the version before"):
            self._finder.prove_before(group, self._sealed)
        self._joiner.join(self._finder.changes, group)
        self.counts.num_changed = self._joiner.num_changed
        self.counts.changed_nbytes = self._joiner.changed_nbytes


class _DeltaWriter:
    def __init__(self, encoders: _Encoders, file: str) -> None:
        self._encoders, self._file = encoders, file

    def write_at(self, start: int, data: memoryview | bytes) -> None:
        with told_if_full():
            self._encoders.put(self._file, start, memoryview(data).cast("B"))

    def view(self, start: int, nbytes: int) -> memoryview | None:
        del start, nbytes
        return None

    def finish(self) -> None:
        """Does nothing: the changes are written when all are there."""

    def abort(self) -> None:
        """Does nothing: the attempt gives up its room."""
