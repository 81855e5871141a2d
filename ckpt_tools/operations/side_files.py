"""Selects the files beside a job's checkpoint to copy, and names the others."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.formats import accelerate
from ckpt_tools.formats.registry import Source
from ckpt_tools.storage import read

# The files are held in memory.
_MAX_FILE_BYTES = 64 << 20
_MAX_TOTAL_BYTES = 1 << 30
_RANDOM = re.compile(
    r"(?P<stem>rng_state|random_states)(?:_(?P<rank>\d{1,6}))?\.(?P<suffix>pth|pkl)"
)
_SHOWN = 8


class SideFiles(NamedTuple):
    """Files to copy with the checkpoint.

    Attributes:
        files: the bytes of each by its new name.
        keys: first keys of the catalog's values that these files contain.
        notes: files that are not copied, and changes.
    """

    files: dict[str, bytes]
    keys: set[str]
    notes: list[str]


def carried(source: Source, ranks: int) -> SideFiles:
    """Returns the files to copy for a job of `ranks` ranks that reads the same layout.

    Each rank has its own random states. Those of ranks that the new job has are copied. A Trainer
    with one process names the file of its only rank without a number.
    """
    files, keys, left, total = dict[str, bytes](), set[str](), list[str](), 0
    sizes = source.folder.list_files()
    values = [name for name in sizes if accelerate.key_of(name)]
    for name in sorted({*values, *source.catalog.beside}):
        random = _RANDOM.fullmatch(name)
        if sizes.get(name, _MAX_FILE_BYTES + 1) > _MAX_FILE_BYTES or (
            random and int(random["rank"] or 0) >= ranks
        ):
            left.append(name)
            continue
        total += sizes[name]
        if total > _MAX_TOTAL_BYTES:
            raise StorageError(
                f"the files beside the checkpoint are too long: more than {_MAX_TOTAL_BYTES} bytes"
                f" together ({printable(source.path)})",
                hint="move those that the job does not need",
            )
        new = _renamed(random, ranks) if random else name
        files[new] = read(source.folder, name)
        if key := accelerate.key_of(name):
            keys.add(key)
    notes = [f"left behind: {_some(left)}"] if left else []
    states = {int(match["rank"] or 0) for name in files if (match := _RANDOM.fullmatch(name))}
    if states and (missing := sorted({*range(ranks)} - states)):
        notes.append(
            f"no random states for rank {_some(map(str, missing))}: the source has those of"
            f" {len(states)}; they start fresh"
        )
    return SideFiles(files, keys, notes)


def _renamed(random: re.Match[str], ranks: int) -> str:
    if random["stem"] == "random_states":
        return random[0]
    return "rng_state.pth" if ranks == 1 else f"rng_state_{int(random['rank'] or 0)}.pth"


def left_beside(catalog: Catalog) -> list[str]:
    """Returns a note on the files beside a checkpoint, for targets that cannot hold them."""
    return (
        [f"files beside the checkpoint stay behind: {_some(catalog.beside)}"]
        if catalog.beside
        else []
    )


def _some(names: Iterable[str]) -> str:
    found = list(map(printable, names))
    return ", ".join(found[:_SHOWN]) + (
        f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    )
