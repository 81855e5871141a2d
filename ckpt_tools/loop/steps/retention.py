"""Removes old steps of a run, and decides which steps stay.

A step is removed in one instant: no reader ever sees a part of it.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_tools.core.logs import log
from ckpt_tools.errors import CheckpointError, NotACheckpointError, StorageError, printable
from ckpt_tools.formats.registry import is_ours
from ckpt_tools.publish.step_names import number_in
from ckpt_tools.run.base import RunRoot
from ckpt_tools.run.reasons import MAX_NAMES, files_to_keep, reason_to_stay
from ckpt_tools.run.retention import Retention, has_metric, sound_steps
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.shared_files import Links
from ckpt_tools.run.step import Step, look, look_at, refuse_unreadable
from ckpt_tools.run.steps import RunListing, list_steps, no_steps, runs_below
from ckpt_tools.storage import is_url, local_path, open_store
from ckpt_tools.transfer.options import Reading

_PIN_TEXT = (
    b"This step is pinned: ckpt prune and retention never remove it. Delete this file to let it"
    b" go.\n"
)
Options = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of a `prune_steps`, or of its dry run.

    Attributes:
        removed: steps, oldest first. Another process may have removed one of them.
        freed: by the path of each, the bytes that this frees. A file that other steps link stays.
        policies: path of each step that a rule keeps, with the rules; and of each that no rule
            counts, with the reason.
        kept: path of each step that the rules would remove but that stays, with the reason.
        damaged: path of each step that was read and found damaged, with the problem. Such a step is
            neither counted nor removed.
        failed: path of each step that could not be removed, with the error.
        unreadable: path of each step that cannot be read now, with the error. Such a step is
            neither counted nor removed.
    """

    removed: list[Step] = field(default_factory=list)
    freed: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    policies: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)

    @property
    def freed_nbytes(self) -> int:
        """Returns the bytes that are free now, or would be."""
        return sum(self.freed.values())


def removable(
    steps: Iterable[Step], rules: Retention, kept: Iterable[Path | str] = ()
) -> list[Step]:
    """Returns the steps that the rules allow to remove.

    Args:
        steps: from `list_steps`. Incomplete and superseded steps, steps without a manifest, links,
            and several steps with one number are neither counted nor removed.
        rules: which complete steps stay.
        kept: paths that stay whatever the rules say.
    """
    complete = [s for s in steps if s.counts]
    stay = {str(path) for path in kept} | _reasons(complete, rules).keys()
    return [s for s in complete if s.is_removable and str(s.path) not in stay]


def _reasons(complete: Sequence[Step], rules: Retention) -> dict[str, str]:
    return rules.reasons(complete, dt.datetime.now(dt.UTC))


def prune_steps(
    root: RunRoot,
    rules: Retention,
    kept: Iterable[Path | str] = (),
    dry_run: bool = False,
    reads: bool | None = None,
    passed: Container[str] = (),
    jobs: int | None = None,
) -> Pruned:
    """Removes the steps that the rules allow to remove, oldest first.

    If one cannot be removed, it continues with the next.

    A pinned step stays in any case. So does a step that a link of the run leads to, and one with
    files that no save wrote. The first step of a new branch stays until the old branch's steps have
    been set aside.

    Args:
        root: of the run.
        rules, kept: as for `removable`.
        dry_run: remove nothing.
        reads: read the steps that stay beside others first: a damaged one is not counted, and
            another stays in its place. If None, only the newest step is read, and the newest that
            a job can resume from, so that at least one such step stays.
        passed: paths of steps that a resume has found unusable. They are neither counted nor
            removed.
        jobs: threads that read.

    Raises:
        NotACheckpointError: there is no directory, or runs lie below it.
        StorageError: it cannot be listed, or is read-only.
    """
    root.check_exists()
    root.check_writable()  # so that a dry run promises nothing that cannot be done
    found = RunListing(root)
    steps = found.steps
    path = str(root.path)
    is_checkpoint = number_in(path.rstrip("/").rpartition("/")[2]) is not None or any(
        map(is_ours, found.others)
    )
    if not steps and (is_checkpoint or runs_below(path)):
        raise no_steps(root)
    unreadable: dict[str, str] = {}
    damaged: dict[str, str] = {}

    def needed_to_stay(steps: Sequence[Step]) -> Iterator[Step]:
        gone = {str(step.path) for step in removable(steps, rules, kept)}
        if not gone or reads is False:
            return iter(())
        stay = [step for step in steps if step.counts and str(step.path) not in gone]
        beside = rules if reads else Retention(last=1)
        return (step for step, _ in beside.reasons_beside(stay))

    left = [step for step in steps if str(step.path) not in passed]
    sound = sound_steps(left, needed_to_stay, damaged, unreadable, jobs)
    to_remove = removable(sound, rules, kept)
    # reading takes long: a job may have gone back since
    if to_remove and reads is not False and not dry_run:
        found = RunListing(root)
        steps = found.steps
        wrong = {*damaged, *unreadable}
        left = [s for s in steps if str(s.path) not in passed and str(s.path) not in wrong]
        now = {(s.name, s.attempt) for s in removable(left, rules, kept)}
        to_remove = [step for step in to_remove if (step.name, step.attempt) in now]
    unreadable |= {str(step.path): step.problem for step in steps if step.error is not None}
    wrong = {*damaged, *unreadable}
    counted = [step for step in steps if step.counts and str(step.path) not in wrong]
    result = Pruned(damaged=damaged, policies=_reasons(counted, rules), unreadable=unreadable)
    for step in steps:
        if step.error is None and step.not_counted:
            told = result.kept if step.twin else result.policies
            told[str(step.path)] = step.not_counted
    _remove_all(root, to_remove, found.waited_for, dry_run, result)
    return result


def _remove_all(
    root: RunRoot, steps: Sequence[Step], needed: Container[str], dry_run: bool, result: Pruned
) -> None:
    """Removes steps but those with a reason to stay, and notes what became of each.

    Args:
        root, dry_run: as for `prune_steps`.
        steps: the steps.
        needed: names of the first steps of new branches.
        result: gets the notes.
    """
    try:
        links = root.links() if steps else []
    except StorageError as error:  # a link that nobody can see may lead to any of them
        result.failed.update({str(s.path): f"it may be linked: {error}" for s in steps})
        return
    shared = Links()
    for step in steps:
        try:
            if reason := (
                "the first step of a new branch"
                if step.name in needed
                else reason_to_stay(root, step, links)
            ):
                result.kept[str(step.path)] = reason
                continue
            freed = shared.freed_nbytes(step)
            if not dry_run:
                remove_step(root, step)
            result.removed.append(step)
            result.freed[str(step.path)] = freed
        except CheckpointError as error:
            result.failed[str(step.path)] = str(error)


def retain(
    root: RunRoot,
    rules: Retention,
    kept: Iterable[Path | str],
    told: set[str],
    passed: Container[str] = (),
) -> bool:
    """Prunes during training, logs the result, and returns whether it was possible.

    It reads no step: this job has just written the newest one and compared its bytes.

    Args:
        root, rules, kept, passed: as for `prune_steps`.
        told: messages that were logged before and are not repeated.
    """
    try:
        if rules.metric and not has_metric(root, rules.metric):
            text = f"no step has the metric {printable(rules.metric)!r}: none is removed"
            if text not in told:
                log.warning("%s", text)
                told.add(text)
            return True
        result = prune_steps(root, rules, kept, reads=False, passed=passed)
    except (CheckpointError, OSError) as error:
        log.warning("could not remove old steps: %s", error)
        return False
    for step in result.removed:
        log.info("removed %s: newer ones are complete", step.path)
    for path, text in result.failed.items():
        log.warning("could not remove %s: %s", path, text)
    for path, text in result.unreadable.items():
        log.warning("%s is not counted, since it cannot be read: %s", path, text)
    for path, reason in result.kept.items():
        if (text := f"{path} stays: {reason}") not in told:
            log.warning("%s", text)
            told.add(text)
    is_thinned = _thin(root, rules, kept, told)
    return is_thinned and not result.failed


def _thin(root: RunRoot, rules: Retention, kept: Iterable[Path | str], told: set[str]) -> bool:
    """Thins old steps if the rules say so, logs the result, and returns whether it was possible."""
    if rules.full is None:
        return True
    from ckpt_tools.operations.thin import thin_steps  # and the path of every write

    held = {str(path) for path in kept}
    options: Reading = {"storage_options": root.options, "jobs": 1}
    try:
        result = thin_steps(
            root, list_steps(root), rules.full, held=held, reads=False, options=options
        )
    except (CheckpointError, OSError) as error:
        log.warning("could not thin old steps: %s", error)
        return False
    for step in result.thinned:
        log.info("thinned %s: no %s", step.path, ", ".join(step.dropped))
        if step.stays:
            log.warning("thinned %s, but %s", step.path, step.stays)
    for path, text in result.failed.items():
        if (line := f"could not thin {path}: {text}") not in told:
            log.warning("%s", line)
            told.add(line)
    return not result.failed


def remove_named(root: RunRoot, name: str) -> str | None:
    """Removes a checkpoint with a name of its own, in one instant.

    Returns why it stays: it is no checkpoint that a save wrote, or other files lie in it. Returns
    None if it is removed.
    """
    path = root.step_path(name)
    if os.path.islink(path):
        return "it is a link"
    step = look_at(None, open_store(path, root.options))
    if step.manifest is None or step.manifest.operation != "save":
        return step.problem or "no save wrote it"
    if reason := _foreign_text(files_to_keep(root, name, step.manifest)):
        return reason
    manifest = step.manifest

    def reason_to_keep(now: str) -> str | None:
        return _changed(root, now, manifest.attempt) or _foreign_text(
            files_to_keep(root, now, manifest)
        )

    root.remove(name, manifest.attempt, reason_to_keep)
    return None


def _foreign_text(names: Sequence[str]) -> str | None:
    return f"other files lie in it: {printable(', '.join(names[:MAX_NAMES]))}" if names else None


# ---- pins ----------------------------------------------------------------------------------------


def pin_step(path: Path | str, options: Options = None, removes: bool = False) -> bool:
    """Adds or removes the pin of a step; returns whether that changed anything.

    Args:
        path: path or URL of the step, `RUN/step-00000100`.
        options: of the object store, as fsspec takes them.
        removes: remove the pin.

    Raises:
        NotACheckpointError: there is no such step.
        StorageError: it cannot be written to.
    """
    where = os.fspath(path).rstrip("/")
    full = where if is_url(where) else os.path.abspath(local_path(where))
    folder, _, name = full.rpartition("/")
    root = open_root(folder or "/", options)
    step = RunListing(root).find(name)
    if step is None:
        hint = "a step is named like RUN/step-00000100" if number_in(name) is None else None
        raise NotACheckpointError(f"no step of a run: {printable(where)}", hint=hint)
    refuse_unreadable([step], "whether it is pinned")
    if step.is_pinned is not removes:
        return False
    root.unpin(name) if removes else root.pin(name, _PIN_TEXT)
    return True


def remove_step(root: RunRoot, step: Step) -> None:
    """Removes a step: first its name or index, in one instant, then its bytes.

    Raises:
        StorageError: it could not be removed.
    """
    assert step.manifest is not None
    attempt = step.manifest.attempt

    def reason_to_keep(name: str) -> str | None:
        changed = _changed(root, name, attempt)
        return changed or reason_to_stay(root, step, root.links(), name)

    root.remove(step.name, attempt, reason_to_keep)


def _changed(root: RunRoot, name: str, attempt: str) -> str | None:
    """Returns what has happened to a step since it was judged; None for nothing.

    A job that goes back to an older step writes its numbers anew.
    """
    now = look(root, None, root.step_store(name))
    if now.error is not None:
        raise now.error
    if now.attempt != attempt:
        return "another save has taken its place"
    return "it was pinned a moment ago" if now.is_pinned else None
