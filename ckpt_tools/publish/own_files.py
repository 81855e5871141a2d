"""Tells which files at a place belong to a checkpoint. All others are somebody else's."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.errors import CheckpointError, NotACheckpointError, StorageError, printable
from ckpt_tools.formats.base import index_of_format, is_note
from ckpt_tools.formats.dcp.format import is_data_file
from ckpt_tools.formats.registry import INDEXES, detect_in, is_checkpoint_file
from ckpt_tools.publish.check_manifest import hash_files
from ckpt_tools.publish.find_manifest import names_in, read_manifest
from ckpt_tools.storage import Store, read


def is_result(folder: Store, name: str) -> bool:
    """Tells whether a file is a checkpoint by itself: it may be replaced.

    A file of a format that any program writes must have the very bytes that its manifest has
    sealed.
    """
    if is_checkpoint_file(folder, name):
        return True
    for beside in names_in(folder, name):
        with suppress(CheckpointError):  # a manifest that anybody may have written
            sealed = read_manifest(folder, beside).files.get(name)
            if sealed is None or folder.size(name) != sealed.nbytes:
                continue
            crc = folder.stored_crcs([name]).get(name)
            if crc is None:
                crc = hash_files(folder, {name: sealed.nbytes})[name]
            if hex64(crc) == sealed.crc64nvme:
                return True
    return False


def foreign_in(store: Store, names: Iterable[str]) -> list[str]:
    """Returns the names of a directory that belong to no checkpoint: never to be overwritten.

    A manifest may list files of any name, such as a config or a tokenizer. But anybody can write a
    manifest, so a file counts only if it has the very bytes that were sealed. Other files count if
    the index refers to them. Without a readable index, names have to do that only torch and this
    tool use.
    """
    own = own_files(store)
    return [n for n in names if not (n in own or is_note(n))]


def own_files(store: Store) -> set[str]:
    """Returns the files of the checkpoint in a directory: data, index, and all that its manifest
    lists with the very bytes.

    An index of another format is a stray file of the user. If no checkpoint is readable, each index
    counts as part of a broken one.
    """
    try:
        inner, form = detect_in(store)
        if inner is not store:  # it lies below, and is not what this directory holds
            raise NotACheckpointError(f"no checkpoint in {printable(store.url)}")
        known = {*form.read_catalog(store).file_sizes, index_of_format(form)}
        # torch leaves an empty file for a rank that saved nothing
        known |= {n for n, size in store.list_files().items() if is_data_file(n) and not size}
    except CheckpointError:
        known = {*INDEXES, *filter(is_data_file, store.list_files())}
    for name in names_in(store):
        with suppress(CheckpointError):  # it vouches for nothing
            manifest = read_manifest(store, name)
            sizes = {
                file: sealed.nbytes
                for file, sealed in manifest.files.items()
                if _has_size(store, file, sealed.nbytes)
            }
            crcs = hash_files(store, {n: nbytes for n, nbytes in sizes.items() if n not in known})
            known |= {n for n, crc in crcs.items() if hex64(crc) == manifest.files[n].crc64nvme}
            known |= {
                index[0]
                for index in [manifest.index]
                if index and hex64(crc64nvme(read(store, index[0]))) == index[1].crc64nvme
            }
    return known


def _has_size(store: Store, file: str, nbytes: int) -> bool:
    try:
        return store.size(file) == nbytes
    except StorageError:
        return False
