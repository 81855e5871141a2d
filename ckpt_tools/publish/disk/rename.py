"""Renames to a free name, and exchanges two directories, each in one step.

If a file system cannot do that, it comes as close as possible.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from ckpt_tools.storage.local import failed
from ckpt_tools.storage.retries import appeared

_NOREPLACE, _EXCHANGE = 1, 2
_AT_FDCWD = -100
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_libc = ctypes.CDLL(None, use_errno=True)


def publish_name(src: Path, dst: Path, folder: int | None = None) -> None:
    """Renames a file or directory to a name that nothing has.

    Args:
        src: the file or directory; a name in `folder` if that is given.
        dst: its new path.
        folder: an open directory.

    Without `renameat2` (NFS, some FUSE) a file is linked, which never replaces either; and a
    directory renamed once nothing is seen there, which never replaces one with files in it.

    Raises:
        StorageError: something is there, or the rename failed.
    """
    if _renameat2(src, dst, _NOREPLACE, folder):
        return
    if os.path.lexists(dst):
        raise appeared(str(dst))
    try:
        is_folder = stat.S_ISDIR(os.stat(src, dir_fd=folder, follow_symlinks=False).st_mode)
        if is_folder or not _link(src, dst, folder):
            os.rename(src, dst, src_dir_fd=folder)
    except OSError as error:
        raise (
            appeared(str(dst))
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY)
            else failed("rename", dst, error)
        ) from error


def exchange(one: Path, other: Path, folder: int | None = None) -> bool:
    """Exchanges the names of two files or directories; returns False if that needs more steps.

    Args:
        one: the first; a name in `folder` if that is given.
        other: the second.
        folder: an open directory.

    Raises:
        StorageError: it failed.
    """
    return _renameat2(one, other, _EXCHANGE, folder)


def _renameat2(src: Path, dst: Path, flags: int, folder: int | None = None) -> bool:
    """Returns False if the file system or the system does not know the flags."""
    call = getattr(_libc, "renameat2", None)
    if call is None:
        return False
    at = _AT_FDCWD if folder is None else folder
    if call(at, os.fsencode(src), _AT_FDCWD, os.fsencode(dst), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise (
        appeared(str(dst))
        if code == errno.EEXIST
        else failed("rename", dst, OSError(code, os.strerror(code)))
    )


def _link(src: Path, dst: Path, folder: int | None = None) -> bool:
    """Moves a file by a second name, which never replaces one; returns False without hard links."""
    try:
        os.link(src, dst, src_dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    with suppress(OSError):  # it goes with the staging
        os.unlink(src, dir_fd=folder)
    return True
