"""Copies complete steps of a run from the disk to an object store, in the background.

One process copies one step at a time, and always takes the newest waiting step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.core.logs import log
from ckpt_tools.errors import CheckpointError, StorageError, printable
from ckpt_tools.loop.steps import rollback
from ckpt_tools.loop.steps.retention import remove_step, retain
from ckpt_tools.loop.steps.waiting import wait_for_thread, with_hint
from ckpt_tools.operations.copy import copy_beside
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.step_names import STEP_PATTERNS, step_name
from ckpt_tools.run.base import RunRoot, log_leftovers
from ckpt_tools.run.retention import Retention
from ckpt_tools.run.rollback import RollbackNote, remove_note, write_note
from ckpt_tools.run.step import Step, damage, refuse_unreadable
from ckpt_tools.run.steps import RunListing, find_latest, list_steps
from ckpt_tools.storage import LocalStore


class Retained(NamedTuple):
    """Which steps of a run stay.

    Attributes:
        rules: of its retention.
        protected: numbers of steps that always stay.
        passed: paths of unusable steps.
        resumed: the step that was loaded, until a newer one is committed.
    """

    rules: Retention
    protected: set[int]
    passed: Container[str]
    resumed: Path | str | None


class MirrorWriter:
    """Copies the steps of a run to a URL.

    A failure is logged, and `close` raises it. The next step is tried anyway.
    """

    def __init__(
        self,
        there: RunRoot,
        every: int | None,
        retained: Callable[[], Retained],
    ) -> None:
        """Stores the settings, and does not contact the store yet.

        Args:
            there: root of the copies in the store.
            every: steps whose number is a multiple of this are copied; all if None.
            retained: returns which steps stay, at present.
        """
        self.there, self.every, self._retained = there, every, retained
        self.error: CheckpointError | None = None
        self._newest: tuple[str, str] | None = None  # of the copies: name and attempt
        self._root: RunRoot | None = None
        self._told: set[str] = set()
        self._is_known = False  # whether the store has been listed
        self._waiting: Path | None = None
        self._failed: Path | None = None  # the newest step that could not be copied
        self._running: Path | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, root: RunRoot) -> None:
        """Starts a first look at the store in the background.

        It removes the leftovers of dead jobs. It copies the newest complete step if the store lacks
        it: the job that wrote the step may have died before.
        """
        self._root = root
        with self._lock:
            self._work_on()

    def _work_on(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ckpt-mirror")
            self._thread.start()

    def _begin(self) -> None:
        """Lists the store for the first time, and removes leftovers."""
        log_leftovers(self.there.remove_leftovers())
        rollback.complete(self.there)
        self._is_known = True
        wanted = [
            s for s in self._steps() if not s.problem and not (self.every and s.number % self.every)
        ]
        there = find_latest(self.there).step
        with self._lock:
            if (
                wanted
                and self._waiting is None
                and (
                    there is None
                    or there.number < wanted[-1].number
                    or self._has_pending_rollback()
                )
            ):
                self._waiting = Path(wanted[-1].path)

    def _steps(self) -> list[Step]:
        return list_steps(self._root) if self._root is not None else []

    def _rollbacks(self) -> list[tuple[RollbackNote, bool]]:
        return RunListing(self._root).rollbacks if self._root is not None else []

    def _has_pending_rollback(self) -> bool:
        """Tells whether a rollback is in effect on the disk but not yet in the mirror."""
        return any(is_in_effect for _, is_in_effect in self._rollbacks())

    def add(self, number: int, path: Path) -> None:
        """Queues a newly committed step; it replaces a step that is still waiting."""
        if self.every and number % self.every:
            return
        with self._lock:
            self._waiting = path
            self._work_on()

    def copy_each_step(self) -> None:
        """Copies each later step, whatever its number: this machine is about to go."""
        self.every = None

    def needed(self) -> list[Path]:
        """Returns the steps that must stay on the disk, because they are not copied yet."""
        with self._lock:
            paths = (self._failed, self._running, self._waiting)
            return [path for path in paths if path is not None]

    def _work(self) -> None:
        try:
            self._copy_all()
        finally:
            with self._lock:
                if self._thread is threading.current_thread():  # it died of something unforeseen
                    self._thread = self._running = None

    def _copy_all(self) -> None:
        """Copies waiting steps until there are none."""
        if not self._is_known:
            try:
                self._begin()
            except Exception as error:  # noqa: BLE001  # the next step is tried anyway
                self.error = (
                    error if isinstance(error, CheckpointError) else StorageError(str(error))
                )
                log.warning("the mirror cannot be listed: %s", with_hint(error))
        while True:
            with self._lock:
                self._running, self._waiting = self._waiting, None
                if self._running is None:
                    self._thread = None
                    return
                path = self._running
            try:
                self._copy(path)
                self.error = self._failed = None
            except Exception as error:  # noqa: BLE001  # `close` raises it
                self.error = (
                    error if isinstance(error, CheckpointError) else StorageError(str(error))
                )
                log.warning("could not mirror %s: %s", path, with_hint(error))
                self._failed = path
                continue
            self._retain()

    def _copy(self, path: Path) -> None:
        """Copies a step, and sets aside the steps that rollbacks on the disk have superseded."""
        store = LocalStore(path)
        try:
            manifest = find_manifest(store)
        finally:
            store.close()
        notes = [
            note
            for note, is_in_effect in self._rollbacks()
            if is_in_effect and manifest is not None
        ]
        for note in notes:
            write_note(
                self.there,
                replace(
                    note,
                    step=path.name,
                    attempt=manifest.attempt if manifest else "",
                    is_committed=False,
                ),
            )
        if manifest is not None:
            self._refuse_older(manifest, notes)
        there = RunListing(self.there).find(path.name)
        if (
            there is not None
            and manifest is not None
            and there.manifest is not None
            and there.manifest.attempt != manifest.attempt
        ):
            self._set_aside(there, manifest.attempt)
        beside = str(self.there.step_path(self._newest[0])) if self._newest is not None else ""
        result = copy_beside(
            path, self.there.step_path(path.name), beside, storage_options=self.there.options
        )
        own = f"; the store copied {result.store_nbytes} bytes itself" * bool(result.store_nbytes)
        log.info("mirrored %s in %.1f s%s", result.destination, result.seconds, own)
        self._newest = (path.name, manifest.attempt) if manifest is not None else None
        if notes:
            rollback.complete(self.there)
        for note in notes:
            if self._root is not None:
                remove_note(self._root, note)

    def _set_aside(self, step: Step, attempt: str) -> None:
        """Sets aside a step in the store that was saved again; removes it if it is damaged."""
        try:
            where = rollback.set_aside(self.there, step, attempt)
        except CheckpointError as error:
            if not damage(step):
                raise
            remove_step(self.there, step)
            log.warning("removed the damaged copy %s: %s", printable(str(step.path)), error)
            return
        log.warning(
            "%s was saved again: the copy in the mirror is set aside as %s",
            printable(step.name),
            printable(where),
        )

    def _refuse_older(self, manifest: Manifest, notes: Sequence[RollbackNote]) -> None:
        """Refuses a step below a newer one in the store, which this run has not superseded.

        That one is of another run, or this job has not resumed from it. Retention would count it as
        the newest, and remove the copies of this run.

        Raises:
            StorageError: there is such a step.
        """
        superseded = {pair for note in notes for pair in note.pairs}
        superseded |= {(step.name, step.attempt) for step in self._steps()}  # of this run
        passed, number = self._retained().passed, manifest.step or 0
        for step in RunListing(self.there).newer(number):
            is_left = (step.name, step.attempt) in superseded or str(step.path) in passed
            refuse_unreadable([step], "whether the mirror is ahead of this run")
            if step.problem or step.manifest is None or is_left:
                continue
            raise StorageError(
                f"the mirror has a newer step, {step.number}, which this job has not resumed from:"
                f" {printable(str(step.path))}",
                hint=(
                    "give each run a mirror of its own; or call resume(state) before the first"
                    " save, or branch_from(None) for a new run"
                ),
            )

    def _retain(self) -> None:
        """Removes old steps, but none whose original is pinned. A failure is only a warning."""
        pinned = [self.there.step_path(step.name) for step in self._steps() if step.is_pinned]
        rules, protected, passed, resumed = self._retained()
        best = [self.there.step_path(step_name(n, f)) for n in protected for f in STEP_PATTERNS]
        kept = [*([resumed] if resumed else []), *pinned, *best]
        retain(self.there, rules, kept, self._told, passed)

    def wait(self) -> None:
        """Waits until nothing is left to copy; logs this after 5 s and then every minute."""
        where = printable(str(self.there.path))
        wait_for_thread(lambda: self._thread, f"a step to be mirrored to {where}")

    def close(self) -> None:
        """Waits until nothing is left to copy.

        Raises:
            StorageError: the newest step is not in the store.
        """
        self.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise StorageError(
                "the newest step could not be mirrored to"
                f" {printable(str(self.there.path))}: {with_hint(error)}",
                hint="it is complete on the disk: `ckpt copy` it there",
            ) from error
        if self._newest is not None and not self._is_there(*self._newest):
            raise StorageError(
                f"the newest step is not in the mirror any more: {printable(self._newest[0])} in"
                f" {printable(str(self.there.path))}",
                hint="another job may use the same mirror: give each run a mirror of its own",
            )

    def _is_there(self, name: str, attempt: str) -> bool:
        try:
            step = RunListing(self.there).find(name)
        except StorageError as error:
            log.warning("the mirror cannot be listed at the end: %s", with_hint(error))
            return True  # it was there after its copy
        return step is not None and step.attempt == attempt
