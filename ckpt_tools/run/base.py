"""The protocol of a run's root: the directory or prefix that holds the steps of one run.

`disk_root` implements it for a directory, `bucket_root` for a prefix of an object store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ckpt_tools.core.logs import log
from ckpt_tools.errors import printable
from ckpt_tools.publish.base import Destination, Leftover, RootLock
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.storage import Store

GRACE_S = 24 * 3600.0
_MOST_SEEN = 200_000


def log_leftovers(found: Sequence[Leftover]) -> None:
    """Logs the unfinished work that was removed, and warns of what could not be looked at."""
    for left in found:
        if left.problem:
            log.warning("%s stays, whatever it is: %s", printable(left.url), left.problem)
        else:
            log.info("removed what a dead job left: %s", left.url)


class RootEntries(NamedTuple):
    """The entries of a root: the store of each folder by name, and the names of files."""

    folders: Mapping[str, Store]
    files: Sequence[str]


class Looks:
    """What a process knows of sealed checkpoints, by their names.

    Each is known with the listing of its files at that time, and counts only while it is the same.
    All of them have a limited size, in tensors or chunks.
    """

    def __init__(self, most: int = _MOST_SEEN) -> None:
        """Knows nothing."""
        self._most = most
        self._known: dict[str, tuple[object, Any, int]] = {}
        self._held, self._lock = 0, threading.Lock()

    def get(self, name: str, listing: object) -> Any:
        """Returns what is known of a step with this listing; None for nothing."""
        known = self._known.get(name)
        return known[1] if known is not None and known[0] == listing else None

    def add(self, name: str, listing: object, known: Any, size: int) -> bool:
        """Keeps what is known of a checkpoint, if there is room; tells whether it does."""
        with self._lock:
            self._drop(name)
            has_room = self._held + size <= self._most
            if has_room:
                self._known[name] = (listing, known, size)
                self._held += size
            return has_room

    def keep(self, names: Container[str]) -> None:
        """Forgets all steps but those of these names."""
        with self._lock:
            for name in [name for name in self._known if name not in names]:
                self._drop(name)

    def _drop(self, name: str) -> None:
        if (known := self._known.pop(name, None)) is not None:
            self._held -= known[2]


class RunRoot(Protocol):
    """The directory or prefix that holds the steps of one run."""

    looks: Looks

    @property
    def path(self) -> Path | str:
        """Returns the path of a directory, or the URL of a prefix."""
        ...

    @property
    def options(self) -> Mapping[str, Any] | None:
        """Returns the options of the object store, in fsspec's form; None for a directory."""
        ...

    def snapshot(self, store: Store) -> object:
        """Returns a value that changes when a file of a step is added, removed or changed.

        Returns None where that is not certain. A write through memory that is mapped is not seen if
        an earlier one has made its page dirty.
        """
        ...

    @property
    def lists_unfinished(self) -> bool:
        """Tells whether a step that was never committed may have the name of a step."""
        ...

    @property
    def checks_at_commit(self) -> bool:
        """Tells whether only the commit asks for an existing step, since asking costs requests."""
        ...

    @property
    def keeps_notes(self) -> bool:
        """Tells whether notes of rollbacks stay for a mirror, which may not have seen them yet."""
        ...

    @property
    def can_rename(self) -> bool:
        """Tells whether a step gets another name in one instant, without a copy."""
        ...

    def check_exists(self) -> None:
        """Refuses a path without a directory. An object store has no roots: nothing to refuse.

        Raises:
            NotACheckpointError: nothing is there, or a file.
        """
        ...

    def step_path(self, name: str) -> Path | str:
        """Returns the path or URL of a step."""
        ...

    def step_store(self, name: str) -> Store:
        """Returns the store of a step, as it was last listed."""
        ...

    def destination(self, name: str) -> Destination:
        """Returns the destination of a step."""
        ...

    def entries(self) -> RootEntries:
        """Lists the root now; an empty listing if it does not exist.

        Raises:
            StorageError: it cannot be listed.
        """
        ...

    # ---- the right to save, and the work of dead jobs --------------------------------------------

    def check_writable(self) -> None:
        """Refuses a place that is only read: a web server, or a chained URL. It sends nothing.

        Raises:
            StorageError: it is one.
        """
        ...

    def claim(self) -> RootLock:
        """Claims the root for this job.

        Raises:
            StorageError: another live job holds it, or it cannot be written to.
        """
        ...

    def check_shared(self, written: bytes, rank: int) -> None:
        """Makes sure that this process sees the lock that another rank has written.

        Args:
            written: `RootLock.written` of that rank.
            rank: of this process, for the message.

        Raises:
            StorageError: it does not see it after ten seconds.
        """
        ...

    def remove_leftovers(self, grace_s: float = GRACE_S, dry_run: bool = False) -> list[Leftover]:
        """Removes unfinished work of dead jobs, and returns it.

        On a disk, a lock tells who is dead. An object store has no such locks. Unfinished work
        there is objects without an index, and uploads that never ended, whose newest byte is older
        than a grace by the store's own clock. Uploads that the store does not let this job list
        stay, with a warning in the log.

        Args:
            grace_s: in an object store, seconds without activity after which a job counts as dead.
            dry_run: remove nothing.

        Raises:
            StorageError: the root cannot be listed. A folder that cannot be read is returned with
                its problem.
        """
        ...

    # ---- notes -----------------------------------------------------------------------------------

    def has_file(self, name: str) -> bool:
        """Tells whether the root has a file of this name now.

        Raises:
            StorageError: the root cannot be read.
        """
        ...

    def read_note(self, name: str, most: int) -> bytes | None:
        """Returns the contents of a small file in the root.

        Returns None if it is longer than `most` bytes, if another user may have written it, or if
        it has just been removed.

        Raises:
            StorageError: it cannot be read.
        """
        ...

    def write_note(self, name: str, data: bytes) -> None:
        """Writes a small file in one step, over an older one of that name.

        Raises:
            StorageError: it could not be written.
        """
        ...

    def remove_note(self, name: str) -> None:
        """Removes a small file; ignores a missing one.

        Raises:
            StorageError: it could not be removed.
        """
        ...

    # ---- steps -----------------------------------------------------------------------------------

    def links(self) -> list[tuple[str, str]]:
        """Returns the symbolic links in the root and in its folders, with their real targets.

        Raises:
            StorageError: the root cannot be listed.
        """
        ...

    def foreign_files(self, name: str, listed: Container[str], with_host: bool = True) -> list[str]:
        """Returns the files of a step, at any depth, that somebody else has put there.

        Empty folders are among them, with a slash at the end. Notes of this tool are not, nor the
        work of other attempts in a bucket.

        Args:
            name: of the step.
            listed: the files that its manifest lists.
            with_host: also those that `note_host_files` has noted.
        """
        ...

    def note_host_files(self, name: str, manifest: Manifest) -> None:
        """Notes what the host of the job has written into a step: a trainer's callback did it.

        Foreign files go with the step, unless somebody changes them. Small files of the save that
        the host has written anew are sealed anew. A bucket notes nothing.

        Args:
            name: of the step.
            manifest: of the step.

        Raises:
            StorageError: it cannot be written.
        """
        ...

    def pin(self, name: str, text: bytes) -> None:
        """Writes the pin of a step.

        Raises:
            StorageError: it cannot be written.
        """
        ...

    def unpin(self, name: str) -> None:
        """Removes the pin of a step.

        Raises:
            StorageError: it cannot be removed.
        """
        ...

    def remove(self, name: str, attempt: str, reason_to_keep: Callable[[str], str | None]) -> None:
        """Removes a step: first its name or index, in one instant, then its bytes.

        If another process has removed it, it does nothing.

        Args:
            name: of the step.
            attempt: id of the attempt that wrote it.
            reason_to_keep: returns why the step must stay after all; None if it may go. It is
                called at the last instant, with the name under which the step lies then.

        Raises:
            StorageError: it could not be removed, or must stay. Then it is as it was.
        """
        ...

    def rename(self, old: str, new: str) -> None:
        """Gives a step another name.

        Where `can_rename` is false, the checkpoint itself has been copied to the new name before.
        This call copies the other files, and then removes the old ones.

        Raises:
            StorageError: something has the new name, or it could not be renamed.
        """
        ...
