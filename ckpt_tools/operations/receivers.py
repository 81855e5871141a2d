"""What receivers of a publication say: the version that each has, and the one that it reads.

A receiver says so in a small file in the directory of the versions. What removes old versions keeps
those that a receiver still needs. Who can write there can say anything, and can remove versions.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.formats.registry import open_folder
from ckpt_tools.run.roots import open_root
from ckpt_tools.storage import Store, read
from ckpt_tools.storage.small_files import parse_json

_NAME, _FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"), "receiver.{}.json"
_FILES = re.compile(r"receiver\.([A-Za-z0-9][A-Za-z0-9._-]{0,63})\.json")
_MAX_BYTES, _MOST, _TRIES = 4096, 10_000, 3
_STALE_S, _FRESH_S = 86_400.0, 3_600.0


class Receiver(NamedTuple):
    """A receiver of versions, as it has said last.

    Attributes:
        name: of the receiver.
        has: the version that it has; 0 for none.
        reads: the version that it is pulling; 0 for none.
        said_s: when it said so, in seconds since 1970, by its own clock.
    """

    name: str
    has: int
    reads: int
    said_s: float

    @property
    def needs(self) -> int:
        """The oldest version that it needs: the one it reads, or the next one; 0 for none."""
        return self.reads or (self.has and self.has + 1)

    def __str__(self) -> str:
        what = f"reads version {self.reads}" if self.reads else f"has version {self.has}"
        return f"receiver {self.name}, which {what}"


def check_receiver(name: str) -> None:
    """Refuses a name that no file can have.

    Raises:
        PlanError: it has other characters, or is too long.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PlanError(
            f"receiver: expected up to 64 letters, digits, dots, dashes or underscores, got"
            f" {printable(repr(name))}"
        )


def say(url: str, options: Mapping[str, Any] | None, name: str, has: int, reads: int) -> None:
    """Says what a receiver has and reads. It is not said again within an hour.

    Raises:
        StorageError: the directory of the versions cannot be written to.
    """
    now = time.time()
    folder = open_folder(url, options)
    try:
        file = _FILE.format(name)
        before = _read(folder, file, name) if file in folder.list_files() else None
    finally:
        folder.close()
    if before and before[1:3] == (has, reads) and 0 <= now - before.said_s < _FRESH_S:
        return
    text = json.dumps({"has": has, "reads": reads, "said_s": now})
    open_root(url, options).write_note(_FILE.format(name), text.encode("ascii"))


def receivers_in(folder: Store) -> tuple[list[Receiver], list[str]]:
    """Returns the receivers that need something, and notes on those that have said nothing lately.

    Raises:
        StorageError: they cannot be read, so that nobody knows what they need.
    """
    found, notes, now = [], [], time.time()
    names = [name for name in sorted(folder.list_files()) if _FILES.fullmatch(name)]
    if len(names) > _MOST:
        raise StorageError(f"{len(names):,} receivers are too many ({printable(folder.url)})")
    for file in names:
        match = _FILES.fullmatch(file)
        assert match is not None
        receiver = _read(folder, file, match[1])
        if receiver is None or not receiver.needs:
            continue
        if abs(now - receiver.said_s) < _STALE_S:
            found.append(receiver)
        else:
            notes.append(f"nothing is kept for {receiver}: it has said nothing for a day")
    return found, notes


def _read(folder: Store, file: str, name: str) -> Receiver | None:
    """Returns what a file says; None if it is gone, or says nothing that can be read.

    Raises:
        StorageError: it cannot be read now.
    """
    for _ in range(_TRIES):  # it may be replaced between its size and its bytes
        try:
            if (nbytes := folder.size(file)) > _MAX_BYTES:
                return None
            body: Any = parse_json(read(folder, file, 0, nbytes).decode("ascii"))
            has, reads, said_s = body["has"], body["reads"], float(body["said_s"])
            break
        except StorageError as error:
            if error.is_missing:
                return None
            raise
        except (ValueError, TypeError, KeyError, OverflowError):
            folder.close()  # the next try opens the file anew
    else:
        return None
    if not all(type(number) is int and 0 <= number < 1 << 31 for number in (has, reads)):
        return None
    return Receiver(name, has, reads, said_s)
