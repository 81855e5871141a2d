"""What a training loop calls: save, resume, and nothing lost in between.

    with CheckpointManager("run", keep_last=3) as checkpoints:
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RngState()}
        first = checkpoints.resume(state)
        for step in range(first + 1, last + 1):
            …
            if step % 500 == 0:
                checkpoints.save(step, state)

Imports torch. May import everything below the command.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ckpt_tools.destination import Destination, open_destination
from ckpt_tools.errors import CheckpointError, IntegrityError, NotACheckpointError, PeerError, StorageError, printable
from ckpt_tools.leftovers import remove_leftovers
from ckpt_tools.live.group import Group
from ckpt_tools.live.load import LoadReport, load_into
from ckpt_tools.live.save import Layout, SaveReport, agree, offers_of, write
from ckpt_tools.live.shards import Stage, local_shards
from ckpt_tools.live.state import export, name_of_rank, pack, state_of
from ckpt_tools.mirror import Mirror
from ckpt_tools.steps import Step, latest, latest_of, list_steps, lock, number_of, prune, see_lock, step_name
from ckpt_tools.storage import is_url

log = logging.getLogger("ckpt_tools")


class CheckpointManager:
    """The checkpoints of one run under one directory. Made, and every method called, by all ranks alike.

    `save` leaves a committed `root/step-00000500/`: stock DCP files and a manifest. Until that instant the step does not
    exist, and from then on it is whole; an error on one rank is an error on all, and the steps before stay as they are.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        asynchronous: bool = True,
        when_busy: str = "wait",
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
        jobs: int | None = None,
        read_once: bool | None = None,
        handle_signals: bool = True,
        mirror: str | None = None,
        mirror_every: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Claims a directory for this job, and removes what dead ones left half-written in it.

        Args:
            root: a directory that all ranks share, made if it is not there; or a URL, `s3://bucket/run`. In an object store nobody can hold
                a lock: of two jobs that save one step, one wins and the other gets an error.
            keep_last: how many of the newest complete steps stay.
            keep_every: steps whose number is a multiple of this stay for good.
            asynchronous: copy to host memory and write in the background.
            when_busy: what a save does while the one before is still being written: `"wait"` for it, or `"skip"`.
            process_group: the ranks that save together; all where None. One process where torch.distributed is not initialised.
            timeout_s: how long ranks wait for each other before the missing one is named.
            jobs: threads a rank writes and reads with; its share of the machine's processors, at most 4, where None.
            read_once: of what several ranks need (DDP, HSDP, columns of rows), one reads and sends: among all ranks, or among nobody;
                None, from an object store among the ranks of a host.
            handle_signals: note SIGTERM and SIGUSR1 for `preempted()`, instead of dying at once.
            mirror: a URL to which complete steps are copied in the background; they outlive the machine, and `resume` takes the
                newest of both.
            mirror_every: steps whose number is a multiple of this are copied; all where None.
            storage_options: of the object store, as fsspec takes them.

        Raises:
            StorageError: another job holds the directory, it cannot be written to, or not all ranks see it.
        """
        _check(root, keep_last, when_busy, mirror)
        self.root = root if is_url(root) else Path(root)
        self._options, self._mirror_url = storage_options, mirror
        self.keep_last, self.keep_every, self.asynchronous, self.when_busy = keep_last, keep_every, asynchronous, when_busy
        self.read_once = read_once
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's
        self._jobs = jobs or min(4, max(1, (os.cpu_count() or 1) // ranks_here))
        self._group, self._writers = Group(timeout_s, process_group), Group(timeout_s, process_group)
        self._stage, self._layout = Stage(), None
        self._told, self._passed = set[str](), set[str]()  # remarks on the store, made once; steps that resume found to be of no use
        try:
            self._claim(mirror_every)
        except BaseException:
            self._release()
            raise
        self._old_handlers = self._watch_signals() if handle_signals else {}

    last_save: SaveReport | None = None
    last_load: LoadReport | None = None
    _layout: Layout | None
    _running: Future[SaveReport] | None = None
    _pool: ThreadPoolExecutor | None = None
    _mirror: Mirror | None = None
    _resumed: Path | str | None = None
    _lock = -1
    _signal = 0

    def _claim(self, mirror_every: int | None) -> None:
        with self._group.phase("open the run's directory"):
            if self._group.rank == 0:
                if not is_url(self.root):
                    self._lock = lock(Path(self.root))
                for left in remove_leftovers(self.root, options=self._options):
                    log.info("removed what a dead job left: %s", left.url)
                if self._mirror_url is not None:
                    self._mirror = Mirror(self._mirror_url, mirror_every, self.keep_last, self.keep_every, self._options)
                    self._mirror.catch_up(Path(self.root))
        if is_url(self.root):
            return
        written = self._group.broadcast(os.pread(self._lock, 4096, 0) if self._group.rank == 0 else b"", "share the run's directory")
        with self._group.phase("share the run's directory"):
            see_lock(Path(self.root), written, self._group.rank)

    # ---- saving --------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], asynchronous: bool | None = None) -> bool:
        """Saves a step. Returns once the state may change again: at once after a copy, or with the step committed.

        Args:
            step: its number, at least 0. A step that is there already is refused, but for one that `resume` passed over: it is replaced.
            state: dicts of modules, optimizers, anything with `state_dict`, `RngState`, `PerRank`, tensors and plain values.
            asynchronous: instead of what the manager was made with.

        Returns:
            False where `when_busy="skip"` and the save before is still being written.

        Raises:
            CheckpointError: this save failed, or the one before in the background, with its own traceback.
        """
        if self._is_busy() and self.when_busy == "skip":
            return False
        self.wait()
        what = step_name(step)
        with torch.no_grad():
            with self._group.phase(f"collect the state for {what}"):
                if self._group.rank == 0 and (target := self._target(step)).exists() and target.url not in self._passed:
                    raise StorageError(
                        f"step {step} is there already: {printable(target.url)}", hint="a step is saved once: move it away to save it again"
                    )
                exported = export(state)
                shards = local_shards(exported.tensors)
                objects = self._objects(exported.objects if self._group.rank == 0 else {}, exported.per_rank)
                paths = exported.paths | {
                    name_of_rank(n, self._group.rank): (*n.split("."), f"rank_{self._group.rank}") for n in exported.per_rank
                }
            offers = offers_of(shards)
            self._layout = layout = agree(
                self._group, self._layout, offers, tuple(objects), {n: paths[n] for n in (*exported.tensors, *objects)}
            )
            is_background = self.asynchronous if asynchronous is None else asynchronous
            with self._group.phase(f"copy the state for {what}"):
                tensors = [shards[i].tensor for i in layout.task.offers]
                memory = self._stage.copy(tensors) if is_background else self._stage.live(tensors)
        if not is_background:
            self._write(step, layout, memory, objects, self._group)
            return True
        self._running = self._background().submit(self._write, step, layout, memory, objects, self._writers)
        return True

    def _target(self, step: int) -> Destination:
        root = self.root if is_url(self.root) else os.fspath(self.root)
        return open_destination(f"{root.rstrip('/')}/{step_name(step)}", self._options)

    def _background(self) -> ThreadPoolExecutor:
        """Returns the one thread that writes, and removes old steps: freeing a gigabyte of page cache takes a sixth of a second."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "ckpt-save")
        return self._pool

    def _objects(self, objects: Mapping[str, Any], per_rank: Mapping[str, Any]) -> dict[str, bytes]:
        own = {name_of_rank(name, self._group.rank): state_of(wrapper) for name, wrapper in per_rank.items()}
        return {name: pack(value) for name, value in (*objects.items(), *own.items())}

    def _write(self, step: int, layout: Layout, memory: Sequence[memoryview], objects: Mapping[str, bytes], group: Group) -> SaveReport:
        target = self._target(step)
        report = write(group, target, step, layout, memory, objects, self._jobs, target.url in self._passed)
        self._passed.discard(target.url)
        for note in report.notes:
            if note not in self._told:
                log.warning("%s: %s", step_name(step), note)
        self._told.update(report.notes)
        if group.rank == 0:
            if self._mirror is not None:
                self._mirror.offer(step, Path(report.path))
            self._background().submit(self._retain)
        self.last_save = report
        return report

    def _retain(self) -> None:
        """Lets old steps go; a failure to do so is a warning, the save is committed."""
        kept = [*([self._resumed] if self._resumed else []), *(self._mirror.needed() if self._mirror else [])]
        try:
            for step in prune(self.root, self.keep_last, self.keep_every, kept, options=self._options):
                log.info("removed %s: newer ones are complete", step.path)
            self._resumed = None  # a newer one is committed
        except (CheckpointError, OSError) as error:
            log.warning("could not remove old steps: %s", error)

    def _is_busy(self) -> bool:
        """Tells whether a save is still being written on any rank."""
        mine = self._running is not None and not self._running.done()
        return bool(self._group.sum([mine], "ask whether a save is being written")[0])

    def wait(self) -> None:
        """Waits until the save in the background is committed.

        Raises:
            CheckpointError: it failed; raised once, with its own traceback.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    # ---- resuming ------------------------------------------------------------------------------------------------------

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
    ) -> int:
        """Loads the newest complete step into a state, on any number of ranks.

        Args:
            state: as given to `save`. Modules and optimizers are loaded in place, plain values are replaced.
            step: this one instead of the newest.
            path: a checkpoint anywhere instead, a path or a URL: of another run, of stock DCP, torchtitan.
            select: globs of names to load, such as `["model.*"]`; everything where empty. The rest keeps what it has.
            strict: refuse where the checkpoint lacks something of the state or has more under the same keys.
            cast: let floating-point tensors change their type; nothing is cast unless asked.
            trust_pickle: run the code that objects in the checkpoint ask for; never needed for what this tool saved.

        Returns:
            The number of the step; 0 where there is none, and for a `path` that tells none by manifest or name.

        Raises:
            PlanError: the checkpoint does not fit the state; the message is a table.
            NotACheckpointError: there is no such step.
            IntegrityError: it is damaged. Without `step` and `path`, the next older step is loaded instead, and that is logged.
            CheckpointError: it cannot be read; or another rank failed.
        """
        self.wait()
        damaged: list[Path | str] = []
        while True:
            with self._group.phase("find the step to resume"):
                chosen = self._choose(step, path, damaged) if self._group.rank == 0 else (0, None)
            number, found = self._group.broadcast(chosen, "find the step to resume")
            if found is None:
                return 0
            try:
                report = load_into(
                    found, state, self._group, select=select, strict=strict, cast=cast, trust_pickle=trust_pickle,
                    read_once=self.read_once, jobs=self._jobs, storage_options=self._options,
                )  # fmt: skip
                break
            except (IntegrityError, PeerError) as error:
                if step is not None or path is not None or not self._is_damage(error):
                    raise
                if self._group.rank == 0:
                    self._pass_over(found, error)
                damaged.append(found)
        self.last_load = report
        for note in report.notes if self._group.rank == 0 else ():
            log.warning("%s: %s", os.path.basename(found), note)
        self._resumed = found if path is None else None
        if self._mirror is not None:
            self._mirror.resumed = self._resumed
        return number

    def _is_damage(self, error: CheckpointError) -> bool:
        """Tells, on all ranks alike, whether damaged bytes were what made a load fail on any of them."""
        return bool(self._group.sum([isinstance(error, IntegrityError)], "find out whether the step is damaged")[0])

    def _pass_over(self, step: Path | str, reason: object) -> None:
        """Notes that a step is of no use: when the job gets there again, it is saved again."""
        log.warning("passed over %s: %s", step, reason)
        self._passed.add(os.fspath(step))

    def _choose(
        self, step: int | None, path: str | os.PathLike[str] | None, damaged: Sequence[Path | str]
    ) -> tuple[int, Path | str | None]:
        if path is not None:
            return number_of(path), path if is_url(path) else Path(path)
        if step is not None:
            found = next((s for s in list_steps(self.root, self._options) if s.number == step), None)
            if found is None:
                there = ", ".join(str(s.number) for s in list_steps(self.root, self._options)) or "none"
                raise NotACheckpointError(f"no step {step} in {printable(str(self.root))}; there are: {there}")
            if found.problem:
                raise NotACheckpointError(f"step {step} is not complete: {found.problem} ({printable(str(found.path))})")
            return step, found.path
        choice = latest_of([self.root, *([self._mirror_url] if self._mirror_url else [])], damaged, self._options)
        if damaged and choice.step is None:
            raise IntegrityError(f"every step is damaged: {', '.join(os.path.basename(p) for p in damaged)} ({printable(str(self.root))})")
        for passed, reason in choice.passed_over:
            self._pass_over(passed, reason)
        return (choice.step.number, choice.step.path) if choice.step else (0, None)

    def steps(self) -> list[Step]:
        """Returns all steps of the run, complete or not, by number."""
        return list_steps(self.root, self._options)

    def latest(self) -> Step | None:
        """Returns the newest complete step."""
        return latest(self.root, options=self._options).step

    # ---- signals and the end ---------------------------------------------------------------------------------------------

    def _watch_signals(self) -> dict[int, Any]:
        def note(number: int, frame: FrameType | None) -> None:
            del frame
            self._signal = self._signal or number

        try:
            return {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR1)}
        except ValueError:  # not in the main thread
            return {}

    def preempted(self) -> int:
        """Tells, on all ranks alike, whether any of them got SIGTERM or SIGUSR1: the number of the signal, or 0.

        Call it after each step. Then save with `asynchronous=False` and exit with 128 + the number (143, 138): torchrun and
        Slurm start the job again, and `resume` goes on from there.
        """
        flags = [self._signal == signal.SIGTERM, self._signal == signal.SIGUSR1]
        term, user = self._group.sum(flags, "ask for signals")
        return signal.SIGTERM if term else signal.SIGUSR1 if user else 0

    def close(self) -> None:
        """Waits for the save in the background and gives the directory free.

        Raises:
            CheckpointError: that save failed.
        """
        try:
            self.wait()
            if self._mirror is not None:
                self._mirror.close()
        finally:
            self._release()

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if self._mirror is not None:
            self._mirror.wait()
        for number, handler in getattr(self, "_old_handlers", {}).items():
            signal.signal(number, handler)
        self._old_handlers = {}
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self._group.close()
        self._writers.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self.wait()
        except CheckpointError:
            log.exception("the save in the background failed as well")
        finally:
            self._release()


def _check(root: str | os.PathLike[str], keep_last: int, when_busy: str, mirror: str | None) -> None:
    if mirror is not None and (is_url(root) or not is_url(mirror)):
        raise ValueError(f"mirror is a URL, for a run on a disk, got {str(root)!r} and {mirror!r}")
    if keep_last < 1 or when_busy not in ("wait", "skip"):
        raise ValueError(f"keep_last must be at least 1 and when_busy 'wait' or 'skip', got {keep_last} and {when_busy!r}")
