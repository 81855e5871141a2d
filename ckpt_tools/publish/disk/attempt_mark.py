"""The mark in a directory that an attempt has made, and the proof that a leftover is one.

A name proves nothing: a person may call a directory `.tmp.notes.deadbeef`, and whoever may write
to a shared folder can give somebody's private directory such a name. So an attempt puts a file with
its id into its staging directory, and removes it once the directory is published. With `overwrite`,
it marks the old result, too, before the two change places.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.base import ATTEMPT, MANIFEST, PIN, note_name, note_of
from ckpt_tools.formats.registry import is_ours
from ckpt_tools.publish.find_manifest import read_manifest
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.storage import LocalStore
from ckpt_tools.storage.local import files_below

MARK = f"ckpt.{ATTEMPT}."  # a note, so readers ignore one that a power cut leaves in a result
STAGING, TRASH = ".tmp.", ".trash."


def mark(directory: int, attempt: str) -> None:
    """Puts an empty file into an open directory, with the id of an attempt in its name.

    Raises:
        OSError: it cannot be made.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(mark_name(attempt), flags, 0o600, dir_fd=directory))


def mark_name(attempt: str) -> str:
    """Returns the name of the mark of an attempt."""
    return f"{MARK}{attempt[:8]}.json"


def unmark(directory: int) -> None:
    """Removes the marks from an open directory."""
    # Btrfs lists what was there when the directory was opened
    fresh = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        for name in os.listdir(fresh):
            if name.startswith(MARK):
                os.unlink(name, dir_fd=directory)
    finally:
        os.close(fresh)


def is_made_here(path: Path) -> bool:
    """Tells whether an attempt has made a directory, or left it behind.

    A staging directory has the mark of its attempt. A step that was being removed has a manifest
    that lists all of its files.
    """
    try:
        found = path.lstat()
        if found.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            return False
        if (path / mark_name(path.name[-8:])).is_file():
            return True
        names = _names_below(path)
    except OSError:  # another process was faster, or it is not to be read
        return False
    if not names:  # it was not yet marked, or is removed but for itself
        return True
    manifests = [name for name in names if note_of(name) == (MANIFEST, "")]
    if path.name.startswith(TRASH):
        own = [note_name(MANIFEST, path.name[-8:])]  # of the save that was judged, and no other
        return manifests == own and not _foreign(path, names, manifests)
    return bool(manifests) and not _foreign(path, [n for n in names if n != PIN], manifests)


def _names_below(path: Path) -> list[str]:
    return [
        os.path.relpath(os.path.join(folder, name), path)
        for folder, folders, files in os.walk(path, onerror=_raise)
        for name in (*files, *(f for f in folders if os.path.islink(os.path.join(folder, f))))
    ]


def _foreign(path: Path, names: Iterable[str], manifests: Iterable[str]) -> list[str]:
    """Returns the files that no manifest lists. A pin is one of them."""
    listed = set(manifests)
    for manifest in (_manifest(path, name) for name in manifests):
        if manifest is not None:
            listed |= {*manifest.files, *(manifest.index or ())[:1]}
    return [n for n in names if n not in listed and not note_of(n)]


def is_kept_step(path: Path, name: str) -> bool:
    """Tells whether a directory in the trash is a whole step that should not have got there.

    A process renamed the step to remove it, found a reason to keep it, and died before it restored
    the name.

    Args:
        path: the directory.
        name: the name that it had.
    """
    number = re.search(r"[0-9]+$", name)
    try:
        names = _names_below(path)
    except OSError:
        return False
    manifests = [n for n in names if note_of(n) == (MANIFEST, "")]
    manifest = _manifest(path, manifests[0]) if len(manifests) == 1 else None
    if manifest is None or number is None or manifest.step != int(number[0]):
        return False
    return {*manifest.files, *(manifest.index or ())[:1]} <= set(names)


def may_be_restored(path: Path) -> bool:
    """Tells whether a directory is an old result that stands aside: it gets its name back."""
    if is_made_here(path):
        return True
    with suppress(OSError):
        names = [name for _, _, files in os.walk(path, onerror=_raise) for name in files]
        return all(is_ours(name) or name == PIN for name in names)
    return False


def _manifest(path: Path, name: str) -> Manifest | None:
    store = LocalStore(path)
    try:
        return read_manifest(store, name)
    except CheckpointError:
        return None
    finally:
        store.close()


def _raise(error: OSError) -> None:
    raise error


def remove_tree(path: Path) -> None:
    """Removes a directory and what proves its origin last, so that a rest is known for a leftover.

    Raises:
        OSError: something cannot be removed.
    """

    def is_proof(name: str) -> bool:
        return name.startswith(MARK) or note_of(name) == (MANIFEST, "")

    with suppress(FileNotFoundError):
        entries = sorted(os.scandir(path), key=lambda entry: is_proof(entry.name))
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, onerror=_ignore_missing)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)
        os.rmdir(path)


def own_nbytes(path: Path) -> int:
    """Returns the bytes of the files below a directory that have no name elsewhere."""
    seen, sizes = Counter[tuple[int, ...]](), dict[tuple[int, ...], int]()
    for at in files_below(path):
        key = at.st_dev, at.st_ino, at.st_nlink
        seen[key] += 1
        sizes[key] = at.st_size
    return sum(nbytes for key, nbytes in sizes.items() if seen[key] == key[2])


def _ignore_missing(call: object, path: str, failure: Any) -> None:
    """Passes over a file that another process has removed, in a directory that both remove."""
    del call, path
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]
