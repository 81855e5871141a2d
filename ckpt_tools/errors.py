"""Every error that this package raises on purpose, with the exit code of `ckpt`.

    CheckpointError             1   anything below; also "differences or damage found"
     ├─ NotACheckpointError    10   no format recognises anything at the path
     ├─ FormatError            11   a file breaks the rules of its format
     │   └─ UnsafePickleError  11   a pickle asks for something that no checkpoint needs
     ├─ CatalogError           12   chunks leave a hole, overlap, or exceed their tensor
     ├─ PlanError              13   the request does not fit the checkpoint
     ├─ IntegrityError         14   bytes differ from a checksum or from a replica
     ├─ StorageError           15   a read, a write or a rename failed, or would fail
     └─ PeerError              16   another rank failed or did not answer

The command adds 0 (fine), 2 (wrong usage), 130 (Ctrl-C) and 143 (SIGTERM). A message reads *what
failed: expected X, got Y (path, fqn)*; `hint` says what you can do about it. Text from a checkpoint
passes through `printable` first.
"""

from __future__ import annotations

import re

# A password may have any character; one of a URL without a user ends at the first slash.
_USER = re.compile(r"(?<=://)(?:[^/@\s'\"]+@)+|(?<=://)[^\s/:@]+:(?!\d+(?:/|$))[^\s]*@")
_QUERY = re.compile(r"(://[^\s?]*\?)([^\s]+)")  # of a URL: every value may be a signature
_FRAGMENT = re.compile(r"(://[^\s#]*#)[^\s]+")
_VALUE = re.compile(r"=[^&;\s'\")]*")
_LOOSE = re.compile(  # a part of a query without its URL
    r"(?i)([?&;](?:x-(?:amz|goog)-[\w-]+|sig(?:nature)?|s[epvrt]|skt|skoid|[\w-]*token(?:__)?|[\w-]*key"
    r"|[\w-]*secret|password|jwt|auth(?:orization)?|[\w-]*keyid|googleaccessid|expires|policy"
    r"|credential|hdnea)=)[^&;\s'\")]+"
)


# a signature whose URL is encoded, or that stands alone
_BARE = re.compile(r"(?i)(x-(?:amz|goog)-[\w-]+(?:=|%3d))[^&;\s'\")%]+")


_SPACED = re.compile(r"(?<=://)[^\s/@:]+:[^/\n@]{1,100}@")  # a password with spaces
# a user and a password, also if the URL around them is no URL any more
_LOGIN = re.compile(r"(?<![\w.@:=-])[^\s/:@'\"(=]+:[^\s/@'\"]+@(?=[\w\[-])")
# a port that is no number: the key of an account, as in abfs://container@account:KEY
_PORT = re.compile(r"(://[^\s/:\[]+):(?!\d+(?:[^\w]|$))[^\s/'\")]+")


def redacted(text: str) -> str:
    """Returns the text without the secrets of URLs.

    User names, passwords, fragments, and all values of a query are replaced by `***`.
    """
    if "://" in text:
        text = _PORT.sub(r"\1:***", _SPACED.sub("***@", _USER.sub("***@", text)))
        text = _QUERY.sub(lambda found: found[1] + _VALUE.sub("=***", found[2]), text)
        text = _FRAGMENT.sub(r"\1***", text)
    if "@" in text:
        text = _LOGIN.sub("***@", text)
    return _BARE.sub(r"\1***", _LOOSE.sub(r"\1***", text))


class CheckpointError(Exception):
    """The base class: `except CheckpointError` catches every error that this package raises."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(redacted(message))
        self.hint = hint = redacted(hint) if hint else hint
        if hint:
            self.add_note(f"hint: {hint}")  # below the message in a traceback


class NotACheckpointError(CheckpointError):
    """Nothing at the path is a checkpoint.

    The message says what was found and what was expected.

    Attributes:
        found: the first half of the message, for a list; "" if there is no shorter form.
        is_unfinished: the folder has files of a save that never ended.
        num_below: checkpoints in the folders below.
    """

    exit_code = 10

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        found: str = "",
        is_unfinished: bool = False,
        num_below: int = 0,
    ) -> None:
        super().__init__(message, hint=hint)
        self.found, self.is_unfinished, self.num_below = redacted(found), is_unfinished, num_below


class FormatError(CheckpointError):
    """A file breaks its format's rules; the message gives file, position, expected and got."""

    exit_code = 11


class UnsafePickleError(FormatError):
    """A pickle names a global outside the allow-list, or is built to exhaust its reader.

    None of it was executed.
    """


class CatalogError(CheckpointError):
    """The chunks of a tensor leave a hole, overlap or exceed its shape.

    The message gives FQN and box.

    Attributes:
        what: the message without the place, for a table that has columns for the place.
    """

    exit_code = 12

    def __init__(self, message: str, *, place: str = "", hint: str | None = None) -> None:
        super().__init__(f"{message} ({place})" if place else message, hint=hint)
        self.what = redacted(message)


class PlanError(CheckpointError):
    """The request does not fit the contents of the checkpoint."""

    exit_code = 13


class IntegrityError(CheckpointError):
    """Bytes differ from their checksum, or replicas differ from each other.

    The message gives file and range.
    """

    exit_code = 14


class StorageError(CheckpointError):
    """An operation on a store failed; the message gives path, operation and cause.

    Attributes:
        is_missing: the file does not exist.
        is_transient: the store could not be reached, or was busy. A retry may succeed.
        is_unreadable: the store or the disk refused to read, or failed. So nothing is known about
            the file: it may be whole.
    """

    exit_code = 15

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        is_missing: bool = False,
        is_transient: bool = False,
        is_unreadable: bool = False,
    ) -> None:
        super().__init__(message, hint=hint)
        self.is_missing, self.is_transient = is_missing, is_transient
        self.is_unreadable = is_unreadable or is_transient


def is_unreadable(error: BaseException) -> bool:
    """Tells whether an error says that something cannot be read now, and not that it is damaged."""
    return isinstance(error, StorageError) and error.is_unreadable


class PeerError(CheckpointError):
    """Another rank of the job failed or did not answer.

    The message gives the phase, the ranks and their own messages.
    """

    exit_code = 16


# control characters, Unicode category Cf, line separators, surrogates, and invisible letters
_ESCAPED = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001345f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_PRINTABLE_CHARS = 512


def printable_lines(text: str) -> str:
    """Returns a message made safe for a terminal, with its own line breaks.

    The names in it must have passed through `printable` already.
    """
    return "\n".join(
        _ESCAPED.sub(lambda found: ascii(found[0])[1:-1], line) for line in text.split("\n")
    )


def printable(text: str) -> str:
    """Returns text from a checkpoint as one line, without control or invisible characters.

    Longer text than 512 characters is cut.
    """
    shown = (
        text
        if len(text) <= _PRINTABLE_CHARS
        else f"{text[:_PRINTABLE_CHARS]}… ({len(text)} characters)"
    )
    return _ESCAPED.sub(lambda found: ascii(found[0])[1:-1], shown)
