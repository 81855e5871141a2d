"""The checkpoints of one run, `ROOT/step-00000500`, on a disk or in an object store: which there are, which are complete, which may go.

Truth is found by looking, never in a pointer file. Unknown names are never touched. May import levels 0 to 3, commit, manifest, integrity.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_tools.commit import make_folder, sync_directory, trash_path, try_lock
from ckpt_tools.errors import CheckpointError, NotACheckpointError, StorageError, printable
from ckpt_tools.formats import INDEXES, detect_in
from ckpt_tools.integrity import first_problem
from ckpt_tools.manifest import Manifest, find, names_in
from ckpt_tools.storage import LocalStore, RemoteStore, Store, is_url
from ckpt_tools.storage.local import failed

log = logging.getLogger("ckpt_tools")
_STEP = re.compile(r"(?:step|checkpoint|global_step|epoch)[-_]?(\d{1,18})")
LOCK = ".ckpt.lock"
_LOOKERS = 16  # each waits for a store
Root = str | os.PathLike[str]
Options = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Step:
    """One checkpoint of a run.

    `path` is the URL of one in an object store; `manifest` is None for one that this tool did not write; `problem` says why it cannot be
    resumed from, "" where it can; `store` has its files.
    """

    number: int
    path: Path | str
    nbytes: int
    manifest: Manifest | None
    problem: str
    store: Store | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The last segment of its path."""
        return os.path.basename(self.path)

    @property
    def is_ours(self) -> bool:
        """Tells whether this tool wrote it, under the name that it gives, so that retention may remove it."""
        return self.manifest is not None and self.name == step_name(self.number) and not os.path.islink(self.path)


@dataclass(frozen=True, slots=True)
class Latest:
    """The step to resume from, and for each newer one that was passed over, why."""

    step: Step | None
    passed_over: Sequence[tuple[Path | str, str]]


def step_name(number: int) -> str:
    """Returns the name of a step's directory."""
    return f"step-{number:08d}"


def list_steps(root: Root, options: Options = None) -> list[Step]:
    """Returns the steps directly under a directory or prefix, by number. Reads names, sizes and manifests, no data.

    In an object store, what was never committed is no step.

    Args:
        root: of the run, a path or a URL.
        options: of the object store, as fsspec takes them.

    Raises:
        StorageError: it cannot be read.
    """
    found = _find(root, options)
    with ThreadPoolExecutor(_LOOKERS if is_url(root) else 1, "ckpt-look") as pool:
        return [step for step in pool.map(lambda item: look_at(*item), found) if _is_visible(step)]


def _find(root: Root, options: Options) -> list[tuple[int, Store]]:
    """Returns the numbers and stores of what is named like a step, by number."""
    if is_url(root):
        run = RemoteStore(root, options)
        return sorted(((int(m[1]), run.enter(n)) for n in run.folders() if (m := _STEP.fullmatch(n))), key=lambda item: item[0])
    try:
        found = [(int(m[1]), e.path) for e in os.scandir(root) if (m := _STEP.fullmatch(e.name)) and e.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise failed("list", os.fspath(root), error) from error
    return [(number, LocalStore(path)) for number, path in sorted(found)]


def _is_visible(step: Step) -> bool:
    return not is_url(step.path) or not step.problem or any(name in INDEXES for name in _open(step).list_files())


def _open(step: Step) -> Store:
    return step.store or LocalStore(step.path)


def look_at(number: int, store: Store | Path) -> Step:
    """Looks at one step: every file that its manifest names is there with its size, and the index has its checksum."""
    store = LocalStore(store) if isinstance(store, Path) else store
    path = store.url if is_url(store.url) else Path(store.url)
    try:
        nbytes = sum(store.list_files().values())
        manifest = find(store)
        problem = _foreign_problem(store) if manifest is None else first_problem(manifest, store)
        return Step(number, path, nbytes, manifest, problem, store)
    except CheckpointError as error:
        return Step(number, path, 0, None, str(error), store)
    finally:
        store.close()


def _foreign_problem(store: Store) -> str:
    try:
        detect_in(store)
    except CheckpointError:
        return "no .metadata: the save never finished"
    return ""


def damage(step: Step) -> str:
    """Reads a step in full and returns what is wrong with it, "" for nothing; without a manifest there is nothing to compare."""
    if step.problem or step.manifest is None:
        return step.problem
    store = _open(step)
    try:
        return first_problem(step.manifest, store, reads_all=True)
    finally:
        store.close()


def latest(root: Root, verify: bool = False, skip: Container[Path | str] = (), options: Options = None) -> Latest:
    """Finds the newest step that is complete, by number.

    Args:
        root: of the run, a path or a URL.
        verify: also read every byte, and pass over a step whose checksums are wrong.
        skip: paths that are known to be damaged.
        options: of the object store, as fsspec takes them.
    """
    passed: list[tuple[Path | str, str]] = []
    for number, store in reversed(_find(root, options)):
        step = look_at(number, store)
        if step.path in skip or not _is_visible(step):
            continue
        problem = damage(step) if verify else step.problem
        if not problem:
            return Latest(step, passed)
        passed.append((step.path, problem))
    return Latest(None, passed)


def number_of(path: Root) -> int:
    """Returns the step of a checkpoint by its manifest or, where there is none, by the last number in its name; 0 where that has none."""
    manifest = look_at(0, Path(path)).manifest if not is_url(path) and os.path.isdir(path) else None
    digits = re.findall(r"\d+", os.path.basename(os.fspath(path).rstrip("/")))
    return int((manifest and manifest.step) or (digits[-1] if digits else 0))


def latest_of(roots: Sequence[Root], skip: Container[Path | str] = (), options: Options = None) -> Latest:
    """Finds the newest complete step of several places, the first of them where they are equal; arguments as for `latest`."""
    found = [latest(root, skip=skip, options=options if is_url(root) else None) for root in roots]
    step = max((f.step for f in found if f.step is not None), key=lambda s: s.number, default=None)
    return Latest(step, [item for f in found for item in f.passed_over])


# ---- retention -------------------------------------------------------------------------------------------------------------


def removable(steps: Iterable[Step], keep_last: int, keep_every: int | None, kept: Iterable[Path | str] = ()) -> list[Step]:
    """Returns the steps that retention lets go: never one of the newest `keep_last` complete ones, never the only one.

    Args:
        steps: from `list_steps`; incomplete and foreign ones are neither counted nor removed.
        keep_last: how many of the newest complete ones stay, at least 1.
        keep_every: steps whose number is a multiple of this stay for good.
        kept: paths that stay whatever the rules say.
    """
    complete = [s for s in steps if not s.problem]
    stay = {*kept, *(s.path for s in complete[-max(1, keep_last) :])}
    return [s for s in complete if s.is_ours and s.path not in stay and not (keep_every and s.number % keep_every == 0)]


def prune(
    root: Root,
    keep_last: int,
    keep_every: int | None = None,
    kept: Iterable[Path | str] = (),
    dry_run: bool = False,
    options: Options = None,
) -> list[Step]:
    """Removes the steps that retention lets go, oldest first, and returns them; arguments as for `removable`.

    Raises:
        NotACheckpointError: there is no such directory.
        StorageError: one could not be removed; those before it are gone.
    """
    if not is_url(root) and not os.path.isdir(root):
        raise NotACheckpointError(f"not a directory: {printable(str(root))}")
    steps = removable(list_steps(root, options), keep_last, keep_every, kept)
    for step in steps if not dry_run else ():
        remove(step)
    return steps


def remove(step: Step) -> None:
    """Removes a step: first its name, or its index, in one instant, then its bytes.

    Raises:
        StorageError: it could not be removed.
    """
    assert step.manifest is not None
    if isinstance(step.store, RemoteStore):
        files = step.store.list_files()
        for part in ([n for n in files if n in INDEXES], names_in(step.store), list(files)):
            step.store.remove(part)
        return
    path = Path(step.path)
    trash = trash_path(path, step.manifest.attempt)
    try:
        os.rename(path, trash)
        sync_directory(path.parent)
        shutil.rmtree(trash)
    except OSError as error:
        raise failed("remove", path, error) from error


# ---- one job at a time -----------------------------------------------------------------------------------------------------


def lock(root: Path) -> int:
    """Claims a root, made if it is not there, for this process, as long as it lives; the kernel releases the open file.

    Raises:
        StorageError: another live job holds it; host, pid and time are named. Where the file system has no locks, a warning is logged.
    """
    path = root / LOCK
    try:
        make_folder(root.absolute())
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise failed("create", path, error) from error
    is_mine = try_lock(fd)
    if is_mine is False:
        holder = printable(os.pread(fd, 4096, 0).decode("utf-8", "replace").strip()) or "unknown"
        os.close(fd)
        raise StorageError(
            f"another job saves to {printable(str(root))}: {holder}", hint="give each job a root of its own, or end that job first"
        )
    if is_mine is None:
        log.warning("%s: no file locks here; a second job would not be refused, nor a dead one's leftovers removed", printable(str(root)))
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{text}\n".encode(), 0)
    os.fsync(fd)  # so that other nodes see it
    return fd


def see_lock(root: Path, written: bytes, rank: int) -> None:
    """Makes sure that a directory is the one that another rank has just locked, by what that rank has written there.

    Raises:
        StorageError: it is not there after ten seconds.
    """
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        with suppress(OSError):
            if (root / LOCK).read_bytes() == written:
                return
        time.sleep(0.1)
    raise StorageError(
        f"rank {rank} does not see rank 0's directory: {printable(str(root))} is not shared",
        hint="save to a filesystem that all nodes mount",
    )
