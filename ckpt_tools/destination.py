"""Where a result goes: a path, published by one rename, or a prefix of an object store, published by its index.

In a store there is no rename. Data files bear the attempt's id in their names, so that attempts never touch each other's
bytes; the manifest follows; then the index, written only where there is none, is the one instant at which the checkpoint
appears. A single file appears with the last request of its upload. May import levels 0 to 3 and commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from ckpt_tools import commit
from ckpt_tools.checksum import crc64nvme, hex64
from ckpt_tools.errors import CheckpointError, StorageError, printable
from ckpt_tools.formats import INDEXES, foreign_files, is_ours
from ckpt_tools.formats.base import attempt_name, attempt_of
from ckpt_tools.manifest import NAME, find
from ckpt_tools.plan import Literal
from ckpt_tools.storage import LocalStore, RemoteStore, Shelf, Store, Writer, is_url, read, write_file
from ckpt_tools.storage.upload import How, appeared

_BESIDE = re.compile(r"\.ckpt\.manifest\.[0-9a-f]{8}\.json")


class Place(Protocol):
    """Where one attempt gathers its files."""

    @property
    def attempt(self) -> str:
        """Its id."""
        ...

    @property
    def shelf(self) -> Shelf:
        """Takes the files."""
        ...

    def files(self) -> Store:
        """Returns what lies there, to be read."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Looks at what lies there now: bytes by name."""
        ...

    def sync(self) -> None:
        """Makes the names of this process's files durable."""
        ...

    def publish(self, manifest: Literal | None, index: Literal | None) -> list[str]:
        """Manifest, then the one step by which everything appears; returns remarks.

        Args:
            manifest: None for a copy of what has none.
            index: None where a single file is its own.

        Raises:
            StorageError: another writer was first, or the store refuses; nothing is visible then.
        """
        ...


class Destination(Protocol):
    """A file or directory to be."""

    @property
    def url(self) -> str:
        """Path or URL."""
        ...

    def exists(self) -> bool:
        """Tells whether something is there, other than what attempts that never committed have left."""
        ...

    def check(self, overwrite: bool) -> None:
        """Refuses early what cannot be published to.

        Raises:
            StorageError: it exists, holds foreign files, or cannot be written to.
        """
        ...

    def name(self, file: str, attempt: str) -> str:
        """Returns the name under which an attempt's data file will lie."""
        ...

    def check_room(self, nbytes: int) -> None:
        """Refuses early what there is no room for, where that can be known.

        Raises:
            StorageError: there is less.
        """
        ...

    def stage(self, attempt: str, overwrite: bool = False, single: str = "", is_kept: bool = False) -> AbstractContextManager[Place]:
        """Yields the place of an attempt; what is left of it is removed on the way out.

        Args:
            attempt: its id.
            overwrite: take the place of what is there.
            single: the one file's name, where there is no index.
            is_kept: go on with what an earlier try of the same attempt has left, and leave what there is to the next.
        """
        ...

    def join(self, attempt: str) -> Place:
        """Returns the place that another process has made.

        Raises:
            StorageError: this one does not see it.
        """
        ...


def open_destination(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Destination:
    """Returns the destination of a path or URL; `options` are those of the object store, as fsspec takes them."""
    where = os.fspath(path)
    return RemoteDestination(where, options) if is_url(where) else _Local(Path(where.removeprefix("file://")))


class _Local:
    def __init__(self, path: Path) -> None:
        self.path, self.url = path, str(path)

    def exists(self) -> bool:
        return os.path.lexists(self.path)

    def check(self, overwrite: bool) -> None:
        commit.check_destination(self.path, overwrite, foreign_files)

    def name(self, file: str, attempt: str) -> str:
        del attempt
        return file

    def check_room(self, nbytes: int) -> None:
        commit.check_room(self.path, nbytes)

    @contextmanager
    def stage(self, attempt: str, overwrite: bool = False, single: str = "", is_kept: bool = False) -> Iterator[Place]:
        with commit.staging(self.path, attempt, is_kept) as staging:
            yield LocalPlace(staging, overwrite, single)

    def join(self, attempt: str) -> Place:
        folder = commit.staging_path(self.path, attempt)
        if not folder.is_dir():
            raise StorageError(
                f"this rank does not see what rank 0 made: {printable(str(folder))}", hint="the directory must be shared by all ranks"
            )
        return LocalPlace(commit.Staging(attempt, folder, self.path), False, "")


class LocalPlace:
    """See `Place`: a staging directory."""

    def __init__(self, staging: commit.Staging, overwrite: bool, single: str) -> None:
        self.attempt, self.shelf = staging.attempt, LocalStore(staging.path)
        self._staging, self._overwrite, self._single = staging, overwrite, single

    def files(self) -> Store:
        return LocalStore(self.shelf.root)

    def sizes(self) -> Mapping[str, int]:
        return self.shelf.list_files()

    def remove(self, name: str) -> None:
        """Removes a file that an earlier try has left."""
        (self.shelf.root / name).unlink()

    def sync(self) -> None:
        for folder in self.shelf.folders():
            commit.sync_directory(self._staging.path / folder)
        commit.sync_directory(self._staging.path)

    def publish(self, manifest: Literal | None, index: Literal | None) -> list[str]:
        for literal in (manifest, index):
            if literal is not None:
                write_file(self.shelf, literal.file, literal.data)
        if index is None:
            commit.publish_file(self._staging, self._single, manifest.file if manifest else "", self._overwrite)
        else:
            commit.publish_directory(self._staging, self._overwrite)
        return []


class RemoteDestination:
    """See `Destination`."""

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        self.url, self._options = url.rstrip("/"), options
        self._parent, _, self._name = self.url.rpartition("/")

    def _look(self) -> tuple[bool, list[str]]:
        """Tells whether something is there, and names what of it belongs to no checkpoint."""
        store = RemoteStore(self.url, self._options)
        if store.is_file():
            return True, [] if is_ours(self._name) else [self._name]
        files = store.list_files()
        foreign = [*(n for n in files if not is_ours(n)), *store.folders()]
        return bool(foreign) or not all(attempt_of(n) or NAME.fullmatch(n) for n in files), foreign

    def exists(self) -> bool:
        return self._look()[0]

    def check(self, overwrite: bool) -> None:
        exists, foreign = self._look()
        if exists and not overwrite:
            raise StorageError(f"the destination exists: {printable(self.url)}", hint="choose another, or replace it with --overwrite")
        if foreign:
            raise StorageError(
                f"the destination holds what no checkpoint consists of: {printable(', '.join(foreign[:5]))} ({printable(self.url)})",
                hint="move it away or choose another destination; --overwrite replaces checkpoints only",
            )

    def name(self, file: str, attempt: str) -> str:
        return attempt_name(file, attempt)

    def check_room(self, nbytes: int) -> None:
        del nbytes

    @contextmanager
    def stage(self, attempt: str, overwrite: bool = False, single: str = "", is_kept: bool = False) -> Iterator[Place]:
        place = RemotePlace(RemoteStore(self._parent if single else self.url, self._options), attempt, overwrite, single)
        try:
            yield place
        finally:
            if not place.is_published:
                place.give_up(is_kept)

    def join(self, attempt: str) -> Place:
        return RemotePlace(RemoteStore(self.url, self._options), attempt, False, "")


class RemotePlace:
    """See `Place`; `store` is where its files lie."""

    def __init__(self, store: RemoteStore, attempt: str, overwrite: bool, single: str) -> None:
        self.store, self.attempt = store, attempt
        self._overwrite, self._single = overwrite, single
        self._manifest, self.is_published = "", False
        self.kept: set[str] = set()  # what belongs to the result, whatever its name looks like
        self._replaces = ""  # the version of what is replaced, so that only one of two does it
        if overwrite:
            there = store.list_files()
            self._replaces = store.version(next((n for n in (single, *INDEXES) if n in there), ""))
        self._is_exclusive = not overwrite or (store.s3 is not None and not self._replaces)  # nothing to replace
        self.capabilities = store.capabilities

    @property
    def shelf(self) -> Shelf:
        return self

    def create(self, path: str, nbytes: int) -> Writer:
        """Starts an object; the one that is a whole result waits for `publish`."""
        return self.store.create(path, nbytes, self.how(path))

    def how(self, path: str) -> How:
        """Returns how an object is to be written."""
        is_last = path == self._single
        return How(None, is_last, is_last and self._is_exclusive, self._replaces if is_last else "")

    def files(self) -> Store:
        return self.store

    def sizes(self) -> Mapping[str, int]:
        return self.store.fresh().list_files()

    def sync(self) -> None:
        """An object is durable once it is there."""

    def publish(self, manifest: Literal | None, index: Literal | None) -> list[str]:
        target = self._single if index is None else index.file
        self._check_absent(target)
        writer = self.store.written.get(target)
        is_sure = self._overwrite
        if manifest is not None:
            self._manifest = manifest.file
            self.store.put(manifest.file, manifest.data)
            is_sure = is_sure or self.store.excludes(manifest.file, manifest.data, writer)
        if not is_sure:
            self._check_absent(target)  # as late as possible
        if index is None:
            assert writer is not None
            writer.complete()
        else:
            self.store.put(index.file, index.data, self._is_exclusive, self._replaces)
        self.is_published = True
        self._tidy(index)
        unsure = f"{printable(self.store.url)} does not refuse a second writer: one at the same instant would not be noticed"
        return [] if is_sure else [unsure]

    def _check_absent(self, target: str) -> None:
        if not self._overwrite and target in self.sizes():
            raise appeared(f"{self.store.url}/{target}")

    def _tidy(self, index: Literal | None) -> None:
        """Removes what other attempts at the same target left: none of them can be committed any more."""
        try:
            stale = [name for name in self.sizes() if name not in self.kept and self._is_stale(name, index)]
            self.store.remove([name for name in stale if self._overwrite or self.store.is_marked(name)])
        except CheckpointError:
            return  # it stays invisible; `ckpt prune` finds it

    def _is_stale(self, name: str, index: Literal | None) -> bool:
        if index is None:
            return name != self._manifest and name.startswith(self._single) and bool(_BESIDE.fullmatch(name[len(self._single) :]))
        if name in INDEXES or name == self._manifest or attempt_of(name) == self.attempt[:8]:
            return False
        return bool(attempt_of(name) or NAME.fullmatch(name)) or (self._overwrite and is_ours(name))

    def give_up(self, is_kept: bool) -> None:
        """Removes what this attempt has put there, unless it was committed after all: a reply can be lost, a signal can come late."""
        for writer in self.store.written.values():
            writer.abort()
        try:
            if is_kept or self._is_committed():
                return
            self.store.remove([n for n in self.sizes() if n == self._manifest or (not self._single and attempt_of(n) == self.attempt[:8])])
        except CheckpointError:
            return  # nobody sees it; `ckpt prune` finds it

    def _is_committed(self) -> bool:
        store = self.store.fresh()
        if self._single:
            writer = self.store.written.get(self._single)
            return writer is not None and writer.is_complete
        found = find(store) if any(name in INDEXES for name in store.list_files()) else None
        if found is None or found.index is None or found.attempt != self.attempt:
            return False
        return hex64(crc64nvme(read(store, found.index[0]))) == found.index[1].crc64nvme
