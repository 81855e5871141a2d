"""Lists the steps of a run, `ROOT/step-00000500`, and finds out which are complete.

It looks at the files themselves. There is no file that points to the newest step. Unknown names are
never touched.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_tools.errors import (
    CheckpointError,
    NotACheckpointError,
    StorageError,
    is_unreadable,
    printable,
)
from ckpt_tools.formats.base import MANIFEST, PIN, note_of
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.registry import INDEXES, check_metadata, detect_in
from ckpt_tools.publish.check_manifest import first_problem
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.rollback_notes import SUPERSEDED, RollbackNote, read_notes
from ckpt_tools.publish.run_root import RunRoot
from ckpt_tools.publish.step_names import STEP, STEP_PATTERNS, number_in, step_name
from ckpt_tools.storage import LocalStore, Store, open_store, place_of

_UNFINISHED = "no .metadata: the save never finished"
_LOOKS = 5
_LOOKERS = 16  # each waits for a store


@dataclass(frozen=True, slots=True)
class Step:
    """One checkpoint of a run.

    Attributes:
        number: of the step.
        path: a path; a URL in an object store.
        nbytes: bytes of its files.
        manifest: None if this tool did not write the step.
        problem: why no job can resume from it, as far as is known; "" if one can.
        error: why it cannot be read now. Then nothing else is known about it.
        store: the store of its files.
        superseded_by: the first step of the branch that replaced it; "" if none has.
        is_pinned: whether it holds a pin.
        twin: the name of another complete step with this number; "" if there is none.
    """

    number: int
    path: Path | str
    nbytes: int
    manifest: Manifest | None = field(repr=False)
    problem: str
    store: Store | None = field(default=None, compare=False, repr=False)
    superseded_by: str = ""
    is_pinned: bool = False
    twin: str = ""
    error: StorageError | None = field(default=None, compare=False, repr=False)

    def __fspath__(self) -> str:
        """Returns the path or URL, so that a step may be given where a checkpoint is expected."""
        return str(self.path)

    @property
    def name(self) -> str:
        """Returns the last segment of the path."""
        return os.path.basename(self.path)

    @property
    def counts(self) -> bool:
        """Tells whether it protects a run, so that older steps may go.

        Such a step is complete, and its manifest has the step's own number. Without a manifest,
        nothing proves a step. Without a number, a copy of an old step could stand for the newest
        one. Of two directories with one number, one is a copy, and neither counts.
        """
        return (
            not self.twin
            and self.manifest is not None
            and self.manifest.step == self.number
            and not self.problem
            and not self.superseded_by
            and not os.path.islink(self.path)
        )

    @property
    def twin_note(self) -> str:
        """Returns the remark on its twin; "" if it has none."""
        return f"{printable(self.twin)} has the same number: neither counts" if self.twin else ""

    @property
    def not_finite(self) -> str:
        """Returns the tensors with NaN or infinity, for a message; "" if none are known."""
        return name_some(self.manifest.not_finite) if self.manifest is not None else ""

    @property
    def is_finite(self) -> bool | None:
        """Tells whether all values are finite; None if the save did not measure them."""
        if self.manifest is None or not self.manifest.has_statistics:
            return None
        return not self.manifest.not_finite

    @property
    def thinned(self) -> Sequence[str]:
        """Returns the top-level keys that `ckpt thin` has removed from it; none for a full step."""
        found = self.manifest.source.get("thinned") if self.manifest is not None else None
        return [str(key) for key in found] if isinstance(found, list) else []

    @property
    def attempt(self) -> str:
        """Returns the id of the attempt that wrote it; "" without a manifest."""
        return self.manifest.attempt if self.manifest is not None else ""

    @property
    def is_removable(self) -> bool:
        """Tells whether this tool wrote it under its own name, so that retention may remove it.

        A step of another tool stays so when it gets a manifest.
        """
        return (
            self.manifest is not None
            and self.manifest.operation != "seal"
            and self.name in {step_name(self.number, pattern) for pattern in STEP_PATTERNS}
            and not os.path.islink(self.path)
        )


def name_some(names: Sequence[str]) -> str:
    """Returns the names of tensors with NaN or infinity for a message; "" for none."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"NaN or infinity in {printable(names[0])}{more}" if names else ""


@dataclass(frozen=True, slots=True)
class Latest:
    """The step to resume from, and each newer step that was passed over, with the reason.

    `not_finite` has the paths of those that were passed over for their values alone. `damaged` has
    those of steps that were complete once: they appeared as a whole, so something is lost.
    """

    step: Step | None
    passed_over: Sequence[tuple[Path | str, str]]
    not_finite: Sequence[Path | str] = ()
    damaged: Sequence[Path | str] = ()


def list_steps(root: RunRoot, with_superseded: bool = False) -> list[Step]:
    """Returns the steps directly under a root, by number.

    It reads names, sizes and manifests, and no data.

    In an object store, work that was never committed is not a step.

    Args:
        root: of the run.
        with_superseded: also those that a rollback set aside under another name.

    Raises:
        StorageError: it cannot be read.
    """
    steps: list[Step] = []
    for _ in range(_LOOKS):
        found = _find(root)
        steps = _list(found, with_superseded)
        if steps or not found.steps:
            break  # else a job has replaced all of them since the listing
    return steps


def list_newer(root: RunRoot, number: int) -> list[Step]:
    """Returns the steps above a number, as `list_steps` does. It looks at no other step.

    Raises:
        StorageError: the root cannot be read.
    """
    found = _find(root)
    newer = [item for item in found.steps if item[0] > number]
    if not newer:
        return []
    superseded_by = _superseded_by(found)
    steps = [_judged(step, superseded_by) for step in map(found.step, newer) if step is not None]
    return [step for step in steps if not step.superseded_by]


def _pattern_of(number: int, store: Store) -> int:
    """Returns the place of a step's name in `STEP_PATTERNS`; their number for none."""
    name = store.url.rstrip("/").rpartition("/")[2]
    names = [step_name(number, pattern) for pattern in STEP_PATTERNS]
    return names.index(name) if name in names else len(names)


def survey(root: RunRoot) -> tuple[list[Step], set[str]]:
    """Returns `list_steps`, and the names of the steps that notes of unfinished rollbacks wait for.

    Raises:
        StorageError: it cannot be read.
    """
    found = _find(root)
    return _list(found), {note.step for note in found.notes if not note.is_committed}


def _list(found: _Found, with_superseded: bool = False) -> list[Step]:
    is_remote = any(store.capabilities.is_remote for _, store in found.steps)
    with ThreadPoolExecutor(_LOOKERS if is_remote else 1, "ckpt-look") as pool:
        steps = [step for step in pool.map(found.step, found.steps) if step is not None]
        superseded_by = _superseded_by(found)
        steps = _with_twins([_judged(step, superseded_by) for step in steps])
        if not with_superseded:
            return [step for step in steps if not step.superseded_by]
        steps += [
            replace(look_at(number, store), superseded_by=by) for number, store, by in found.aside
        ]
    return sorted(steps, key=lambda step: (step.number, bool(step.superseded_by)))


@dataclass(frozen=True, slots=True)
class _Found:
    """The entries of a root.

    Attributes:
        root: the root.
        steps: the folders with the name of a step, by number.
        aside: the folders that rollbacks set aside: number, store, and the step in their place.
        notes: the notes of rollbacks.
        others: all other names, without hidden ones.
    """

    root: RunRoot
    steps: list[tuple[int, Store]]
    aside: list[tuple[int, Store, str]]
    notes: list[RollbackNote]
    others: list[str]

    def step(self, item: tuple[int, Store]) -> Step | None:
        """Looks at one of `steps`; returns None if it is not shown as a step, complete or not."""
        step = look_at(*item)
        if step.problem and self.root.lists_unfinished:
            # another process may have removed it, or renamed it to this name, at this instant
            return look_at(*item) if os.path.lexists(step.path) else None
        return step if self._shows(step) else None

    def _shows(self, step: Step) -> bool:
        """Tells whether a folder of a bucket is shown as a step."""
        if not step.problem:
            return True
        if not any(name in INDEXES for name in _store_of(step).list_files()):
            return False
        # it may have been removed since the listing
        now = open_store(step.path, self.root.options).list_files()
        return any(name in INDEXES for name in now)


def _find(root: RunRoot) -> _Found:
    stores, files = root.entries()
    steps = sorted(
        ((int(m[1]), store) for n, store in stores.items() if (m := STEP.fullmatch(n))),
        key=lambda item: (item[0], -_pattern_of(*item)),  # of several with one number, ours is last
    )
    moved = [(m, store) for n, store in stores.items() if (m := SUPERSEDED.fullmatch(n))]
    aside = [(int(s[1]), store, m[2]) for m, store in moved if (s := STEP.fullmatch(m[1]))]
    taken = {name for name in stores if STEP.fullmatch(name) or SUPERSEDED.fullmatch(name)}
    others = sorted(
        f"{name}/" if name in stores else name
        for name in (*stores, *files)
        if name not in taken and not name.startswith(".")
    )
    return _Found(root, steps, aside, read_notes(root, files), others)


def list_all(root: RunRoot) -> tuple[list[Step], list[str]]:
    """Returns all steps, including superseded ones, and the other names under a root.

    Folders end in a slash. Hidden names are left out.

    Raises:
        StorageError: it cannot be read.
    """
    found = _find(root)
    return _list(found, with_superseded=True), found.others


def _with_twins(steps: Sequence[Step]) -> list[Step]:
    """Notes the steps whose number another complete step has: one of them is a copy."""
    names: dict[int, list[str]] = {}
    for step in steps:
        if step.counts:
            names.setdefault(step.number, []).append(step.name)
    return [
        replace(step, twin=next(name for name in same if name != step.name))
        if len(same := names.get(step.number, [])) > 1 and step.name in same
        else step
        for step in steps
    ]


def rollbacks(root: RunRoot) -> list[tuple[RollbackNote, bool]]:
    """Returns the notes of rollbacks in a root, and whether each is in effect.

    Raises:
        StorageError: it cannot be read.
    """
    found = _find(root)
    return [(note, _is_in_effect(note, found)) for note in found.notes]


def _is_in_effect(note: RollbackNote, found: _Found) -> bool:
    """Tells whether the first step of a new branch was committed."""
    if note.is_committed:
        return True
    for number, store in found.steps:
        if store.url.rstrip("/").rpartition("/")[2] == note.step:
            step = look_at(number, store)
            return step.error is not None or (  # then nobody counts the steps of the other branch
                not step.problem
                and step.manifest is not None
                and step.manifest.attempt == note.attempt
            )
    return False


def _superseded_by(found: _Found) -> dict[tuple[str, str], str]:
    """Returns the steps that rollbacks in effect superseded, each with the step in its place.

    A step is a pair of name and attempt.
    """
    return {
        key: note.step for note in found.notes if _is_in_effect(note, found) for key in note.pairs
    }


def _judged(step: Step, superseded_by: Mapping[tuple[str, str], str]) -> Step:
    by = superseded_by.get((step.name, step.attempt), "")
    return replace(step, superseded_by=by) if by else step


def _store_of(step: Step) -> Store:
    return step.store or LocalStore(step.path)


def look_at(number: int | None, store: Store | Path) -> Step:
    """Looks at one step: the sizes of all files in its manifest, and the checksum of its index.

    Args:
        number: of the step, from its name; None if the name has none.
        store: the store of its files, or its directory.
    """
    store = LocalStore(store) if isinstance(store, Path) else store
    path = place_of(store.url)
    try:
        files = store.list_files()
        manifest = find_manifest(store)
        problem = (
            _foreign_problem(store)
            if manifest is None
            else first_problem(manifest, store) or _other_number(number, manifest)
        )
        return Step(
            number or 0, path, sum(files.values()), manifest, problem, store, is_pinned=PIN in files
        )
    except CheckpointError as error:
        cause = error if isinstance(error, StorageError) and error.is_unreadable else None
        if isinstance(path, Path) and path.is_symlink() and not os.path.exists(path):
            cause = StorageError(
                f"it is a link, and nothing can be reached by it: {printable(os.readlink(path))}",
                hint="mount the disk that it leads to; or remove the link, if the step is gone",
                is_unreadable=True,
            )
            error = cause
        return Step(number or 0, path, 0, None, str(error), store, error=cause)
    finally:
        store.close()


def _other_number(number: int | None, manifest: Manifest) -> str:
    """Returns the problem of a step that is a copy of another one; "" if it is no copy."""
    is_other = number is not None and manifest.step not in (None, number)
    return f"it is a copy of step {manifest.step}, by its manifest" if is_other else ""


def _foreign_problem(store: Store) -> str:
    try:
        detect_in(store)
    except CheckpointError as error:
        if is_unreadable(error):
            raise
        return _UNFINISHED
    return ""


def refuse_unreadable(steps: Iterable[Step], why: str) -> None:
    """Raises the error of the first step that cannot be read, if there is one.

    Args:
        steps: of a run.
        why: what cannot be known without it: "which step is the newest".

    Raises:
        StorageError: a step cannot be read.
    """
    for step in steps:
        if (error := step.error) is not None:
            raise StorageError(
                f"{printable(step.name)} cannot be read, so it is not known {why}: {error}",
                hint=error.hint,
                is_transient=error.is_transient,
                is_unreadable=True,
            )


def unsound(step: Step) -> str:
    """Reads the index of a step without a manifest, and returns why no job can resume from it.

    Returns "" if a job can. For a sealed step, it returns the known problem and reads nothing.

    Raises:
        StorageError: it cannot be read.
    """
    if step.problem or step.manifest is not None:
        return step.problem
    try:
        check_metadata(_store_of(step))
    except CheckpointError as error:
        if is_unreadable(error):
            raise
        return str(error)
    return ""


def damage(step: Step | None) -> str:
    """Reads a whole step and returns its problem; "" if it has none.

    Without a manifest, only the index is checked.

    Raises:
        StorageError: it cannot be read.
    """
    if step is None:
        return "it is gone"
    if step.error is not None:
        raise step.error
    if step.problem or step.manifest is None:
        return unsound(step)
    store = _store_of(step)
    try:
        return first_problem(step.manifest, store, reads_all=True)
    finally:
        store.close()


def lasting_damage(step: Step) -> str | None:
    """Returns the problem of a step as `damage` does; None if the step was removed meanwhile.

    While other processes rename steps, a name can be missing for an instant. So a problem has to be
    there twice.
    """
    problem = damage(step)
    if problem and is_there(step):
        problem = damage(step)
    return problem if not problem or is_there(step) else None


def is_there(step: Step) -> bool:
    """Tells whether a step is still under its name. Retention may remove it while it is read."""
    if isinstance(step.path, Path) and not step.path.exists():
        return False
    now = look_at(step.number, _store_of(step))
    if now.error is not None:
        raise now.error
    return now.attempt == step.attempt


def find_latest(
    root: RunRoot,
    verify: bool = False,
    skip: Container[Path | str] = (),
    allow_not_finite: bool = False,
) -> Latest:
    """Finds the newest complete step by number. Superseded steps do not count.

    Args:
        root: of the run.
        verify: also read every byte, and pass over a step whose checksums are wrong.
        skip: paths that are known to be damaged.
        allow_not_finite: take also a step whose save found NaN or infinity.

    Raises:
        StorageError: the root cannot be read, or a step that may be the newest.
    """
    best = Latest(None, ())
    for _ in range(_LOOKS):
        found = _find(root)
        best = _latest(found, verify, skip, _superseded_by(found), allow_not_finite)
        if best.step is not None or best.passed_over or not found.steps:
            break  # else a job has replaced all of them since the listing
    return best


def _latest(
    found: _Found,
    verify: bool,
    skip: Container[Path | str],
    superseded_by: Mapping[tuple[str, str], str],
    allow_not_finite: bool,
) -> Latest:
    passed: list[tuple[Path | str, str]] = []
    not_finite: list[Path | str] = []
    damaged: list[Path | str] = []
    for number, store in reversed(found.steps):
        seen = found.step((number, store))
        if seen is None:
            continue
        step = _judged(seen, superseded_by)
        if step.path in skip or step.superseded_by:
            continue
        refuse_unreadable([step], "which step is the newest complete one")
        problem = lasting_damage(step) if verify else unsound(step)
        if problem is None:
            continue  # a newer one has taken its place
        if problem and _was_complete(step):
            damaged.append(step.path)
        if not problem and not allow_not_finite and step.not_finite:
            problem = step.not_finite
            not_finite.append(step.path)
        if not problem:
            return Latest(step, passed, not_finite, damaged)
        passed.append((step.path, problem))
    return Latest(None, passed, not_finite, damaged)


def _was_complete(step: Step) -> bool:
    """Tells whether a step with a problem was complete once.

    A step with a manifest, or with DCP's index, appeared as a whole. Other writers leave such a
    step when they are killed.
    """
    try:
        names = _store_of(step).list_files()
    except StorageError as error:
        if error.is_unreadable:
            raise
        return False
    return dcp.LOOKS_FOR in names or any(note_of(n) == (MANIFEST, "") for n in names)


def latest_of(
    roots: Sequence[RunRoot], skip: Container[Path | str] = (), allow_not_finite: bool = False
) -> Latest:
    """Finds the newest complete step of several places, the first of them where they are equal;
    arguments as for `find_latest`.

    A rollback that is in effect in one of them is so in all: a mirror may not have heard of it yet.
    """
    places = [_find(root) for root in roots]
    superseded_by = {key: by for found in places for key, by in _superseded_by(found).items()}
    best = [_latest(found, False, skip, superseded_by, allow_not_finite) for found in places]
    step = max((b.step for b in best if b.step is not None), key=lambda s: s.number, default=None)
    passed = [item for b in best for item in b.passed_over]
    not_finite = [path for b in best for path in b.not_finite]
    return Latest(step, passed, not_finite, [path for b in best for path in b.damaged])


def find_step(root: RunRoot, name: str) -> Step | None:
    """Returns the step of that name; None if there is none.

    Raises:
        StorageError: the root cannot be read.
    """
    found = _find(root)
    for number, store in found.steps:
        if store.url.rstrip("/").rpartition("/")[2] == name:
            return found.step((number, store))
    return None


def number_of(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> int:
    """Returns the step of a checkpoint by its manifest, else by its name if that is of a step.

    Returns 0 if neither has a number.

    Args:
        path: a path or a URL.
        options: of the object store, as fsspec takes them.
    """
    manifest = look_at(None, open_store(path, options)).manifest
    if manifest is not None and manifest.step is not None:
        return manifest.step
    return number_in(os.path.basename(os.fspath(path).rstrip("/"))) or 0


def no_steps(root: str) -> NotACheckpointError:
    """Returns the error of a command for runs that was given something else."""
    return NotACheckpointError(
        f"no steps in {printable(root)}",
        hint="give the directory of a run, in which the steps lie: RUN, not RUN/step-00000100",
    )
