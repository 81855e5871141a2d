"""Finds our steps among those of a host, and loads parts of a step. Several hosts use it."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ckpt_tools.core.logs import log
from ckpt_tools.errors import NotACheckpointError, PlanError, printable
from ckpt_tools.formats.base import note_of
from ckpt_tools.loop.loading.load import load
from ckpt_tools.loop.loading.reader import open_checkpoint
from ckpt_tools.loop.manager import CheckpointManager
from ckpt_tools.loop.options import GONE, RENAMED, GroupedOptions, Writing, grouped
from ckpt_tools.operations.convert.convert import convert
from ckpt_tools.publish.step_names import number_in
from ckpt_tools.run.retention import Retention
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.steps import RunListing
from ckpt_tools.storage import is_url

_INDEX = ".metadata"
_copies: dict[str, str] = {}  # directories made by `local_copy`, and the URLs of their steps


def ours(checkpoint: str | os.PathLike[str] | None) -> str:
    """Returns the path or URL of a checkpoint that this tool loads; "" for one of the host's form.

    It has DCP's index at its top, as each of our steps has. A directory that `local_copy` has made
    stands for the step in the object store.
    """
    if checkpoint is None or is_url(checkpoint):
        return str(checkpoint or "")
    folder = Path(checkpoint)
    if str(folder) in _copies:
        return _copies[str(folder)]
    return str(folder) if (folder / _INDEX).is_file() else ""


def choose_newest(manager: CheckpointManager, folder: str, prefix: str, last_file: str) -> str:
    """Returns on all ranks the newest sound step, or a newer complete checkpoint of the host.

    Args:
        manager: of the run.
        folder: with the checkpoints of the host.
        prefix: of their names, before the number.
        last_file: which the host writes last.

    Raises:
        NotACheckpointError: there is neither.
    """
    sound = manager.newest_sound()
    foreign = [
        (number, path)
        for path in Path(folder).glob(f"{prefix}*")
        if (number := number_in(path.name)) is not None
        and (path / last_file).is_file()
        and not ours(path)
    ]
    number, path = max(foreign, default=(-1, Path()))
    if sound is not None and sound[0] > number and ours(sound[1]):
        return os.fspath(sound[1])
    if not foreign:
        raise NotACheckpointError(
            f"no complete checkpoint in {printable(str(manager.root))}",
            hint="begin without a checkpoint to resume from",
        )
    log.warning("%s was written by the trainer itself, which reads it", printable(str(path)))
    return str(path)


def move_foreign(path: str) -> None:
    """Gives a directory of the host another name, if a step is to have its name."""
    if is_url(path) or not os.path.isdir(path) or ours(path):
        return
    number = next(n for n in range(1, 1000) if not os.path.lexists(f"{path}.set-aside-{n}"))
    os.rename(path, f"{path}.set-aside-{number}")
    log.warning("%s is not a step of this tool, and is now %s.set-aside-%d", path, path, number)


def contents(folder: str) -> dict[str, bytes]:
    """Returns the files of a directory by name."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def put_model(step: str, folder: str, kind: str) -> None:
    """Writes a step's model into a folder, in Hugging Face's form, and replaces what is there.

    Args:
        step: path or URL, with the configs in it.
        folder: of the result, which may have other files.
        kind: `"hf"` or `"peft"`.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="_") as beside:
        convert(step, Path(beside, "out"), to=kind, base=step)
        files = [p for p in Path(beside, "out").iterdir() if note_of(p.name) is None]
        shards = [p for p in files if p.suffix == ".safetensors"]
        if len(shards) == 1 and kind == "hf":  # one file needs no index
            files = [p for p in files if p.name != "model.safetensors.index.json"]
        for old in Path(folder).glob("*model*"):  # a loader could take them for the new ones
            if old.name.endswith((".safetensors", ".safetensors.index.json", ".bin")):
                old.unlink()
        for path in files:
            is_only = path in shards and len(shards) == 1 and kind == "hf"
            path.replace(Path(folder, "model.safetensors" if is_only else path.name))


class Watch:
    """Asks a manager after each step whether to save, and whether the job was told to end.

    Attributes:
        manager: of the run.
        is_pending: whether a save was asked for after the last step.
        shown: the newest step that callbacks of the host could see complete; None for none.
    """

    shown: int | None = None

    def __init__(self, manager: CheckpointManager) -> None:
        """Stores the manager."""
        self.manager, self._signal, self.is_pending = manager, 0, False

    def wants_save(self, step: int) -> bool:
        """Tells on all ranks whether to save now."""
        self._signal = self.manager.preempted()
        self.is_pending = self.manager.should_save(step) or bool(self._signal)
        return self.is_pending

    def end_if_preempted(self) -> None:
        """Ends the process after the save that SIGTERM or SIGUSR1 has asked for.

        Raises:
            SystemExit: with 128 and the number of the signal.
        """
        if self._signal:
            self.manager.wait()
            raise SystemExit(128 + self._signal)


def local_copy(
    manager: CheckpointManager, checkpoint: str, folder: str, names: Sequence[str]
) -> str:
    """Returns a local directory for a host that reads small files itself.

    For a step in an object store, it has copies of these files, and `ours` knows its URL.

    Args:
        manager: for the options of its store.
        checkpoint: path or URL.
        folder: a temporary directory.
        names: of small files.
    """
    if not is_url(checkpoint):
        return checkpoint
    copied = Path(folder, checkpoint.rstrip("/").rpartition("/")[2])
    copied.mkdir()
    with open_checkpoint(checkpoint, storage_options=manager.storage_options) as step:
        for name in names:
            (copied / name).write_bytes(step.file(name))
    _copies[str(copied)] = checkpoint
    return str(copied)


def load_keys(
    manager: CheckpointManager, where: str, state: MutableMapping[str, Any], keys: Sequence[str]
) -> None:
    """Loads some top-level keys of a step into a state. Keys that it lacks are logged.

    Args:
        manager: for the options of its store.
        where: path or URL of the step.
        state: by top-level key.
        keys: what to load.
    """
    options = manager.storage_options
    with open_checkpoint(where, storage_options=options) as step:
        stored = {name.partition(".")[0] for name in step.names()}
    if missing := [key for key in keys if key not in stored]:
        log.warning("%s has no %s: it starts anew", printable(where), ", ".join(missing))
    there = [key for key in keys if key in stored]
    rest = state.keys() - set(keys)  # such as the model, by whose names an optimizer is stored
    if there:
        wanted = {key: state[key] for key in (*rest, *there)}
        globs = [f"{key}.*" for key in there] if rest else []
        report = load(where, wanted, select=globs, storage_options=options)
        if manager.rank == 0:
            log.info("%s: loaded %s", printable(where), ", ".join(there))
        # a host loads the keys one after the other: none of them leaves the others out
        for note in (n for n in report.notes if n != report.left_out_note):
            if manager.rank == 0:
                log.warning("%s: %s", printable(where), note)


def note_host_files(manager: CheckpointManager, name: str) -> None:
    """Notes the files that the callbacks of a trainer have written into a step: they belong to it.

    Only rank 0 calls it, once the step is complete.

    Args:
        manager: of the run.
        name: of the step.
    """
    root = open_root(manager.root, manager.storage_options)
    step = RunListing(root).find(name)
    if step is not None and step.manifest is not None:
        root.note_host_files(name, step.manifest)


def refuse_release(package: str, releases: tuple[str, str]) -> None:
    """Refuses a release of a host whose own methods this tool does not know.

    A copy of its source that is not installed tells no release: that is logged.

    Args:
        package: of the host.
        releases: the first that is known, and the first that is not known any more.

    Raises:
        PlanError: another release is installed.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        log.warning(
            "the release of %s is not known: expected %s or newer, below %s", package, *releases
        )
        return
    numbers = [tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (found, *releases)]
    if not numbers[1] <= numbers[0] < numbers[2]:
        raise PlanError(
            f"{package} {found} is not known: expected {releases[0]} or newer, below {releases[1]}",
            hint="install such a release; or save with CheckpointManager in a callback of your own",
        )


def options_of(
    given: Mapping[str, Any], *, keep_last: int | None, names: str = "", **usual: Any
) -> dict[str, Any]:
    """Returns the options of a manager inside a trainer.

    Args:
        given: by the user, also under old names.
        keep_last: how many steps the trainer keeps; the user's rules replace it.
        names: of the trainer's steps, if they are not those of a manager.
        **usual: other options that the trainer sets.

    Raises:
        ValueError: `Writing(when_busy="skip")`: the trainer would count a skipped save as done. Or
            an option is out of range.
    """
    old = {name: value for name, value in given.items() if name in RENAMED or name in GONE}
    new = {name: value for name, value in given.items() if name not in old}
    groups = {name: new.pop(name, None) for name in GroupedOptions._fields}
    is_theirs = groups["retention"] is None and "keep_last" not in new
    kept = keep_last if is_theirs else new.pop("keep_last", Retention().last)
    made = grouped(kept, **groups, old=old)
    if made.writing.when_busy != "wait":
        raise ValueError("when_busy: a trainer counts a skipped save as done, so only 'wait' works")
    writing = made.writing
    if names and writing.names == Writing().names:
        writing = replace(writing, names=names)
    return {**usual, **new, **made._asdict(), "writing": writing}
