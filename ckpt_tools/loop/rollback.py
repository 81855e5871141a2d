"""Sets aside the steps that a rollback superseded: they get another name, and stay.

`step-00000300` becomes `step-00000300.superseded-1a2b3c4d`: on a disk by a rename, in an object
store by a copy within the store. Only the user removes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckpt_tools.core.logs import log
from ckpt_tools.errors import printable
from ckpt_tools.loop.retention import remove_files
from ckpt_tools.operations.copy import copy
from ckpt_tools.publish.local import sync_directory
from ckpt_tools.publish.rename import publish_name
from ckpt_tools.publish.steps import Root, Step, list_steps, rollbacks
from ckpt_tools.publish.superseded import RollbackNote, remove_note, write_note
from ckpt_tools.storage import RemoteStore, is_url

Options = Mapping[str, Any] | None


def newer_than(steps: Iterable[Step], number: int) -> dict[str, str]:
    """Returns the names of the steps above a number, complete or not, each with its attempt."""
    return {s.name: s.manifest.attempt if s.manifest else "" for s in steps if s.number > number}


def make_way(root: Root, note: RollbackNote, options: Options) -> None:
    """Sets aside the old step that has the name of the first new step.

    Raises:
        StorageError: it cannot be moved.
    """
    for step in list_steps(root, options):
        if step.name == note.step and note.victims.get(step.name) == (
            step.manifest.attempt if step.manifest else ""
        ):
            _set_aside(root, step, note, options)


def complete(root: Root, options: Options, keeps_notes: bool = False) -> None:
    """Sets aside the steps superseded by rollbacks in effect; removes the notes of the others.

    Args:
        root: of the run, a path or a URL.
        options: of the object store, as fsspec takes them.
        keeps_notes: keep the notes: on a disk, the mirror may still need them.

    Raises:
        StorageError: a step cannot be moved; the next call tries again.
    """
    for note, is_in_effect in rollbacks(root, options):
        if not is_in_effect:  # one job saves at a time, so a dead job left this note
            _bring_back(root, note, options)
            remove_note(root, note, options)
            continue
        if not note.is_committed:
            write_note(root, note.committed, options)
        for step in list_steps(root, options, with_superseded=True):
            if step.name in note.victims and note.victims[step.name] == (
                step.manifest.attempt if step.manifest else ""
            ):
                _set_aside(root, step, note, options)
        if not keeps_notes:
            remove_note(root, note, options)


def _set_aside(root: Root, step: Step, note: RollbackNote, options: Options) -> None:
    where = set_aside(root, step, note.attempt, options)
    log.warning(
        "set aside %s: superseded by %s, which continues from step %d",
        printable(where),
        note.step,
        note.resumed,
    )


def set_aside(root: Root, step: Step, attempt: str, options: Options) -> str:
    """Renames a step with all its files, and returns its new path or URL.

    Args:
        root: of the run.
        step: the step.
        attempt: id of the attempt that supersedes it.
        options: of the object store, as fsspec takes them.

    Raises:
        StorageError: it cannot be moved; the next call tries again.
    """
    where = f"{str(root).rstrip('/')}/{step.name}.superseded-{attempt[:8]}"
    _move(root, str(step.path), where, options)
    return where


def _move(root: Root, old: str, new: str, options: Options) -> None:
    if not is_url(root):
        publish_name(Path(old), Path(new))
        sync_directory(Path(root))
        return
    copy(old, new, storage_options=options)
    source, target = RemoteStore(old, options), RemoteStore(new, options)
    # list_deep: also files below the checkpoint's own level
    for name in sorted(source.list_deep().keys() - target.list_deep().keys()):
        source.carry(name, target)
    remove_files(source)


def _bring_back(root: Root, note: RollbackNote, options: Options) -> None:
    """Restores the name of a step that made way for a save that was never committed."""
    steps = list_steps(root, options, with_superseded=True)
    there = {step.name for step in steps}
    for step in steps:
        name, _, attempt = step.name.partition(".superseded-")
        if attempt == note.attempt[:8] and name == note.step and name not in there:
            _move(root, str(step.path), f"{str(root).rstrip('/')}/{name}", options)
            log.warning("brought back %s: the save that it made way for was never committed", name)
