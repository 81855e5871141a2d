"""One step of a run: whether it is complete, and whether a job can resume from it.

It looks at the files themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ckpt_tools.errors import (
    CheckpointError,
    StorageError,
    is_unreadable,
    printable,
)
from ckpt_tools.formats.base import MANIFEST, PIN, note_of
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.registry import (
    Source,
    check_metadata,
    detect_in,
    open_source_in,
)
from ckpt_tools.publish.check_manifest import first_problem
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.step_names import STEP_PATTERNS, number_in, step_name
from ckpt_tools.run.base import RunRoot
from ckpt_tools.storage import LocalStore, Store, open_store, place_of

if TYPE_CHECKING:
    from ckpt_tools.storage import RemoteStore

_UNFINISHED = "no .metadata: the save never finished"


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
        """Returns the names that `ckpt thin` has removed from it; none for a full step."""
        return self.manifest.thinned if self.manifest is not None else []

    @property
    def not_counted(self) -> str:
        """Returns why no rule of retention counts it; "" if the rules do."""
        if self.problem:
            return f"it is not complete: {self.problem}"
        if self.twin:
            return self.twin_note
        return "" if self.counts or self.superseded_by else "no save of this tool wrote it"

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


def _as_bucket(store: Store) -> RemoteStore | None:
    """Returns a store as one of objects; None if it is a directory."""
    return cast("RemoteStore", store) if store.capabilities.is_remote else None


def store_of(step: Step) -> Store:
    return step.store or LocalStore(step.path)


def open_step(step: Step) -> Source:
    """Opens a step by its files as they were listed.

    Raises:
        CheckpointError: see `registry.open_source`.
    """
    return open_source_in(store_of(step))


def look(root: RunRoot, number: int | None, store: Store) -> Step:
    """Looks at one step of a run, as `look_at` does.

    Nothing is read again of a step whose files are those of an earlier look.
    """
    name = store.url.rstrip("/").rpartition("/")[2]
    listing = root.snapshot(store)
    known: Step | None = root.looks.get(name, listing) if listing is not None else None
    if known is not None:
        return replace(known, store=store)
    step = look_at(number, store)
    if None not in (listing, number, step.manifest) and not step.problem:
        assert step.manifest is not None
        root.looks.add(name, listing, replace(step, store=None), len(step.manifest.tensors))
    return step


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
        # a second try in a bucket lists again
        known = files if _as_bucket(store) is None else None
        manifest = find_manifest(store, files=known)
        problem = (
            _foreign_problem(store)
            if manifest is None
            else first_problem(manifest, store, known=known) or _other_number(number, manifest)
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
        check_metadata(store_of(step))
    except CheckpointError as error:
        if is_unreadable(error):
            raise
        return str(error)
    return ""


def damage(step: Step | None, jobs: int | None = None) -> str:
    """Reads a whole step with so many threads, and returns its problem; "" if it has none.

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
    store = store_of(step)
    try:
        return first_problem(step.manifest, store, reads_all=True, jobs=jobs)
    finally:
        store.close()


def lasting_damage(
    step: Step, jobs: int | None = None, read: Callable[[Step, int | None], str] = damage
) -> str | None:
    """Returns the problem of a step as `read` does; None if the step was removed meanwhile.

    While other processes rename steps, a name can be missing for an instant. So a problem has to be
    there twice.
    """
    problem = read(step, jobs)
    if problem and is_there(step):
        problem = read(step, jobs)
    return problem if not problem or is_there(step) else None


def is_there(step: Step) -> bool:
    """Tells whether a step is still under its name. Retention may remove it while it is read."""
    if isinstance(step.path, Path) and not step.path.exists():
        return False
    bucket, index = _as_bucket(store_of(step)), step.manifest.index if step.manifest else None
    if bucket is not None and index is not None and (version := bucket.version(index[0])):
        return bucket.current_version(index[0]) == version
    now = look_at(step.number, store_of(step))
    if now.error is not None:
        raise now.error
    return now.attempt == step.attempt


def was_complete(step: Step) -> bool:
    """Tells whether a step with a problem was complete once.

    A step with a manifest, or with DCP's index, appeared as a whole. Other writers leave such a
    step when they are killed.
    """
    try:
        names = store_of(step).list_files()
    except StorageError as error:
        if error.is_unreadable:
            raise
        return False
    return dcp.LOOKS_FOR in names or any(note_of(n) == (MANIFEST, "") for n in names)


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
