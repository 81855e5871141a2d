"""Writes steps in a background thread.

It retries during an outage. After a commit it completes a rollback, feeds the mirror and removes
old steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_tools.core.laps import Laps, format_laps
from ckpt_tools.core.logs import log
from ckpt_tools.errors import CheckpointError, StorageError, printable
from ckpt_tools.formats.base import new_attempt
from ckpt_tools.loop.saving.file_contents import KnownFiles
from ckpt_tools.loop.saving.hooks import Hooks
from ckpt_tools.loop.saving.huggingface_copies import HuggingFaceWriter
from ckpt_tools.loop.saving.known_files import ResumedStep, Unchanged
from ckpt_tools.loop.saving.limits import WriteLimits
from ckpt_tools.loop.saving.save import Save, SaveLayout, SaveReport, write
from ckpt_tools.loop.saving.staying import SettledTensors
from ckpt_tools.loop.state.archives import ReadBack
from ckpt_tools.loop.state.staging import StagedTensors
from ckpt_tools.loop.steps import rollback
from ckpt_tools.loop.steps.history import RunHistory
from ckpt_tools.loop.steps.mirror import MirrorWriter, Retained
from ckpt_tools.loop.steps.retention import remove_named, retain
from ckpt_tools.loop.steps.waiting import Outage, wait_for, with_hint
from ckpt_tools.publish.base import Destination, RootLock
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.publish.step_names import STEP_PATTERNS, step_name
from ckpt_tools.ranks.gloo import GlooGroup
from ckpt_tools.run.retention import Retention
from ckpt_tools.run.rollback import RollbackNote, write_note
from ckpt_tools.run.step import name_some


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A step to write.

    Attributes:
        step: its number.
        name: of its directory.
        is_numbered: whether the name is that of the step, so that retention, a mirror and a
            rollback concern it.
        save: this rank's part of it.
        staged: this rank's shards in host memory, without those of `unchanged`; in the order of
            `SaveLayout.staged_plans`.
        unchanged: the frozen shards, if the step before has them.
        frozen_checksums: a checksum of each frozen shard.
        stall_s: seconds for which `save` has held the loop; 0 for a blocking save.
    """

    step: int
    name: str
    is_numbered: bool
    save: Save
    staged: StagedTensors
    unchanged: Unchanged | None
    frozen_checksums: tuple[int, ...]
    stall_s: float


class BackgroundWriter:
    """Writes the steps of a run, in the background or at once.

    Attributes:
        lock, mirror, huggingface: only on rank 0, and only if the run has them.
        last_save: the report of the last save.
        protected: numbers of steps that retention does not remove.
        on_failure: called when a save has failed, in the thread that writes.
        settled: the tensors that have not changed for some saves; None to look for none.
        known_files: that the next save may link.
    """

    lock: RootLock | None = None
    mirror: MirrorWriter | None = None
    huggingface: HuggingFaceWriter | None = None
    last_save: SaveReport | None = None
    settled: SettledTensors | None = None
    _failures = 0
    _logged_failure: CheckpointError | None = None  # of the newest save; nothing has raised it
    _before: tuple[SaveLayout | None, Path | str] = (None, "")
    _logged: set[str]
    _running: Future[SaveReport] | None = None
    _retention: Future[None] | None = None  # the last one that was asked for
    _pool: ThreadPoolExecutor | None = None

    def __init__(
        self,
        history: RunHistory,
        jobs: int,
        retry_s: float,
        max_failures: int,
        rules: Retention,
        hooks: Hooks,
        step_format: str,
        limits: WriteLimits,
    ) -> None:
        """Stores the manager's settings.

        Args:
            history: the root, and what this job knows of its steps.
            jobs, retry_s, max_failures: as for the manager.
            rules: which steps stay.
            hooks: called after each commit and each failure.
            step_format: of the names of steps.
            limits: of saves in the background.
        """
        self.limits = limits
        self.history, self.root = history, history.root
        self.jobs, self.retry_s, self.max_failures, self.rules = jobs, retry_s, max_failures, rules
        self._hooks, self._format, self.protected = hooks, step_format, set[int]()
        self.known_files = KnownFiles()
        self._read_back, self._logged = ReadBack(), set[str]()  # warnings on the store, logged once
        self._is_waited_for = threading.Event()
        self.on_failure: Callable[[], None] = _nothing

    @property
    def _is_first(self) -> bool:
        """Tells whether this is rank 0, which warns for all."""
        return self.lock is not None

    @property
    def is_busy(self) -> bool:
        """Tells whether a save is being written in the background."""
        return self._running is not None and not self._running.done()

    def name(self, step: int) -> str:
        """Returns the name of a step's directory."""
        return step_name(step, self._format)

    def target(self, name: str) -> Destination:
        """Returns the destination of a step, by its name."""
        return self.root.destination(name)

    def is_taken(self, name: str) -> bool:
        """Tells whether the run has a step that no save may replace.

        Some roots are not asked while the loop waits: their commit refuses such a save.
        """
        is_left = self.history.branch is not None and name in self.history.branch[1]
        target = self.target(name)
        return (
            not self.root.checks_at_commit
            and not is_left
            and target.url not in self.history.passed
            and target.exists()
        )

    def resumed_from(
        self, path: Path | str, group: GlooGroup, options: Mapping[str, Any] | None
    ) -> None:
        """Takes note of the step that was loaded, if it is one of this run: the next save may link
        its files. All ranks call it.
        """
        name = os.path.basename(path)
        step: ResumedStep | None = ResumedStep(name, self.target(name), path, options)
        names = list[str]()
        with group.phase("look at the files of the step"):
            if group.rank == 0:  # the others may see the root by another path
                step = step if path == self.root.step_path(name) else None
                names = step.settled() if step is not None and self.settled is not None else []
        is_own, names = group.broadcast(
            (step is not None, names), "share the names of settled tensors"
        )
        self.known_files.resumed = step if is_own and self.settled is not None else None
        if names and self.settled is not None:
            self.settled.begin(names)

    def submit(self, save: PendingSave, group: GlooGroup) -> None:
        """Starts to write a step in the background."""
        self._is_waited_for.clear()
        self._running = self._background().submit(self.write, save, group, self.limits)

    def _background(self) -> ThreadPoolExecutor:
        """Returns the thread that writes steps and removes old ones.

        Removal belongs in the background: freeing a gigabyte of page cache takes a sixth of a
        second.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "ckpt-save")
        return self._pool

    def wait(self, is_last: bool = False) -> None:
        """Waits until the background save is committed. `max_mbps` does not hold meanwhile.

        Args:
            is_last: no save follows, so any failure is raised.

        Raises:
            CheckpointError: it failed, and so did the `max_failures - 1` saves before it, which
                were logged.
        """
        running = self._running
        if running is None:
            if is_last and self._logged_failure is not None:
                raise self._logged_failure  # the newest save has failed
            return
        self._is_waited_for.set()
        try:
            wait_for(running, f"a save to {printable(str(self.root.path))}", self._is_first)
        except BaseException as error:
            if not running.done() or error is not running.exception():
                raise  # an interrupted wait: the save still reads its memory
            self._running = None
            if not isinstance(error, CheckpointError):
                raise
            self._failures += 1
            if is_last or self._failures >= self.max_failures:
                self._failures = 0
                raise
            if self._is_first:  # its error names the rank that failed
                log.warning(
                    "a save failed, %d of at most %d in a row: %s",
                    self._failures,
                    self.max_failures - 1,
                    with_hint(error),
                )
            self._logged_failure = error
        self._running = None

    def write(
        self, save: PendingSave, group: GlooGroup, limits: WriteLimits | None = None
    ) -> SaveReport:
        """Writes and commits a step, and retries while the store cannot be reached.

        All ranks call it. `limits` are those of a save in the background.

        Raises:
            CheckpointError: it failed; nothing is visible then.
        """
        self._logged_failure = None  # this save is the newest one now
        outage, attempts = Outage(self.retry_s), list[str]()
        while True:
            attempts.append(group.broadcast(new_attempt(), f"begin {save.name}"))
            try:
                report = self._try(save, group, attempts, limits or WriteLimits(self.jobs))
                break
            except BaseException as error:
                if not outage.tries_again(group, error, save.name):
                    self.on_failure()
                    if group.rank == 0:
                        self._hooks.failed(save.step, error)
                    raise
        self._before = save.save.layout, self.root.step_path(save.name)
        report.stall_s, report.metrics = save.stall_s or report.seconds, save.save.extras.metrics
        self._failures, self.last_save = 0, report
        if save.is_numbered:
            self.history.last_step = save.step
        self.history.passed.discard(report.path)
        self._log_saved(save, report)
        if group.rank == 0:
            if save.is_numbered:
                self._follow_up(save.step, report.path)
            report.mirror_lag_steps = len(self.mirror.needed()) if self.mirror else 0
            self._hooks.committed(report)
        return report

    def _log_saved(self, save: PendingSave, report: SaveReport) -> None:
        """Logs the store's remarks, each once, and tensors that are not finite."""
        for note in report.notes:
            if note not in self._logged:
                log.warning("%s: %s", save.name, note)
        self._logged.update(report.notes)
        log.info(
            "saved %s: %d bytes%s in %.2f s (%s)",
            save.name,
            report.nbytes,
            f", {report.linked_nbytes} of them linked" * bool(report.linked_nbytes),
            report.seconds,
            format_laps(report.timing),
        )
        if report.not_finite:
            log.warning("%s is not finite: %s", save.name, name_some(report.not_finite))

    def _try(
        self,
        pending: PendingSave,
        group: GlooGroup,
        attempts: Sequence[str],
        limits: WriteLimits,
    ) -> SaveReport:
        target, what, save = self.target(pending.name), pending.name, pending.save
        is_there, news = False, None  # news of the settled tensors
        with group.phase(f"begin {what}"):
            self._read_back.check(save.objects)
            memory, laps = pending.staged.wait(), Laps()
            contents = self.known_files.contents(
                save.layout,
                memory,
                pending.unchanged,
                pending.frozen_checksums,
                save.extras.statistics,
                limits.jobs,
            )
            laps.lap("compare")
            if group.rank == 0:
                is_there = self._make_ready(pending, target, attempts)
                if self.settled is not None and self.settled.chosen != self.settled.names:
                    news = sorted(self.settled.chosen)
        is_there, news = group.broadcast((is_there, news), f"begin {what}")
        if self.settled is not None and news is not None:
            self.settled.names = frozenset(news)
        if is_there:
            return SaveReport(target.url, 0, step=save.step)
        save = replace(
            save,
            overwrite=save.overwrite or target.url in self.history.passed,
            extras=replace(
                save.extras,
                before=self._step_before(save.layout),
                timing=_with(save.extras.timing, copy=pending.staged.waited_s, **laps.seconds),
            ),
        )
        progress = limits.throttle(self._is_waited_for)
        report, parts, manifest = write(
            group,
            target,
            save,
            [content.given for content in contents],
            attempts[-1],
            limits.jobs,
            self._check_lock,
            progress,
        )
        if self.settled is not None and manifest is not None:
            self.settled.note({n: tensor.fingerprint for n, tensor in manifest.tensors.items()})
        self.known_files.remember(save.layout, contents, parts, what, target, attempts[-1])
        return report

    def _make_ready(
        self, pending: PendingSave, target: Destination, attempts: Sequence[str]
    ) -> bool:
        """Makes way for a step. Returns whether an earlier attempt has committed it already.

        Only rank 0 calls it.
        """
        self._check_lock()
        # its reply was lost in an outage
        is_there = len(attempts) > 1 and _attempt_of(target) in attempts[:-1]
        if pending.is_numbered and self.root.checks_at_commit and not pending.save.overwrite:
            self.history.refuse_older(pending.step)
        if pending.is_numbered and self.history.branch is not None and not is_there:
            note = RollbackNote(pending.name, attempts[-1], *self.history.branch)
            write_note(self.root, note)
            rollback.make_way(self.root, note)
        if target.url in self.history.passed and not pending.save.overwrite:
            self._make_room(target, pending.name, attempts[-1])
        return is_there

    def _make_room(self, target: Destination, name: str, attempt: str) -> None:
        """Sets a damaged step aside if it holds files that must not be removed with it."""
        try:
            target.check(overwrite=True)
        except StorageError as error:
            if not target.exists():
                raise
            aside = f"{name}.superseded-{attempt[:8]}"
            self.root.rename(name, aside)
            log.warning("%s is damaged, and is set aside as %s: %s", name, aside, error)

    def _step_before(self, layout: SaveLayout) -> Path | None:
        """Returns the step that was written last, if it is on a disk and has the same layout."""
        known, path = self._before
        return path if known is layout and isinstance(path, Path) else None

    def refuse_hooks(self, method: str) -> None:
        """Refuses a call from a hook, which would wait for itself.

        Raises:
            CheckpointError: a hook runs in this thread.
        """
        if self._hooks.is_calling:
            raise CheckpointError(
                f"{method} was called by on_commit or on_error, and would wait for itself",
                hint="set a flag there, and call it in the training loop",
            )

    def remove(self, name: str) -> None:
        """Removes a checkpoint in the background, once the save under way is committed.

        If that save fails, or the one before it has failed, the checkpoint stays.
        """
        self._background().submit(self._remove, name, self._running, self._failures)

    def _remove(self, name: str, running: Future[SaveReport] | None, failures: int) -> None:
        if failures or (running is not None and running.exception() is not None):
            log.warning("%s stays, since the save after it has failed", printable(name))
            return
        try:
            self._check_lock()
            if reason := remove_named(self.root, name):
                log.warning("%s stays: %s", printable(name), reason)
        except (CheckpointError, OSError) as error:
            log.warning("could not remove %s: %s", printable(name), with_hint(error))
        except Exception:  # noqa: BLE001  # nobody waits for this thread
            log.exception("could not remove %s", printable(name))

    def _check_lock(self) -> None:
        if self.lock is not None:
            self.lock.check()

    def _follow_up(self, step: int, path: str) -> None:
        """Completes a rollback, feeds the mirror and removes old steps, after rank 0's commit."""
        if self.history.branch is not None:
            self.history.branch = None
            try:
                rollback.complete(self.root)
            except (CheckpointError, OSError) as error:
                log.warning(
                    "could not set aside the steps of the branch before; the next start does: %s",
                    with_hint(error),
                )
        if self.mirror is not None:
            self.mirror.add(step, Path(path))
        if self.huggingface is not None:
            self.huggingface.add(step, path)
        self._ask_for_retention()

    def _ask_for_retention(self) -> None:
        """Removes old steps in the background. If a removal still waits there, it does for both."""
        is_waiting = (
            self._retention is not None
            and not self._retention.running()
            and not self._retention.done()
        )
        if self.rules.removes_something and not is_waiting:
            self._retention = self._background().submit(self._retain)

    def _retain(self) -> None:
        """Removes old steps. A failure is only logged, since the save is committed."""
        try:
            self._remove_old_steps()
        except Exception:  # noqa: BLE001  # of a rule, for example
            log.exception("could not remove old steps")

    def _remove_old_steps(self) -> None:
        kept = [
            *([self.history.resumed] if self.history.resumed else []),
            *([self.last_save.path] if self.last_save else []),
            *(self.mirror.needed() if self.mirror else []),
            *(self.huggingface.needed() if self.huggingface else []),
            *(
                self.root.step_path(step_name(step, pattern))
                for step in set(self.protected)
                for pattern in STEP_PATTERNS
            ),
        ]
        if retain(self.root, self.rules, kept, self._logged, self.history.passed):
            self.history.resumed = None  # a newer one is committed

    def retain_copied(self) -> None:
        """Removes old steps that stayed only until they were copied. Rank 0 calls it at the end."""
        if self.last_save is not None and (self.mirror or self.huggingface):
            self._ask_for_retention()

    @property
    def retained(self) -> Retained:
        """Returns which steps stay, at present."""
        passed, resumed = self.history.passed, self.history.resumed
        return Retained(self.rules, set(self.protected), passed, resumed)

    def wait_for_removals(self) -> None:
        """Waits until old steps are removed, if that was asked for."""
        if self._retention is not None:
            wait_for(self._retention, f"old steps of {self.root.path} to be removed")

    def close(self) -> None:
        """Ends the thread after its last task."""
        if self._pool is not None:
            wait_for(self._pool.submit(_nothing), f"old steps of {self.root.path} to be removed")
            self._pool.shutdown()
            self._pool = None


def _nothing() -> None:
    """Stands for the end of what a thread had to do."""


def _with(timing: Mapping[str, float], **more: float) -> dict[str, float]:
    """Returns the seconds of the phases, with more of some."""
    return {**timing, **{name: timing.get(name, 0.0) + seconds for name, seconds in more.items()}}


def _attempt_of(target: Destination) -> str:
    """Returns the attempt that wrote the checkpoint at a destination; "" if there is none."""
    store, _ = target.existing_result()
    try:
        manifest = find_manifest(store) if target.exists() else None
    finally:
        store.close()
    return manifest.attempt if manifest else ""
