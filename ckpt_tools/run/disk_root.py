"""A run in a directory. See `run_root.RunRoot`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_tools.core.checksum import hex64
from ckpt_tools.core.logs import log
from ckpt_tools.errors import NotACheckpointError, StorageError, printable
from ckpt_tools.formats.base import HOST, PIN, note_name, note_of
from ckpt_tools.formats.dcp.format import is_data_file
from ckpt_tools.publish.base import Leftover
from ckpt_tools.publish.check_manifest import hash_files
from ckpt_tools.publish.disk.attempt_mark import remove_tree
from ckpt_tools.publish.disk.destination import LocalDestination
from ckpt_tools.publish.disk.flock import owner_problem, release
from ckpt_tools.publish.disk.lock import FileLock, wait_for_lock_file
from ckpt_tools.publish.disk.rename import publish_name
from ckpt_tools.publish.disk.staging import (
    LONG_TRIES,
    is_at,
    lock_directory,
    remove_dead,
    sync_directory,
    trash_path,
)
from ckpt_tools.publish.find_manifest import noted_by_host
from ckpt_tools.publish.manifest import Manifest, SealedFile, file_name
from ckpt_tools.publish.step_names import is_step_name
from ckpt_tools.run.base import GRACE_S, Looks, RootEntries
from ckpt_tools.storage import LocalStore, Store, read, write_file
from ckpt_tools.storage.local import failed, snapshot

_OF_THE_DISK = "lost+found"  # of the top of a file system, for root alone


class LocalRoot:
    """See `RunRoot`: a directory. A step becomes visible, moves and goes by one rename."""

    options: Mapping[str, Any] | None = None
    lists_unfinished = True
    checks_at_commit = False
    keeps_notes = True
    can_rename = True

    def __init__(self, path: Path) -> None:
        self.path, self.looks = path, Looks()

    def check_exists(self) -> None:
        if self.path.is_dir():
            return
        where = printable(str(self.path))
        if not os.path.lexists(self.path):
            raise NotACheckpointError(f"no such directory: {where}")
        hint = "ckpt inspect shows a file" if os.path.isfile(self.path) else None
        raise NotACheckpointError(f"not a directory: {where}", hint=hint)

    def _refuse_file(self) -> None:
        """Refuses a root that is a file, or lies below one.

        Raises:
            StorageError: so it is.
        """
        for place in (self.path, *self.path.parents):
            try:
                if place.is_dir():
                    return
            except OSError as error:  # such as a name that is too long
                raise failed("open", place, error) from error
            if os.path.lexists(place):
                raise StorageError(
                    f"a run needs a directory, and this is none: {printable(str(place))}",
                    hint="give the path of a directory; it is made if it is not there",
                )

    def step_path(self, name: str) -> Path:
        return self.path / name

    def step_store(self, name: str) -> LocalStore:
        return LocalStore(self.path / name)

    def destination(self, name: str) -> LocalDestination:
        return LocalDestination(self.path / name, None)

    def entries(self) -> RootEntries:
        try:
            found = sorted(os.scandir(self.path), key=lambda e: e.name)
        except FileNotFoundError:
            return RootEntries({}, ())
        except OSError as error:
            if isinstance(error, NotADirectoryError):
                self.check_exists()
            raise failed("list", self.path, error) from error
        folders = {e.name: LocalStore(e.path) for e in found if _is_folder(e)}
        self.looks.keep(folders)
        return RootEntries(
            folders,
            [e.name for e in found if e.is_file(follow_symlinks=False)],
        )

    def snapshot(self, store: Store) -> object:
        return snapshot(store.url)

    def check_writable(self) -> None:
        """Does nothing: the claim tells."""

    def claim(self) -> FileLock:
        self._refuse_file()
        return FileLock(self.path)

    def check_shared(self, written: bytes, rank: int) -> None:
        wait_for_lock_file(self.path, written, rank)

    def remove_leftovers(self, grace_s: float = GRACE_S, dry_run: bool = False) -> list[Leftover]:
        del grace_s
        dead = remove_dead(self.path, dry_run=dry_run)
        return [Leftover(str(path), "directory", nbytes=n) for path, n in dead.items()]

    def has_file(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    def read_note(self, name: str, most: int) -> bytes | None:
        path = self.path / name
        try:
            problem = owner_problem(path.lstat(), self.path.stat())
        except FileNotFoundError:  # its job has removed it since the listing
            return None
        if problem:  # another user's note could set steps aside
            log.warning(
                "a note of a rollback is not used, since %s: %s", problem, printable(str(path))
            )
            return None
        store = LocalStore(self.path)
        try:
            return read(store, name) if store.size(name) <= most else None
        finally:
            store.close()

    def write_note(self, name: str, data: bytes) -> None:
        new = self.path / f"{name}.new"
        try:
            new.unlink(missing_ok=True)
            write_file(LocalStore(self.path), new.name, data)
            os.replace(new, self.path / name)
        except (OSError, StorageError) as error:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            if isinstance(error, StorageError):
                raise
            raise failed("write", self.path / name, error) from error
        sync_directory(self.path)

    def remove_note(self, name: str) -> None:
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise failed("remove", self.path / name, error) from error

    def links(self) -> list[tuple[str, str]]:
        top = os.path.realpath(self.path)
        try:
            folders = [e.path for e in os.scandir(top) if e.is_dir(follow_symlinks=False)]
            links = [link for place in (top, *folders) for link in _links_in(place)]
        except OSError as error:
            raise failed("list", top, error) from error
        return [(link, os.path.realpath(link)) for link in links]

    def note_host_files(self, name: str, manifest: Manifest) -> None:
        listed = {*manifest.files, *(manifest.index or ())[:1]}
        found = {n: _stamp(self.path / name / n) for n in self.foreign_files(name, listed)}
        step = LocalRoot(self.path / name)
        if found:
            step.write_note(note_name(HOST, manifest.attempt), json.dumps(found).encode())
        store = LocalStore(self.path / name)
        sizes = store.list_files()
        small = {n: sizes[n] for n in manifest.files if not is_data_file(n) and n in sizes}
        anew = {
            n: SealedFile(sizes[n], hex64(crc))
            for n, crc in hash_files(store, small).items()
            if (sizes[n], hex64(crc)) != manifest.files[n][:2]
        }
        if anew:
            log.info("%s: sealed anew, since a callback wrote them: %s", name, ", ".join(anew))
            sealed = replace(manifest, files={**manifest.files, **anew})
            step.write_note(file_name(manifest.attempt), sealed.render())

    def _host_files(self, name: str) -> set[str]:
        """Returns the files that the host has added to a step, and that nobody has changed."""
        noted = noted_by_host(LocalStore(self.path / name))
        return {n for n, stamp in noted.items() if _stamp(self.path / name / n) == stamp}

    def foreign_files(self, name: str, listed: Container[str], with_host: bool = True) -> list[str]:
        top, found = str(self.path / name), []
        for folder, folders, names in os.walk(top, onerror=_raise_unreadable):
            links = [n for n in folders if os.path.islink(os.path.join(folder, n))]
            found += [os.path.relpath(os.path.join(folder, n), top) for n in (*names, *links)]
            if folder != top and not names and not folders:
                found.append(
                    os.path.relpath(folder, top) + "/"
                )  # an empty folder is somebody's too
        foreign = sorted(n for n in found if n not in listed and not note_of(n))
        if with_host or not foreign:
            return foreign
        of_host = self._host_files(name)
        return [n for n in foreign if n not in of_host]

    def pin(self, name: str, text: bytes) -> None:
        step = self.path / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        is_made = False
        try:  # a link or a pipe of that name is an error: do not write through it
            fd = os.open(step / PIN, flags, 0o666)
            is_made = True
            with os.fdopen(fd, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(fd)
            sync_directory(step)
        except OSError as error:
            if is_made:  # on a full disk, an empty pin would be one
                with suppress(OSError):
                    (step / PIN).unlink()
            raise failed("pin", step, error) from error

    def unpin(self, name: str) -> None:
        step = self.path / name
        try:
            (step / PIN).unlink(missing_ok=True)
            sync_directory(step)
        except OSError as error:
            raise failed("unpin", step, error) from error

    def remove(self, name: str, attempt: str, reason_to_keep: Callable[[str], str | None]) -> None:
        step = self.path / name
        trash = trash_path(step, attempt)
        lock = self._lock_step(step)
        if lock is None:
            return
        try:
            try:
                os.rename(step, trash)
                if reason := reason_to_keep(trash.relative_to(self.path).as_posix()):
                    raise StorageError(f"{printable(name)} stays: {reason}")
            except BaseException as error:
                if is_at(lock, trash):
                    publish_name(trash, step)
                if isinstance(error, OSError):
                    raise failed("remove", step, error) from error
                raise
            sync_directory(self.path)
            self._empty(name, trash)
        finally:
            release(lock)

    def _lock_step(self, step: Path) -> int | None:
        """Locks a step, so that no other process takes it for a leftover; None if it is gone.

        Raises:
            StorageError: another process holds it.
        """
        for _ in range(LONG_TRIES):
            if not os.path.lexists(step):
                return None
            try:
                lock = lock_directory(step)
            except OSError as error:
                raise failed("remove", step, error) from error
            if lock >= 0:
                return lock
            time.sleep(0.01)
        raise StorageError(f"another process is at work on {printable(str(step))}")

    def _empty(self, name: str, trash: Path) -> None:
        try:
            remove_tree(trash)
        except OSError as error:
            raise StorageError(
                f"{printable(name)} was removed from the run, but some of its files could not be"
                f" removed: {error.strerror} ({printable(str(trash))})",
                hint="remove that directory",
            ) from error

    def rename(self, old: str, new: str) -> None:
        publish_name(self.path / old, self.path / new)
        sync_directory(self.path)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Returns size and time of a file; None if it is gone. An empty folder has them, too."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _raise_unreadable(error: OSError) -> None:
    """Refuses a folder that cannot be listed: it may hold anything."""
    if not isinstance(error, FileNotFoundError):
        raise failed("list", Path(error.filename or ""), error) from error


def _links_in(folder: str) -> list[str]:
    """Returns the symbolic links in a folder; none if it has been removed since its listing."""
    try:
        return [entry.path for entry in os.scandir(folder) if entry.is_symlink()]
    except FileNotFoundError:
        return []
    except PermissionError:
        if os.path.basename(folder) == _OF_THE_DISK:
            return []
        raise


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Tells whether an entry is a folder, or a link to one.

    A link with the name of a step is one also if nothing can be reached by it: its disk may be
    away, and the step must not be forgotten.
    """
    is_step_link = entry.is_symlink() and is_step_name(entry.name)
    try:
        return entry.is_dir() or (is_step_link and not os.path.exists(entry.path))
    except OSError:
        return is_step_link
