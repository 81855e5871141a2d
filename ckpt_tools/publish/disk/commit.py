"""Making a result visible at one instant: staging, the order of fsyncs, one rename.

Data and manifest are written under the name of one attempt and made durable. Then one rename
publishes them. It never replaces anything. With `overwrite`, the old result stays until the new one
is complete. Then the two change places in one step. If a file system cannot do that, the old result
stands aside for a moment. If the process dies in that moment, the next one puts it back.
`docs/architecture.md` has the protocol, step by step.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_tools.core import ending
from ckpt_tools.core.logs import log
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.formats.base import ASIDE, MANIFEST, note_of, short_name
from ckpt_tools.publish.disk.attempt_mark import STAGING, TRASH, mark, remove_tree, unmark
from ckpt_tools.publish.disk.flock import release, try_lock
from ckpt_tools.publish.disk.rename import exchange, publish_name
from ckpt_tools.publish.disk.staging import (
    LONG_TRIES,
    TRIES,
    StagingDirectory,
    discard,
    exchanged,
    is_at,
    lock_directory,
    restore_aside,
    staging,
    sync_directory,
)
from ckpt_tools.publish.refusals import refuse_existing, refuse_foreign
from ckpt_tools.storage import write_file
from ckpt_tools.storage.local import failed


def check_destination(
    target: Path, overwrite: bool, find_foreign: Callable[[Path], list[str]]
) -> None:
    """Refuses a destination to which nothing can be published, before any data is read.

    It first restores a result that a killed attempt has set aside.

    Args:
        target: the file or directory to be.
        overwrite: whether an old result may be replaced.
        find_foreign: returns the names under an existing destination that belong to no checkpoint.

    Raises:
        StorageError: it exists, holds foreign files, or its folder cannot be written to.
    """
    if not overwrite:
        restore_aside(target.parent, target.name)
    parent = existing_parent(target)
    if not parent.is_dir():
        raise StorageError(f"the destination's parent is not a directory: {printable(str(parent))}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(
            f"the destination's folder cannot be written to: {printable(str(parent))}"
        )
    if not os.path.lexists(target):
        return
    foreign = [] if target.is_symlink() else _foreign_at(target, find_foreign)
    if not overwrite:
        raise refuse_existing(str(target), not foreign and not target.is_symlink())
    if target.is_symlink():
        raise StorageError(
            f"the destination is a symbolic link: {printable(str(target))}",
            hint="give the path that it leads to",
        )
    if foreign:
        raise refuse_foreign(str(target), foreign)


def _foreign_at(path: Path, find_foreign: Callable[[Path], list[str]]) -> list[str]:
    """Returns the foreign names at a path. Another writer may replace the result meanwhile."""
    for _ in range(TRIES):
        try:
            return find_foreign(path)
        except StorageError as error:
            if not error.is_missing:
                raise
            time.sleep(0.01)
    return find_foreign(path) if os.path.lexists(path) else []


def existing_parent(target: Path) -> Path:
    """Returns the nearest folder above a path that exists; those between are made when something is
    written.
    """
    return next(p for p in target.absolute().parents if os.path.lexists(p))


def check_room(target: Path, nbytes: int) -> None:
    """Refuses early what the filesystem has no room for.

    Raises:
        StorageError: fewer than `nbytes` bytes are free where `target` will lie.
    """
    parent = existing_parent(target)
    stat = os.statvfs(parent)
    free = stat.f_bavail * stat.f_frsize
    if free < nbytes:
        raise StorageError(
            f"no room: expected {nbytes} free bytes, got {free} ({printable(str(parent))})",
            hint="free some room, or write to another filesystem",
        )


FindForeign = Callable[[Path], list[str]]


def publish_directory(staged: StagingDirectory, overwrite: bool, find_foreign: FindForeign) -> None:
    """Gives a complete staging directory its final name: the commit.

    Args:
        staged: the directory.
        overwrite: whether a result may be replaced.
        find_foreign: as for `check_destination`. It looks once more: files may have come since.

    Raises:
        StorageError: another writer was first, a file of somebody else is there, or the rename
            failed. Nothing is visible then.
    """
    _set_mode(staged)
    for folder, _, _ in os.walk(staged.path, topdown=False):
        sync_directory(Path(folder))
    if not is_at(staged.lock, staged.path):
        raise exchanged(staged.path)
    if overwrite and os.path.lexists(staged.target):
        _replace_directory(staged, find_foreign)
    else:
        publish_name(staged.path, staged.target)
        if not _was_published(staged):
            publish_name(staged.target, staged.path)
            raise exchanged(staged.path)
    _confirm(staged.target)
    with suppress(OSError):  # it is published; readers ignore the mark
        unmark(staged.lock)


def _replace_directory(staged: StagingDirectory, find_foreign: FindForeign) -> None:
    """Exchanges a staging directory with the result at its target.

    The old result is locked until it has been looked at under its new name. Without that, another
    process would take it for the leftover of a dead attempt.
    """
    _refuse_foreign(staged.target, staged.target, find_foreign)
    lock = _lock_old(staged)
    try:
        try:
            mark(lock, staged.attempt)
            _change_places(staged, find_foreign)
        except BaseException:
            with suppress(OSError):
                unmark(lock)
            raise
    except OSError as error:
        raise failed("replace", staged.target, error) from error
    finally:
        release(lock)


def _change_places(staged: StagingDirectory, find_foreign: FindForeign) -> None:
    if not exchange(staged.path, staged.target):
        _replace_by_turns(staged, find_foreign)
        return
    try:  # the staging name now holds the old one
        _refuse_foreign(staged.path, staged.target, find_foreign)
        if not _was_published(staged):
            raise exchanged(staged.path)
    except BaseException:
        exchange(staged.path, staged.target)
        raise


def _lock_old(staged: StagingDirectory) -> int:
    """Locks the result that is to be replaced; its writer may hold it for its last lines of work.

    Raises:
        StorageError: another process holds it.
    """
    for _ in range(LONG_TRIES):
        lock = lock_directory(staged.target)
        if lock >= 0:
            return lock
        time.sleep(0.01)
    raise StorageError(
        f"another process is at work on this: {printable(str(staged.target))}",
        hint="wait for it to end",
    )


def _was_published(staged: StagingDirectory) -> bool:
    """Tells whether the directory of an attempt was at its target, even if it was replaced since.

    If somebody has moved it away, then something else has got its name.
    """
    if is_at(staged.lock, staged.target):
        return True
    try:
        now = Path(os.readlink(f"/proc/self/fd/{staged.lock}"))
    except OSError:  # without /proc
        return False
    name, parent = short_name(staged.target.name), Path(os.path.realpath(staged.target.parent))
    is_old = any(now.name.startswith(f"{p}{name}.") for p in (STAGING, TRASH, ASIDE))
    return now.name.endswith(" (deleted)") or (now.parent == parent and is_old)


def _refuse_foreign(old: Path, target: Path, find_foreign: FindForeign) -> None:
    """Refuses to replace anything but a checkpoint.

    Args:
        old: where the old result is.
        target: where it was at first.
        find_foreign: as for `check_destination`.

    Raises:
        StorageError: it is a link, or holds files of somebody else.
    """
    foreign = [target.name] if old.is_symlink() else _foreign_at(old, find_foreign)
    if foreign:
        raise refuse_foreign(str(target), foreign)


def _replace_by_turns(staged: StagingDirectory, find_foreign: FindForeign) -> None:
    """Replaces a directory where two cannot change places: the old one stands aside until the new
    one is there for good.
    """
    target, aside = (
        staged.target,
        staged.target.parent / f"{ASIDE}{staged.target.name}.{staged.attempt[:8]}",
    )
    try:
        publish_name(target, aside)
        _refuse_foreign(aside, target, find_foreign)
        publish_name(staged.path, target)
        _confirm(target)
        with suppress(OSError):  # else the next one removes it
            remove_tree(discard(aside))
    except BaseException:
        if not os.path.lexists(target):
            with suppress(OSError):  # else the next one brings it back
                os.rename(aside, target)
        raise


def publish_file(
    staged: StagingDirectory, name: str, manifest: str, overwrite: bool, find_foreign: FindForeign
) -> None:
    """Gives a staged file its final name, its manifest first: the rename of the data is the commit.

    Args:
        staged: the directory that has the file.
        name, manifest: names of the file and of its manifest in it.
        overwrite: whether a result may be replaced.
        find_foreign: as for `check_destination`. It looks once more: a file may have come since.

    Raises:
        StorageError: another writer was first, a file of somebody else is there, or the rename
            failed. Nothing is visible then.
    """
    target, folder = staged.target, staged.lock
    try:
        os.fsync(folder)
        with _one_at_a_time(target.parent):
            replaced = os.lstat(target) if overwrite and os.path.lexists(target) else None
            if replaced:
                _refuse_foreign(target, target, find_foreign)
            own = os.stat(name, dir_fd=folder, follow_symlinks=False)
            try:
                os.rename(manifest, target.parent / manifest, src_dir_fd=folder)
                sync_directory(target.parent)
                if replaced:
                    _replace_file(staged, name, replaced)
                else:
                    publish_name(Path(name), target, folder)
            except BaseException:
                with suppress(FileNotFoundError):
                    left = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if os.path.samestat(left, own):  # it was not published
                        (target.parent / manifest).unlink(missing_ok=True)
                raise
            _confirm(target)
            for old in target.parent.iterdir():
                is_beside = note_of(old.name) == (MANIFEST, short_name(target.name))
                if is_beside and old.name != manifest:
                    with suppress(OSError):  # a directory of that name is somebody's
                        old.unlink()
    except OSError as error:
        raise failed("publish", target, error) from error


def _replace_file(staged: StagingDirectory, name: str, replaced: os.stat_result) -> None:
    """Exchanges a result with the file that was looked at, and with no other.

    Raises:
        StorageError: another file took its place meanwhile. It is there again.
    """
    target, folder = staged.target, staged.lock
    if not exchange(Path(name), target, folder):
        os.replace(name, target, src_dir_fd=folder)
        return
    if not os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), replaced):
        exchange(Path(name), target, folder)
        raise StorageError(
            "another writer replaced the destination while this was at work:"
            f" {printable(str(target))}",
            hint="look at its result, and start again if you still want to replace it",
        )
    os.fsync(folder)  # both directories have changed
    os.unlink(name, dir_fd=folder)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Lets one process at a time give names in a folder.

    A file and its manifest are two names. Of two processes that replace one file, each would remove
    the manifest of the other. Somebody else may hold a lock of the folder, such as `flock` in a
    shell: that one is not waited for.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(LONG_TRIES * 2):
            if try_lock(fd) is not False:
                break
            time.sleep(0.01)
        else:
            log.warning(
                "another process holds a lock of %s: not waited for", printable(str(folder))
            )
        yield
    finally:
        release(fd)


def add_file(folder: Path, name: str, data: bytes, attempt: str, overwrite: bool = False) -> None:
    """Adds a small file to a directory: whole, durable, and not over another unless that is asked.

    Nothing is written through a link: a file takes the place of a link of its name.

    Raises:
        StorageError: there is one of that name, or the directory cannot be written to; nothing is
            left then.
    """
    with staging(folder / name, attempt) as staged:
        store = staged.open()
        write_file(store, name, data)
        store.close()
        sync_directory(staged.path)
        if overwrite:
            try:
                os.replace(staged.path / name, staged.target)
            except OSError as error:
                raise failed("write", staged.target, error) from error
        else:
            publish_name(staged.path / name, staged.target)
        _confirm(staged.target)


def _confirm(target: Path) -> None:
    """Makes the new name durable; if that fails the result is there, but a power cut might undo
    it.
    """
    ending.published()
    try:
        sync_directory(target.parent)
    except StorageError as error:
        raise StorageError(
            str(error),
            hint=(
                f"{target} is complete and in place, but a power cut might still undo its name: run"
                " `sync`"
            ),
        ) from error


def _set_mode(staged: StagingDirectory) -> None:
    """Gives a staging directory, private so far, the mode that `mkdir` gives a directory in that
    place.

    Setgid, and the mask of a default ACL, come from the folder above. A new directory inside the
    staging directory inherits both the same way, so its mode is the one to set.
    """
    probe, fd = f".mode.{staged.path.name[-8:]}", staged.lock
    try:
        with suppress(FileExistsError):  # of an attempt with the same id that was killed here
            os.mkdir(probe, 0o777, dir_fd=fd)
        mode = os.stat(probe, dir_fd=fd).st_mode
        os.rmdir(probe, dir_fd=fd)
        os.fchmod(fd, stat.S_IMODE(mode))
    except OSError as error:
        raise failed("set the mode of", staged.path, error) from error
