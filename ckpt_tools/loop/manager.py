"""Saves the steps of a run and resumes from the newest one.

    with CheckpointManager("run", keep_last=3) as checkpoints:
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RngState()}
        resumed = checkpoints.resume(state)  # None in a new run
        for step in range((resumed or 0) + 1, last + 1):
            …
            if step % 500 == 0:
                checkpoints.save(step, state)

Imports torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import torch
import torch.distributed as dist

from ckpt_tools.core.laps import Laps
from ckpt_tools.core.logs import log
from ckpt_tools.core.memory import no_gc
from ckpt_tools.core.threads import num_threads, ranks_on_host
from ckpt_tools.errors import (
    CheckpointError,
    StorageError,
    printable,
)
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.loop import at_exit
from ckpt_tools.loop.arguments import (
    check_choice,
    check_manager,
    check_name,
    check_step,
    shown_choice,
)
from ckpt_tools.loop.loading.load import load_into
from ckpt_tools.loop.loading.load_request import LoadReport, LoadRequest, OnMismatch
from ckpt_tools.loop.on_exception import saved_on_exception
from ckpt_tools.loop.options import Mirror, OldOptions, Outages, Resuming, Writing, grouped
from ckpt_tools.loop.preemption import Preemption
from ckpt_tools.loop.save_times import SaveTimes
from ckpt_tools.loop.saving.background import BackgroundWriter, PendingSave
from ckpt_tools.loop.saving.collect import Collector, SaveRequest
from ckpt_tools.loop.saving.hooks import Hooks, OnCommit, OnError
from ckpt_tools.loop.saving.huggingface_copies import HuggingFace, HuggingFaceWriter
from ckpt_tools.loop.saving.limits import WriteLimits
from ckpt_tools.loop.saving.replicas import Proof
from ckpt_tools.loop.saving.save import Save, SaveReport
from ckpt_tools.loop.saving.staying import SettledTensors, StayingShards
from ckpt_tools.loop.signals import SignalWatch
from ckpt_tools.loop.state.device_statistics import measure_on_device
from ckpt_tools.loop.state.late_staging import LateStaging
from ckpt_tools.loop.state.optimizers import StateOwners
from ckpt_tools.loop.state.shard_info import FileKind
from ckpt_tools.loop.state.staging import StagedTensors, Stager
from ckpt_tools.loop.state.state_dict import check_state
from ckpt_tools.loop.steps import rollback
from ckpt_tools.loop.steps.history import RunHistory
from ckpt_tools.loop.steps.mirror import MirrorWriter
from ckpt_tools.loop.steps.search import StepSearch
from ckpt_tools.loop.steps.waiting import retry_outage
from ckpt_tools.operations.arguments import checked
from ckpt_tools.publish.destinations import refuse_tilde
from ckpt_tools.ranks.gloo import GlooGroup
from ckpt_tools.run.base import RunRoot, log_leftovers
from ckpt_tools.run.retention import Retention
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import Step
from ckpt_tools.run.steps import find_latest, list_steps
from ckpt_tools.storage import is_url, local_path


class CheckpointManager:
    """The checkpoints of one run in one directory.

    All ranks create it, and call its methods in the same order with the same arguments.

    `save` leaves a committed `root/step-00000500/`: stock DCP files and a manifest. The step does
    not exist before the commit, and it is complete after it. If one rank fails, every rank raises,
    and the steps before stay as they are.

    A manager that you do not close is closed when the process ends. If a save in the background has
    failed by then, the error is logged and the exit status is 1. `del` alone closes nothing, and
    `os._exit` ends a save that is being written.
    """

    @checked(
        OldOptions,
        name="CheckpointManager",
        names_only=("jobs", "mirror", "on_commit", "on_error", "export"),
    )
    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        retention: Retention | None = None,
        asynchronous: bool = True,
        save_every: int | None = None,
        save_every_s: float | None = None,
        mirror: str | Mirror | None = None,
        export: HuggingFace | None = None,
        on_commit: OnCommit | Sequence[OnCommit] | None = None,
        on_error: OnError | Sequence[OnError] | None = None,
        statistics: bool = False,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
        storage_options: Mapping[str, Any] | None = None,
        handle_signals: bool = True,
        writing: Writing | None = None,
        resuming: Resuming | None = None,
        outages: Outages | None = None,
        **old: Unpack[OldOptions],
    ) -> None:
        """Claims a directory for this job, and removes unfinished files of dead jobs from it.

        Args:
            root: a directory that all ranks share, made if it is not there; or a URL,
                `s3://bucket/run`. One job at a time holds it: with a locked file on a disk, with a
                lease in an object store.
            keep_last: how many of the newest complete steps stay; all if None.
            retention: rules in place of `keep_last`: by number, time, age, or a metric.
            asynchronous: copy to host memory and write in the background.
            save_every: `should_save` asks for a save when the step is a multiple of this.
            save_every_s: `should_save` asks for a save this many seconds after the last one.
            mirror: a URL to which complete steps are copied in the background; or a `Mirror`.
            export: write a copy in Hugging Face's layout beside a step, in the background.
            on_commit: a function, or a list of functions, of the `SaveReport` of each committed
                step. Rank 0 calls it, in the thread that wrote the step. An exception is logged.
            on_error: the same for a failed save: `(step, error)`.
            statistics: measure every tensor while it is written: magnitudes, zeros, NaN and
                infinity. They stand in the manifest; see `ckpt stats` and `ckpt check`.
            process_group: the ranks that save together; all if None. Without an initialised
                torch.distributed, this process alone.
            timeout_s: how long ranks wait for each other before the missing one is named.
            storage_options: options of the object store, in fsspec's form.
            handle_signals: note SIGTERM and SIGUSR1 for `preempted()`, instead of dying at once. If
                the loop does not call it, or a second signal arrives, the signal acts as it would
                without a manager.
            writing: threads, limits, overlapping copies, comparison of replicas; see `Writing`.
            resuming: how steps are read; see `Resuming`.
            outages: how long to retry, and which failures raise; see `Outages`.
            old: keywords of before 0.2; each warns, and says the new one.

        Raises:
            StorageError: another job holds the directory, it is not writable, or not all ranks see
                it.
        """
        check_manager(root, keep_last, timeout_s, save_every, save_every_s)
        options = grouped(keep_last, retention, mirror, writing, resuming, outages, old)
        if options.mirror is not None and is_url(root):
            raise ValueError(
                f"mirror: only a run on a disk has a mirror, and the root is {str(root)!r}"
            )
        writing, outages = options.writing, options.outages
        self._jobs = num_threads(writing.jobs, ranks_on_host(), is_beside_training=True)
        limits = WriteLimits(writing.background_jobs or self._jobs, writing.max_mbps)
        refuse_tilde(root)
        # absolute: the job may change its working directory
        self._root = open_root(
            root if is_url(root) else Path(local_path(root)).absolute(), storage_options
        )
        self.root, self.storage_options = self._root.path, storage_options
        self.asynchronous, self.when_busy = asynchronous, writing.when_busy
        self.read_once = options.resuming.read_once
        self.retry_s, self.max_failures = (
            min(outages.retry_s, timeout_s * 0.8),
            outages.max_failures,
        )
        self._group, self._writers = (
            GlooGroup(timeout_s, process_group),
            GlooGroup(timeout_s, process_group),
        )
        self._stage, self._pid, self._process_group = Stager(), os.getpid(), process_group
        settled = SettledTensors() if writing.incremental == "auto" else None
        self._timeout_s, self._collector = (
            timeout_s,
            Collector(
                self._group,
                Proof.of(writing.replicas),
                StayingShards(self._jobs, settled) if settled is not None else None,
            ),
        )
        there = None
        if options.mirror is not None:
            there = open_root(options.mirror.url, storage_options)
        self.statistics = statistics
        self._history = RunHistory(
            self._root, there, storage_options, options.resuming.allow_not_finite
        )
        self._search = StepSearch(self._history, self._group, storage_options)
        self._writer = BackgroundWriter(
            self._history,
            self._jobs,
            self.retry_s,
            outages.max_failures,
            options.retention,
            Hooks(on_commit, on_error),
            writing.names,
            limits,
        )
        self._writer.settled = settled
        self._save_times = SaveTimes(self._root, save_every, save_every_s)
        self._writer.on_failure = self._save_times.failed
        try:
            self._claim(there, options.mirror.every if options.mirror is not None else None)
            self._late = LateStaging() if writing.overlap_copy else None
            if export is not None and not isinstance(export, HuggingFace):
                raise TypeError(f"export: expected a HuggingFace, got {export!r}")
            if export is not None:
                export.check()
            if export is not None and self._group.rank == 0:
                self._writer.huggingface = HuggingFaceWriter(export, storage_options)
        except BaseException:
            self._release()
            raise
        if handle_signals:
            self._signals = SignalWatch()
            self._preemption = Preemption(self._group, self._signals, timeout_s)
        at_exit.register(self.close)

    last_load: LoadReport | None = None
    _late: LateStaging | None = None
    _mirror: MirrorWriter | None = None
    _signals: SignalWatch | None = None
    _preemption: Preemption | None = None
    _is_open = True

    def _claim(self, there: RunRoot | None, mirror_every: int | None) -> None:
        with self._group.phase("open the run's directory"):
            if self._group.rank == 0:
                retry_outage(f"cannot open {self.root}", self._open_root, self.retry_s)
                if there is not None:
                    there.check_writable()
                    self._mirror = MirrorWriter(there, mirror_every, lambda: self._writer.retained)
                    self._writer.mirror = self._mirror
                    self._mirror.start(self._root)
        mine = self._writer.lock.written if self._writer.lock is not None else b""
        written = self._group.broadcast(mine, "share the run's directory")
        with self._group.phase("share the run's directory"):
            self._root.check_shared(written, self._group.rank)

    def _open_root(self) -> None:
        if self._root.has_file(dcp.LOOKS_FOR):
            raise StorageError(
                f"the directory of a run is itself a checkpoint: {printable(str(self.root))}",
                hint="give the directory that holds the steps",
            )
        if self._writer.lock is None:
            self._writer.lock = self._root.claim()
        log_leftovers(self._root.remove_leftovers())
        rollback.complete(self._root)

    # ---- saving ----------------------------------------------------------------------------------

    @checked(names_only=("only", "files"))
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        asynchronous: bool | None = None,
        *,
        overwrite: bool = False,
        only: str | Callable[[str], bool] | None = None,
        files: Mapping[str, bytes] | Callable[[], Mapping[str, bytes]] | None = None,
        metrics: Mapping[str, float] | None = None,
        name: str | None = None,
        names_differ: bool = False,
    ) -> bool:
        """Saves a step, and returns when the state may change again.

        A background save returns after the copy to host memory; with `overlap_copy`, see there. Any
        other save returns after the commit.

        Args:
            step: its number, at least 0. A step that exists already is refused, unless `resume`
                passed over it: then it is replaced. The step that this manager saved last or
                resumed from is not saved again; this is logged. The first step must not be older
                than the newest of the run, unless `resume` or `branch_from` was called.
            state: dicts, lists and tuples of modules, optimizers, anything with `state_dict`,
                `RngState`, `PerRank`, generators, tensors and plain values.
            asynchronous: overrides the manager's setting for this save.
            overwrite: replace an existing step. The old one stays until the new one is complete.
            only: `"trainable"` leaves out parameters that take no gradient, such as the base model
                below an adapter. `resume` then keeps their present values, and says so. A function
                of a name, such as `model.layers.0.weight`, chooses among the entries of modules.
                A resume of the rest needs `strict=False`.
            files: contents of small files that lie in the step, by name, such as a config. Rank 0's
                count. The manifest seals them. A function that returns them is called on rank 0;
                if it fails, all ranks raise.
            metrics: numbers of this step, such as a validation loss. The manifest and the report
                that `on_commit` gets have them. Rank 0's count.
            name: of the directory below the root, if a trainer names its checkpoints itself.
                Retention, `resume` and a mirror leave such a checkpoint alone; see `remove`.
            names_differ: the ranks have different names, such as the stages of a pipeline. The
                lowest rank that has a value writes it; a value that differs is refused. Without
                this, a name that a rank lacks is refused.

        Returns:
            False if a background save is skipped: `when_busy="skip"`, and the previous one is still
            being written.

        Raises:
            PlanError: a value in the state could not be loaded again; the message says where it is.
            CheckpointError: this save failed, or the previous background save did; its own
                traceback is kept.
        """
        began, step = time.monotonic(), check_step(step)
        self._check_open("save")
        what = check_name(name) or self._writer.name(step)
        is_background = self.asynchronous if asynchronous is None else asynchronous
        changed = ", asynchronous=False" * (not is_background) + ", overwrite=True" * overwrite
        changed += f", only={shown_choice(only)}" * bool(only) + f", name={name!r}" * (
            name is not None
        )
        changed += ", names_differ=True" * names_differ
        call = f"save({step}{changed})"
        # a save that training waits for, such as the last one, is never skipped
        may_skip = is_background and self.when_busy == "skip"
        request = SaveRequest(
            what,
            name is None,
            state,
            only,
            files,
            metrics,
            self.statistics,
            names_differ,
            lambda: self._refuse_taken(step, what, overwrite, name is None),
        )
        with torch.no_grad():
            if self._group.meet("save", call, (self._writer.is_busy and may_skip, 0))[0]:
                return False
            laps = Laps()
            self.wait()
            laps.lap("wait")
            if step == self._history.last_step and not overwrite and name is None:
                if self._group.rank == 0:
                    log.warning(
                        "step %d is saved already, and not saved again; overwrite=True replaces it",
                        step,
                    )
                return True
            self._save_times.began()
            try:
                with no_gc():  # one walk takes as long as a small save
                    save = self._collected(request, step, overwrite, is_background, began, laps)
            except BaseException:
                self._save_times.failed()
                raise
        try:
            if is_background:
                self._writer.submit(save, self._writers)
            else:
                self._writer.write(save, self._group)
        finally:
            save.staged.raise_interrupt()
        return True

    def _collected(
        self,
        request: SaveRequest,
        step: int,
        overwrite: bool,
        is_background: bool,
        began: float,
        laps: Laps,
    ) -> PendingSave:
        """Returns what this rank writes, copied to host memory."""
        collected = self._collector.collect(request, laps)
        unchanged = self._writer.known_files.frozen(
            collected.layout,
            collected.tensors,
            collected.frozen_checksums,
            collected.extras.statistics,
        )
        plans = collected.layout.staged_plans(unchanged is None)
        tensors = [collected.tensors[n] for plan in plans for n in plan.numbers]
        measured = measure_on_device(tensors) if collected.extras.statistics else None
        # a frozen parameter may be an optimizer's by now, and its checksum is that of now
        num_late = sum(len(p.numbers) for p in plans if p.kind != FileKind.FROZEN)
        staged = self._stage_shards(tensors, collected.owners, is_background, num_late)
        if measured is not None:
            measured.hold_updates()
        laps.lap("copy")
        extras = replace(collected.extras, timing=laps.seconds, measured=measured)
        return PendingSave(
            step,
            request.what,
            request.is_numbered,
            Save(step, collected.layout, collected.objects, overwrite, extras),
            staged,
            unchanged,
            collected.frozen_checksums,
            time.monotonic() - began if is_background else 0.0,
        )

    def _refuse_taken(self, step: int, what: str, overwrite: bool, is_numbered: bool) -> None:
        """Refuses a step that is there already, or an older one. Only rank 0 calls it."""
        if overwrite:
            return
        if is_numbered and not self._root.checks_at_commit:
            self._history.refuse_older(step)
        if self._writer.is_taken(what):
            raise StorageError(
                f"step {step} is there already: {printable(self._writer.target(what).url)}",
                hint="a step is saved once: pass overwrite=True to replace it, or move it away",
            )

    def _stage_shards(
        self,
        tensors: Sequence[torch.Tensor],
        owners: StateOwners,
        is_background: bool,
        num_late: int,
    ) -> StagedTensors:
        """Returns shards in host memory. Copies of the first `num_late` may still run.

        The writer raises what fails here. So every rank hears of it without a further exchange.
        """
        try:
            if not is_background:
                return self._stage.live(tensors)
            if self._late is None:
                return self._stage.copy(tensors)
            late = self._late.find(owners, tensors[:num_late])
            staged = self._stage.copy(tensors, late)
            self._late.began(staged)
            return staged
        except BaseException as error:  # noqa: BLE001  raised by the writer
            return StagedTensors((), error=error)

    def before_step(self) -> None:
        """Lets later changes of the state wait until the last save has copied it.

        Only `overlap_copy=True` needs it. A hook of torch calls it before each optimizer's step.
        Call it yourself before anything else changes a parameter or an optimizer's state, and
        before a step in a CUDA graph or a compiled function. On a GPU, only the device waits.
        """
        if self._late is not None:
            self._late.hold()

    def _check_open(self, method: str) -> None:
        if os.getpid() != self._pid:
            raise CheckpointError(
                f"{method} was called in a process that was forked from that of the manager"
                f" ({self._pid})",
                hint="call it in the parent, or make a manager",
            )
        self._writer.refuse_hooks(method)
        if not self._is_open:
            raise CheckpointError(
                f"{method} was called on a manager that is closed ({printable(str(self.root))})",
                hint="make a new one",
            )

    def remove(self, name: str) -> None:
        """Removes a checkpoint that was saved under a name of its own.

        If a save is under way, that happens in the background after its commit. If that save fails,
        the checkpoint stays. So does anything that is not a checkpoint of this tool alone. Only
        the call of rank 0 counts.
        """
        self._check_open("remove")
        if name is None:
            raise TypeError("name: expected a string, got None")
        if check_name(name) and self._group.rank == 0:
            self._writer.remove(name)

    def should_save(self, step: int) -> bool:
        """Returns on all ranks whether it is time to save.

        It is time if the step is a multiple of `save_every`, if `save_every_s` seconds have passed,
        if somebody made the file `ROOT/.save-now`, which is removed then, or if any rank got
        SIGUSR2. An object store is asked for the file every ten seconds.

        Call it after each step, on all ranks.
        """
        step = check_step(step)
        self._check_open("should_save")
        is_due = self._group.rank == 0 and self._save_times.is_due(step)
        if self._signals is not None:
            is_due = self._signals.take_request() or is_due
        is_due = bool(self._group.meet("should_save", f"should_save({step})", (is_due, 0))[0])
        if is_due and not self._save_times.is_periodic(step):
            self._save_times.ask()
        return is_due

    @checked()
    def save_on_exception(
        self,
        step: Callable[[], int | None],
        state: Mapping[str, Any],
        *,
        wait_s: float = 30.0,
    ) -> AbstractContextManager[None]:
        """Returns a context that saves if its block raises; the exception continues afterwards.

        All ranks enter it once, around the loop. It saves only if every rank raises after the same
        step, and if no optimizer of the state has stepped since; else the log says why it does not.
        Positions in the data, and random generators, have already moved on to the step that failed.
        `SystemExit` is no exception here, and Ctrl-C is one.

        Args:
            step: returns the number of the last complete step; None before the first. Set that
                number directly after `optimizer.step()`, and not by the loop's own variable.
            state: as given to `save`.
            wait_s: seconds to wait for the exceptions of other ranks. The ranks that did not raise
                may wait in a collective for this one, so all of it is lost time.
        """
        self._check_open("save_on_exception")
        if not wait_s > 0:
            raise ValueError(f"wait_s: expected more than 0, got {wait_s!r}")
        timeout_s = self._timeout_s
        return saved_on_exception(self, step, state, wait_s, timeout_s, self._process_group)

    @property
    def last_step(self) -> int | None:
        """The step that was saved last or resumed from; None if there is none yet."""
        return self._history.last_step

    @property
    def rank(self) -> int:
        """The number of this rank among those that save together."""
        return self._group.rank

    def phase(self, what: str) -> AbstractContextManager[object]:
        """Returns a context in which a failure of one rank is told to all, such as after a save.

        Args:
            what: names it in messages: "write the model".
        """
        self._check_open("phase")
        return self._group.phase(what)

    @property
    def keep_last(self) -> int | None:
        """How many of the newest complete steps stay; all if None. It may change between saves."""
        return self._writer.rules.last

    @keep_last.setter
    def keep_last(self, number: int | None) -> None:
        self._writer.rules = replace(self._writer.rules, last=number)

    @property
    def protected_steps(self) -> set[int]:
        """Numbers of steps that retention never removes, such as the best one; rank 0's count."""
        return self._writer.protected

    def wait(self, removals: bool = False) -> None:
        """Waits until the background save is committed.

        Args:
            removals: wait also until rank 0 has removed the old steps.

        Raises:
            CheckpointError: the save failed; raised once, with its own traceback. With
                `max_failures=n`, the n-th failure in a row raises, and earlier ones are logged.
        """
        self._writer.refuse_hooks("wait")
        self._writer.wait()
        if removals:
            self._writer.wait_for_removals()

    # ---- resuming --------------------------------------------------------------------------------

    @checked(names_only=("rename", "select"))
    def resume(
        self,
        state: MutableMapping[str, Any],
        step: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        select: Sequence[str] = (),
        strict: bool = True,
        cast: bool = False,
        trust_pickle: bool = False,
        rename: Mapping[str, str] | None = None,
        on_mismatch: Mapping[str, OnMismatch] | None = None,
    ) -> int | None:
        """Loads the newest complete step into a state, on any number of ranks.

        Args:
            state: as given to `save`. Modules and optimizers are loaded in place, plain values are
                replaced.
            step: load this step instead of the newest. When the first new step is committed, newer
                steps get names `step-….superseded-…`. No command or load uses them after that.
            path: load this checkpoint instead, a path or a URL. It may come from another run, stock
                DCP or torchtitan.
            select: globs of names to load, such as `["model.*"]`; everything if empty. Other
                entries keep their values.
            strict: refuse a checkpoint that lacks entries of the state, or has more entries under
                the same keys.
            cast: let floating-point tensors change their type; nothing is cast unless asked.
            trust_pickle: run code that objects in the checkpoint ask for. Checkpoints of this tool
                never need it.
            rename: regular expressions and their replacements in the checkpoint's names, applied in
                order.
            on_mismatch: globs of the state's names. Each says how to load tensors whose shape in
                the checkpoint differs. `"grow"` loads the elements that both have. `"skip"` keeps
                the tensor. A function `(stored, shape) -> tensor` makes the new tensor from the
                whole stored one. `"refuse"` is an error, as without a glob; it also refuses moments
                of few bits whose blocks this job's ranks cut, which are float32 otherwise.

        Returns:
            The number of the step; None if the run has no step yet. For a `path`, the number in its
            manifest, or in a name such as `step-500`; 0 if neither has one.

        Raises:
            PlanError: the checkpoint does not fit the state; the message is a table. Or a glob
                matches nothing.
            NotACheckpointError: there is no such step.
            IntegrityError: the step is damaged. Without `step` and `path`, `resume` loads the next
                older step instead and logs that. It raises if none is left, and some were complete
                once.
            CheckpointError: it cannot be read; or another rank failed.
        """
        self._check_open("resume")
        check_state(state)
        step = check_choice(step, path)
        request = LoadRequest(select, strict, cast, trust_pickle, rename or {}, on_mismatch or {})
        words = [
            f"{name}={str(value)!r}"
            for name, value in (("step", step), ("path", path))
            if value is not None
        ]
        self._group.meet("resume", f"resume({', '.join(filter(None, (*words, str(request))))})")
        self.wait()
        loaded = self._search.load(
            lambda found: load_into(
                found,
                state,
                self._group,
                request,
                self.read_once,
                self.storage_options,
                self._jobs,
            ),
            step,
            path,
            self.retry_s,
        )
        if loaded is None:
            return None
        number, found, report = loaded
        self.last_load = report
        for note in report.notes if self._group.rank == 0 else ():
            log.warning("%s: %s", os.path.basename(found), note)
        self._history.resumed, self._history.last_step = (
            (found, number) if path is None else (None, None)
        )
        if path is None:
            self._writer.resumed_from(found, self._group, self.storage_options)
        return number

    def branch_from(self, number: int | None) -> None:
        """Begins a new branch of the run after a step, without a load; None: a new run.

        It is for trainers that load in several places. When the next step is committed, newer
        steps get names `step-….superseded-…`, as after `resume(step=number)`.
        """
        self._check_open("branch_from")
        self._group.meet("branch_from", f"branch_from({number})")
        self.wait()
        with self._group.phase("begin a branch"):
            if self._group.rank == 0:
                self._history.leave_newer(-1 if number is None else number)

    def newest_sound(self, verify: bool = True) -> tuple[int, Path | str] | None:
        """Returns on all ranks the number and path of the newest sound step; None if there is none.

        It is for trainers that load in several places. Damaged steps are passed over, as in
        `resume`: they do not count for retention, and the job replaces them.

        Args:
            verify: read every byte of the step, one share per rank.
        """
        self._check_open("newest_sound")
        self._group.meet("newest_sound", f"newest_sound({verify})")
        self.wait()
        return self._search.newest_sound(verify, self.retry_s)

    @property
    def last_save(self) -> SaveReport | None:
        """Returns the report of the last committed save."""
        return self._writer.last_save

    def steps(self) -> list[Step]:
        """Returns all steps of the run, complete or not, by number."""
        return list_steps(self._root)

    def latest(self) -> Step | None:
        """Returns the newest complete step."""
        return find_latest(self._root).step

    # ---- signals and the end ---------------------------------------------------------------------

    def preempted(self) -> int:
        """Returns on all ranks the signal that any of them got, SIGTERM or SIGUSR1; 0 if none did.

        Call it after each step, on all ranks. It exchanges nothing with other ranks until one has
        got a signal. All ranks then have it after the same step, the present one or a later one.
        Save with `asynchronous=False` and exit with 128 + the number (143, 138). torchrun and Slurm
        start the job again, and `resume` continues from that step.

        Raises:
            PeerError: a rank got a signal, and another one did not answer.
        """
        self._check_open("preempted")
        number = self._preemption.ask() if self._preemption is not None else 0
        if number and self._mirror is not None:
            self._mirror.copy_each_step()
        return number

    def close(self) -> None:
        """Waits for the background save, then releases the directory.

        Raises:
            CheckpointError: that save failed.
        """
        if not self._is_open or os.getpid() != self._pid:
            return  # a forked child holds only a copy of the manager
        self._writer.refuse_hooks("close")
        try:
            self._writer.wait(is_last=True)
            try:
                if self._mirror is not None:
                    self._mirror.close()
            finally:
                if self._writer.huggingface is not None:
                    self._writer.huggingface.close()
            self._writer.retain_copied()
        finally:
            self._release()

    def _release(self) -> None:
        self._is_open = False
        if self._late is not None:
            self._late.close()
        at_exit.unregister(self.close)
        self._writer.close()
        self._stage.close()
        if self._mirror is not None:
            self._mirror.wait()
        if self._writer.huggingface is not None:
            self._writer.huggingface.wait()
        if self._preemption is not None:
            self._preemption.close()
        if self._signals is not None:
            self._signals.stop()
        if self._writer.lock is not None:
            self._writer.lock.release()
        self._group.close()
        self._writers.close()

    def __repr__(self) -> str:
        state = "" if self._is_open else ", closed"
        return f"CheckpointManager({str(self.root)!r}, last_step={self.last_step}{state})"

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or os.getpid() != self._pid:
            self.close()
            return
        try:
            self._writer.wait(is_last=True)
        except CheckpointError:
            log.exception("the save in the background failed as well")
        finally:
            self._release()
