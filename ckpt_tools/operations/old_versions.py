"""Removes old versions of a publication, which no version that is kept needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tools.errors import CheckpointError, printable
from ckpt_tools.formats.base import PIN
from ckpt_tools.formats.deltas.layout import read_delta_index, version_name
from ckpt_tools.formats.registry import open_folder, versions_in
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.run.roots import open_root
from ckpt_tools.storage import Store


def remove_old(
    url: str, keep_last: int, options: Mapping[str, Any] | None
) -> tuple[list[int], list[str]]:
    """Removes all versions below the complete one that the oldest kept version begins with.

    The newest of them goes first. So if this is interrupted, those that are left need none that has
    gone. What an interrupted call has left is removed, too.

    Args:
        url: the directory of the versions.
        keep_last: number of the newest versions to keep.
        options: of the object store.

    Returns:
        The removed versions, the newest first; and notes on those that stay although nothing needs
        them, or that are needed.
    """
    notes = [
        f"{printable(left.url)} was left by an earlier attempt, and stays: {left.problem}"
        for left in open_root(url, options).remove_leftovers()
        if left.problem
    ]
    numbers = versions_in(url, options)
    if len(numbers) <= keep_last:
        return [], notes
    oldest = numbers[-keep_last]
    folder = open_folder(url, options)
    try:
        first = _complete_below(folder, oldest)
        old = [number for number in numbers[:-keep_last] if number < first]
        needed = [number for number in numbers[:-keep_last] if number >= first]
        if needed:
            what = f"version {oldest} needs" + (" it" if len(needed) == 1 else " them")
            notes.append(f"{_names(needed)} stay{'s' * (len(needed) == 1)}: {what}")
        removed = []
        for number in reversed(old):
            if problem := _remove(url, folder.enter(version_name(number)), number, options):
                notes.append(problem)
                break  # those below it are needed to read it
            removed.append(number)
        return removed, notes
    finally:
        folder.close()


def _complete_below(folder: Store, number: int) -> int:
    """Returns the complete version that a version begins with; 0 is the base."""
    while number and read_delta_index(folder.enter(version_name(number))) is not None:
        number -= 1
    return number


def _remove(url: str, store: Store, number: int, options: Mapping[str, Any] | None) -> str:
    """Removes a version; returns a note if it stays, "" if it does not."""
    try:
        manifest = find_manifest(store)
        if manifest is None:
            return f"version {number} stays: another program wrote it (there is no manifest)"
        root = open_root(url, options)

        def reason_to_keep(name: str) -> str | None:
            return "it is pinned" if PIN in root.step_store(name).list_files() else None

        root.remove(version_name(number), manifest.attempt, reason_to_keep)
    except CheckpointError as error:
        return printable(str(error))
    finally:
        store.close()
    return ""


def _names(numbers: Sequence[int]) -> str:
    """Returns the numbers of neighbouring versions, for people."""
    if len(numbers) == 1:
        return f"version {numbers[0]}"
    return f"versions {numbers[0]} to {numbers[-1]}"
