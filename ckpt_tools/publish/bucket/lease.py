"""The lease of a prefix in an object store: an object that its job renews.

By the store's clock it expires when its job no longer renews it.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from ckpt_tools.core.logs import log
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.formats.base import LOCK
from ckpt_tools.publish.holder import held_by_another, is_holder_alive, own_holder, parse_holder
from ckpt_tools.storage import RemoteStore
from ckpt_tools.storage.object_info import SmallObject

LEASE_S, RENEW_S = 60.0, 20.0
_EXPIRES = "expires_after_s"  # a lock of a disk, which somebody has copied here, lacks it
_given_up: set[str] = set()  # leases that this process no longer holds, but could not remove
_LOOK_S = 1.0  # between two looks at the lease of another job


def is_leased(store: RemoteStore) -> bool:
    """Tells whether a live job or copy holds the lease of a prefix."""
    seen = store.read_small(LOCK)
    if seen is None or _is_dead(parse_holder(seen.data)[0]):
        return False
    return seen.age_s is None or seen.age_s <= LEASE_S


def _is_dead(holder: Mapping[str, Any]) -> bool:
    """Tells whether nobody holds a lease any more, whatever its age."""
    return (
        _EXPIRES not in holder
        or str(holder.get("id")) in _given_up
        or is_holder_alive(holder) is False
    )


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
        self._store = RemoteStore(url, options)
        self._me, self._id, self._turn = own_holder(), uuid.uuid4().hex, 0
        self._lost = ""
        self._stops, self._renews = threading.Event(), threading.Lock()
        self._take()
        self._renewed_at = time.monotonic()
        self._thread = threading.Thread(target=self._renew, name="ckpt-lease", daemon=True)
        self._thread.start()

    def _data(self) -> bytes:
        self._turn += 1
        return json.dumps(
            {**self._me, "id": self._id, "turn": self._turn, _EXPIRES: LEASE_S}
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
        return now is not None and parse_holder(now.data)[0].get("id") == self._id

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
            holder, text = parse_holder(seen.data if seen else b"")
            if seen and (
                (is_holder_alive(holder) and not _is_dead(holder))
                or (first is not None and first.data != seen.data)
            ):
                raise held_by_another(self._store.url, holder, text)
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
        holder, _ = parse_holder(seen.data)
        return (
            _is_dead(holder)
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
            holder, text = parse_holder(seen.data) if seen else ({}, "")
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
        _given_up.add(self._id)
        try:
            seen = self._look()
            if seen is not None and parse_holder(seen.data)[0].get("id") == self._id:
                self._store.remove([LOCK])
        except StorageError as error:
            log.warning(
                "the lease of %s could not be removed; it expires within %.0f s: %s",
                printable(self._store.url),
                LEASE_S,
                error,
            )
