"""Sets aside the steps that a rollback superseded: they get another name, and stay.

`step-00000300` becomes `step-00000300.superseded-1a2b3c4d`: on a disk by a rename, in an object
store by a copy within the store. Only the user removes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt_tools.core.logs import log
from ckpt_tools.errors import printable
from ckpt_tools.operations.copy import copy
from ckpt_tools.run.base import RunRoot
from ckpt_tools.run.rollback import RollbackNote, remove_note, write_note
from ckpt_tools.run.step import Step, refuse_unreadable
from ckpt_tools.run.steps import RunListing, list_steps


def newer_than(steps: Iterable[Step], number: int) -> dict[str, str]:
    """Returns the names of the steps above a number, complete or not, each with its attempt.

    Raises:
        StorageError: one of them cannot be read.
    """
    newer = [step for step in steps if step.number > number]
    refuse_unreadable(newer, "which steps a new branch supersedes")
    return {step.name: step.attempt for step in newer}


def merged(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Returns the steps of two roots by name, with each attempt that either has."""
    return {
        name: " ".join(sorted({*one.get(name, other.get(name, "")).split(" "), *found.split(" ")}))
        for name, found in (*one.items(), *other.items())
    }


def make_way(root: RunRoot, note: RollbackNote) -> None:
    """Sets aside the old step that has the name of the first new step.

    Raises:
        StorageError: it cannot be moved.
    """
    for step in list_steps(root):
        if step.name == note.step and note.supersedes(step.name, step.attempt):
            _set_aside(root, step, note)


def complete(root: RunRoot) -> None:
    """Sets aside the steps superseded by rollbacks in effect; removes the notes of the others.

    Args:
        root: of the run. A root that `keeps_notes` keeps those in effect.

    Raises:
        StorageError: a step cannot be moved; the next call tries again.
    """
    for note, is_in_effect in RunListing(root).rollbacks:
        if not is_in_effect:  # one job saves at a time, so a dead job left this note
            _restore_names(root, note)
            remove_note(root, note)
            continue
        if not note.is_committed:
            write_note(root, note.committed)
        for step in RunListing(root).all_steps:
            if note.supersedes(step.name, step.attempt):
                _set_aside(root, step, note)
        if not root.keeps_notes:
            remove_note(root, note)


def _set_aside(root: RunRoot, step: Step, note: RollbackNote) -> None:
    where = set_aside(root, step, note.attempt)
    log.warning(
        "set aside %s: superseded by %s, which continues from step %d",
        printable(where),
        note.step,
        note.resumed,
    )


def set_aside(root: RunRoot, step: Step, attempt: str) -> str:
    """Renames a step with all its files, and returns its new path or URL.

    Args:
        root: of the run.
        step: the step.
        attempt: id of the attempt that supersedes it.

    Raises:
        StorageError: it cannot be moved; the next call tries again.
    """
    name = f"{step.name}.superseded-{attempt[:8]}"
    _move(root, step.name, name)
    return str(root.step_path(name))


def _move(root: RunRoot, old: str, new: str) -> None:
    if not root.can_rename:
        copy(root.step_path(old), root.step_path(new), storage_options=root.options)
    root.rename(old, new)


def _restore_names(root: RunRoot, note: RollbackNote) -> None:
    """Restores the name of a step that made way for a save that was never committed."""
    steps = RunListing(root).all_steps
    there = {step.name for step in steps}
    for step in steps:
        name, _, attempt = step.name.partition(".superseded-")
        if attempt == note.attempt[:8] and name == note.step and name not in there:
            _move(root, step.name, name)
            log.warning("brought back %s: the save that it made way for was never committed", name)
