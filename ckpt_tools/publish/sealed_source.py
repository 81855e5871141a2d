"""Opens a sealed checkpoint, and compares everything that was read with its manifest.

Readers decide by names, headers, pickles and indexes before they read a payload. These have to be
the sealed ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.core.catalog import TORCH_ZIP, BytesEntry, Catalog
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.errors import IntegrityError, StorageError, printable
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.registry import Source, open_source
from ckpt_tools.publish.find_manifest import manifest_of
from ckpt_tools.publish.manifest import Manifest, SealedPickle
from ckpt_tools.storage import Store, read
from ckpt_tools.storage.one_file import folder_of
from ckpt_tools.storage.retries import read_again_if_wrong

# Up to this length, a file with a pickle or a JSON file is compared as a whole.
_PICKLE_FILE_BYTES, _JSON_BYTES = 16 << 20, 1 << 20
_DAMAGED_INDEX = (
    "if another tool has written here since the seal, remove ckpt.manifest.*.json and run ckpt"
    " seal. Else a bit has flipped: try again, take another copy, or save the rest: ckpt salvage"
)


def checked_manifest(source: Source) -> Manifest | None:
    """Returns the manifest of an opened checkpoint; None if there is none.

    Raises:
        IntegrityError: the checkpoint's names are not those that were sealed. No other checksum
            finds a flipped bit in a name.
    """
    manifest = manifest_of(source.store)
    if manifest is not None:
        check_files(manifest, source)
        _check_indexes(manifest, source.catalog)
        check_pickles(manifest, source.store, source.catalog)
        _check_headers(manifest, source.catalog)
        _check_names(manifest, source.catalog)
    return manifest


def open_sealed(
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> tuple[Source, Manifest | None]:
    """Opens a checkpoint whose names are the sealed ones; returns its manifest, too.

    If names from a remote store differ from the sealed ones, they are read once more. The arguments
    and errors are those of `open_source` and `checked_manifest`.
    """
    opened = [open_source(path, options, beside)]

    def checked() -> tuple[Source, Manifest | None]:
        source = opened.pop() if opened else open_source(path, options, beside)
        try:
            manifest = checked_manifest(source)
            return replace(source, catalog=with_sealed_objects(source.catalog, manifest)), manifest
        except BaseException:
            source.store.close()
            raise

    return read_again_if_wrong(opened[0].store, checked)


def with_sealed_objects(catalog: Catalog, manifest: Manifest | None) -> Catalog:
    """Returns the catalog, with the sealed checksums of its objects."""
    sealed = manifest.objects if manifest is not None else {}
    if not sealed:
        return catalog
    objects = {
        fqn: replace(item, crc64=int(sealed[fqn].crc64nvme, 16)) if fqn in sealed else item
        for fqn, item in catalog.objects.items()
    }
    return replace(catalog, objects=objects)


def read_object(store: Store, item: BytesEntry) -> bytes:
    """Reads an object, and compares it with its sealed checksum.

    Raises:
        IntegrityError: it is not what was sealed.
    """
    extent = item.extent
    data = read(store, extent.file, extent.start, extent.nbytes)
    if item.crc64 is not None and crc64nvme(data) != item.crc64:
        raise IntegrityError(
            f"an object is not what was sealed: expected CRC-64 {hex64(item.crc64)}, got"
            f" {hex64(crc64nvme(data))} ({printable(item.fqn)!r} in {printable(extent.file)})",
            hint="ckpt verify names what is damaged; restore the file, or take another step",
        )
    return data


def strays_of(manifest: Manifest, catalog: Catalog) -> list[str]:
    """Returns the files that a catalog takes values from and that were not sealed."""
    sealed = {*manifest.files, *(manifest.index or ())[:1]}
    used = set(catalog.file_sizes)
    # a sealed model may be a part of a larger checkpoint, but no other model may take its place
    data = {name for name in manifest.files if name.endswith(safetensors.SUFFIX)}
    is_part = catalog.format != manifest.format and bool(data) and data <= used
    return [] if is_part else sorted(used - sealed - catalog.memory_files.keys())


def check_files(manifest: Manifest, source: Source) -> None:
    """Refuses a sealed checkpoint that takes values from other files.

    Raises:
        IntegrityError: somebody has put such a file there.
    """
    if strays := strays_of(manifest, source.catalog):
        raise IntegrityError(
            f"a file that was not sealed would give values: {printable(', '.join(strays[:3]))}"
            f" ({printable(source.path)})",
            hint="move it away; or remove the manifest, to read everything without a seal",
        )


def _check_indexes(manifest: Manifest, catalog: Catalog) -> None:
    """Compares the index files, as they were read, with their checksums in the manifest."""
    sealed = {**manifest.files, **dict([manifest.index] if manifest.index else ())}
    for name, crc in catalog.index_crcs.items():
        if name in sealed and hex64(crc) != sealed[name].crc64nvme:
            raise IntegrityError(
                f"an index is not the sealed one: expected CRC-64 {sealed[name].crc64nvme}, got"
                f" {hex64(crc)} ({printable(name)})",
                hint=_DAMAGED_INDEX,
            )


def check_pickles(manifest: Manifest, store: Store, catalog: Catalog) -> None:
    """Compares the pickles of `torch.save` files with their checksums in the manifest.

    A pickle has every name and plain value. Short files that have them, too, are compared as a
    whole: the index, the progress of transformers' Trainer, and `torch.save` files whose pickles
    were not sealed.

    Raises:
        IntegrityError: one is not what was sealed.
    """
    used, ranges = whole_archives(catalog), dict(manifest.pickles)
    for name, file in [*manifest.files.items(), *([manifest.index] if manifest.index else [])]:
        is_short = file.nbytes <= (_PICKLE_FILE_BYTES if name in used else _JSON_BYTES)
        is_index = manifest.index is not None and name == manifest.index[0]
        is_read = name in used or is_index or name.endswith("trainer_state.json")
        if is_read and is_short and name not in ranges and name not in catalog.index_crcs:
            ranges[name] = SealedPickle(0, file.nbytes, file.crc64nvme)
    folder = folder_of(store)[0]
    folder.will_read((name, found.start, found.nbytes) for name, found in ranges.items())
    for name, (start, nbytes, expected) in ranges.items():
        try:
            is_short = folder.size(name) < start + nbytes
            data = b"" if is_short else read(folder, name, start, nbytes)
            got = "a shorter file" if is_short else hex64(crc64nvme(data))
        except StorageError as error:
            if not error.is_missing:
                raise
            raise IntegrityError(
                f"a sealed file is missing: {printable(name)} ({printable(folder.url)})",
                hint="restore it; ckpt salvage writes what is there",
            ) from error
        if got != expected:
            raise IntegrityError(
                f"the pickle of a file is not the sealed one: expected CRC-64 {expected}, got {got}"
                f" ({printable(name)})",
                hint=_DAMAGED_INDEX,
            )


def whole_archives(catalog: Catalog) -> set[str]:
    """Returns the files that are one archive of `torch.save` each."""
    return {
        file
        for file, start, nbytes, packing, *_ in catalog.archives
        if start == 0 and packing == TORCH_ZIP and nbytes == catalog.file_sizes.get(file)
    }


def check_file(manifest: Manifest | None, name: str, data: bytes) -> None:
    """Compares a small file that was read with its checksum in the manifest, if it has one.

    Raises:
        IntegrityError: it is not what was sealed.
    """
    if manifest is None:
        return
    sealed = {**manifest.files, **dict([manifest.index] if manifest.index else ())}.get(name)
    if sealed is not None and hex64(crc64nvme(data)) != sealed.crc64nvme:
        raise IntegrityError(
            f"a file is not the sealed one: expected CRC-64 {sealed.crc64nvme}, got"
            f" {hex64(crc64nvme(data))} ({printable(name)})",
            hint="restore it; or remove the manifest, if the file was changed on purpose",
        )


def _check_names(manifest: Manifest, catalog: Catalog) -> None:
    """Refuses a checkpoint that lacks sealed tensors: names come from those of files, too.

    It may have more tensors. Also, a sealed model may be a part of a larger checkpoint.
    """
    if catalog.lacks_shapes or catalog.format != manifest.format:
        return
    there = catalog.tensors.keys() | catalog.unread.keys()
    if missing := [fqn for fqn in manifest.tensors if fqn not in there]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        names = printable(", ".join(missing[:3]))
        raise IntegrityError(
            f"{len(missing)} sealed tensors are not there: {names}{more}",
            hint=(
                "a file is missing, has another name, or is damaged: ckpt verify names it. If"
                " another tool has written here since the seal, remove the manifest"
            ),
        )


def _check_headers(manifest: Manifest, catalog: Catalog) -> None:
    """Compares names, types and shapes that come from headers, which have no checksum.

    Indexes have one in the manifest, and torch's pickles have one in their zip.
    """
    if manifest.operation == "copy" and not manifest.tensors:
        return  # a copy of a file without a manifest reads no header
    has_pickle = any(archive.packing == TORCH_ZIP for archive in catalog.archives)
    if catalog.index_crcs or has_pickle or catalog.lacks_shapes:
        return
    sealed = {fqn: (t.dtype, tuple(t.shape)) for fqn, t in manifest.tensors.items()}
    found = {fqn: (t.dtype.name, tuple(t.shape)) for fqn, t in catalog.tensors.items()}
    for fqn in {**found, **sealed} if found != sealed else ():
        if found.get(fqn) != sealed.get(fqn):
            raise IntegrityError(
                f"a header is not the sealed one: expected {sealed.get(fqn, 'no such tensor')}, got"
                f" {found.get(fqn, 'none')} ({printable(fqn)!r})",
                hint=_DAMAGED_INDEX,
            )
