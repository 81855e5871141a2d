"""The checkpoints of one run, `ROOT/step-00000500`, on a disk or in an object store: which there
are, which are complete, which may go.

Truth is found by looking, never in a pointer file. Unknown names are never touched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.base import PIN
from ckpt_tools.formats.registry import INDEXES, detect_in, prove
from ckpt_tools.publish.check_manifest import first_problem
from ckpt_tools.publish.manifest import Manifest, find
from ckpt_tools.publish.superseded import SUPERSEDED, RollbackNote, read_notes
from ckpt_tools.storage import LocalStore, RemoteStore, Store, is_url, local_path
from ckpt_tools.storage.local import failed

_STEP = re.compile(r"(?:step|checkpoint|global_step|epoch)[-_]?([0-9]{1,18})")
_LOOKERS = 16  # each waits for a store
Root = str | os.PathLike[str]
Options = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Step:
    """One checkpoint of a run.

    `path` is the URL of one in an object store; `manifest` is None for one that this tool did not
    write; `problem` says why it cannot be resumed from, "" where it can; `store` has its files.
    `superseded_by` names the first step of the branch that took its place. `is_pinned` tells
    whether it holds a `PIN`.
    """

    number: int
    path: Path | str
    nbytes: int
    manifest: Manifest | None = field(repr=False)
    problem: str
    store: Store | None = field(default=None, compare=False, repr=False)
    superseded_by: str = ""
    is_pinned: bool = False

    @property
    def name(self) -> str:
        """The last segment of its path."""
        return os.path.basename(self.path)

    @property
    def is_ours(self) -> bool:
        """Tells whether this tool wrote it, under the name that it gives, so that retention may
        remove it.

        A manifest that was added to another tool's checkpoint does not make it this tool's.
        """
        return (
            self.manifest is not None
            and self.manifest.operation != "seal"
            and self.name == step_name(self.number)
            and not os.path.islink(self.path)
        )


@dataclass(frozen=True, slots=True)
class Latest:
    """The step to resume from, and for each newer one that was passed over, why."""

    step: Step | None
    passed_over: Sequence[tuple[Path | str, str]]


def is_step_name(name: str) -> bool:
    """Tells whether a folder of that name is a step of a run."""
    return _STEP.fullmatch(name) is not None


def number_in(name: str) -> int | None:
    """Returns the number in the name of a step's directory, None for another name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def step_name(number: int) -> str:
    """Returns the name of a step's directory."""
    return f"step-{number:08d}"


def list_steps(root: Root, options: Options = None, with_superseded: bool = False) -> list[Step]:
    """Returns the steps directly under a directory or prefix, by number. Reads names, sizes and
    manifests, no data.

    In an object store, what was never committed is no step.

    Args:
        root: of the run, a path or a URL.
        options: of the object store, as fsspec takes them.
        with_superseded: also those that a rollback set aside under another name.

    Raises:
        StorageError: it cannot be read.
    """
    return _list(_find(root, options), with_superseded)


def survey(root: Root, options: Options = None) -> tuple[list[Step], set[str]]:
    """Returns `list_steps`, and the names of the steps that notes of unfinished rollbacks wait for.

    Raises:
        StorageError: it cannot be read.
    """
    found = _find(root, options)
    return _list(found), {note.step for note in found.notes if not note.is_committed}


def _list(found: _Found, with_superseded: bool = False) -> list[Step]:
    is_far = any(isinstance(store, RemoteStore) for _, store in found.steps)
    with ThreadPoolExecutor(_LOOKERS if is_far else 1, "ckpt-look") as pool:
        steps = [
            step for step in pool.map(lambda item: look_at(*item), found.steps) if _is_visible(step)
        ]
        victims = _victims(found)
        steps = [_judged(step, victims) for step in steps]
        if not with_superseded:
            return [step for step in steps if not step.superseded_by]
        steps += [
            replace(look_at(number, store), superseded_by=by) for number, store, by in found.aside
        ]
    return sorted(steps, key=lambda step: (step.number, bool(step.superseded_by)))


@dataclass(frozen=True, slots=True)
class _Found:
    """What is named like a step under a root, by number; what rollbacks set aside; their notes; and
    all other names but hidden ones.
    """

    steps: list[tuple[int, Store]]
    aside: list[tuple[int, Store, str]]
    notes: list[RollbackNote]
    others: list[str]


def _find(root: Root, options: Options) -> _Found:
    run: LocalStore | RemoteStore
    if is_url(root):
        run = RemoteStore(root, options)
        stores: dict[str, Store] = dict(run.enter_all())
        files = list(run.list_files())
    else:
        run = LocalStore(Path(local_path(root)))
        try:
            entries = sorted(os.scandir(root), key=lambda e: e.name)
        except FileNotFoundError:
            return _Found([], [], [], [])
        except OSError as error:
            raise failed("list", os.fspath(root), error) from error
        files = [e.name for e in entries if e.is_file(follow_symlinks=False)]
        stores = {e.name: LocalStore(e.path) for e in entries if e.is_dir()}
    steps = sorted(
        ((int(m[1]), store) for n, store in stores.items() if (m := _STEP.fullmatch(n))),
        key=lambda item: item[0],
    )
    moved = [(m, store) for n, store in stores.items() if (m := SUPERSEDED.fullmatch(n))]
    aside = [(int(s[1]), store, m[2]) for m, store in moved if (s := _STEP.fullmatch(m[1]))]
    taken = {name for name in stores if _STEP.fullmatch(name) or SUPERSEDED.fullmatch(name)}
    others = sorted(
        f"{name}/" if name in stores else name
        for name in (*stores, *files)
        if name not in taken and not name.startswith(".")
    )
    return _Found(steps, aside, read_notes(run, files), others)


def list_all(root: Root, options: Options = None) -> tuple[list[Step], list[str]]:
    """Returns all steps, superseded ones too, and the other names under a root: folders end in a
    slash, hidden names are left out.

    Raises:
        StorageError: it cannot be read.
    """
    found = _find(root, options)
    return _list(found, with_superseded=True), found.others


def rollbacks(root: Root, options: Options = None) -> list[tuple[RollbackNote, bool]]:
    """Returns the notes of rollbacks in a root, and whether each is in effect.

    Raises:
        StorageError: it cannot be read.
    """
    found = _find(root, options)
    return [(note, _is_in_effect(note, found)) for note in found.notes]


def _is_in_effect(note: RollbackNote, found: _Found) -> bool:
    """Tells whether the first step of a new branch was committed."""
    if note.is_committed:
        return True
    for number, store in found.steps:
        if store.url.rstrip("/").rpartition("/")[2] == note.step:
            step = look_at(number, store)
            return (
                not step.problem
                and step.manifest is not None
                and step.manifest.attempt == note.attempt
            )
    return False


def _victims(found: _Found) -> dict[tuple[str, str], str]:
    """Returns name and attempt of the steps that rollbacks in effect superseded, each with the step
    that took its place.
    """
    return {
        victim: note.step
        for note in found.notes
        if _is_in_effect(note, found)
        for victim in note.victims.items()
    }


def _judged(step: Step, victims: Mapping[tuple[str, str], str]) -> Step:
    by = victims.get((step.name, step.manifest.attempt if step.manifest else ""), "")
    return replace(step, superseded_by=by) if by else step


def _is_visible(step: Step) -> bool:
    return (
        not is_url(step.path)
        or not step.problem
        or any(name in INDEXES for name in _open(step).list_files())
    )


def _open(step: Step) -> Store:
    return step.store or LocalStore(step.path)


def look_at(number: int | None, store: Store | Path) -> Step:
    """Looks at one step: every file that its manifest names is there with its size, and the index
    has its checksum.

    Args:
        number: of the step, by its name; None where the name says none.
        store: its files, or its directory.
    """
    store = LocalStore(store) if isinstance(store, Path) else store
    path = store.url if is_url(store.url) else Path(store.url)
    try:
        files = store.list_files()
        manifest = find(store)
        problem = (
            _foreign_problem(store)
            if manifest is None
            else first_problem(manifest, store) or _other_number(number, manifest)
        )
        return Step(
            number or 0, path, sum(files.values()), manifest, problem, store, is_pinned=PIN in files
        )
    except CheckpointError as error:
        return Step(number or 0, path, 0, None, str(error), store)
    finally:
        store.close()


def _other_number(number: int | None, manifest: Manifest) -> str:
    """Returns what is wrong with a step that is a copy of another one, "" for nothing."""
    is_other = number is not None and manifest.step not in (None, number)
    return f"it is a copy of step {manifest.step}, by its manifest" if is_other else ""


def _foreign_problem(store: Store) -> str:
    try:
        detect_in(store)
    except CheckpointError:
        return "no .metadata: the save never finished"
    return ""


def unsound(step: Step) -> str:
    """Reads the index of a step without a manifest, and returns why it cannot be resumed from; ""
    for nothing, and for a sealed step.
    """
    if step.problem or step.manifest is not None:
        return step.problem
    try:
        prove(_open(step))
    except CheckpointError as error:
        return str(error)
    return ""


def damage(step: Step | None) -> str:
    """Reads a step in full and returns what is wrong with it, "" for nothing; without a manifest
    there is nothing to compare.
    """
    if step is None or step.problem or step.manifest is None:
        return unsound(step) if step is not None else "it is gone"
    store = _open(step)
    try:
        return first_problem(step.manifest, store, reads_all=True)
    finally:
        store.close()


def latest(
    root: Root, verify: bool = False, skip: Container[Path | str] = (), options: Options = None
) -> Latest:
    """Finds the newest step that is complete, by number; those that a rollback superseded are none.

    Args:
        root: of the run, a path or a URL.
        verify: also read every byte, and pass over a step whose checksums are wrong.
        skip: paths that are known to be damaged.
        options: of the object store, as fsspec takes them.
    """
    found = _find(root, options)
    return _latest(found, verify, skip, _victims(found))


def _latest(
    found: _Found, verify: bool, skip: Container[Path | str], victims: Mapping[tuple[str, str], str]
) -> Latest:
    passed: list[tuple[Path | str, str]] = []
    for number, store in reversed(found.steps):
        step = _judged(look_at(number, store), victims)
        if step.path in skip or step.superseded_by or not _is_visible(step):
            continue
        problem = damage(step) if verify else unsound(step)
        if not problem:
            return Latest(step, passed)
        passed.append((step.path, problem))
    return Latest(None, passed)


def latest_of(
    roots: Sequence[Root], skip: Container[Path | str] = (), options: Options = None
) -> Latest:
    """Finds the newest complete step of several places, the first of them where they are equal;
    arguments as for `latest`.

    A rollback that is in effect in one of them is so in all: a mirror may not have heard of it yet.
    """
    places = [_find(root, options if is_url(root) else None) for root in roots]
    victims = {victim: by for found in places for victim, by in _victims(found).items()}
    best = [_latest(found, False, skip, victims) for found in places]
    step = max((b.step for b in best if b.step is not None), key=lambda s: s.number, default=None)
    return Latest(step, [item for b in best for item in b.passed_over])


def find_step(root: Root, name: str, options: Options = None) -> Step | None:
    """Returns the step of that name, None where there is none.

    Raises:
        StorageError: the root cannot be read.
    """
    number, store = next(
        (
            (n, s)
            for n, s in _find(root, options).steps
            if s.url.rstrip("/").rpartition("/")[2] == name
        ),
        (0, None),
    )
    step = look_at(number, store) if store is not None else None
    return step if step is not None and _is_visible(step) else None


def number_of(path: Root) -> int:
    """Returns the step of a checkpoint by its manifest or, where there is none, by the last number
    in its name; 0 where that has none.
    """
    manifest = (
        look_at(None, Path(path)).manifest if not is_url(path) and os.path.isdir(path) else None
    )
    digits = re.findall(r"\d+", os.path.basename(os.fspath(path).rstrip("/")))
    return int((manifest and manifest.step) or (digits[-1] if digits else 0))
