"""A result on a local or shared file system: a path, published by one rename."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import cast

from ckpt_tools.core.plan import Literal
from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.publish.base import Attempt, CopyTarget, Destination, NoLinksError
from ckpt_tools.publish.check_manifest import hash_files
from ckpt_tools.publish.disk import commit
from ckpt_tools.publish.disk.attempt_mark import MARK
from ckpt_tools.publish.disk.clones import DiskClones, can_clone
from ckpt_tools.publish.disk.staging import (
    StagingDirectory,
    find_dead,
    staging,
    staging_path,
    sync_directory,
)
from ckpt_tools.publish.own_files import foreign_in, is_result
from ckpt_tools.publish.refusals import refuse_incomplete
from ckpt_tools.storage import (
    LocalStore,
    Store,
    write_file,
)
from ckpt_tools.storage.local import PinnedStore, failed
from ckpt_tools.storage.retries import appeared


def _identity(path: Path) -> tuple[int, ...]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


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


class LocalDestination(Destination):
    """See `Destination`."""

    def __init__(
        self,
        path: Path,
        accept: Callable[[str], None] | None = None,
        find_foreign: Callable[[Path], list[str]] = foreign_files,
    ) -> None:
        """Takes the path, what accepts the result, and what finds files that are not replaced."""
        self.path, self.url, self._accept = path, str(path), accept
        self._find_foreign = find_foreign

    def exists(self) -> bool:
        return os.path.lexists(self.path)

    def check(self, overwrite: bool, known: Container[str] = ()) -> None:
        del known
        if self.path.name in ("", ".."):  # a result takes a name at once, and these have none
            raise PlanError(
                f"the destination has no name: {printable(str(self.path))}",
                hint="give the directory by its name, from another one",
            )
        commit.check_destination(self.path, overwrite, self._find_foreign)

    def identity(self, name: str) -> tuple[int | str, ...]:
        try:
            return _identity(self.path / name)
        except OSError as error:
            raise failed("look at", self.path / name, error) from error

    def add_note(self, name: str, data: bytes, attempt: str) -> None:
        folder = self.path if self.path.is_dir() else self.path.parent
        commit.add_file(folder, name, data, attempt)

    def check_room(self, nbytes: int) -> None:
        commit.check_room(self.path, nbytes)

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
            yield LocalAttempt(staged, overwrite, single, self._accept, True, self._find_foreign)

    def join(self, attempt: str, single: str = "", shares_files: bool = False) -> Attempt:
        folder = staging_path(self.path, attempt)
        if not folder.is_dir():
            raise StorageError(
                f"this rank does not see what rank 0 made: {printable(str(folder))}",
                hint="the directory must be shared by all ranks",
            )
        directory = StagingDirectory(attempt, folder, self.path)
        return LocalAttempt(directory, False, single, creates=not shares_files)


def _right_files(store: LocalStore, files: Mapping[str, int], crcs: Mapping[str, int]) -> set[str]:
    """Returns the names of the files with the expected size and checksum."""
    there = store.list_files(below=True)
    found = hash_files(
        store, {name: n for name, n in there.items() if name in crcs and files.get(name) == n}
    )
    return {name for name, crc in found.items() if crc == crcs[name]}


class LocalAttempt(Attempt):
    """See `Attempt`: a staging directory."""

    folder: Path

    def __init__(
        self,
        staging: StagingDirectory,
        overwrite: bool,
        single: str,
        accept: Callable[[str], None] | None = None,
        creates: bool = True,
        find_foreign: Callable[[Path], list[str]] = foreign_files,
    ) -> None:
        self._find_foreign = find_foreign
        self.attempt, self.folder = staging.attempt, staging.path
        self._own = staging.open(creates=creates)
        self._staging, self._overwrite, self._single, self._accept = (
            staging,
            overwrite,
            single,
            accept,
        )

    @property
    def writable(self) -> PinnedStore:
        return self._own

    def files(self) -> Store:
        return LocalStore(self.writable.root)

    def sizes(self) -> Mapping[str, int]:
        return self.writable.list_files()

    def sizes_of(self, names: Sequence[str]) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for name in names:  # at any depth
            with suppress(OSError):
                found[name] = os.lstat(self.writable.root / name).st_size
        return found

    def keep_matching(self, files: Mapping[str, int], crcs: Mapping[str, int]) -> set[str]:
        there = LocalStore(self.writable.root)
        right = _right_files(there, files, crcs)
        for name in there.list_files(below=True).keys() - right:
            if not name.startswith(MARK):
                (self.writable.root / name).unlink()
        return right

    def prepare(self, files: Mapping[str, int]) -> None:
        own = self._own
        there = {
            path.relative_to(self.folder).as_posix(): path.stat().st_size
            for path in self.folder.rglob("*")
            if path.is_file()
        }
        for name, nbytes in files.items():
            if there.get(name) != nbytes:
                (self.folder / name).unlink(missing_ok=True)
                own.create(name, nbytes).abort()
        from ckpt_tools.publish import journal

        for name in there.keys() - files.keys():
            if not PurePath(name).match(journal.GLOB) and not name.startswith(MARK):
                (self.folder / name).unlink()
        self._own = self._staging.open(creates=False)

    def copy_target(self, origin: Store) -> CopyTarget | None:
        if not origin.capabilities.has_descriptors:
            return None
        source = cast("LocalStore", origin)
        return DiskClones(self.writable, source) if can_clone(source, self.writable) else None

    def identity(self, name: str) -> tuple[int | str, ...]:
        return _identity(self.writable.root / name)

    def take_over(
        self, origin: Store, file: str, name: str, nbytes: int, identity: tuple[int | str, ...]
    ) -> str:
        if not origin.capabilities.has_descriptors:
            return super().take_over(origin, file, name, nbytes, identity)
        path, own = cast("LocalStore", origin).root / file, self.writable.directory
        try:
            if _identity(path) != identity:
                raise StorageError("the file of the step before has changed")
            os.link(path, name, dst_dir_fd=own, follow_symlinks=False)
        except OSError as error:
            problem = f"cannot link: {os.strerror(error.errno or 0)}"
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EMLINK):
                raise StorageError(problem) from error
            if (clones := self.copy_target(origin)) is None:
                raise NoLinksError(problem) from error
            try:
                clones.copy_file(name, file, nbytes)
            except StorageError:
                with suppress(OSError):  # it is written instead
                    os.unlink(name, dir_fd=own)
                raise
            return "cloned"
        if _identity(self.writable.root / name) != identity:
            os.unlink(name, dir_fd=own)
            raise StorageError("the file of the step before was exchanged meanwhile")
        return "linked"

    def sync(self) -> None:
        for folder in self.writable.folders():
            sync_directory(self._staging.path / folder)
        sync_directory(self._staging.path)

    def publish(
        self, manifest: Literal | None, index: Literal | None, files: Mapping[str, int]
    ) -> list[str]:
        refuse_incomplete(files, self.sizes_of, str(self.folder))
        for literal in (manifest, index):
            if literal is not None:
                write_file(self._staging.open(), literal.file, literal.data)
        from ckpt_tools.publish import journal  # with NumPy, and `ckpt ls` starts without

        journal.remove_journals(self.folder)
        if self._accept is not None:
            self._accept(str(self.folder))
        if self._single:
            commit.publish_file(
                self._staging,
                self._single,
                manifest.file if manifest else "",
                self._overwrite,
                self._find_foreign,
            )
        else:
            commit.publish_directory(self._staging, self._overwrite, self._find_foreign)
        return []
