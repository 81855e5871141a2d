"""A result on a local or shared file system: a path, published by one rename."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from ckpt_tools.core.plan import Literal
from ckpt_tools.engine.partition import Regions
from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.publish import journal, local_commit
from ckpt_tools.publish.attempt_mark import MARK
from ckpt_tools.publish.base import Attempt, CopyTarget, UploadNotes
from ckpt_tools.publish.check_manifest import hash_files
from ckpt_tools.publish.own_files import foreign_in, is_result
from ckpt_tools.publish.staging import (
    StagingDirectory,
    find_dead,
    staging,
    staging_path,
    sync_directory,
)
from ckpt_tools.storage import (
    LocalStore,
    Store,
    write_file,
)
from ckpt_tools.storage.local import failed
from ckpt_tools.storage.retries import appeared

if TYPE_CHECKING:
    from ckpt_tools.storage.s3.open_uploads import OpenUpload


def foreign_files(target: Path) -> list[str]:
    """Returns what is at a destination and belongs to no checkpoint. See `foreign_in`."""
    if target.is_file():
        folder = LocalStore(target.parent)
        try:
            return [] if is_result(folder, target.name) else [target.name]
        finally:
            folder.close()
    store = LocalStore(target)
    try:
        return foreign_in(store, sorted(_names_below(target)))
    finally:
        store.close()


def _names_below(top: Path) -> Iterator[str]:
    """Yields the files and links below a directory.

    Raises:
        StorageError: a folder cannot be listed, so it may hold anything.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise failed("list", Path(error.filename or top), error) from error

    for folder, folders, files in os.walk(top, onerror=refuse):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in (*files, *links):
            yield os.path.relpath(os.path.join(folder, name), top)


class LocalDestination:
    """See `Destination`."""

    def __init__(self, path: Path, accept: Callable[[str], None] | None = None) -> None:
        self.path, self.url, self._accept = path, str(path), accept

    def exists(self) -> bool:
        return os.path.lexists(self.path)

    def check(self, overwrite: bool, known: Container[str] = ()) -> None:
        del known
        if self.path.name in ("", ".."):  # a result takes a name at once, and these have none
            raise PlanError(
                f"the destination has no name: {printable(str(self.path))}",
                hint="give the directory by its name, from another one",
            )
        local_commit.check_destination(self.path, overwrite, foreign_files)

    def name(self, file: str, attempt: str) -> str:
        del attempt
        return file

    min_part_bytes, needs_index = 0, False

    def claim(self) -> None:
        """Returns None: the rename of a directory decides between writers."""

    def unfinished(self, names: Collection[str]) -> set[str]:
        """Returns nothing: attempts work in directories of their own."""
        del names
        return set()

    def object_infos(self, names: Iterable[str]) -> None:
        """Returns None: files on a disk have no marks."""
        del names

    def add_note(self, name: str, data: bytes, attempt: str) -> None:
        folder = self.path if self.path.is_dir() else self.path.parent
        local_commit.add_file(folder, name, data, attempt)

    def give_up_uploads(self, names: Container[str]) -> None:
        """Does nothing: a disk has no uploads."""

    def check_room(self, nbytes: int) -> None:
        local_commit.check_room(self.path, nbytes)

    can_resume, names_attempts = True, False

    def find_uploads(self, work: str, single: str) -> UploadNotes | None:
        del work, single
        return None

    def dead_attempts(self) -> list[Path]:
        return find_dead(self.path)

    def right_files(
        self, attempt: str, files: Mapping[str, int], crcs: Mapping[str, int]
    ) -> set[str]:
        left = staging_path(self.path, attempt)
        return _right_files(LocalStore(left), files, crcs) if left.is_dir() else set()

    def existing_result(self) -> tuple[Store, str]:
        return (
            (LocalStore(self.path), "")
            if self.path.is_dir()
            else (LocalStore(self.path.parent), self.path.name)
        )

    @contextmanager
    def stage(
        self,
        attempt: str,
        overwrite: bool = False,
        single: str = "",
        kept_glob: str = "",
        takes_over: Path | None = None,
    ) -> Iterator[Attempt]:
        with staging(self.path, attempt, kept_glob, takes_over) as staged:
            # another process has published since the first look
            if self.exists() and not overwrite:
                raise appeared(self.url)
            yield LocalAttempt(staged, overwrite, single, self._accept)

    takes_parts = True

    def join(self, attempt: str, single: str = "", shares_files: bool = False) -> Attempt:
        folder = staging_path(self.path, attempt)
        if not folder.is_dir():
            raise StorageError(
                f"this rank does not see what rank 0 made: {printable(str(folder))}",
                hint="the directory must be shared by all ranks",
            )
        directory = StagingDirectory(attempt, folder, self.path)
        staged = LocalAttempt(directory, False, single)
        if shares_files:
            staged.writable = directory.open(creates=False)
        return staged


def _right_files(store: LocalStore, files: Mapping[str, int], crcs: Mapping[str, int]) -> set[str]:
    """Returns the names of the files with the expected size and checksum."""
    there = store.list_files(below=True)
    found = hash_files(
        store, {name: n for name, n in there.items() if name in crcs and files.get(name) == n}
    )
    return {name for name, crc in found.items() if crc == crcs[name]}


class LocalAttempt:
    """See `Attempt`: a staging directory."""

    def __init__(
        self,
        staging: StagingDirectory,
        overwrite: bool,
        single: str,
        accept: Callable[[str], None] | None = None,
    ) -> None:
        self.attempt, self.folder = staging.attempt, staging.path
        self.writable = staging.open()
        self._staging, self._overwrite, self._single, self._accept = (
            staging,
            overwrite,
            single,
            accept,
        )

    kept_nbytes = 0

    def files(self) -> Store:
        return LocalStore(self.writable.root)

    def sizes(self) -> Mapping[str, int]:
        return self.writable.list_files()

    def sizes_of(self, names: Sequence[str]) -> Mapping[str, int]:
        del names
        return self.sizes()

    def keep_matching(self, files: Mapping[str, int], crcs: Mapping[str, int]) -> set[str]:
        there = LocalStore(self.writable.root)
        right = _right_files(there, files, crcs)
        for name in there.list_files(below=True).keys() - right:
            if not name.startswith(MARK):
                (self.writable.root / name).unlink()
        return right

    def prepare(self, files: Mapping[str, int]) -> None:
        own = self.writable
        there = {
            path.relative_to(self.folder).as_posix(): path.stat().st_size
            for path in self.folder.rglob("*")
            if path.is_file()
        }
        for name, nbytes in files.items():
            if there.get(name) != nbytes:
                (self.folder / name).unlink(missing_ok=True)
                own.create(name, nbytes).abort()
        for name in there.keys() - files.keys():
            if not PurePath(name).match(journal.GLOB) and not name.startswith(MARK):
                (self.folder / name).unlink()
        self.writable = self._staging.open(creates=False)

    def share(self, regions: Regions) -> None:
        del regions  # every process may write anywhere

    def copy_target(self, origin: Store) -> CopyTarget | None:
        del origin
        return None

    def begin_uploads(
        self, work: str, files: Mapping[str, int], earlier: UploadNotes | None
    ) -> Mapping[str, OpenUpload]:
        del work, files, earlier
        return {}

    def join_uploads(self, uploads: Mapping[str, OpenUpload]) -> None:
        del uploads

    def sync(self) -> None:
        for folder in self.writable.folders():
            sync_directory(self._staging.path / folder)
        sync_directory(self._staging.path)

    def publish(self, manifest: Literal | None, index: Literal | None) -> list[str]:
        for literal in (manifest, index):
            if literal is not None:
                write_file(self._staging.open(), literal.file, literal.data)
        journal.remove_journals(self.folder)
        if self._accept is not None:
            self._accept(str(self.folder))
        if self._single:
            local_commit.publish_file(
                self._staging,
                self._single,
                manifest.file if manifest else "",
                self._overwrite,
                foreign_files,
            )
        else:
            local_commit.publish_directory(self._staging, self._overwrite, foreign_files)
        return []
