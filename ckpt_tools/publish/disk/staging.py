"""Staging directories: the private directory of one attempt, and what dead attempts leave.

A staging directory is made beside the destination, locked and marked, and published by
`local.publish_directory`. The lock tells whether its process lives. The mark tells that an attempt
made it, and no person with a similar name in mind.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.core.logs import log
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.formats.base import ASIDE, SHORT_ID, is_date_like, short_name
from ckpt_tools.publish.disk.attempt_mark import (
    MARK,
    STAGING,
    TRASH,
    is_kept_step,
    is_made_here,
    mark,
    may_be_restored,
    own_nbytes,
    remove_tree,
    unmark,
)
from ckpt_tools.publish.disk.flock import held_by_this_thread, release, try_lock
from ckpt_tools.publish.disk.rename import publish_name
from ckpt_tools.storage import PinnedStore
from ckpt_tools.storage.local import failed

TRIES, LONG_TRIES = 8, 100  # each after 10 ms
# what says that there is no folder to list
_NO_FOLDER = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
_ENDING = re.compile(rf"\.{SHORT_ID}")  # of the names of staging directories, asides and trash
_PRIVATE = 0o700  # the mode of a staging directory until it is published


@dataclass(frozen=True, slots=True)
class StagingDirectory:
    """The private directory of one attempt, beside the destination.

    Attributes:
        attempt: id of the attempt.
        path: the directory.
        target: the destination.
        lock: the open directory; -1 in other processes than the one that made it.
    """

    attempt: str
    path: Path
    target: Path
    lock: int = -1

    def open(self, creates: bool = True) -> PinnedStore:
        """Opens the directory for writing.

        Raises:
            StorageError: its name leads elsewhere by now.
        """
        if self.path.is_symlink():
            raise exchanged(self.path)
        store = PinnedStore(self.path, creates)
        found = os.fstat(store.directory)
        if self.lock >= 0 and not os.path.samestat(found, os.fstat(self.lock)):
            raise exchanged(self.path)
        if problem := _trust_problem(found):
            raise StorageError(
                f"a staging directory is not used, since {problem}: {printable(str(self.path))}",
                hint="look at it, and remove it",
            )
        return store


def exchanged(path: Path) -> StorageError:
    return StorageError(
        f"somebody has moved the staging directory away: {printable(str(path))}",
        hint="nothing was published; write into a folder that nobody else may change",
    )


def staging_path(target: Path, attempt: str) -> Path:
    """Returns where an attempt at `target` gathers its files."""
    return target.parent / f"{STAGING}{short_name(target.name)}.{attempt[:8]}"


def trash_path(target: Path, attempt: str) -> Path:
    """Returns the name under which a result of an attempt waits for its removal."""
    return target.parent / f"{TRASH}{short_name(target.name)}.{attempt[:8]}"


@contextmanager
def staging(
    target: Path, attempt: str, kept_glob: str = "", takes_over: Path | None = None
) -> Iterator[StagingDirectory]:
    """Yields a staging directory for `target`; whatever is left of it is removed on the way out.

    Leftovers of dead attempts at the same target are removed first; those of live ones are
    recognised by their lock.

    Args:
        target: the file or directory to be.
        attempt: id of the attempt.
        kept_glob: keep the directory for the next attempt if a file in it matches this glob. If an
            earlier attempt left one, continue it.
        takes_over: a dead attempt's staging directory, to be this one's.
    """
    new_folders = [p for p in target.absolute().parents if not os.path.lexists(p)]
    path = staging_path(target, attempt)
    lock, is_tried = -1, False

    def clean() -> None:
        if is_tried:
            _remove_own(path, lock, kept_glob, target)
        for folder in new_folders if not os.path.lexists(target) else ():
            with suppress(OSError):  # it is not ours alone any more
                folder.rmdir()

    # A signal may come at any instant, also within a `finally`: so there are two.
    try:
        try:
            remove_dead(
                target.parent,
                short_name(target.name),
                spared=takes_over or (path if kept_glob else None),
            )
            try:
                make_folder(target.absolute().parent)
                lock = _inherit(takes_over, path) if takes_over is not None else -1
                is_tried = True
                if lock < 0:
                    lock = _make_and_lock(path, is_emptied=not kept_glob)
                if lock >= 0:
                    mark(lock, attempt)
            except OSError as error:
                raise failed("create a staging directory", path, error) from error
            if lock < 0:
                raise StorageError(
                    f"another process is at work on this: {printable(str(path))}",
                    hint="wait for it to end",
                )
            yield StagingDirectory(attempt, path, target, lock)
        finally:
            clean()
    finally:
        try:
            clean()
        finally:
            if lock >= 0:
                release(lock)


def _remove_own(path: Path, lock: int, kept_glob: str, target: Path) -> None:
    """Removes a staging directory at the end of an attempt, unless another process holds it by now.

    Args:
        path: the directory; after an exchange, what the result has replaced.
        lock: of the attempt, or -1 if a signal came before it.
        kept_glob: as for `staging`.
        target: the result.
    """
    with suppress(OSError):
        is_locked = lock >= 0 and os.path.samestat(os.fstat(lock), os.lstat(path))
        own = lock if is_locked else _lock_soon(path, lock, target)
        if own < 0 and lock < 0:
            own = held_by_this_thread(path)
        try:
            # Without locks nobody knows whose it is, unless this attempt has just put it there.
            is_free = try_lock(own) if own >= 0 and not is_locked else False
            is_own = is_locked or is_free or (is_free is None and is_at(lock, target))
            if lock < 0 and own >= 0 and (_trust_problem(os.fstat(own)) or not is_made_here(path)):
                is_own = False  # it was there before, and this attempt has refused it
            is_kept = kept_glob and any(
                not found.name.startswith(MARK) for found in path.glob(kept_glob)
            )
            if is_own and not is_kept:
                remove_tree(path)
        finally:
            if own >= 0 and not is_locked:
                release(own)


def _lock_soon(path: Path, lock: int, target: Path) -> int:
    """Opens and locks a replaced result; returns -1 if another process holds it.

    The writer of the replaced result may have published it a moment ago, and still holds its lock
    for the last lines of its work. So this waits for a second if the new result is in place.
    """
    for _ in range(LONG_TRIES if is_at(lock, target) else 1):
        own = lock_directory(path)
        if own >= 0 or not os.path.lexists(path):
            return own
        time.sleep(0.01)
    return -1


def is_at(fd: int, path: Path) -> bool:
    """Tells whether an open directory is now at a path."""
    return fd >= 0 and os.path.lexists(path) and os.path.samestat(os.fstat(fd), os.lstat(path))


def _make_and_lock(path: Path, is_emptied: bool) -> int:
    """Makes a staging directory and locks it; returns -1 if another process holds it.

    Two processes may use the same path, because copies of one checkpoint share an attempt id. Only
    the holder of the lock owns the directory. Another process may also remove the directory between
    its making and its locking, so both are tried again.

    Args:
        path: the directory.
        is_emptied: remove what a dead attempt left in it.
    """
    for _ in range(TRIES):
        with suppress(FileExistsError):
            path.mkdir(_PRIVATE)
        lock = lock_directory(path)
        if lock >= 0 and (problem := _trust_problem(os.fstat(lock))):
            release(lock)
            raise StorageError(
                f"a staging directory is not used, since {problem}: {printable(str(path))}",
                hint="look at it, and remove it",
            )
        if lock < 0:
            time.sleep(0.01)
        elif not any(path.iterdir()):
            return lock
        elif not is_made_here(path):
            release(lock)
            raise StorageError(
                f"a directory has the name of a staging directory: {printable(str(path))}",
                hint="look at it, and give it another name",
            )
        elif not is_emptied:
            return lock
        elif try_lock(lock):
            remove_tree(path)
            release(lock)
        else:  # a file system without locks: it may be at work
            release(lock)
            return -1
    return -1


def _trust_problem(found: os.stat_result) -> str:
    """Returns why a staging directory is not this user's alone; "" if it is.

    The name of a copy's directory can be guessed. In a shared folder, another user could make it
    first, own the result, and lead files elsewhere by links.
    """
    if found.st_uid != os.geteuid():
        return f"another user made it (uid {found.st_uid})"
    return "other users may write to it" if found.st_mode & stat.S_IWOTH else ""


def _inherit(old: Path, path: Path) -> int:
    """Locks a dead attempt's directory and gives it another name; returns -1 where another was
    faster.
    """
    lock = lock_directory(old)
    if lock >= 0:
        try:
            mark(lock, path.name[-8:])  # it is known under both names
            os.rename(old, path)
        except OSError:
            release(lock)
            raise
    return lock


def lock_directory(path: Path) -> int:
    """Opens and locks a directory; returns -1 where another holds it, or has removed it.

    Between its making and its locking another process may take it for a dead one's, and remove it.
    Then it is made again.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return -1
    with suppress(OSError):
        if try_lock(fd) is not False and os.path.samestat(os.fstat(fd), os.lstat(path)):
            return fd
    release(fd)
    return -1


def find_dead(target: Path) -> list[Path]:
    """Returns the staging directories that dead attempts at a target have left."""
    found = remove_dead(target.parent, short_name(target.name), dry_run=True)
    return [path for path in found if path.name.startswith(STAGING)]


def remove_dead(
    parent: Path, name: str = "", dry_run: bool = False, spared: Path | None = None
) -> dict[Path, int]:
    """Removes what dead attempts left in a folder: staging and trash whose lock no process holds.

    Returns the bytes that were freed, by path.

    Args:
        parent: the folder.
        name: the target whose leftovers are meant; all if empty.
        dry_run: only look.
        spared: one that stays.
    """
    if not dry_run:
        restore_aside(parent, name)
    dead: dict[Path, int] = {}
    for prefix in (STAGING, TRASH):
        for path in _unheld(parent, prefix, name):
            if path == spared:
                continue
            nbytes = own_nbytes(path)
            if not dry_run:
                with suppress(OSError):
                    remove_tree(path)
                if os.path.lexists(path):
                    log.warning("could not remove all of %s: look at it", printable(str(path)))
                    continue
            dead[path] = nbytes
    return dead


def unfinished_in(parent: Path) -> dict[Path, int]:
    """Returns the staging directories and the trash in a folder, with their bytes.

    It takes no lock, which could stop a process. So it does not tell whether one is at work there.
    """
    found: dict[Path, int] = {}
    with suppress(OSError):
        for entry in os.scandir(parent):
            is_ours = entry.name.startswith((STAGING, TRASH)) and _ENDING.fullmatch(entry.name[-9:])
            if is_ours and entry.is_dir(follow_symlinks=False):
                found[parent / entry.name] = own_nbytes(parent / entry.name)
    return found


def restore_aside(parent: Path, name: str = "") -> None:
    """Restores the name of an old result that a dead attempt has set aside.

    If the new result is in place, the old one becomes trash.

    Args:
        parent, name: as for `remove_dead`.
    """
    for path in _unheld(parent, ASIDE, name, may_be_restored):
        stood_at = parent / path.name[len(ASIDE) : -9]
        with suppress(StorageError, OSError):  # another was faster
            if not os.path.lexists(stood_at):
                publish_name(path, stood_at)
                _unmark_path(stood_at)
            else:
                discard(path)
    for path in _unheld(parent, TRASH, name, is_kept_step_in_trash):
        with suppress(StorageError, OSError):  # a new step has its name
            publish_name(path, parent / path.name[len(TRASH) : -9])
            log.warning("restored %s, which a dead process had set aside", printable(path.name))


def _unmark_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        unmark(fd)
    finally:
        os.close(fd)


def discard(aside: Path) -> Path:
    """Renames an old result to trash, so that a half removed one is not restored; returns it."""
    return aside.rename(aside.parent / f"{TRASH}{aside.name[len(ASIDE) :]}")


def is_kept_step_in_trash(path: Path) -> bool:
    """Tells whether a directory in the trash is a step that must get its name back."""
    name = path.name[len(TRASH) : -9]
    is_free = is_made_here(path) and not _is_linked(path.with_name(name))
    return not is_free and is_kept_step(path, name)


def _is_linked(step: Path) -> bool:
    """Tells whether a link beside a step leads to it."""
    own = os.path.realpath(step)
    links = (entry.path for entry in os.scandir(step.parent) if entry.is_symlink())
    return any(f"{os.path.realpath(link)}/".startswith(f"{own}/") for link in links)


def _unheld(
    parent: Path, prefix: str, name: str, is_meant: Callable[[Path], bool] = is_made_here
) -> Iterator[Path]:
    """Yields the directories of attempts whose lock no process holds, each while it is locked
    here.
    """
    try:
        with os.scandir(parent) as entries:
            names = sorted(entry.name for entry in entries if entry.name.startswith(prefix))
    except OSError as error:
        if error.errno in _NO_FOLDER:
            return
        raise failed("list", parent, error) from error
    for found in names:
        if not _ENDING.fullmatch(found[-9:]) or (name and found[len(prefix) : -9] != name):
            continue
        path = parent / found
        if is_date_like(path.name[-8:]) or path.is_symlink() or not path.is_dir():
            continue
        if not is_meant(path):
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process was faster
            continue
        try:
            if try_lock(fd):
                yield path
        finally:
            release(fd)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise failed("make durable", path, error) from error


def make_folder(path: Path) -> None:
    """Makes a directory, and those above it that are missing, durably: else a power cut could take
    everything that is put there.

    Raises:
        OSError: it cannot be made.
    """
    missing = [p for p in (path, *path.parents) if not os.path.lexists(p)]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_directory(folder.parent)
