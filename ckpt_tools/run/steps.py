"""Lists the steps of a run, `ROOT/step-00000500`, and finds the newest one.

There is no file that points to it. Unknown names are never touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ckpt_tools.core.memory import no_gc
from ckpt_tools.errors import (
    NotACheckpointError,
    printable,
)
from ckpt_tools.formats.registry import (
    INDEXES,
)
from ckpt_tools.publish.step_names import STEP, STEP_PATTERNS, number_in, step_name
from ckpt_tools.run.base import RunRoot
from ckpt_tools.run.rollback import SUPERSEDED, RollbackNote, read_notes
from ckpt_tools.run.step import (
    Step,
    damage,
    lasting_damage,
    look,
    look_at,
    refuse_unreadable,
    store_of,
    unsound,
    was_complete,
)
from ckpt_tools.storage import Store, open_store

_LOOKS = 5
_LOOKERS = 16  # each waits for a store


@dataclass(frozen=True, slots=True)
class Latest:
    """The step to resume from, and each newer step that was passed over, with the reason.

    `not_finite` has the paths of those that were passed over for their values alone. `damaged` has
    those of steps that were complete once: they appeared as a whole, so something is lost.
    `blocked` has the files with the name of a later step, which therefore cannot be saved.
    """

    step: Step | None
    passed_over: Sequence[tuple[Path | str, str]]
    not_finite: Sequence[Path | str] = ()
    damaged: Sequence[Path | str] = ()
    blocked: Sequence[str] = ()


def list_steps(root: RunRoot) -> list[Step]:
    """Returns the steps directly under a root, by number, without superseded ones.

    It reads names, sizes and manifests, and no data.

    Raises:
        StorageError: it cannot be read.
    """
    return RunListing(root).steps


class RunListing:
    """The entries of a root. Steps are looked at when they are asked for.

    Every method and property raises StorageError if the root cannot be read.

    Attributes:
        root: the root.
        others: all names but those of steps, without hidden ones. Folders end in a slash.
    """

    def __init__(self, root: RunRoot) -> None:
        """Lists a root."""
        self.root = root
        self._list()

    def _list(self) -> None:
        stores, files = self.root.entries()
        self._folders = sorted(
            ((int(m[1]), store) for n, store in stores.items() if (m := STEP.fullmatch(n))),
            key=lambda item: (item[0], -_pattern_of(*item)),  # of one number, ours is last
        )
        moved = [(m, store) for n, store in stores.items() if (m := SUPERSEDED.fullmatch(n))]
        self._aside = [
            (int(s[1]), store, m[2]) for m, store in moved if (s := STEP.fullmatch(m[1]))
        ]
        taken = {name for name in stores if STEP.fullmatch(name) or SUPERSEDED.fullmatch(name)}
        self.others = sorted(
            f"{name}/" if name in stores else name
            for name in (*stores, *files)
            if name not in taken and not name.startswith(".")
        )
        self._notes = read_notes(self.root, files)

    @property
    def has_folders(self) -> bool:
        """Tells whether there is a folder with the name of a step."""
        return bool(self._folders)

    @property
    def steps(self) -> list[Step]:
        """Returns the steps by number, without superseded ones.

        In an object store, work that was never committed is not a step.
        """
        return [step for step in self._named if not step.superseded_by]

    @cached_property
    def all_steps(self) -> list[Step]:
        """Returns the steps by number, also those that a rollback set aside under another name."""
        aside = [
            replace(look(self.root, number, store), superseded_by=by)
            for number, store, by in self._aside
        ]
        return sorted(
            [*self._named, *aside], key=lambda step: (step.number, bool(step.superseded_by))
        )

    @cached_property
    def _named(self) -> list[Step]:
        """Returns all folders with the name of a step that are shown as steps."""
        for _ in range(_LOOKS):
            if any(store.capabilities.is_remote for _, store in self._folders):
                with ThreadPoolExecutor(_LOOKERS, "ckpt-look") as pool:
                    looks = [*pool.map(self._look_at, self._folders)]
            else:
                with no_gc():  # a thousand manifests are a million objects
                    looks = [*map(self._look_at, self._folders)]
            found = [step for step in looks if step]
            if found or not self._folders:
                break
            self._list()  # a job has replaced all of them since the listing
            self.__dict__.pop("rollbacks", None)
        superseded_by = self.superseded_by
        return _with_twins([_judged(step, superseded_by) for step in found])

    def newer(self, number: int) -> list[Step]:
        """Returns the steps above a number, without superseded ones. It looks at no other step."""
        newer = [
            step for item in self._folders if item[0] > number if (step := self._look_at(item))
        ]
        superseded_by = self.superseded_by if newer else {}
        return [step for step in newer if not _judged(step, superseded_by).superseded_by]

    def find(self, name: str) -> Step | None:
        """Returns the step of that name; None if there is none."""
        return next((self._look_at(item) for item in self._folders if _name(item[1]) == name), None)

    @cached_property
    def rollbacks(self) -> list[tuple[RollbackNote, bool]]:
        """Returns the notes of rollbacks, and whether each is in effect."""
        return [(note, self._is_in_effect(note)) for note in self._notes]

    @property
    def waited_for(self) -> set[str]:
        """Returns the names of the steps that notes of unfinished rollbacks wait for."""
        return {note.step for note in self._notes if not note.is_committed}

    @property
    def superseded_by(self) -> dict[tuple[str, str], str]:
        """Returns the steps that rollbacks in effect superseded, each with the step in its place.

        A step is a pair of name and attempt.
        """
        return {
            key: note.step
            for note, is_in_effect in self.rollbacks
            if is_in_effect
            for key in note.pairs
        }

    def latest(
        self,
        verify: bool,
        skip: Container[Path | str],
        allow_not_finite: bool,
        superseded_by: Mapping[tuple[str, str], str],
        jobs: int | None = None,
        read: Callable[[Step, int | None], str] = damage,
    ) -> Latest:
        """Returns the newest complete step; arguments as for `find_latest`."""
        passed: list[tuple[Path | str, str]] = []
        not_finite: list[Path | str] = []
        damaged: list[Path | str] = []
        for item in reversed(self._folders):
            seen = self._look_at(item)
            if seen is None:
                continue
            step = _judged(seen, superseded_by)
            if step.path in skip or step.superseded_by:
                continue
            refuse_unreadable([step], "which step is the newest complete one")
            problem = lasting_damage(step, jobs, read) if verify else unsound(step)
            if problem is None:
                continue  # a newer one has taken its place
            if problem and was_complete(step):
                damaged.append(step.path)
            if not problem and not allow_not_finite and step.not_finite:
                problem = step.not_finite
                not_finite.append(step.path)
            if not problem:
                return Latest(step, passed, not_finite, damaged)
            passed.append((step.path, problem))
        return Latest(None, passed, not_finite, damaged)

    def blocked_above(self, number: int) -> list[str]:
        """Returns the files that have the name of a step above a number."""
        numbers = {
            name: n for name in self.others if (n := number_in(name)) is not None and n > number
        }
        return [f for f, n in numbers.items() if any(f == step_name(n, p) for p in STEP_PATTERNS)]

    def _look_at(self, item: tuple[int, Store]) -> Step | None:
        """Looks at one folder; returns None if it is not shown as a step, complete or not."""
        step = look(self.root, *item)
        if step.problem and self.root.lists_unfinished:
            # another process may have removed it, or renamed it to this name, at this instant
            return look_at(*item) if os.path.lexists(step.path) else None
        return step if self._shows(step) else None

    def _shows(self, step: Step) -> bool:
        """Tells whether a folder of a bucket is shown as a step."""
        if not step.problem:
            return True
        if not any(name in INDEXES for name in store_of(step).list_files()):
            return False
        # it may have been removed since the listing
        now = open_store(step.path, self.root.options).list_files()
        return any(name in INDEXES for name in now)

    def _is_in_effect(self, note: RollbackNote) -> bool:
        """Tells whether the first step of a new branch was committed."""
        if note.is_committed:
            return True
        for number, store in self._folders:
            if _name(store) == note.step:
                step = look(self.root, number, store)
                return step.error is not None or (  # then nobody counts the other branch's steps
                    not step.problem
                    and step.manifest is not None
                    and step.manifest.attempt == note.attempt
                )
        return False


def _name(store: Store) -> str:
    return store.url.rstrip("/").rpartition("/")[2]


def _pattern_of(number: int, store: Store) -> int:
    """Returns the place of a step's name in `STEP_PATTERNS`; their number for none."""
    names = [step_name(number, pattern) for pattern in STEP_PATTERNS]
    return names.index(_name(store)) if _name(store) in names else len(names)


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


def _judged(step: Step, superseded_by: Mapping[tuple[str, str], str]) -> Step:
    by = superseded_by.get((step.name, step.attempt), "")
    return replace(step, superseded_by=by) if by else step


def find_latest(
    root: RunRoot,
    *others: RunRoot,
    verify: bool = False,
    skip: Container[Path | str] = (),
    allow_not_finite: bool = False,
    jobs: int | None = None,
    read: Callable[[Step, int | None], str] = damage,
) -> Latest:
    """Finds the newest complete step by number. Superseded steps do not count.

    A rollback that is in effect in one of several places is so in all: a mirror may not have heard
    of it yet.

    Args:
        root: of the run.
        others: places with the same run, such as its mirror. Of equal steps, the first is taken.
        verify: also read every byte, and pass over a step whose checksums are wrong.
        skip: paths that are known to be damaged.
        allow_not_finite: take also a step whose save found NaN or infinity.
        jobs: threads that read with `verify`.
        read: returns the problem of a step with `verify`, as `damage` does.

    Raises:
        StorageError: a root cannot be read, or a step that may be the newest.
    """
    best = Latest(None, ())
    for _ in range(_LOOKS):
        places = [RunListing(place) for place in (root, *others)]
        superseded_by = {key: by for found in places for key, by in found.superseded_by.items()}
        rules = verify, skip, allow_not_finite, superseded_by, jobs, read
        latest = [place.latest(*rules) for place in places]
        steps = [found.step for found in latest if found.step is not None]
        step = max(steps, key=lambda step: step.number, default=None)
        best = Latest(
            step,
            [item for found in latest for item in found.passed_over],
            [path for found in latest for path in found.not_finite],
            [path for found in latest for path in found.damaged],
            places[0].blocked_above(step.number if step is not None else -1),
        )
        if step is not None or best.passed_over or not any(found.has_folders for found in places):
            break  # else a job has replaced all of them since the listing
    return best


def no_steps(root: RunRoot) -> NotACheckpointError:
    """Returns the error of a command for runs that was given something else.

    Raises:
        NotACheckpointError: not even a directory is there.
    """
    root.check_exists()
    path = str(root.path)
    runs = runs_below(path)
    return NotACheckpointError(
        f"no steps in {printable(path)}",
        hint=(
            f"runs lie below: {printable(', '.join(runs))}"
            if runs
            else "give the directory of a run, in which the steps lie: RUN, not RUN/step-00000100"
        ),
    )


def runs_below(root: str) -> list[str]:
    """Returns the directories below a directory that hold steps, up to 8; none for a URL."""
    found: list[str] = []
    with suppress(OSError):
        for entry in sorted(os.scandir(root), key=lambda e: e.name):
            with suppress(OSError):
                inner = os.scandir(entry.path) if entry.is_dir(follow_symlinks=False) else ()
                if any(number_in(e.name) is not None and e.is_dir() for e in inner):
                    found.append(entry.name)
    return found[:8]
