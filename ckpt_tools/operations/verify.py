"""Verify: every file that the manifest names is there, with its size and its checksum; nothing else is.

Bytes are read by the engine and hashed; or, quickly, an object store is asked for the checksums that it keeps. May import
levels 0 to 4 and the parts of this folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Unpack

from ckpt_tools.checksum import crc64nvme, hex64
from ckpt_tools.engine.run import run
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, schedule, tile_bytes
from ckpt_tools.engine.sinks import HashSink
from ckpt_tools.errors import NotACheckpointError, printable
from ckpt_tools.formats import is_ours, open_source
from ckpt_tools.manifest import Manifest, of_source
from ckpt_tools.operations.copy import plan_files
from ckpt_tools.operations.move import Options, Path_, no_bar
from ckpt_tools.storage import RemoteStore, Store, read

_ASKERS = 16


class Problem(NamedTuple):
    """What is wrong with a file."""

    file: str
    what: str


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a verification found.

    Attributes:
        path: the checkpoint.
        num_files, nbytes: how many files, and of how many bytes, were compared.
        problems: what is wrong; whole where empty.
        unknown: files whose checksum nobody could tell without reading them.
        seconds: wall-clock time.
    """

    path: str
    num_files: int
    nbytes: int
    problems: Sequence[Problem]
    unknown: Sequence[str] = ()
    seconds: float = 0.0


def verify(src: Path_, *, quick: bool = False, **options: Unpack[Options]) -> VerifyResult:
    """Compares a checkpoint with its manifest.

    Args:
        src: a checkpoint, or a directory with one below; a path or a URL.
        quick: read no data: names, sizes, the index, and the checksums that an object store keeps.
        **options: see `Options`.

    Raises:
        NotACheckpointError: there is no checkpoint, or none with a manifest.
        CheckpointError: its metadata is malformed, or it cannot be read.
    """
    began = time.monotonic()
    source = open_source(src, options.get("storage_options"))
    manifest = of_source(source)
    if manifest is None:
        raise NotACheckpointError(
            f"no manifest to compare with: {printable(source.path)}",
            hint="its structure is sound, as far as that can be told; only what this tool wrote has checksums",
        )
    files = source.store.list_files()
    problems, same = _compare_names(manifest, files, source.store)
    crcs = _ask(source.remote, same) if quick else _read(source.store, {name: files[name] for name in same}, options)
    wrong = [name for name in same if crcs.get(name) is not None and hex64(crcs[name] or 0) != manifest.files[name].crc64nvme]
    if wrong and not quick and source.remote is not None:  # it may have happened on the way
        source.store.close()
        crcs |= _read(source.store, {name: files[name] for name in wrong}, options)
    for name in same:
        crc = crcs.get(name)
        if crc is not None and hex64(crc) != manifest.files[name].crc64nvme:
            problems.append(Problem(name, f"damaged: expected CRC-64 {manifest.files[name].crc64nvme}, got {hex64(crc)}"))
    source.store.close()
    unknown = [name for name in same if crcs.get(name) is None]
    return VerifyResult(
        source.path, len(manifest.files), sum(s.nbytes for s in manifest.files.values()), problems, unknown, time.monotonic() - began
    )


def _compare_names(manifest: Manifest, files: Mapping[str, int], store: Store) -> tuple[list[Problem], list[str]]:
    """Returns what is wrong by names, sizes and index, and the files that are worth a look inside."""
    problems, same = [], []
    for name, sealed in manifest.files.items():
        if name not in files:
            problems.append(Problem(name, "missing"))
        elif files[name] != sealed.nbytes:
            problems.append(Problem(name, f"expected {sealed.nbytes} bytes, got {files[name]}"))
        else:
            same.append(name)
    if manifest.index is not None:
        name, sealed = manifest.index
        crc = hex64(crc64nvme(read(store, name))) if name in files else ""
        if crc != sealed.crc64nvme:
            problems.append(Problem(name, f"damaged: expected CRC-64 {sealed.crc64nvme}, got {crc}" if crc else "missing"))
    if manifest.index is None:
        return problems, same  # one file, among others
    known = {*manifest.files, manifest.index[0]}
    problems += [
        Problem(n, "no part of this checkpoint") for n in files if is_ours(n) and ".ckpt.manifest." not in f".{n}" and n not in known
    ]
    return problems, same


def _ask(store: RemoteStore | None, names: Sequence[str]) -> dict[str, int | None]:
    """Returns the checksums that a store keeps; a disk keeps none."""
    if store is None:
        return {}
    with ThreadPoolExecutor(_ASKERS, "ckpt-ask") as pool:
        return dict(zip(names, pool.map(store.crc64, names), strict=True))


def _read(store: Store, files: Mapping[str, int], options: Options) -> dict[str, int | None]:
    """Reads files and returns their checksums."""
    jobs = options.get("jobs") or min(8, os.cpu_count() or 1)
    sink, bar = HashSink(), options.get("progress") or no_bar
    with bar("verify", sum(files.values())) as advance:
        tiles = tile_bytes(options.get("memory_bytes") or DEFAULT_MEMORY_BYTES, jobs)
        run(schedule(plan_files(files), {}, *tiles), store, sink, jobs, advance)
    return {**dict.fromkeys(files, 0), **sink.fingerprints.join()}  # that of no bytes is 0
