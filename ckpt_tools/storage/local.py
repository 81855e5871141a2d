"""The local file system as a store.

It uses file descriptors, and knows nothing about checkpoints.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from ckpt_tools.errors import StorageError, printable
from ckpt_tools.storage.base import Capabilities, StoreDefaults, Writer, check_path

_FLUSH_BYTES = 32 << 20
# longer ones make the kernel look for huge pages, which a virtual machine may have to fetch first
_WRITE_BYTES = 512 << 10
_SHORT_BYTES = 8 << 10  # too short to be worth a system call
_LONG_BYTES = 64 << 20
_SETTLED_NS = 2_000_000_000  # a change after this time has another time
_LOOKS = 3
_SYNC_FILE_RANGE_WRITE = 2
# such an error tells what lies at a path; any other one, that it could not be read
_OF_THE_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def failed(operation: str, path: str | Path, error: OSError) -> StorageError:
    """Returns the StorageError for a failed system call, with a hint if the user can fix it."""
    hints = {
        errno.ENOSPC: "free some room, or write to another filesystem",
        errno.EDQUOT: "free some of your quota",
        errno.EMFILE: "raise `ulimit -n`",
    }
    message = f"cannot {operation}: {error.strerror or error} ({printable(str(path))})"
    return StorageError(
        message,
        hint=hints.get(error.errno or 0),
        is_missing=error.errno == errno.ENOENT,
        is_unreadable=error.errno not in _OF_THE_PATH,
    )


def with_room(fd: int) -> int:
    """Returns a new descriptor; lets the process open more files if half of its numbers are taken.

    A checkpoint of 2,000 ranks has 2,000 files, and most shells allow a process 1,024.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if fd >= allowed // 2 and allowed < most:
        with suppress(OSError, ValueError):  # then `ulimit -n` is the hint of a later error
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * allowed, most), most))
    return fd


NO_FILE = "no regular file"  # what stands for the target of an entry that is no link


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Tells whether an entry is a file, or a link that can be followed to one."""
    try:
        return entry.is_file()
    except OSError:  # links in a circle, or a link into a folder that is closed to this user
        return False


def files_below(folder: str | os.PathLike[str]) -> Iterator[os.stat_result]:
    """Yields the status of each file below a directory, as far as it is still there.

    It follows no links.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another process removes it
                yield os.lstat(os.path.join(place, name))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Tells whether an entry is a folder, or a link that can be followed to one."""
    try:
        return entry.is_dir()
    except OSError:
        return False


class LocalStore(StoreDefaults):
    """Files under one directory.

    It follows symbolic links only if they stay under this directory. Links in a snapshot of a
    Hugging Face cache may also lead to that cache's `blobs`. A link that leads elsewhere is not
    listed, and opening it is an error.
    """

    capabilities = Capabilities(can_write_anywhere=True, has_descriptors=True)
    traffic = None

    def __init__(self, root: str | Path, follows: str = "") -> None:
        """Stores the directory; opens nothing yet.

        Args:
            root: the directory.
            follows: name of one file that is followed wherever it leads, because the user gave its
                path.
        """
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()
        self._root = os.path.realpath(root)
        self._below = self._root.rstrip("/") + "/"
        self._follows, self._blobs = follows, _blobs_of(self._root)
        self.url = str(root)

    @cached_property
    def root(self) -> Path:
        """The real path of the directory."""
        return Path(self._root)

    def list_files(self, below: bool = False) -> Mapping[str, int]:
        try:
            found = sorted(os.scandir(self._root), key=lambda e: e.name)
            files = self._sizes(found)
            for folder in (e for e in found if below and _is_folder(e) and self._lies_inside(e)):
                inner = sorted(os.scandir(folder.path), key=lambda e: e.name)
                files |= {f"{folder.name}/{name}": n for name, n in self._sizes(inner).items()}
        except OSError as error:
            raise failed("list a directory", self.root, error) from error
        return files

    def _sizes(self, entries: Iterable[os.DirEntry[str]]) -> dict[str, int]:
        files = {}
        for entry in entries:
            if _is_file(entry) and self._lies_inside(entry):
                with suppress(FileNotFoundError):  # it was removed since the listing
                    files[entry.name] = entry.stat().st_size
        return files

    def folders(self) -> list[str]:
        try:
            return sorted(e.name for e in os.scandir(self.root) if e.is_dir(follow_symlinks=False))
        except OSError as error:
            raise failed("list a directory", self.root, error) from error

    def enter(self, name: str) -> LocalStore:
        return LocalStore(os.path.join(self.url, name))

    def beside(self, name: str) -> LocalStore:
        """Returns the store of another folder beside this one."""
        return LocalStore(os.path.join(os.path.dirname(self._root), name))

    def size(self, path: str) -> int:
        return os.fstat(self._open(path)).st_size

    def descriptor(self, path: str) -> int:
        """Returns the open file, which stays that of the store."""
        return self._open(path)

    def version(self, path: str) -> str:
        at = os.fstat(self._open(path))
        return f"{at.st_size} {at.st_mtime_ns} {at.st_ctime_ns}"

    def read_into(self, path: str, start: int, buffer: memoryview) -> None:
        fd, at, view = self._open(path), start, buffer
        try:
            while len(view):
                count = os.preadv(fd, [view], at)
                if count == 0:
                    raise StorageError(
                        f"a file ended early: expected bytes {start}:{start + len(buffer)}, got up"
                        f" to {at} ({printable(path)})",
                        hint="the file is truncated, or something shrank it while it was read",
                    )
                at, view = at + count, view[count:]
        except OSError as error:
            raise failed("read", path, error) from error

    def will_read(self, ranges: Iterable[tuple[str, int, int]], is_all: bool = False) -> None:
        del is_all
        for path, start, nbytes in (r for r in ranges if r[2] >= _SHORT_BYTES):
            # for a long range, the kernel's own sequential read-ahead is better
            advice = os.POSIX_FADV_WILLNEED if nbytes < _LONG_BYTES else os.POSIX_FADV_SEQUENTIAL
            os.posix_fadvise(self._open(path), start, nbytes, advice)

    def create(self, path: str, nbytes: int) -> Writer:
        full = self.root / check_path(path, str(self.root))
        if "/" in path:
            full.parent.mkdir(parents=True, exist_ok=True)
        return _LocalWriter(full, nbytes)

    def close(self) -> None:
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])

    def __del__(self) -> None:
        """Closes the files of a store that nobody has closed, as after an error."""
        self.close()

    def _is_inside(self, path: str) -> bool:
        real = _real_path(path)
        return real is not None and self._may_read(real, path)

    def _may_read(self, real: str, path: str) -> bool:
        """Tells whether a real path lies within the root, or where a link of it may lead."""
        return (
            real.startswith(self._below)
            or (self._blobs is not None and os.path.dirname(real) == self._blobs)
            or (bool(self._follows) and path == self._below + self._follows)
        )

    def blob_name(self, path: str) -> str:
        folder, name = os.path.split(os.path.realpath(self._below + check_path(path, self._root)))
        return name if self._blobs is not None and folder == self._blobs else ""

    def strays(self) -> Mapping[str, str]:
        try:
            found = sorted(os.scandir(self.root), key=lambda e: e.name)
            return {
                e.name: os.readlink(e.path) if e.is_symlink() else NO_FILE
                for e in found
                if not (_is_folder(e) or (_is_file(e) and self._lies_inside(e)))
            }
        except OSError as error:
            raise failed("list a directory", self.root, error) from error

    def _lies_inside(self, entry: os.DirEntry[str]) -> bool:
        """Tells whether an entry of a listing lies within the root; only a link can lead out."""
        return not entry.is_symlink() or self._is_inside(entry.path)

    def _open(self, path: str) -> int:
        fd = self._fds.get(path)
        if fd is None:
            with self._lock:
                fd = self._fds.get(path)
                if fd is None:
                    fd = self._fds[path] = self._open_regular(path)
        return fd

    def _open_regular(self, path: str) -> int:
        full = self._below + check_path(path, self._root)
        try:
            fd = with_room(self._open_within(path, full))
        except OSError as error:
            raise failed("open", full, error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StorageError(f"not a regular file: {printable(full)}")
        if not self._is_within(fd, full):
            os.close(fd)
            raise StorageError(
                f"a file was replaced by a link that leads out of the checkpoint: {printable(path)}"
            )
        return fd

    def _open_within(self, path: str, full: str) -> int:
        """Opens a file. Only a link, or one in the place of a folder, needs a look at its path."""
        how = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        if "/" not in path:
            try:
                return os.open(full, how | os.O_NOFOLLOW)
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
        if not self._is_inside(full):
            raise StorageError(
                f"a file is a link that leads out of the checkpoint: {printable(path)} ->"
                f" {printable(str(_real_path(full)))}"
            )
        return os.open(full, how)

    def _is_within(self, fd: int, full: str) -> bool:
        """Tells whether an open file lies within the root.

        Between the check of the path and the opening, a link may have replaced the file.
        """
        try:
            real = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # without /proc, check the path again
            return self._is_inside(full)
        # it was replaced after the opening, so it is the requested file
        is_gone = real.endswith(" (deleted)") and not os.path.exists(real)
        return self._may_read(real, full) or (is_gone and self._is_inside(full))


def _real_path(path: str) -> str | None:
    """Returns the real path; None if the path keeps changing."""
    for _ in range(_LOOKS):
        try:
            return os.path.realpath(path)
        except OSError:  # a link was replaced by a file between two system calls
            continue
    return None


def _blobs_of(root: str) -> str | None:
    """Returns the blobs directory for a snapshot of a Hugging Face cache, else None.

    It is `X/blobs` for `X/snapshots/REVISION` and directories below.
    """
    if "/snapshots/" not in root:
        return None
    blobs = f"{root.rpartition('/snapshots/')[0]}/blobs"
    return blobs if os.path.isdir(blobs) and not os.path.islink(blobs) else None


def snapshot(folder: str) -> object:
    """Returns a value that changes when a file of a directory is added, removed or changed.

    Returns None where that is not certain: a file has just changed, or something else than a file
    lies there. A write through memory that is mapped is not seen if an earlier one has made its
    page dirty.
    """
    latest, found = time.time_ns() - _SETTLED_NS, []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                at = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(at.st_mode) or at.st_ctime_ns > latest:
                    return None
                times = at.st_mtime_ns, at.st_ctime_ns
                found.append((entry.name, at.st_dev, at.st_ino, at.st_size, *times))
    except OSError:
        return None  # whoever reads it says so
    return sorted(found)


class PinnedStore(LocalStore):
    """A directory that is opened once. Files are written into it, wherever its name leads later.

    Whoever can write into the folder above could exchange the directory for a link.
    """

    def __init__(self, root: str | Path, creates: bool = True) -> None:
        """Opens the directory.

        Args:
            root: the directory itself, no link.
            creates: create files. If False, another process or an earlier try has created them, and
                this process writes into them.
        """
        super().__init__(root)
        self._creates = creates
        self.directory = -1
        try:
            self.directory = os.open(
                root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
            )
        except OSError as error:
            raise failed("open", root, error) from error

    def create(self, path: str, nbytes: int) -> Writer:
        path = check_path(path, str(self.root))
        folders = path.split("/")[:-1]
        for depth in range(len(folders) if self._creates else 0):
            with suppress(FileExistsError):
                os.mkdir("/".join(folders[: depth + 1]), dir_fd=self.directory)
        return _LocalWriter(self.root / path, nbytes, self._creates, (path, self.directory))

    def close(self) -> None:
        super().close()
        fd, self.directory = self.directory, -1
        if fd >= 0:
            os.close(fd)


class _LocalWriter:
    def __init__(
        self, path: Path, nbytes: int, is_new: bool = True, at: tuple[str, int] | None = None
    ) -> None:
        """Opens or creates a file.

        Args:
            path: the file.
            nbytes: its size, if it is new.
            is_new: whether it must not exist.
            at: its path below an open directory, and that directory.
        """
        self.path = path
        name, folder = at or (path, None)
        try:
            how = os.O_WRONLY | (os.O_CREAT | os.O_EXCL) * is_new | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = with_room(os.open(name, how, 0o666, dir_fd=folder))
        except OSError as error:
            raise failed("create" if is_new else "open", path, error) from error
        try:
            if nbytes and is_new:
                os.truncate(self._fd, nbytes)
        except OSError as error:
            self.abort()
            raise failed(f"make room for {nbytes} bytes in", path, error) from error

    def write_at(self, start: int, data: memoryview | bytes) -> None:
        at, view = start, memoryview(data)
        try:
            while len(view):
                count = os.pwrite(self._fd, view[:_WRITE_BYTES], at)
                at, view = at + count, view[count:]
        except OSError as error:
            raise failed("write", self.path, error) from error
        if _sync_file_range is not None and start // _FLUSH_BYTES != at // _FLUSH_BYTES:
            block = start // _FLUSH_BYTES * _FLUSH_BYTES
            # write back early, so that the final fsync is short
            _sync_file_range(self._fd, block, _FLUSH_BYTES, _SYNC_FILE_RANGE_WRITE)

    def view(self, start: int, nbytes: int) -> memoryview | None:
        del start, nbytes
        return None

    def finish(self) -> None:
        fd, self._fd = self._fd, -1
        try:
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise failed("make durable", self.path, error) from error

    def abort(self) -> None:
        fd, self._fd = self._fd, -1  # first, because a signal may follow the close at once
        if fd >= 0:
            os.close(fd)
