"""Copies within one file system that shares blocks: XFS, Btrfs, and others with `FICLONERANGE`.

A clone writes no data: both files refer to the same blocks until one of them changes. Ranges must
begin and end at a block in both files. Source: ioctl_ficlonerange(2).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ckpt_tools.publish.base import CopiedRange
from ckpt_tools.storage import LocalStore, Writer
from ckpt_tools.storage.local import PinnedStore, failed

BLOCK_BYTES = 4096  # the usual block, and the page of most processors
_FICLONERANGE = 0x4020940D
_PROBE = ".ckpt.clone"  # hidden, and gone at once
# the file system cannot do it here; any other error is one of the disk
_UNABLE = (
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.EXDEV,
    errno.EINVAL,
    errno.EPERM,
    errno.EACCES,
    errno.ENOSYS,
    errno.ETXTBSY,
)


def _clone(source: int, start: int, nbytes: int, to: int, at: int) -> None:
    fcntl.ioctl(to, _FICLONERANGE, struct.pack("<qQQQ", source, start, nbytes, at))


def can_clone(source: LocalStore, into: PinnedStore) -> bool:
    """Tells whether two directories are on one file system that shares blocks. It tries it."""
    try:
        if os.stat(source.root).st_dev != os.fstat(into.directory).st_dev:
            return False
    except OSError:  # the source is gone: whoever reads it says so
        return False
    how = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(_PROBE, how, 0o600, dir_fd=into.directory)
    except OSError:
        return False
    try:
        os.pwrite(fd, bytes(BLOCK_BYTES), 0)
        _clone(fd, 0, BLOCK_BYTES, fd, BLOCK_BYTES)
    except OSError:
        return False
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(_PROBE, dir_fd=into.directory)
    return True


class DiskClones:
    """See `CopyTarget`: copies within one file system.

    A range that the file system refuses to clone is copied by the kernel instead.
    """

    block_nbytes = BLOCK_BYTES

    def __init__(self, store: PinnedStore, source: LocalStore) -> None:
        self._store, self._source = store, source
        self.capabilities = store.capabilities
        self.create = store.create

    def create_copied(
        self, path: str, nbytes: int, starts: Sequence[int], ranges: Iterable[CopiedRange]
    ) -> Writer:
        del starts
        writer = self._store.create(path, nbytes)
        try:
            fd = os.open(
                path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._store.directory
            )
            try:
                for at, size, file, start in ranges:
                    _share(self._source.descriptor(file), start, size, fd, at)
            finally:
                os.close(fd)
        except OSError as error:
            writer.abort()
            raise failed("clone into", path, error) from error
        except BaseException:
            writer.abort()
            raise
        return writer

    def copy_file(self, name: str, file: str, nbytes: int) -> None:
        whole = [CopiedRange(0, nbytes, file, 0)] if nbytes else []
        self.create_copied(name, nbytes, (), whole).finish()


def _share(source: int, start: int, nbytes: int, to: int, at: int) -> None:
    """Clones a range; copies it if the file system refuses to clone it.

    A file system that can clone refuses some files, such as one that is in use for swapping.
    """
    try:
        _clone(source, start, nbytes, to, at)
        return
    except OSError as error:
        if error.errno not in _UNABLE:
            raise
    end = start + nbytes
    while start < end:
        count = os.copy_file_range(source, to, end - start, start, at)
        if count == 0:
            raise OSError(errno.EIO, "the source ended early")
        start, at = start + count, at + count
