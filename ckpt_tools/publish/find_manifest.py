"""Finds and reads the manifest of a directory, or that of one file in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.errors import CheckpointError, FormatError, IntegrityError, printable
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.base import HOST, MANIFEST, note_name, note_of, short_name
from ckpt_tools.formats.registry import INDEXES
from ckpt_tools.publish.manifest import Manifest, parse_manifest
from ckpt_tools.storage import Store, check_path, read
from ckpt_tools.storage.base import MAX_NOTE_BYTES
from ckpt_tools.storage.one_file import folder_of
from ckpt_tools.storage.retries import read_again_if_wrong

_READ_BYTES = 16 << 20
_MOST_NAMES = 8  # of an error
_MAX_BYTES = 128 << 20  # JSON takes up to twenty times its length in memory


def names_in(store: Store, beside: str = "", files: Iterable[str] | None = None) -> list[str]:
    """Returns the names of the manifests in a directory, or of those of one file in it.

    Args:
        store: the directory.
        beside: the file.
        files: its listing, if that is known.
    """
    wanted = MANIFEST, short_name(beside)
    names = store.list_files() if files is None else files
    return [name for name in names if note_of(name) == wanted]


def find_manifest(
    store: Store, beside: str = "", files: Mapping[str, int] | None = None
) -> Manifest | None:
    """Returns the manifest in a directory, or that of one file in it; None if there is none.

    A crash may leave several, and so may an object store in which one attempt has just taken the
    place of another. Then it is the one that knows the index, or whose checksum fits the file.

    Args:
        store: the directory.
        beside: the file.
        files: its listing, if that is known.

    Raises:
        FormatError: it is malformed, or of several none fits or more than one.
    """
    files = store.list_files() if files is None else files
    names = names_in(store, beside, files)
    if len(names) < 2:
        return read_manifest(store, names[0]) if names else None
    fit: Manifest | None = None
    num_fit, crcs = 0, dict[str, str]()
    for name in names:  # one at a time: each may take much memory
        found = read_manifest(store, name)
        file, expected = _known_file(found, beside)
        if file not in files:
            continue
        if file not in crcs:
            crcs[file] = hash_file(store, file)
        if expected == crcs[file] and not (beside and fit):
            fit, num_fit = found, num_fit + 1
    if num_fit != 1:
        shown = ", ".join(names[:_MOST_NAMES]) + f" and {len(names) - _MOST_NAMES} more" * (
            len(names) > _MOST_NAMES
        )
        raise FormatError(
            f"{len(names)} manifests, of which {num_fit} fit: {printable(shown)}"
            f" ({printable(store.url)})",
            hint="remove all but one that fits; or all of them, and then ckpt seal",
        )
    return fit


def _known_file(manifest: Manifest, beside: str) -> tuple[str, str]:
    """Returns the file by which a manifest is known, and its CRC-64; "" for none.

    That is the only file, or the index: a delta's own one, and not that of the complete version.
    """
    if beside:
        sealed = manifest.files.get(beside)
        return (beside, sealed.crc64nvme) if sealed is not None else ("", "")
    own = manifest.delta_files
    if name := next((name for name in INDEXES if name in own), ""):
        return name, own[name][1]
    return (manifest.index[0], manifest.index[1].crc64nvme) if manifest.index else ("", "")


def hash_file(store: Store, name: str) -> str:
    """Reads a whole file, and returns its CRC-64 as 16 hex digits."""
    crc, nbytes = 0, store.size(name)
    for start in range(0, nbytes, _READ_BYTES):
        piece = read(store, name, start, min(_READ_BYTES, nbytes - start))
        crc = crc64nvme(piece, crc)
    return hex64(crc)


def read_manifest(store: Store, name: str) -> Manifest:
    """Reads one manifest of a directory. Wrong bytes of a remote store are read again.

    Raises:
        FormatError: it is malformed, or too long to be a manifest.
    """
    if (nbytes := store.size(name)) > _MAX_BYTES:
        raise FormatError(
            f"a manifest is too long: expected at most {_MAX_BYTES} bytes, got {nbytes}"
            f" ({printable(name)})"
        )
    return read_again_if_wrong(store, lambda: parse_manifest(read(store, name), name))


def noted_by_host(store: Store, attempt: str = "") -> dict[str, tuple[int, int]]:
    """Returns the files that the host of a job has added to a step, each with its size and time.

    A malformed note vouches for nothing, nor does that of another attempt than `attempt`, if given.
    """
    found: dict[str, tuple[int, int]] = {}
    for name in store.list_files():
        is_note = note_of(name) == (HOST, "") and store.size(name) <= MAX_NOTE_BYTES
        if is_note and (not attempt or name == note_name(HOST, attempt)):
            with suppress(ValueError, TypeError, AttributeError, RecursionError, CheckpointError):
                noted = json.loads(read(store, name)).items()
                for path, (nbytes, time) in noted:
                    check_path(path.removesuffix("/"), store.url)  # an empty folder has a slash
                    found[path] = int(nbytes), int(time)
    return found


def manifest_of(store: Store) -> Manifest | None:
    """Returns the manifest of a detected checkpoint; None if there is none.

    Raises:
        IntegrityError: the manifest beside a file is of another file.
    """
    folder, given = folder_of(store)
    name = given or only_file(folder)
    manifest = find_manifest(folder, name)
    if manifest is not None and name and name not in manifest.files:
        raise IntegrityError(
            f"the manifest beside a file is of another file: expected {printable(name)!r}, got"
            f" {printable(', '.join(list(manifest.files)[:3]))!r} ({printable(folder.url)})",
            hint="give the file its name back, or remove the manifest to read it without",
        )
    return manifest


def only_file(folder: Store) -> str:
    """Returns the name of a file that is the whole checkpoint of a directory and has a manifest.

    Returns "" if there is none.
    """
    files = folder.list_files()
    found = [name for name in files if name.endswith(safetensors.SUFFIX)]
    is_single = len(found) == 1 and not any(name in INDEXES for name in files)
    return found[0] if is_single and names_in(folder, found[0]) else ""
