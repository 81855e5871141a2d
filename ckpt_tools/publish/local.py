"""Making a result visible at one instant: staging, the order of fsyncs, one rename.

Data and manifest are written under the name of one attempt and made durable. Then one rename
publishes them. It never replaces anything. With `overwrite`, the old result stays until the new one
is complete. Then the two change places in one step. If a file system cannot do that, the old result
stands aside for a moment. If the process dies in that moment, the next one puts it back.
`docs/architecture.md` has the protocol, step by step.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.core.logs import log
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.formats.base import ASIDE, MANIFEST, PIN, is_date_like, note_of, short_name
from ckpt_tools.formats.registry import is_ours
from ckpt_tools.publish.flock import held_by_this_thread, release, try_lock
from ckpt_tools.publish.refusals import refuse_existing, refuse_foreign
from ckpt_tools.publish.rename import exchange, publish_name
from ckpt_tools.storage import PinnedStore, write_file
from ckpt_tools.storage.local import failed

_STAGING, _TRASH = ".tmp.", ".trash."
_TRIES, _LONG_TRIES = 8, 100  # each after 10 ms
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
            raise _exchanged(self.path)
        store = PinnedStore(self.path, creates)
        found = os.fstat(store.directory)
        if self.lock >= 0 and not os.path.samestat(found, os.fstat(self.lock)):
            raise _exchanged(self.path)
        if problem := _trust_problem(found):
            raise StorageError(
                f"a staging directory is not used, since {problem}: {printable(str(self.path))}",
                hint="look at it, and remove it",
            )
        return store


def _exchanged(path: Path) -> StorageError:
    return StorageError(
        f"somebody has moved the staging directory away: {printable(str(path))}",
        hint="nothing was published; write into a folder that nobody else may change",
    )


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
        restore_aside(target.parent, _escape_glob(target.name))
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
    for _ in range(_TRIES):
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


def staging_path(target: Path, attempt: str) -> Path:
    """Returns where an attempt at `target` gathers its files."""
    return target.parent / f"{_STAGING}{short_name(target.name)}.{attempt[:8]}"


def trash_path(target: Path, attempt: str) -> Path:
    """Returns the name under which a result of an attempt waits for its removal."""
    return target.parent / f"{_TRASH}{short_name(target.name)}.{attempt[:8]}"


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
    made = [p for p in target.absolute().parents if not os.path.lexists(p)]
    path = staging_path(target, attempt)
    lock, is_tried = -1, False

    def clean() -> None:
        if is_tried:
            _remove_own(path, lock, kept_glob, target)
        for folder in made if not os.path.lexists(target) else ():
            with suppress(OSError):  # it is not ours alone any more
                folder.rmdir()

    # A signal may come at any instant, also within a `finally`: so there are two.
    try:
        try:
            remove_dead(
                target.parent,
                _escape_glob(short_name(target.name)),
                spared=takes_over or (path if kept_glob else None),
            )
            try:
                make_folder(target.absolute().parent)
                lock = _inherit(takes_over, path) if takes_over is not None else -1
                is_tried = True
                if lock < 0:
                    lock = _make_and_lock(path, is_emptied=not kept_glob)
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
            is_own = is_locked or is_free or (is_free is None and _is_at(lock, target))
            if lock < 0 and own >= 0 and _trust_problem(os.fstat(own)):
                is_own = False  # it was there before, and this attempt has refused it
            if is_own and (not kept_glob or not any(path.glob(kept_glob))):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            if own >= 0 and not is_locked:
                release(own)


def _lock_soon(path: Path, lock: int, target: Path) -> int:
    """Opens and locks a replaced result; returns -1 if another process holds it.

    The writer of the replaced result may have published it a moment ago, and still holds its lock
    for the last lines of its work. So this waits for a second if the new result is in place.
    """
    for _ in range(_LONG_TRIES if _is_at(lock, target) else 1):
        own = _lock(path)
        if own >= 0 or not os.path.lexists(path):
            return own
        time.sleep(0.01)
    return -1


def _is_at(fd: int, path: Path) -> bool:
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
    for _ in range(_TRIES):
        with suppress(FileExistsError):
            path.mkdir(_PRIVATE)
        lock = _lock(path)
        if lock >= 0 and (problem := _trust_problem(os.fstat(lock))):
            release(lock)
            raise StorageError(
                f"a staging directory is not used, since {problem}: {printable(str(path))}",
                hint="look at it, and remove it",
            )
        if lock < 0:
            time.sleep(0.01)
        elif not is_emptied or not any(path.iterdir()):
            return lock
        elif try_lock(lock):
            shutil.rmtree(path)
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
    lock = _lock(old)
    if lock >= 0:
        try:
            os.rename(old, path)
        except OSError:
            release(lock)
            raise
    return lock


def _lock(path: Path) -> int:
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
    found = remove_dead(target.parent, _escape_glob(short_name(target.name)), dry_run=True)
    return [path for path in found if path.name.startswith(_STAGING)]


def remove_dead(
    parent: Path, name: str = "*", dry_run: bool = False, spared: Path | None = None
) -> list[Path]:
    """Removes what dead attempts left in a folder, and returns it: staging and trash whose lock no
    process holds.

    Args:
        parent: the folder.
        name: glob of the targets whose leftovers are meant.
        dry_run: only look.
        spared: one that stays.
    """
    if not dry_run:
        restore_aside(parent, name)
    dead = []
    for prefix in (_STAGING, _TRASH):
        for path in _unheld(parent, prefix, name):
            if path == spared:
                continue
            if not dry_run:
                shutil.rmtree(path, ignore_errors=True)
                if os.path.lexists(path):
                    log.warning("could not remove all of %s: look at it", printable(str(path)))
                    continue
            dead.append(path)
    return dead


def restore_aside(parent: Path, name: str = "*") -> None:
    """Restores the name of an old result that a dead attempt has set aside.

    If the new result is in place, the old one becomes trash.

    Args:
        parent, name: as for `remove_dead`.
    """
    for path in _unheld(parent, ASIDE, name):
        stood_at = parent / path.name[len(ASIDE) : -9]
        with suppress(StorageError, OSError):  # another was faster
            if os.path.lexists(stood_at):
                _discard(path)
            else:
                publish_name(path, stood_at)


def _discard(aside: Path) -> Path:
    """Renames an old result to trash, so that a half removed one is not restored; returns it."""
    return aside.rename(aside.parent / f"{_TRASH}{aside.name[len(ASIDE) :]}")


def _unheld(parent: Path, prefix: str, name: str) -> Iterator[Path]:
    """Yields the directories of attempts whose lock no process holds, each while it is locked
    here.
    """
    for path in sorted(parent.glob(f"{prefix}{name}.{'[0-9a-f]' * 8}")):
        if is_date_like(path.name[-8:]) or path.is_symlink() or not path.is_dir():
            continue
        if not _is_made_here(path):
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


def _is_made_here(path: Path) -> bool:
    """Tells whether an attempt made a directory, and no person with a similar name in mind.

    A staging directory is private until it is published. A result that was replaced, or a step that
    was removed, has a manifest, or nothing but files of a checkpoint.
    """
    try:
        found = path.stat()
        if found.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            return False
        if stat.S_IMODE(found.st_mode) & 0o777 == _PRIVATE:
            return True
        names = [name for _, _, files in os.walk(path) for name in files]
    except FileNotFoundError:  # another process was faster
        return False
    return any(note_of(name) == (MANIFEST, "") for name in names) or all(
        is_ours(name) or name == PIN for name in names
    )


def _escape_glob(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


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
    if not _is_at(staged.lock, staged.path):
        raise _exchanged(staged.path)
    if overwrite and os.path.lexists(staged.target):
        _replace_directory(staged, find_foreign)
    else:
        publish_name(staged.path, staged.target)
        if not _was_published(staged):
            publish_name(staged.target, staged.path)
            raise _exchanged(staged.path)
    _confirm(staged.target)


def _replace_directory(staged: StagingDirectory, find_foreign: FindForeign) -> None:
    """Exchanges a staging directory with the result at its target.

    The old result is locked until it has been looked at under its new name. Without that, another
    process would take it for the leftover of a dead attempt.
    """
    _refuse_foreign(staged.target, staged.target, find_foreign)
    lock = _lock_old(staged)
    try:
        if not exchange(staged.path, staged.target):
            _replace_by_turns(staged, find_foreign)
            return
        try:  # the staging name now holds the old one
            _refuse_foreign(staged.path, staged.target, find_foreign)
            if not _was_published(staged):
                raise _exchanged(staged.path)
        except BaseException:
            exchange(staged.path, staged.target)
            raise
    finally:
        release(lock)


def _lock_old(staged: StagingDirectory) -> int:
    """Locks the result that is to be replaced; its writer may hold it for its last lines of work.

    Raises:
        StorageError: another process holds it.
    """
    for _ in range(_LONG_TRIES):
        lock = _lock(staged.target)
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
    if _is_at(staged.lock, staged.target):
        return True
    try:
        now = Path(os.readlink(f"/proc/self/fd/{staged.lock}"))
    except OSError:  # without /proc
        return False
    name, parent = short_name(staged.target.name), Path(os.path.realpath(staged.target.parent))
    is_old = any(now.name.startswith(f"{p}{name}.") for p in (_STAGING, _TRASH, ASIDE))
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
            shutil.rmtree(_discard(aside))
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
        for _ in range(_LONG_TRIES * 2):
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


def add_file(folder: Path, name: str, data: bytes, attempt: str) -> None:
    """Adds a small file to a directory: whole, durable, and never over another.

    Raises:
        StorageError: there is one of that name, or the directory cannot be written to; nothing is
            left then.
    """
    with staging(folder / name, attempt) as staged:
        store = staged.open()
        write_file(store, name, data)
        store.close()
        sync_directory(staged.path)
        publish_name(staged.path / name, staged.target)
        _confirm(staged.target)


def _confirm(target: Path) -> None:
    """Makes the new name durable; if that fails the result is there, but a power cut might undo
    it.
    """
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
        os.mkdir(probe, 0o777, dir_fd=fd)
        mode = os.stat(probe, dir_fd=fd).st_mode
        os.rmdir(probe, dir_fd=fd)
        os.fchmod(fd, stat.S_IMODE(mode))
    except OSError as error:
        raise failed("set the mode of", staged.path, error) from error
