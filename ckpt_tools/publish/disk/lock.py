"""One job at a time on a run's root: a locked file, which the kernel releases with its process."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ckpt_tools.core.logs import log
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.formats.base import LOCK
from ckpt_tools.publish.disk.flock import owner_problem, release, try_lock
from ckpt_tools.publish.disk.staging import make_folder
from ckpt_tools.publish.holder import held_by_another, own_holder, parse_holder
from ckpt_tools.storage.local import failed

_MODE = 0o600  # whoever can open a file can lock it


def _check_own(fd: int, path: Path) -> None:
    """Refuses a lock file that could be another name of somebody's file.

    Raises:
        StorageError: it is not a regular file, has a second name, or belongs to another user.
    """
    found, above = os.fstat(fd), os.stat(path.parent)
    problem = owner_problem(found, above)
    if problem:
        raise StorageError(
            f"the lock of a run is not used, since {problem}: {printable(str(path))}",
            hint="look at it, and remove it",
        )


class FileLock:
    """See `RootLock`: a locked file in the root. It is created if it does not exist."""

    is_inherited = False

    def __init__(self, root: Path) -> None:
        """Claims a root for this process, as long as it lives.

        Raises:
            StorageError: another live job holds it; the message names host, pid and time. If the
                file system has no locks, a warning is logged instead.
        """
        self.root = root
        self._fd = self._take()

    def _take(self) -> int:
        while True:
            fd = self._open()
            with suppress(OSError):
                # the holder before may have removed the file between our opening and our lock
                if os.path.samestat(os.fstat(fd), os.lstat(self.root / LOCK)):
                    return fd
            release(fd)

    def _open(self) -> int:
        """Opens and locks the file, and writes this process into it."""
        path = self.root / LOCK
        try:
            make_folder(self.root.absolute())
            fd = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, _MODE
            )
        except OSError as error:
            raise failed("create", path, error) from error
        try:
            _check_own(fd, path)
            with suppress(OSError):  # an earlier release let everybody read it
                os.fchmod(fd, _MODE)
        except BaseException:
            os.close(fd)
            raise
        is_mine = try_lock(fd)
        if is_mine is False:
            holder, text = parse_holder(os.pread(fd, 4096, 0))
            release(fd)
            raise held_by_another(str(self.root), holder, text)
        if is_mine is None:
            log.warning(
                "%s: no file locks here; a second job would not be refused, nor a dead one's"
                " leftovers removed",
                printable(str(self.root)),
            )
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{json.dumps(own_holder())}\n".encode(), 0)
            os.fsync(fd)  # so that other nodes see it
        except OSError as error:
            release(fd)
            raise failed("write", path, error) from error
        return fd

    @property
    def written(self) -> bytes:
        return os.pread(self._fd, 4096, 0)

    def check(self) -> None:
        """See `RootLock`. If the root was removed or replaced, it is created and claimed again.

        A warning says so.
        """
        try:
            is_same = os.path.samestat(os.fstat(self._fd), os.stat(self.root / LOCK))
        except FileNotFoundError:
            is_same = False
        except OSError as error:
            raise failed("look at", self.root / LOCK, error) from error
        if not is_same:
            new = self._take()
            release(self._fd)
            self._fd = new
            log.warning(
                "%s was removed or replaced while this job saved to it. It was made again, and the"
                " earlier steps are gone",
                printable(str(self.root)),
            )

    def release(self) -> None:
        """See `RootLock`. It removes the file: a copy of the run would have a lock of nobody."""
        if self._fd < 0:
            return
        path = self.root / LOCK
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), os.lstat(path)):
                path.unlink()
        release(self._fd)
        self._fd = -1


def wait_for_lock_file(root: Path, written: bytes, rank: int) -> None:
    """Makes sure that this process sees the directory that another rank has just locked.

    It compares the contents of the lock file.

    Raises:
        StorageError: the contents differ after ten seconds.
    """
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        with suppress(OSError):
            if (root / LOCK).read_bytes() == written:
                return
        time.sleep(0.1)
    raise StorageError(
        f"rank {rank} does not see rank 0's directory: {printable(str(root))} is not shared",
        hint="save to a filesystem that all nodes mount",
    )


# ---- in an object store --------------------------------------------------------------------------
