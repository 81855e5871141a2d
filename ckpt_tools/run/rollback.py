"""Notes of a rollback: the steps that the first step of a new branch supersedes.

A job that resumes from step 100 while 200 and 300 exist leaves their branch. It writes a note
before its first save. The note takes effect at the instant at which that save is committed: from
then on the old steps are neither the newest ones nor counted. They are then given another name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from ckpt_tools.formats.base import SHORT_ID, is_attempt_id
from ckpt_tools.run.base import RunRoot
from ckpt_tools.storage.base import MAX_NOTE_BYTES

_NOTE = re.compile(rf"\.ckpt\.rollback\.{SHORT_ID}\.json")
SUPERSEDED = re.compile(rf"(.+)\.superseded-({SHORT_ID})")


@dataclass(frozen=True, slots=True)
class RollbackNote:
    """A rollback of a run.

    Attributes:
        step, attempt: name of the first new step, and the id of the attempt that writes it.
        resumed: number of the step that the new branch begins at.
        superseded: name of each superseded step to the attempt that wrote it, "" where it has no
            manifest. If disk and mirror thinned a step separately, these are two attempts, with a
            space between them.
        is_committed: whether the first new step was seen complete.
    """

    step: str
    attempt: str
    resumed: int
    superseded: Mapping[str, str]
    is_committed: bool = False

    @property
    def file(self) -> str:
        """Returns the name of the note in the root."""
        return f".ckpt.rollback.{self.attempt[:8]}.json"

    def render(self) -> bytes:
        """Returns the note as JSON."""
        fields = {
            "step": self.step,
            "attempt": self.attempt,
            "resumed": self.resumed,
            "is_committed": self.is_committed,
        }
        return (
            json.dumps(
                {"ckpt_rollback": 1, **fields, "victims": dict(self.superseded)}, indent=1
            ).encode()
            + b"\n"
        )

    def supersedes(self, name: str, attempt: str) -> bool:
        """Tells whether a step is one of the superseded ones."""
        return name in self.superseded and attempt in self.superseded[name].split(" ")

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """Returns name and attempt of each superseded step."""
        return {
            (n, attempt) for n, found in self.superseded.items() for attempt in found.split(" ")
        }

    @property
    def committed(self) -> RollbackNote:
        """Returns the same note, in effect even if its step is removed later."""
        return replace(self, is_committed=True)


def _parse(data: bytes) -> RollbackNote | None:
    with suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        body = json.loads(data)
        if body["ckpt_rollback"] == 1 and is_attempt_id(body["attempt"]):
            superseded = {str(name): str(attempt) for name, attempt in body["victims"].items()}
            return RollbackNote(
                str(body["step"]),
                body["attempt"],
                int(body["resumed"]),
                superseded,
                body["is_committed"] is True,
            )
    return None


def read_notes(root: RunRoot, names: Iterable[str]) -> list[RollbackNote]:
    """Returns the notes among the files of a root. Malformed files are no notes."""
    found = []
    for name in names:
        data = root.read_note(name, MAX_NOTE_BYTES) if _NOTE.fullmatch(name) else None
        note = _parse(data) if data is not None else None
        if note is not None and note.file == name:
            found.append(note)
    return found


def write_note(root: RunRoot, note: RollbackNote) -> None:
    """Writes a note, over an older form of it.

    Raises:
        StorageError: it could not be written.
    """
    root.write_note(note.file, note.render())


def remove_note(root: RunRoot, note: RollbackNote) -> None:
    """Removes a note.

    Raises:
        StorageError: it could not be removed.
    """
    root.remove_note(note.file)
