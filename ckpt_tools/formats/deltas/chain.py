"""Shows a delta as the complete version that it stands for.

The files are those of the nearest complete version below. The changes of all versions since then
are applied to the bytes as they are read, so several deltas are one pass. Nothing is written.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.shared_cache import SharedCache
from ckpt_tools.errors import (
    FormatError,
    IntegrityError,
    NotACheckpointError,
    PlanError,
    StorageError,
    printable,
)
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.base import MANIFEST, attempt_of, note_name, note_of
from ckpt_tools.formats.deltas.encoding import Patch, check_frame, decode, fold, new_hasher
from ckpt_tools.formats.deltas.layout import DeltaIndex, Layout, index_text, read_delta_index
from ckpt_tools.storage import Capabilities, Store, Writer, read
from ckpt_tools.storage.base import StoreDefaults
from ckpt_tools.storage.memory import MemoryStore

_PIECE_BYTES = 2 << 20
_AHEAD_BYTES = 64 << 20  # of frames in a bucket that are fetched before they are asked for
_KEPT_BYTES = 64 << 20  # of decoded changes
_KEPT_TENSORS = 4  # whatever their bytes: threads may be at several tensors


class Layer(NamedTuple):
    """A delta: what its index says, the store of its directory, and what opens that anew.

    A chain may have more files than a process may open at the same time.
    """

    about: DeltaIndex
    store: Store
    reopen: Callable[[], Store]

    @property
    def is_remote(self) -> bool:
        """Whether it is in a bucket. Then it has no open files, and may stay open."""
        return self.store.capabilities.is_remote

    @contextmanager
    def opened(self) -> Iterator[Store]:
        """Yields the directory, and closes its files."""
        if self.is_remote:
            yield self.store
            return
        store = self.reopen()
        try:
            yield store
        finally:
            store.close()


class Frame(NamedTuple):
    """Where the change of a tensor lies, and the checksum of the new bytes; "" for none."""

    layer: Layer
    file: str
    start: int
    nbytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A tensor that versions since the complete one have changed.

    Attributes:
        fqn: its name.
        file, start, nbytes: where it lies in the complete version.
        frames: its changes, oldest first.
    """

    fqn: str
    file: str
    start: int
    nbytes: int
    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True)
class Chain:
    """A version as the complete one below it and the deltas since.

    Attributes:
        base: the store of the complete version.
        layers: the deltas, oldest first.
    """

    base: Store
    layers: Sequence[Layer]

    def close(self) -> None:
        """Closes all stores."""
        for store in (self.base, *(layer.store for layer in self.layers)):
            store.close()


def find_chain(
    store: Store,
    layout: Layout,
    number: int,
    sibling: Callable[[str], Store],
    elsewhere: Callable[[str], Store],
    base: str = "",
    is_reached: Callable[[int, Store], Store | None] | None = None,
) -> Chain:
    """Looks back from a version for the complete one.

    Args:
        store: the directory of the version.
        layout: how versions are called.
        number: its number.
        sibling: returns the store of the folder of that name beside it.
        elsewhere: opens a path or URL.
        base: path or URL of version 0; "" for the one that the publisher noted.
        is_reached: takes the number and store of a version, 0 included; returns the store of that
            version as a complete one, if there is one elsewhere.

    Raises:
        StorageError: a version is missing.
        FormatError: an index is malformed, or in the wrong directory.
    """
    layers: list[Layer] = []
    said = ""
    while True:
        if is_reached is not None and (found := is_reached(number, store)) is not None:
            return Chain(found, layers)
        index = read_delta_index(store)
        if index is None:
            return Chain(store, layers)
        if index.number != number:
            raise FormatError(
                f"{printable(store.url)} says that it is version {index.number}",
                hint="its directory was renamed or copied: give it its own name back",
            )
        layers.insert(0, Layer(index, store, partial(sibling, layout.version_name(number))))
        if not store.capabilities.is_remote:
            store.close()  # its index is read; a chain may be long
        said = said or index.base
        number = index.base_number
        if number == 0:
            below = _open_base(base or _said_base(said, store), elsewhere)
            found = None if is_reached is None else is_reached(number, below)
            if found is None:
                return Chain(below, layers)
            below.close()
            return Chain(found, layers)
        below = sibling(layout.version_name(number))
        if not _holds_files(below):
            raise StorageError(
                f"version {number} is missing, and version {number + 1} is a change of it"
                f" ({printable(store.url)})",
                hint=(
                    "restore it, or pull a version from the next complete one on; a publisher"
                    " begins anew with ckpt publish --full, or full=True"
                    if layout.has_complete
                    else "restore it; or publish the model to another directory, with that of the"
                    " engines as --base"
                ),
                is_missing=True,
            )
        store = below


def _holds_files(store: Store) -> bool:
    try:
        return bool(store.list_files())
    except StorageError as error:
        if not error.is_missing:
            raise
        return False


_BASE_HINT = (
    "the model that the engine started with has to be there; --base DIR of ckpt publish and pull"
    " takes it from elsewhere, and a pull makes a complete copy"
)


def _said_base(said: str, store: Store) -> str:
    """Returns where a delta says that version 0 lies.

    Raises:
        PlanError: it does not say, or it names another kind of store: a delta of somebody else
            makes no requests to a host that the user did not name.
    """
    where = printable(store.url)
    if not said:
        raise PlanError(
            f"{where} is a change of version 0, and does not say where that is", hint=_BASE_HINT
        )
    scheme, is_url = said.partition("://")[::2]
    if is_url and scheme != store.url.partition("://")[0]:
        raise PlanError(
            f"{where} names a version 0 in another kind of store, which is not opened unasked:"
            f" {printable(said)}",
            hint=_BASE_HINT,
        )
    return said


def _open_base(where: str, elsewhere: Callable[[str], Store]) -> Store:
    try:
        return elsewhere(where)
    except (NotACheckpointError, StorageError) as error:
        raise StorageError(f"version 0 cannot be opened: {error}", hint=_BASE_HINT) from error


class PatchedStore(StoreDefaults):
    """The files of a version, as they would be if it were complete."""

    def __init__(self, chain: Chain, url: str) -> None:
        """Reads the headers of the complete version and of all deltas.

        Raises:
            CheckpointError: they are malformed, or do not belong together.
        """
        self._chain, self.url = chain, url
        self._base, self._last = chain.base, chain.layers[-1].store
        self.traffic, kind = self._base.traffic, self._base.capabilities
        self.capabilities = Capabilities(
            can_write_anywhere=False,
            fetches_ahead=kind.fetches_ahead or any(layer.is_remote for layer in chain.layers),
            is_remote=any(s.capabilities.is_remote for s in (self._base, self._last)),
        )
        catalog = safetensors.read_catalog(self._base)
        self.changed = _changed(catalog, chain.layers)
        is_single = safetensors.INDEX not in self._base.list_files()
        index = {safetensors.INDEX: index_text(self._base, catalog)} if is_single else {}
        self._memory = MemoryStore(index, url)
        self._by_file: dict[str, list[ChangedTensor]] = {}
        for tensor in sorted(self.changed.values(), key=lambda t: t.start):
            self._by_file.setdefault(tensor.file, []).append(tensor)
        is_sealed = bool(self._manifests())
        self._ahead = _FramesAhead()
        self._decoded = _Decoded(None if is_sealed else self._check, self._ahead)

    @property
    def about(self) -> str:
        """The number of the version, and what it changes, for people."""
        last = self._chain.layers[-1].about
        return f"{last.number}, a delta of {last.base_number} ({last.encoding})"

    @property
    def layers(self) -> Sequence[Layer]:
        """The deltas that are applied, oldest first."""
        return self._chain.layers

    @property
    def complete_url(self) -> str:
        """The path or URL of the complete version."""
        return self._base.url

    def list_files(self, below: bool = False) -> Mapping[str, int]:
        files = {n: b for n, b in self._base.list_files(below).items() if note_of(n) is None}
        files |= {n: self._memory.size(n) for n in self._memory.files}
        return files | self._manifests()

    def _manifests(self) -> dict[str, int]:
        """Returns the manifests of the version, with their bytes: one, and none of a dead attempt.

        In a bucket, the names of a delta's files have the id of the attempt that has published it.
        """
        found = {n: b for n, b in self._last.list_files().items() if note_of(n) == (MANIFEST, "")}
        ids = {attempt_of(file) for file in self._chain.layers[-1].about.weight_map.values()} - {""}
        mine = {n: b for n, b in found.items() if n in {note_name(MANIFEST, one) for one in ids}}
        return mine or found

    def folders(self) -> list[str]:
        return self._base.folders()

    def enter(self, name: str) -> Store:
        return self._base.enter(name)

    def strays(self) -> Mapping[str, str]:
        return self._base.strays()

    def size(self, path: str) -> int:
        return self._of(path).size(path)

    def version(self, path: str) -> str:
        frames = {
            (frame.file, id(frame.layer.store)): frame
            for tensor in self._by_file.get(path, ())
            for frame in tensor.frames
        }
        versions = [self._of(path).version(path)]
        for (file, _), frame in frames.items():
            with frame.layer.opened() as store:
                versions.append(store.version(file))
        return " ".join(versions)

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        self._of(path).read_into(path, start, buffer)
        data, end = np.frombuffer(buffer, np.uint8), start + len(buffer)
        for tensor in self._changed_in(path, start, len(buffer)):
            low, high = max(start, tensor.start), min(end, tensor.start + tensor.nbytes)
            for patch in self._decoded.get(tensor):
                patch.apply(data[low - start : high - start], low - tensor.start)

    def _changed_in(self, path: str, start: int, nbytes: int) -> Iterator[ChangedTensor]:
        """Yields the changed tensors of which a range has bytes."""
        changed, end = self._by_file.get(path, []), start + nbytes
        at = max(0, bisect_right(changed, start, key=lambda t: t.start) - 1)
        for tensor in changed[at:]:
            if tensor.start >= end:
                return
            if max(start, tensor.start) < min(end, tensor.start + tensor.nbytes):
                yield tensor

    def patches_of(self, fqn: str) -> Sequence[Patch]:
        """Returns the changes of a tensor since the complete version, in order; none if it stayed.

        Raises:
            CheckpointError: they cannot be read, or are damaged.
        """
        tensor = self.changed.get(fqn)
        return () if tensor is None else self._decoded.get(tensor)

    def _check(self, tensor: ChangedTensor, patches: Sequence[Patch]) -> None:
        """Compares a changed tensor with the checksum of its publisher: nothing else proves it."""
        if not self.is_right(tensor, patches):
            raise IntegrityError(
                f"after the changes, a tensor is not the published one: {printable(tensor.fqn)!r}"
                f" ({printable(self.url)})",
                hint=f"the changes do not belong to {printable(self._base.url)}, or it is damaged",
            )

    def is_right(self, tensor: ChangedTensor, patches: Sequence[Patch]) -> bool:
        """Reads a changed tensor, and compares it with the checksum of its publisher."""
        frame = tensor.frames[-1]
        hasher = new_hasher(frame.layer.about.checksum)
        buffer = np.empty(min(_PIECE_BYTES, tensor.nbytes), np.uint8)
        for at in range(0, tensor.nbytes, _PIECE_BYTES):
            part = buffer[: tensor.nbytes - at]
            self._base.read_into(tensor.file, tensor.start + at, part.data)
            for patch in patches:
                patch.apply(part, at)
            hasher.update(part.data)
        return hasher.hexdigest() == frame.checksum

    def will_read(self, ranges: Iterable[tuple[str, int, int]], is_all: bool = False) -> None:
        mine = [r for r in ranges if self._of(r[0]) is self._base]
        self._ahead.announce(t for r in mine for t in self._changed_in(*r))
        self._base.will_read(mine, is_all)

    def create(self, path: str, nbytes: int) -> Writer:
        raise StorageError(f"a version is not written to: {printable(path)} ({nbytes} bytes)")

    def close(self) -> None:
        self._decoded.clear()
        self._chain.close()

    def _of(self, path: str) -> Store:
        if path in self._memory.files:
            return self._memory
        return self._last if note_of(path) is not None else self._base


def as_patched(store: Store) -> PatchedStore | None:
    """Returns the store of a delta that is shown as a complete version; None for any other."""
    return store if isinstance(store, PatchedStore) else None


def _changed(catalog: Catalog, layers: Sequence[Layer]) -> dict[str, ChangedTensor]:
    found: dict[str, list[Frame]] = {}
    for layer in layers:
        with layer.opened() as store:
            frames = _frames_of(store, layer.about)
        for fqn, entry in frames.tensors.items():
            extent = entry.chunks[0].extent
            checksum = layer.about.checksums.get(fqn) or frames.extras.get(fqn, "")
            found.setdefault(fqn, []).append(
                Frame(layer, extent.file, extent.start, extent.nbytes, checksum)
            )
    return {fqn: _tensor(catalog.tensors.get(fqn), frames, fqn) for fqn, frames in found.items()}


def _frames_of(store: Store, index: DeltaIndex) -> Catalog:
    """Reads the headers of a delta's files.

    Raises:
        FormatError: there is a file that the index does not name; receivers of slime would apply
            it. Those of SkyRL read only what is named.
    """
    files = set(index.weight_map.values())
    others = [n for n in store.list_files() if n.endswith(safetensors.SUFFIX) and n not in files]
    others = [n for n in others if not attempt_of(n)]  # of an attempt that was given up
    if others and index.file == safetensors.INDEX:
        raise FormatError(
            f"the index of a delta does not name one of its files: {printable(others[0])}"
            f" ({printable(store.url)})"
        )
    return safetensors.read_files(store, sorted(files), index.weight_map)


def _tensor(entry: TensorEntry | None, frames: Sequence[Frame], fqn: str) -> ChangedTensor:
    where = printable(frames[0].layer.store.url)
    if entry is None:
        raise IntegrityError(
            f"a tensor is changed that the complete version lacks: {printable(fqn)!r} ({where})",
            hint="it is not the version that the publisher changed: give another --base",
        )
    if len(entry.chunks) != 1:
        raise PlanError(f"a changed tensor is stored in parts: {printable(fqn)!r} ({where})")
    extent = entry.chunks[0].extent
    return ChangedTensor(fqn, extent.file, extent.start, extent.nbytes, frames)


def damaged_frames(store: Store, index: DeltaIndex, jobs: int) -> dict[str, str]:
    """Returns the changed tensors of a delta whose frames cannot be decompressed, with the reason.

    Raises:
        CheckpointError: the files cannot be read, or lack a tensor of the index.
    """
    found = _frames_of(store, index)

    def problem(entry: TensorEntry) -> str:
        extent = entry.chunks[0].extent
        return check_frame(read(store, extent.file, extent.start, extent.nbytes))

    with ThreadPoolExecutor(jobs, "ckpt-delta") as pool:
        told = pool.map(problem, found.tensors.values())
        return {fqn: why for fqn, why in zip(found.tensors, told, strict=True) if why}


class _FramesAhead:
    """Tells the stores of a bucket which frames will be read, so that many requests run at once.

    The frames that are announced and not read yet take a bounded part of the memory.
    """

    def __init__(self) -> None:
        self._lock, self._seen, self._waiting = threading.Lock(), set[str](), deque[ChangedTensor]()
        self._coming: dict[str, int] = {}
        self._read = set[str]()
        self._nbytes = 0

    def announce(self, tensors: Iterable[ChangedTensor]) -> None:
        """Queues the frames of tensors, each once."""
        with self._lock:
            for tensor in tensors:
                if tensor.fqn not in self._seen:
                    self._seen.add(tensor.fqn)
                    self._waiting.append(tensor)
            self._start()

    def has_read(self, tensor: ChangedTensor) -> None:
        """Notes that the frames of a tensor have been read."""
        with self._lock:
            self._read.add(tensor.fqn)
            self._nbytes -= self._coming.pop(tensor.fqn, 0)
            self._start()

    def _start(self) -> None:
        if self._nbytes > _AHEAD_BYTES // 2:  # neighbours that start together share a request
            return
        ranges: dict[int, tuple[Store, list[tuple[str, int, int]]]] = {}
        while self._waiting and self._nbytes < _AHEAD_BYTES:
            tensor = self._waiting.popleft()
            if tensor.fqn in self._read:
                continue
            frames = [frame for frame in tensor.frames if frame.layer.is_remote]
            self._coming[tensor.fqn] = sum(frame.nbytes for frame in frames)
            self._nbytes += self._coming[tensor.fqn]
            for layer, file, start, nbytes, _ in frames:
                mine = ranges.setdefault(id(layer.store), (layer.store, []))[1]
                mine.append((file, start, nbytes))
        for store, mine in ranges.values():
            store.will_read(mine)


class _Decoded:
    """The decoded changes of tensors in use. Each is decoded once, however many threads want it."""

    def __init__(
        self,
        check: Callable[[ChangedTensor, Sequence[Patch]], None] | None,
        ahead: _FramesAhead,
    ) -> None:
        """Takes what proves a decoded tensor, if nobody else does."""
        self._check, self._right, self._ahead = check, set[str](), ahead
        self._kept = SharedCache[str, Sequence[Patch]](
            _KEPT_BYTES, _KEPT_TENSORS, lambda patches: sum(patch.nbytes for patch in patches)
        )

    def get(self, tensor: ChangedTensor) -> Sequence[Patch]:
        """Returns the changes of a tensor, in order; those of one encoding are one patch."""
        return self._kept.get(tensor.fqn, lambda: self._proved(tensor))

    def _proved(self, tensor: ChangedTensor) -> Sequence[Patch]:
        patches = _decode(tensor)
        self._ahead.has_read(tensor)
        if self._check is not None and tensor.fqn not in self._right:
            self._check(tensor, patches)
            self._right.add(tensor.fqn)
        return patches

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()


def _decode(tensor: ChangedTensor) -> Sequence[Patch]:
    patches: list[Patch] = []
    for layer, file, start, nbytes, _ in tensor.frames:
        what = f"{printable(tensor.fqn)!r} in {printable(layer.store.url)}"
        with layer.opened() as store:
            frame = read(store, file, start, nbytes)
        patch = decode(frame, layer.about.encoding, tensor.nbytes, what)
        both = fold(patches[-1], patch) if patches else None
        patches = [*patches, patch] if both is None else [*patches[:-1], both]
    return patches


def wrong_tensors(store: PatchedStore, jobs: int) -> list[str]:
    """Returns the names of changed tensors whose bytes are not those that the publisher noted.

    Args:
        store: the version. Each of its changed tensors is read once.
        jobs: threads.

    Raises:
        IntegrityError: the change of a tensor is damaged.
    """

    def is_wrong(tensor: ChangedTensor) -> bool:
        return not store.is_right(tensor, _decode(tensor))

    with ThreadPoolExecutor(jobs, "ckpt-delta") as pool:
        tensors = list(store.changed.values())
        return [t.fqn for t, bad in zip(tensors, pool.map(is_wrong, tensors), strict=True) if bad]
