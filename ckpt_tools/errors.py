"""Every error that this package raises on purpose, and the exit code that `ckpt` gives for it.

    CheckpointError             1   anything below; also "differences or damage found"
     ├─ NotACheckpointError    10   nothing at the path that any format recognises
     ├─ FormatError            11   a file breaks the rules of its format
     │   └─ UnsafePickleError  11   a pickle asks for something that no checkpoint needs
     ├─ CatalogError           12   chunks leave a hole, overlap, or exceed their tensor
     ├─ PlanError              13   the request does not fit the checkpoint
     ├─ IntegrityError         14   bytes are not what a checksum or a replica says
     └─ StorageError           15   a read, a write or a rename failed, or would

The command adds 0 (fine), 2 (wrong usage), 130 (Ctrl-C) and 143 (SIGTERM). A message reads *what
failed: expected X, got Y (path, fqn)*; `hint` is what to do about it. Text that comes out of a
checkpoint passes through `printable` first.
"""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/@\s'\"]+@")
_SIGNED = re.compile(
    r"(?i)([?&](?:x-amz-[\w-]+|x-goog-[\w-]+|s(?:ig|ignature|e|p|v|r|t|kt|koid)|(?:access_?)?token|key|awsaccesskeyid|key-pair-id|googleaccessid"
    r"|expires|policy|credential)=)[^&\s'\")]+"
)


def redacted(text: str) -> str:
    """Returns a text without the secrets of URLs: names of users, passwords, and the values of
    signed queries.
    """
    return _SIGNED.sub(r"\1***", _USER.sub("***@", text))


class CheckpointError(Exception):
    """The root of the tree: `except CheckpointError` catches whatever this package reports."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(redacted(message))
        self.hint = hint = redacted(hint) if hint else hint
        if hint:
            self.add_note(f"hint: {hint}")  # below the message in a traceback


class NotACheckpointError(CheckpointError):
    """Nothing at the path is a checkpoint; the message says what was found and what was looked
    for.
    """

    exit_code = 10


class FormatError(CheckpointError):
    """A file breaks its format's rules; the message gives file, position, expected and got."""

    exit_code = 11


class UnsafePickleError(FormatError):
    """A pickle names a global outside the allow-list, or is built to hurt its reader. Nothing of it
    ran.
    """


class CatalogError(CheckpointError):
    """The chunks of a tensor leave a hole, overlap or exceed its shape; the message gives FQN and
    box.
    """

    exit_code = 12


class PlanError(CheckpointError):
    """What was asked for does not fit what the checkpoint holds."""

    exit_code = 13


class IntegrityError(CheckpointError):
    """Bytes differ from their checksum, or replicas from each other; the message gives file and
    range.
    """

    exit_code = 14


class StorageError(CheckpointError):
    """An operation on a store failed; the message gives path, operation and cause.

    Attributes:
        is_missing: there is no such file.
        is_transient: the store could not be reached, or was busy; the same may succeed later.
    """

    exit_code = 15

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        is_missing: bool = False,
        is_transient: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        self.is_missing, self.is_transient = is_missing, is_transient


class PeerError(CheckpointError):
    """Another rank of the job failed or did not answer; the message gives phase, ranks and their
    own messages.
    """

    exit_code = 16


# controls, Unicode's category Cf, separators of lines, surrogates, and letters that show nothing
_ESCAPED = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001345f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_PRINTABLE_CHARS = 512


def printable_lines(text: str) -> str:
    """Returns a message made safe for a terminal, its own lines kept: names in it were made
    printable one by one.
    """
    return "\n".join(
        _ESCAPED.sub(lambda found: ascii(found[0])[1:-1], line) for line in text.split("\n")
    )


def printable(text: str) -> str:
    """Returns text from a checkpoint made safe for a terminal: one line, with nothing that controls
    it or that nobody sees.
    """
    shown = (
        text
        if len(text) <= _PRINTABLE_CHARS
        else f"{text[:_PRINTABLE_CHARS]}… ({len(text)} characters)"
    )
    return _ESCAPED.sub(lambda found: ascii(found[0])[1:-1], shown)
