"""One job at a time on a run's root: a locked file on a disk, a lease in an object store.

The kernel releases a file's lock when its process ends. A lease is an object that its job renews;
by the store's clock it expires when the job no longer does.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ckpt_tools.core.logs import log
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.formats.base import LOCK
from ckpt_tools.publish.flock import owner_problem, release, try_lock
from ckpt_tools.publish.staging import make_folder
from ckpt_tools.storage import RemoteStore
from ckpt_tools.storage.local import failed
from ckpt_tools.storage.object_info import SmallObject

LEASE_S, RENEW_S = 60.0, 20.0
_LOOK_S = 1.0  # between two looks at the lease of another job


class RootLock(Protocol):
    """The right to save to a root."""

    @property
    def written(self) -> bytes:
        """Returns the contents of the lock's file, which the other ranks compare."""
        ...

    @property
    def is_inherited(self) -> bool:
        """Tells whether the holder before died, so that its unfinished work belongs to nobody."""
        ...

    def check(self) -> None:
        """Makes sure that this job still holds the root.

        Raises:
            StorageError: another job has the root.
        """
        ...

    def release(self) -> None:
        """Gives up the right."""
        ...


def _me() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "boot": _boot(),
        "started": _started(os.getpid()),
    }


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _started(pid: int) -> str:
    """Returns when a process started, in the kernel's units; "" if there is no such process."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _is_mine(holder: Mapping[str, Any]) -> bool:
    me = _me()
    return all(holder.get(key) == me[key] for key in ("host", "pid", "boot", "started"))


def _is_holder_alive(holder: Mapping[str, Any]) -> bool | None:
    """Tells whether the process that holds a lease is alive; None if it ran on another machine."""
    if (
        not holder.get("boot")
        or holder.get("boot") != _boot()
        or holder.get("host") != socket.gethostname()
    ):
        return None
    pid = holder.get("pid")
    return _started(pid if type(pid) is int else 0) == holder.get("started")


def is_leased(store: RemoteStore) -> bool:
    """Tells whether a live job or copy holds the lease of a prefix."""
    seen = store.read_small(LOCK)
    if seen is None or _is_holder_alive(_parse(seen.data)[0]) is False:
        return False
    return seen.age_s is None or seen.age_s <= LEASE_S


def _taken(root: str, holder: Mapping[str, Any], text: str) -> StorageError:
    if _is_mine(holder):
        return StorageError(
            f"this process has another manager open on {printable(root)}, or copies to it, since"
            f" {printable(str(holder.get('since')))}",
            hint=(
                "call close() on it first; a notebook cell that makes a manager should close the"
                " one before"
            ),
        )
    return StorageError(
        f"another job writes to {printable(root)}: {text or 'unknown'}",
        hint="give each job a root of its own, or end that job first",
    )


def _parse(data: bytes) -> tuple[dict[str, Any], str]:
    """Returns the holder that a lock names, and the same as text for people."""
    text = printable(data.decode("utf-8", "replace").strip())
    with suppress(ValueError, RecursionError):
        holder = json.loads(data)
        if isinstance(holder, dict):
            shown = ", ".join(
                f"{key} {printable(str(holder[key]))}"
                for key in ("host", "pid", "since")
                if key in holder
            )
            return holder, shown or text
    return {}, text


# ---- on a disk -----------------------------------------------------------------------------------


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
        path = self.root / LOCK
        try:
            make_folder(self.root.absolute())
            fd = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
            )
        except OSError as error:
            raise failed("create", path, error) from error
        try:
            _check_own(fd, path)
        except BaseException:
            os.close(fd)
            raise
        is_mine = try_lock(fd)
        if is_mine is False:
            holder, text = _parse(os.pread(fd, 4096, 0))
            release(fd)
            raise _taken(str(self.root), holder, text)
        if is_mine is None:
            log.warning(
                "%s: no file locks here; a second job would not be refused, nor a dead one's"
                " leftovers removed",
                printable(str(self.root)),
            )
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{json.dumps(_me())}\n".encode(), 0)
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
        if self._fd >= 0:
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


class Lease:
    """See `RootLock`: an object in the root, which a thread renews every 20 s.

    It expires after 60 s. If the store knows conditions, as S3 does, each write replaces only the
    version that was read before.

    """

    written = b""
    is_inherited = False

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        """Claims a root for this job.

        A lease whose process has ended on this machine, or that has expired, is replaced at once.
        That of another machine is watched, for 60 s at most: if it is renewed, its job lives.

        Raises:
            StorageError: another live job holds it; host, pid and time are named. Or the store
                cannot be reached.
        """
        from ckpt_tools.storage import RemoteStore  # at its first use: it imports much

        self._store = RemoteStore(url, options)
        self._me, self._id, self._turn = _me(), uuid.uuid4().hex, 0
        self._lost = ""
        self._stops, self._renews = threading.Event(), threading.Lock()
        self._take()
        self._renewed_at = time.monotonic()
        self._thread = threading.Thread(target=self._renew, name="ckpt-lease", daemon=True)
        self._thread.start()

    def _data(self) -> bytes:
        self._turn += 1
        return json.dumps(
            {**self._me, "id": self._id, "turn": self._turn, "expires_after_s": LEASE_S}
        ).encode()

    def _look(self) -> SmallObject | None:
        return self._store.read_small(LOCK)

    def _put(self, over: SmallObject | None) -> bool:
        """Replaces the lease that was read before; returns False if another job was faster."""
        data = self._data()
        try:
            self._store.put(
                LOCK, data, is_exclusive=over is None, replaces=over.version if over else ""
            )
        except StorageError as error:
            if error.is_transient:
                raise
            now = self._look()
            if now is not None and now.data == data:
                return True
            if now is None or (over is not None and now.version == over.version):
                raise
            return False
        now = self._look()
        return now is not None and _parse(now.data)[0].get("id") == self._id

    def _take(self) -> None:
        seen = self._look()
        began, told = time.monotonic(), False
        first = seen
        while True:
            if seen is None or self._is_over(seen, time.monotonic() - began):
                if self._put(seen):
                    self.is_inherited = seen is not None
                    return
                first, began = None, time.monotonic()
            holder, text = _parse(seen.data if seen else b"")
            if seen and (
                _is_holder_alive(holder) or (first is not None and first.data != seen.data)
            ):
                raise _taken(self._store.url, holder, text)
            if seen and not told:
                told = True
                log.warning(
                    "%s: another job has a lease: %s; waiting until it is renewed or expires",
                    printable(self._store.url),
                    text,
                )
            time.sleep(_LOOK_S)
            first = first or seen
            seen = self._look()

    def _is_over(self, seen: SmallObject, watched_s: float) -> bool:
        holder, _ = _parse(seen.data)
        return (
            _is_holder_alive(holder) is False
            or watched_s > LEASE_S
            or (seen.age_s is not None and seen.age_s > LEASE_S)
        )

    def _renew(self) -> None:
        while not self._lost and not self._stops.wait(RENEW_S):
            try:
                self._renew_once()
            except Exception as error:  # noqa: BLE001  # the store may come back; the lease is compared then
                log.debug("could not renew the lease of %s: %s", self._store.url, error)

    def _renew_once(self) -> None:
        """Writes the lease again, unless another job has it.

        If another write was faster, the next call finds out why.
        """
        with self._renews:
            began, seen = time.monotonic(), self._look()
            holder, text = _parse(seen.data) if seen else ({}, "")
            if seen is not None and holder.get("id") != self._id:
                self._lost = text or "unknown"
            elif self._put(seen):
                self._renewed_at = began

    def check(self) -> None:
        """See `RootLock`. It first renews a lease that may have expired: the thread may be late."""
        while not self._lost and time.monotonic() - self._renewed_at > LEASE_S:
            self._renew_once()
        if self._lost:
            raise StorageError(
                f"another job has taken over {printable(self._store.url)}: {self._lost}",
                hint=(
                    "this job could not renew its lease for a minute, and must not save any more:"
                    " end one of the two"
                ),
            )

    def release(self) -> None:
        if self._stops.is_set():
            return
        self._stops.set()
        self._thread.join(30)
        with suppress(StorageError):  # it expires
            seen = self._look()
            if seen is not None and _parse(seen.data)[0].get("id") == self._id:
                self._store.remove([LOCK])
