"""Removes old versions of a publication, which no version that is kept needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tools.errors import CheckpointError, printable
from ckpt_tools.formats.base import PIN
from ckpt_tools.formats.deltas.layout import Versions, read_delta_index
from ckpt_tools.formats.registry import open_folder, versions_in
from ckpt_tools.operations.receivers import receivers_in
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.run.base import RunRoot
from ckpt_tools.run.roots import open_root
from ckpt_tools.storage import Store


def remove_old(
    url: str, keep_last: int, options: Mapping[str, Any] | None
) -> tuple[list[int], list[str]]:
    """Removes all versions below the complete one that the oldest kept version begins with.

    That is one of the newest `keep_last`, or an older one that a receiver still needs.

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
    root = open_root(url, options)
    notes = [
        f"an earlier attempt left {printable(left.url)}, which "
        + (f"stays: {left.problem}" if left.problem else "was removed")
        for left in root.remove_leftovers()
    ]
    versions = versions_in(url, options)
    numbers = versions.numbers
    if len(numbers) <= keep_last:
        return [], notes
    oldest = numbers[-keep_last]
    folder = open_folder(url, options)
    try:
        receivers, silent = receivers_in(folder)
        slowest = min(receivers, key=lambda receiver: receiver.needs, default=None)
        wanted = [] if slowest is None else [n for n in numbers if slowest.needs <= n < oldest]
        if wanted:
            oldest = wanted[0]
        first = _complete_below(folder, versions, oldest)
        old = [number for number in numbers if number < first]
        needed = [number for number in numbers if first <= number < oldest]
        notes += [*silent, *_staying(wanted, f" for {slowest}"), *_needed(needed, oldest)]
        removed = []
        for number in reversed(old):
            if number >= first:
                continue
            if problem := _remove(root, folder, versions, number):
                first = _complete_below(folder, versions, number)
                below = [n for n in old if first <= n < number]
                notes += [problem, *_needed(below, number)]
                continue
            removed.append(number)
        return removed, notes
    finally:
        folder.close()


def _complete_below(folder: Store, versions: Versions, number: int) -> int:
    """Returns the complete version that a version begins with; 0 is the base."""
    while number and read_delta_index(folder.enter(versions.name(number))) is not None:
        number -= 1
    return number


def _remove(root: RunRoot, folder: Store, versions: Versions, number: int) -> str:
    """Removes a version; returns a note if it stays, "" if it does not."""
    store = folder.enter(versions.name(number))
    try:
        manifest = find_manifest(store)
        if manifest is None:
            return f"version {number} stays: another program wrote it (there is no manifest)"

        def reason_to_keep(name: str) -> str | None:
            return "it is pinned" if PIN in root.step_store(name).list_files() else None

        root.remove(versions.name(number), manifest.attempt, reason_to_keep)
    except CheckpointError as error:
        return printable(str(error))
    finally:
        store.close()
    return ""


def _needed(numbers: Sequence[int], by: int) -> list[str]:
    """Returns the note on neighbouring versions that another one needs; none for no versions."""
    return _staying(numbers, f": version {by} needs {'it' if len(numbers) < 2 else 'them'}")


def _staying(numbers: Sequence[int], why: str) -> list[str]:
    if len(numbers) < 2:
        return [f"version {number} stays{why}" for number in numbers]
    return [f"versions {numbers[0]} to {numbers[-1]} stay{why}"]
