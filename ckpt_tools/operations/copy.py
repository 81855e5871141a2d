"""Copy: every file of a checkpoint as it is, from disk or store to disk or store; only what is missing, committed last.

A file is carried as an object, so this is one more plan for the same engine; within one S3 the store copies by itself.
May import levels 0 to 4.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Unpack

from ckpt_tools.box import whole
from ckpt_tools.catalog import BytesEntry, Catalog, Extent
from ckpt_tools.checksum import crc64nvme, hex64
from ckpt_tools.destination import Destination, LocalPlace, Place, RemotePlace, open_destination
from ckpt_tools.engine.run import run
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, tile_bytes
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.errors import IntegrityError, NotACheckpointError, PlanError, StorageError, printable
from ckpt_tools.formats import INDEXES, Source, open_source
from ckpt_tools.formats.base import attempt_of
from ckpt_tools.manifest import NAME, Manifest, Sealed, file_name, find, of_source
from ckpt_tools.operations.move import Options, Path_, check_apart, no_bar, steps_for
from ckpt_tools.plan import Literal, Plan, Slot, Target, plan_transfer
from ckpt_tools.storage import LocalStore, RemoteStore, Store, Writer, is_url, read
from ckpt_tools.storage.upload import How, Upload

_COPY_BYTES = 64 << 20  # one request within a store
_ASKERS = 16
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What a copy did, or with `dry_run` would do.

    Attributes:
        source, destination: from where, to where.
        files: bytes of every file of the checkpoint.
        kept_nbytes: bytes that were there already, and right.
        client_nbytes, store_nbytes: bytes that went through this process, and that the store copied by itself.
        notes: remarks.
        seconds: wall-clock time.
        is_dry_run: whether nothing was written.
    """

    source: str
    destination: str
    files: Mapping[str, int]
    kept_nbytes: int
    client_nbytes: int
    store_nbytes: int
    notes: Sequence[str] = ()
    seconds: float = 0.0
    is_dry_run: bool = False


def copy(src: Path_, dst: Path_, *, to_storage_options: Mapping[str, Any] | None = None, **options: Unpack[Options]) -> CopyResult:
    """Copies a checkpoint as it is. A second run transfers what is missing or differs; nothing is visible before everything is there.

    Args:
        src: a checkpoint, or a directory with one below; a path or a URL.
        dst: the directory (or file) to be; a path or a URL.
        to_storage_options: of the destination's store, where they are not the source's.
        **options: see `Options`; a checkpoint that is there is never replaced, so `overwrite` is refused.

    Raises:
        IntegrityError: the source's bytes are not what its manifest says.
        CheckpointError: see the tree in `errors`. What has been transferred is kept for the next run.
    """
    began = time.monotonic()
    if options.get("overwrite"):
        raise PlanError("a copy replaces nothing", hint="copy to another place, or remove what is there first")
    source = open_source(src, options.get("storage_options"))
    to_options = options.get("storage_options") if to_storage_options is None else to_storage_options
    target = open_destination(dst, to_options)
    check_apart(source.path, target.url)
    work = _Work(source, target, options)
    there = work.look_at(to_options) if target.exists() else "nothing"
    if there == "all":
        kept, note = sum(work.files.values()), "it is there already"
        return CopyResult(source.path, target.url, work.files, kept, 0, 0, (note,), time.monotonic() - began)
    if there == "another":
        raise StorageError(f"the destination exists: {printable(target.url)}", hint="choose another, or remove it first")
    if options.get("dry_run"):
        return CopyResult(source.path, target.url, work.files, 0, sum(work.files.values()), 0, (), time.monotonic() - began, True)
    target.check_room(sum(work.files.values()))
    try:
        notes = work.do()
    except IntegrityError:
        if source.remote is None:
            raise
        source.store.close()  # it may have happened on the way
        notes = work.do()
    source.store.close()
    moved = sum(work.files[name] for name in work.missing)
    return CopyResult(
        source.path, target.url, work.files, work.kept_nbytes, 0 if work.is_within else moved, moved if work.is_within else 0, notes,
        time.monotonic() - began,
    )  # fmt: skip


def plan_files(files: Mapping[str, int], name: Callable[[str], str] = str) -> Plan:
    """Plans the copy of whole files, each as an object; `name` gives what each is called at the other end."""
    items = {file: BytesEntry(file, Extent(file, 0, nbytes)) for file, nbytes in files.items()}
    slots = {file: (Slot(whole((nbytes,)), name(file), 0),) for file, nbytes in files.items()}
    return plan_transfer(Catalog("files", {}, items), Target("files", {name(f): n for f, n in files.items()}, slots))


class _Work:
    """One copy: which files there are, what their checksums are, and which of them have to move."""

    def __init__(self, source: Source, target: Destination, options: Options) -> None:
        self.source, self.target, self.options = source, target, options
        self.manifest = of_source(source)
        self.sealed: dict[str, Sealed] = dict(self.manifest.files) if self.manifest else {}
        files = dict(source.store.list_files(below=True))
        if self.manifest:
            files = {name: nbytes for name, nbytes in files.items() if not self._is_stale(name)}
        self.index = next((name for name in INDEXES if name in files), "")
        self.seal = next((name for name in files if NAME.fullmatch(name)), "")
        self.single = target.url.rpartition("/")[2] if source.is_file else ""
        if not self.index and not source.is_file:
            raise NotACheckpointError(
                f"a directory without an index is not copied yet: {printable(source.path)}", hint="copy its parts one by one"
            )
        self.files = files
        self.data = [name for name in files if name not in (self.index, self.seal)]
        self.missing: list[str] = []
        self.kept_nbytes = 0
        self.is_within = False

    def _is_stale(self, name: str) -> bool:
        assert self.manifest is not None
        is_foreign = bool(NAME.fullmatch(name)) and name != file_name(self.manifest.attempt)
        return is_foreign or bool(attempt_of(name) and name not in self.manifest.files)

    def name(self, file: str) -> str:
        """Returns the name of a file at the destination."""
        return self.single or file

    # ---- what is there -------------------------------------------------------------------------------------------------

    def look_at(self, options: Mapping[str, Any] | None) -> str:
        """Tells whether the destination holds "all" of this very checkpoint, a "part" that is not committed, or "another" thing."""
        if self.single:
            return "another"
        url = self.target.url
        store = RemoteStore(url, options) if is_url(url) else LocalStore(url)
        files = store.list_files(below=True)
        if is_url(url) and self.index not in files and set(files) <= set(self.files):
            return "part"
        is_same = all(files.get(name) == nbytes for name, nbytes in self.files.items())
        return "all" if is_same and self.manifest is not None and find(store) == self.manifest else "another"

    def _present(self, place: Place) -> set[str]:
        """Returns the data files that an earlier try has left, and that have the checksum of the manifest."""
        store = place.files()
        sizes = store.list_files(below=True)
        same = [name for name in self.data if name in self.sealed and sizes.get(name) == self.files[name]]
        with ThreadPoolExecutor(_ASKERS if isinstance(store, RemoteStore) else 1, "ckpt-ask") as pool:
            crcs = list(pool.map(lambda name: _crc64(store, name, sizes[name]), same))
        return {name for name, crc in zip(same, crcs, strict=True) if crc == int(self.sealed[name].crc64nvme, 16)}

    # ---- moving --------------------------------------------------------------------------------------------------------

    def do(self) -> list[str]:
        """Moves what is missing and commits; returns remarks."""
        attempt = self.manifest.attempt if self.manifest and not self.single else str(uuid.uuid4())
        bar = self.options.get("progress") or no_bar
        with self.target.stage(attempt, single=self.single, is_kept=not self.single) as place:
            present = set() if self.single else self._present(place)
            self.missing = [name for name in self.data if name not in present]
            self.kept_nbytes = sum(self.files[name] for name in present)
            self._clear(place)
            if isinstance(place, RemotePlace):
                place.kept = {self.name(name) for name in self.files}
            with bar("copy", sum(self.files[name] for name in self.missing)) as advance:
                origin = self.source.remote
                if self._is_within(place, origin):
                    assert isinstance(place, RemotePlace) and origin is not None
                    self.is_within = True
                    self._within(place, origin, advance)
                    crcs = {name: int(s.crc64nvme, 16) for name, s in self.sealed.items()}
                else:
                    crcs = self._through(place, advance)
            place.sync()
            return place.publish(*self._last(attempt, crcs))

    def _is_within(self, place: Place, origin: RemoteStore | None) -> bool:
        """Tells whether the store can copy by itself; a single file only where somebody knows its checksum."""
        if origin is None or not isinstance(place, RemotePlace) or not place.store.is_same_s3(origin):
            return False
        if self.single and not self.sealed:
            (name, nbytes), *_ = self.files.items()
            crc = origin.crc64(name)
            self.sealed = {} if crc is None else {name: Sealed(nbytes, hex64(crc))}
        return bool(self.sealed) or not self.single

    def _clear(self, place: Place) -> None:
        """Removes from a staging directory what is not right; in a store it is replaced."""
        if isinstance(place, LocalPlace):
            for name in set(place.files().list_files(below=True)) - (set(self.data) - set(self.missing)):
                place.remove(name)

    def _last(self, attempt: str, crcs: Mapping[str, int]) -> tuple[Literal | None, Literal | None]:
        """Returns manifest and index, which come last."""
        store = self.source.store
        if not self.single:
            seal = Literal(self.seal, 0, read(store, self.seal)) if self.seal else None
            return seal, Literal(self.index, 0, read(store, self.index))
        (name, nbytes), *_ = self.files.items()
        manifest = Manifest.now(
            attempt, "copy", self.source.format.NAME, {"name": self.source.name, "format": self.source.format.NAME}, world_size=None,
            files={self.single: Sealed(nbytes, hex64(crcs[name]))}, index=None, tensors=self.manifest.tensors if self.manifest else {},
        )  # fmt: skip
        return Literal(file_name(attempt, self.single), 0, manifest.render()), None

    def _through(self, place: Place, advance: Callable[[int], None]) -> dict[str, int]:
        """Moves files through this process, and returns their checksums."""
        jobs = self.options.get("jobs") or min(8, os.cpu_count() or 1)
        tiles = tile_bytes(self.options.get("memory_bytes") or DEFAULT_MEMORY_BYTES, jobs)
        plan = plan_files({name: self.files[name] for name in self.missing}, self.name)
        sink = WriteSink(plan.target, _Shelf(place, self))
        try:
            sink.open()
            run(steps_for(plan, {}, tiles, place.shelf), self.source.store, sink, jobs, advance)
            checksums = sink.finish()
        except BaseException:
            sink.abort()
            raise
        for name, sealed in self.sealed.items():
            if self.name(name) in checksums and hex64(checksums[self.name(name)]) != sealed.crc64nvme:
                raise IntegrityError(
                    f"bytes were damaged since they were written: expected CRC-64 {sealed.crc64nvme}, got"
                    f" {hex64(checksums[self.name(name)])} ({printable(name)} in {printable(self.source.path)})",
                    hint="try again in case the network did it, else restore the file or take another step",
                )
        return {name: checksums[self.name(name)] for name in self.missing}

    def _within(self, place: RemotePlace, origin: RemoteStore, advance: Callable[[int], None]) -> None:
        """Has the store copy files by itself."""

        def one(name: str) -> None:
            nbytes = self.files[name]
            starts = range(0, nbytes, max(_COPY_BYTES, -(-nbytes // 10_000)))
            upload = place.store.create(self.name(name), nbytes, replace(self.how(place, name), starts=starts))
            assert isinstance(upload, Upload)
            for start in starts:
                count = min(starts.step, nbytes - start)
                upload.copy(start, count, f"{origin.root}/{name}", start, origin.version(name), None)
            upload.finish()
            advance(nbytes)

        with ThreadPoolExecutor(_ASKERS, "ckpt-copy") as pool:
            for done in [pool.submit(one, name) for name in self.missing]:
                done.result()

    def how(self, place: RemotePlace, name: str) -> How:
        """Returns how a file is written to a store: where there is none, or in the place of what is not right."""
        there = place.store.version(name)
        crc = int(self.sealed[name].crc64nvme, 16) if name in self.sealed else None
        usual = place.how(self.name(name))
        return replace(usual, is_exclusive=usual.is_exclusive or not there, replaces=usual.replaces or there, crc64=crc)


class _Shelf:
    """Puts files where they go, with what is known of them."""

    def __init__(self, place: Place, work: _Work) -> None:
        self._place, self._work, self.capabilities = place, work, place.shelf.capabilities

    def create(self, path: str, nbytes: int) -> Writer:
        if isinstance(self._place, RemotePlace):
            name = next(iter(self._work.files)) if self._work.single else path
            return self._place.store.create(path, nbytes, self._work.how(self._place, name))
        return self._place.shelf.create(path, nbytes)


def _crc64(store: Store, name: str, nbytes: int) -> int | None:
    """Returns the checksum of a file: what an object store knows of it, or what its bytes say."""
    if isinstance(store, RemoteStore):
        return store.crc64(name)
    crc = 0
    for start in range(0, nbytes, _BLOCK_BYTES):
        crc = crc64nvme(read(store, name, start, min(_BLOCK_BYTES, nbytes - start)), crc)
    return crc
