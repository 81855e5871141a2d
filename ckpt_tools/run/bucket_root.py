"""A run below a prefix of an object store. See `run_root.RunRoot`."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, cast

from ckpt_tools.core.logs import log
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.formats.base import LOCK, PIN, note_of
from ckpt_tools.formats.registry import INDEXES
from ckpt_tools.publish.base import Leftover
from ckpt_tools.publish.bucket.destination import RemoteDestination
from ckpt_tools.publish.bucket.lease import Lease, is_leased
from ckpt_tools.publish.bucket.leftovers import files_of_attempts, remove_abandoned
from ckpt_tools.publish.find_manifest import names_in
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.run.base import GRACE_S, Looks, RootEntries
from ckpt_tools.storage import RemoteStore, Store, read, write_file


class BucketRoot:
    """See `RunRoot`: a prefix. A step is visible while its index exists."""

    lists_unfinished = False
    checks_at_commit = True
    keeps_notes = False
    can_rename = False

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        self.path, self.options = url.rstrip("/"), options
        # the last listing, which spares requests until the next one
        self._listed: RemoteStore | None = None
        self._folders: Mapping[str, RemoteStore] = {}
        self._lease: Lease | None = None
        self.looks = Looks()

    def _store(self, name: str = "") -> RemoteStore:
        return RemoteStore(f"{self.path}/{name}" if name else self.path, self.options)

    def check_exists(self) -> None:
        pass

    def step_path(self, name: str) -> str:
        return f"{self.path}/{name}"

    def step_store(self, name: str) -> RemoteStore:
        return self._folders.get(name) or self._store(name)

    def destination(self, name: str) -> RemoteDestination:
        return RemoteDestination(self.step_path(name), self.options)

    def entries(self) -> RootEntries:
        self._listed = store = self._store()
        self._folders = store.enter_all()
        self.looks.keep(self._folders)
        return RootEntries(self._folders, list(store.list_files()))

    def snapshot(self, store: Store) -> object:
        bucket = cast(RemoteStore, store)
        try:
            files = bucket.list_files()
            found = [(name, size, bucket.version(name)) for name, size in files.items()]
            is_known = all(version for *_, version in found) and not bucket.folders()
            return found if is_known else None
        except StorageError:
            return None  # the look says so

    def check_writable(self) -> None:
        self._store().check_writable()

    def claim(self) -> Lease:
        self._lease = Lease(self.path, self.options)
        return self._lease

    def check_shared(self, written: bytes, rank: int) -> None:
        """Does nothing: a store is the same for all ranks."""

    def remove_leftovers(self, grace_s: float = GRACE_S, dry_run: bool = False) -> list[Leftover]:
        store = self._store()
        if self._lease is None and store.s3 is not None and is_leased(store):
            where = printable(self.path)
            log.warning("%s: a job holds this run, so unfinished work in it stays", where)
            return []
        return remove_abandoned(store, grace_s, dry_run)

    def has_file(self, name: str) -> bool:
        return bool(self._store().sizes_of([name]))

    def read_note(self, name: str, most: int) -> bytes | None:
        # who can write a note into a bucket can also remove the steps
        store = self._listed or self._store()
        return read(store, name) if store.size(name) <= most else None

    def write_note(self, name: str, data: bytes) -> None:
        self._store().put(name, data)

    def remove_note(self, name: str) -> None:
        self._store().remove([name])

    def links(self) -> list[tuple[str, str]]:
        return []

    def note_host_files(self, name: str, manifest: Manifest) -> None:
        """Does nothing: a trainer's callback writes to a disk."""

    def foreign_files(self, name: str, listed: Container[str], with_host: bool = True) -> list[str]:
        del with_host
        store = self.step_store(name)
        files = [n for n in store.list_deep() if n != LOCK and n not in listed and not note_of(n)]
        return sorted(set(files) - files_of_attempts(store, files))

    def pin(self, name: str, text: bytes) -> None:
        write_file(self._store(name), PIN, text)

    def unpin(self, name: str) -> None:
        self._store(name).remove([PIN])

    def remove(self, name: str, attempt: str, reason_to_keep: Callable[[str], str | None]) -> None:
        """See `RunRoot`. A store removes no object on a condition, so it looks just before.

        It asks for the index and the pin. Other files are those of the last listing.
        """
        del attempt
        store = self.step_store(name)
        self._folders = {**self._folders, name: store}
        reason = reason_to_keep(name)
        for index in (found for found in store.list_deep() if found in INDEXES):
            now = store.current_version(index)
            if not now and not store.has(index):
                return  # another process has removed it
            if now != store.version(index):
                reason = "another save has taken its place"
        if store.has(PIN):
            reason = reason or "it was pinned a moment ago"
        if reason:
            raise StorageError(f"{printable(name)} stays: {reason}")
        _remove(store)

    def rename(self, old: str, new: str) -> None:
        source, target = self._store(old), self._store(new)
        # list_deep: also files below the checkpoint's own level
        for name in sorted(source.list_deep().keys() - target.list_deep().keys()):
            source.copy_to(name, target)
        _remove(source)


def _remove(store: RemoteStore) -> None:
    """Removes the objects of a step. Once the index is gone, it is no step any more."""
    files = store.list_deep()
    for part in ([n for n in files if n in INDEXES], names_in(store), list(files)):
        store.remove(part)
