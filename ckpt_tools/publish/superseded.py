"""Notes of a rollback: which steps the first step of a new branch supersedes.

A job that resumes from step 100 while 200 and 300 exist leaves their branch. It writes a note
before its first save. The note takes effect at the instant at which that save is committed: from
then on the old steps are neither the newest ones nor counted. They are then given another name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_tools.core.logs import log
from ckpt_tools.errors import printable
from ckpt_tools.publish.flock import owner_problem
from ckpt_tools.publish.local import sync_directory
from ckpt_tools.storage import LocalStore, RemoteStore, is_url, read, write_file
from ckpt_tools.storage.local import failed

_NOTE = re.compile(r"\.ckpt\.rollback\.[0-9a-f]{8}\.json")
_MAX_NOTE_BYTES = 4 << 20
SUPERSEDED = re.compile(r"(.+)\.superseded-([0-9a-f]{8})")
Options = Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class RollbackNote:
    """A rollback of a run.

    Attributes:
        step, attempt: name of the first new step, and the id of the attempt that writes it.
        resumed: number of the step that the new branch begins at.
        victims: name of each superseded step to the attempt that wrote it, "" where it has no
            manifest.
        is_committed: whether the first new step was seen complete.
    """

    step: str
    attempt: str
    resumed: int
    victims: Mapping[str, str]
    is_committed: bool = False

    @property
    def file(self) -> str:
        """Its name in the root."""
        return f".ckpt.rollback.{self.attempt[:8]}.json"

    def render(self) -> bytes:
        """Returns it as JSON."""
        fields = {
            "step": self.step,
            "attempt": self.attempt,
            "resumed": self.resumed,
            "is_committed": self.is_committed,
        }
        return (
            json.dumps(
                {"ckpt_rollback": 1, **fields, "victims": dict(self.victims)}, indent=1
            ).encode()
            + b"\n"
        )

    @property
    def committed(self) -> RollbackNote:
        """The same, in effect whether or not its step is still there."""
        return replace(self, is_committed=True)


def _parse(data: bytes) -> RollbackNote | None:
    with suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        body = json.loads(data)
        if body["ckpt_rollback"] == 1 and re.fullmatch(
            r"[0-9a-f]{8}-[0-9a-f-]{27}", body["attempt"]
        ):
            victims = {str(name): str(attempt) for name, attempt in body["victims"].items()}
            return RollbackNote(
                str(body["step"]),
                body["attempt"],
                int(body["resumed"]),
                victims,
                body["is_committed"] is True,
            )
    return None


def read_notes(store: LocalStore | RemoteStore, names: Iterable[str]) -> list[RollbackNote]:
    """Returns the notes among the files of a root. Malformed files are no notes."""
    found = []
    for name in names:
        if _NOTE.fullmatch(name) and store.size(name) <= _MAX_NOTE_BYTES and _is_own(store, name):
            note = _parse(read(store, name))
            if note is not None and note.file == name:
                found.append(note)
    return found


def _is_own(store: LocalStore | RemoteStore, name: str) -> bool:
    """Tells whether the job may trust a note: somebody else's could set steps aside.

    In a bucket whoever can write a note can remove the steps as well.
    """
    if isinstance(store, RemoteStore):
        return True
    path = store.root / name
    problem = owner_problem(path.lstat(), store.root.stat())
    if problem:
        log.warning("a note of a rollback is not used, since %s: %s", problem, printable(str(path)))
    return not problem


def write_note(root: str | os.PathLike[str], note: RollbackNote, options: Options) -> None:
    """Writes a note, over an older form of it.

    Raises:
        StorageError: it could not be written.
    """
    if is_url(root):
        RemoteStore(root, options).put(note.file, note.render())
        return
    path, new = Path(root) / note.file, Path(root) / f"{note.file}.new"
    try:
        new.unlink(missing_ok=True)
        write_file(LocalStore(Path(root)), new.name, note.render())
        os.replace(new, path)
    except OSError as error:
        raise failed("write", path, error) from error
    sync_directory(Path(root))


def remove_note(root: str | os.PathLike[str], note: RollbackNote, options: Options) -> None:
    """Removes a note.

    Raises:
        StorageError: it could not be removed.
    """
    if is_url(root):
        RemoteStore(root, options).remove([note.file])
        return
    try:
        (Path(root) / note.file).unlink(missing_ok=True)
    except OSError as error:
        raise failed("remove", Path(root) / note.file, error) from error
