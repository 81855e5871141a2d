"""File locks of this process that its children do not inherit.

A lock of `flock` belongs to the open file, which a forked child shares: a DataLoader worker that
outlives a killed job would keep the job's lock. So a child closes them as soon as it is forked.
Imports nothing of the package.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

_held: dict[int, int] = {}  # the thread that locked each open file


def try_lock(fd: int) -> bool | None:
    """Locks an open file or directory until it is closed.

    Returns False if another process holds the lock, and None if the file system has no locks.

    Lustre is often mounted without locks. No attempt is taken for dead then: what a killed process
    leaves stays.
    """
    was_held = fd in _held
    _held[fd] = threading.get_ident()  # first, because a signal may follow the lock at once
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if not was_held:
            _held.pop(fd, None)
        return None if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK) else False
    return True


def held_by_this_thread(path: Path) -> int:
    """Returns the open file by which this thread holds the lock of a path; -1 if it does not.

    A signal may have come between the lock and the assignment of its descriptor to a variable.
    """
    for fd, thread in list(_held.items()):
        with suppress(OSError):
            if thread == threading.get_ident() and os.path.samestat(os.fstat(fd), os.lstat(path)):
                return fd
    return -1


def release(fd: int) -> None:
    """Closes a file, and with it its lock."""
    _held.pop(fd, None)
    with suppress(OSError):
        # a child that was forked a moment ago may not have closed its copy yet
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _after_fork() -> None:
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


def owner_problem(found: os.stat_result, above: os.stat_result) -> str:
    """Returns why a file of a shared directory is not trusted, "" if it is.

    Args:
        found: the file, itself and not what a link leads to.
        above: its directory.
    """
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_nlink > 1:
        return "it is a second name of another file"
    if found.st_uid not in (os.geteuid(), above.st_uid):
        return f"it belongs to user {found.st_uid}"
    return ""
