"""Tells what lies in a folder: checkpoints, runs, other folders, and why the rest is not read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.errors import CheckpointError, NotACheckpointError, printable
from ckpt_tools.formats.base import note_of
from ckpt_tools.formats.registry import (
    Source,
    is_ours,
    natural,
    open_source,
    open_source_in,
    suffix_of,
)
from ckpt_tools.publish.step_names import number_in
from ckpt_tools.storage import LocalStore, Store, is_url, local_path, open_store
from ckpt_tools.storage.local import NO_FILE, files_below
from ckpt_tools.storage.one_file import folder_of

_MOST = 100  # entries that are opened
_MOST_FILES = 50_000  # whose bytes are summed up, in all entries together
_SHOWN = 6  # other checkpoints that a note names
RUN, STEP, FOLDER, FILE, LINK = "run", "step", "folder", "file", "link"


_NONE = "no checkpoint in it, three levels down"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in a folder.

    Attributes:
        name: within the folder; that of a folder ends in a slash.
        kind: the format of a checkpoint, or "run", "step", "folder", "file", "link".
        nbytes: bytes of its files; on a disk, those of folders below, too, each file once. None if
            unknown: of a folder in a bucket that holds folders, or beyond the first 50,000 files.
        about: its contents, or why it is not read; "" for a file that is nothing of a checkpoint.
        is_readable: whether it is a checkpoint, or holds some.
        is_opened: False beyond the first 100 entries.
    """

    name: str
    kind: str
    nbytes: int | None
    about: str
    is_readable: bool
    is_opened: bool = True


def entries_of(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    is_wanted: Callable[[str], bool] = lambda _: True,
) -> list[Entry]:
    """Returns what lies in a folder: folders first, then files, by name.

    Args:
        path: of the folder, or its URL.
        storage_options: of the object store, as fsspec takes them.
        is_wanted: tells by the name whether to list an entry.

    Returns:
        The entries, from metadata only. One that cannot be read hides no other. Hidden names and
        our own notes are omitted. Only the first 100 entries are opened.

    Raises:
        StorageError: the folder itself cannot be listed.
    """
    where = local_path(path).rstrip("/") or "/"
    store = open_store(where, storage_options)
    try:
        names = (n for n in store.folders() if not n.startswith(".") and is_wanted(n))
        folders = sorted(names, key=natural)
        files = {
            name: size
            for name, size in store.list_files().items()
            if not name.startswith(".") and note_of(name) is None and is_wanted(name)
        }
        strays = {
            n: to for n, to in store.strays().items() if not n.startswith(".") and is_wanted(n)
        }
        look, files_left = iter(range(_MOST)), iter(range(_MOST_FILES))
        return [
            *(_folder(store, name, next(look, None) is not None, files_left) for name in folders),
            *(
                _file(f"{where}/{name}", name, size, storage_options, look)
                for name, size in sorted(files.items(), key=lambda item: natural(item[0]))
            ),
            *(_link(name, target) for name, target in sorted(strays.items())),
        ]
    finally:
        store.close()


def others_at(src: str | os.PathLike[str], store: Store) -> list[str]:
    """Returns other checkpoints at a path: files beside steps, and steps and runs beside files.

    Args:
        src: the given path.
        store: of the checkpoint that was found there, or below.
    """
    folder, file = folder_of(store)
    if file:
        return []
    where = local_path(src).rstrip("/")
    # a step was found below the path: also look for files
    if not is_url(where) and os.path.realpath(where) != os.path.realpath(folder.url):
        return [name for name in LocalStore(where).list_files() if suffix_of(name)]
    names = folder.folders()
    return [f"{n}/" for n in names if number_in(n) is not None or has_steps(folder, n)]


def note_on_others(src: str | os.PathLike[str], store: Store) -> list[str]:
    """Returns a note on the other checkpoints at a path, which an operation leaves alone.

    It looks only on a disk, since each look in a bucket costs a request. The arguments are those of
    `others_at`.
    """
    others = [] if store.capabilities.is_remote else others_at(src, store)
    some = printable(", ".join(others[:_SHOWN]) + " …" * (len(others) > _SHOWN))
    return [f"not looked at: {some}"] if others else []


def _link(name: str, target: str) -> Entry:
    if target == NO_FILE:
        return Entry(name, FILE, None, f"not read: {NO_FILE}, such as a pipe or a device", False)
    about = f"not read: a link out of the folder, to nothing, or in a circle: {printable(target)}"
    return Entry(name, LINK, None, about, False)


def _folder(above: Store, name: str, may_open: bool, files_left: Iterator[int]) -> Entry:
    shown = f"{name}/"
    if not may_open:
        return Entry(shown, FOLDER, None, "not opened", False, is_opened=False)
    try:
        store = above.enter(name)
        files, inside = store.list_files(), store.folders()
        nbytes = _bytes_below(store, files_left) if inside else sum(files.values())
        numbers = sorted(n for each in inside if (n := number_in(each)) is not None)
        if numbers:
            about = f"{_count(len(numbers), 'step')}, the newest is {numbers[-1]:,}"
            return Entry(shown, RUN, nbytes, about, True)
        if number_in(name) is not None or any(is_ours(each) for each in files):
            kind = STEP if number_in(name) is not None else FOLDER
            found = _opened(shown, kind, nbytes, lambda: open_source_in(store))
            if found.is_readable or found.about != _NONE:
                return found
        below = [each for each in inside if has_steps(store, each)]
        if below:
            more = f" and {len(below) - 4} more" if len(below) > 4 else ""
            runs = ", ".join(map(printable, below[:4]))
            return Entry(shown, FOLDER, nbytes, f"runs lie below: {runs}{more}", True)
        if not files and not inside:
            return Entry(shown, FOLDER, 0, "empty", False)
        loose = [each for each in files if suffix_of(each)]
        if loose:
            more = f" and {len(loose) - 3} more" if len(loose) > 3 else ""
            about = f"files of checkpoints: {', '.join(map(printable, loose[:3]))}{more}"
            return Entry(shown, FOLDER, nbytes, about, True)
        return _opened(shown, FOLDER, nbytes, lambda: open_source_in(store))
    except CheckpointError as error:
        return _unread(shown, FOLDER, None, error)


def _bytes_below(store: Store, files_left: Iterator[int]) -> int | None:
    """Returns the bytes below a folder, each file once; None in a bucket, or if there are many.

    Each file takes one of `files_left`.
    """
    if store.capabilities.is_remote:
        return None
    found: dict[tuple[int, int], int] = {}
    for at in files_below(store.url):
        if next(files_left, None) is None:
            return None
        found[at.st_dev, at.st_ino] = at.st_size
    return sum(found.values())


def has_steps(store: Store, name: str) -> bool:
    """Tells whether a folder in a store is a run with steps."""
    try:
        return any(number_in(each) is not None for each in store.enter(name).folders())
    except CheckpointError:
        return False


def _file(
    path: str,
    name: str,
    nbytes: int,
    options: Mapping[str, Any] | None,
    look: Iterator[int],
) -> Entry:
    if not suffix_of(name):
        return Entry(name, FILE, nbytes, "", False)
    if next(look, None) is None:
        return Entry(name, FILE, nbytes, "not opened", False, is_opened=False)
    return _opened(name, FILE, nbytes, lambda: open_source(path, options))


def _opened(name: str, kind: str, nbytes: int | None, opener: Any) -> Entry:
    """Returns the entry of a checkpoint, or of what should be one."""
    try:
        source: Source = opener()
        source.store.close()
    except CheckpointError as error:
        return _unread(name, kind, nbytes, error)
    catalog = source.catalog
    ranks = f", written by {_count(catalog.world_size, 'rank')}" if catalog.world_size else ""
    about = f"{_count(len(catalog.tensors), 'tensor')}{ranks}"
    if version := catalog.extras.get("version"):
        about += f"; version {version}"
    return Entry(name, catalog.format, nbytes, about, True)


def _unread(name: str, kind: str, nbytes: int | None, error: CheckpointError) -> Entry:
    """Returns the entry of something that cannot be opened, with the reason on one line."""
    text = str(error).partition("\n")[0].removesuffix(":")
    if isinstance(error, NotACheckpointError):
        if error.num_below:
            about = f"{error.num_below:,} checkpoints lie below"
            return Entry(name, kind, nbytes, about, True)
        if kind == FOLDER and error.found and not error.is_unfinished:
            return Entry(name, kind, nbytes, _NONE, False)
        text = error.hint if error.is_unfinished and error.hint else error.found or text
    text = text.removeprefix(f"{printable(name)} ")
    return Entry(name, kind, nbytes, f"not read: {text}", False)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
