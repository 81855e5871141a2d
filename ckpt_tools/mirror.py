"""The second tier of a run: steps that are complete on the disk, copied to an object store in the background.

One process copies, one step at a time, and always the newest that is waiting. May import everything below the manager.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_tools.errors import CheckpointError, StorageError, printable
from ckpt_tools.leftovers import remove_leftovers
from ckpt_tools.operations.copy import copy
from ckpt_tools.steps import latest, list_steps, prune

log = logging.getLogger("ckpt_tools")


class Mirror:
    """Copies the steps of a run to a URL. A failure is logged, and told by `close`; the next step is another try."""

    def __init__(self, url: str, every: int | None, keep_last: int, keep_every: int | None, options: Mapping[str, Any] | None) -> None:
        """Looks at the store, and removes what dead jobs left there.

        Args:
            url: root of the run in the store.
            every: steps whose number is a multiple of this are copied; all where None.
            keep_last, keep_every: as for the manager.
            options: of the store, as fsspec takes them.

        Raises:
            StorageError: it cannot be listed.
        """
        self.url, self.every, self.keep_last, self.keep_every, self.options = url.rstrip("/"), every, keep_last, keep_every, options
        self.error: CheckpointError | None = None
        self.resumed: Path | str | None = None
        self._waiting: Path | None = None
        self._running: Path | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        for left in remove_leftovers(self.url, options=options):
            log.info("removed what a dead job left: %s", left.url)

    def catch_up(self, root: Path) -> None:
        """Takes the newest complete step of a run, if the mirror lacks it: the job that wrote it may have died before it was copied."""
        wanted = [s for s in list_steps(root) if not s.problem and not (self.every and s.number % self.every)]
        there = latest(self.url, options=self.options).step
        if wanted and (there is None or there.number < wanted[-1].number):
            self.offer(wanted[-1].number, Path(wanted[-1].path))

    def offer(self, number: int, path: Path) -> None:
        """Takes a step that has just been committed; one that is still waiting gives way to it."""
        if self.every and number % self.every:
            return
        with self._lock:
            self._waiting = path
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ckpt-mirror")
                self._thread.start()

    def needed(self) -> list[Path]:
        """Returns the steps that must stay on the disk, because they are not copied yet."""
        with self._lock:
            return [path for path in (self._running, self._waiting) if path is not None]

    def _work(self) -> None:
        while True:
            with self._lock:
                self._running, self._waiting = self._waiting, None
                if self._running is None:
                    self._thread = None
                    return
                path = self._running
            try:
                result = copy(path, f"{self.url}/{path.name}", storage_options=self.options)
                log.info("mirrored %s in %.1f s", result.destination, result.seconds)
                self.error = None
            except (CheckpointError, OSError) as error:
                self.error = error if isinstance(error, CheckpointError) else StorageError(str(error))
                log.warning("could not mirror %s: %s", path, error)
                continue
            self._retain()

    def _retain(self) -> None:
        """Lets old steps go; a failure to do so is a warning."""
        try:
            for step in prune(self.url, self.keep_last, self.keep_every, [self.resumed] if self.resumed else [], options=self.options):
                log.info("removed %s: newer ones are complete", step.path)
            self.resumed = None
        except CheckpointError as error:
            log.warning("could not remove old steps: %s", error)

    def wait(self) -> None:
        """Waits until nothing is left to copy."""
        while (thread := self._thread) is not None:
            thread.join()

    def close(self) -> None:
        """Waits until nothing is left to copy.

        Raises:
            StorageError: the newest step is not in the store.
        """
        self.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise StorageError(
                f"the newest step could not be mirrored to {printable(self.url)}: {error}",
                hint="it is complete on the disk: `ckpt copy` it there",
            ) from error
