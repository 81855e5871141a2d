"""Seal: a manifest for a checkpoint that has none, once everything that can be compared is right.

May import levels 0 to 4 and the parts of this folder.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Unpack

from ckpt_tools.catalog import Extent, TensorEntry
from ckpt_tools.checksum import crc32, crc64nvme, hex64, join_crc64
from ckpt_tools.commit import add_file
from ckpt_tools.errors import IntegrityError, PlanError, printable
from ckpt_tools.formats import INDEXES, folder_of
from ckpt_tools.manifest import Manifest, Sealed, file_name, seal_file, seal_tensors
from ckpt_tools.operations.move import Options, Path_
from ckpt_tools.operations.verify import Verification
from ckpt_tools.plan import num_cells, plan_values
from ckpt_tools.storage import RemoteStore, read


@dataclass(frozen=True, slots=True)
class SealResult:
    """What was sealed.

    Attributes:
        path: the checkpoint.
        manifest: name of the new file.
        files: bytes of every data file.
        num_tensors: how many have a fingerprint now.
        unknown: files with bytes of which nobody kept a checksum: they are sealed as they are.
        seconds: wall-clock time.
    """

    path: str
    manifest: str
    files: Mapping[str, int]
    num_tensors: int
    unknown: tuple[str, ...]
    seconds: float


def seal(src: Path_, **options: Unpack[Options]) -> SealResult:
    """Adds a manifest to a checkpoint that has none. Nothing else is written.

    Args:
        src: a checkpoint, or a directory with one below; a path or a URL.
        **options: see `Options`.

    Raises:
        PlanError: it has a manifest, or its index is of a kind that no manifest knows.
        IntegrityError: it is damaged; what is wrong is named.
        CheckpointError: it cannot be read or written to.
    """
    began = time.monotonic()
    work = Verification(src, options)
    folder, file = folder_of(work.store)
    if work.manifest is not None:
        raise PlanError(f"it has a manifest: {printable(work.store.url)}", hint="ckpt verify compares with it")
    problems, unknown = work.examine_all(quick=False)
    if problems:
        raise IntegrityError(
            f"a damaged checkpoint is not sealed: {problems[0]}" + (f", and {len(problems) - 1} more" if len(problems) > 1 else ""),
            hint="ckpt verify names everything; ckpt salvage writes what is whole",
        )
    assert work.catalog is not None
    index = "" if file else next((name for name in INDEXES if name in folder.list_files()), "")
    if not index and not file:
        raise PlanError(f"only what has one index can be sealed: {printable(work.store.url)}", hint="reshard it first")
    sizes = dict(work.catalog.file_sizes)
    tensors = list(work.catalog.tensors.values())
    located = work.format.locate(work.store, tensors)
    files, prints = _seal_files(work, sizes, _cells(tensors, located)), work.fingerprints(tensors, located)
    data = read(folder, index) if index else b""
    attempt = str(uuid.uuid4())
    manifest = Manifest.now(
        attempt, "seal", work.format.NAME, {}, world_size=work.catalog.world_size,
        files=files,
        index=(index, Sealed(len(data), hex64(crc64nvme(data)))) if index else None,
        tensors=seal_tensors(plan_values(tensors), prints),
    )  # fmt: skip
    name = file_name(attempt, file)
    if isinstance(folder, RemoteStore):
        folder.put(name, manifest.render(), is_exclusive=True)
    else:
        add_file(Path(folder.url), name, manifest.render(), attempt)
    return SealResult(work.store.url, name, sizes, len(manifest.tensors), tuple(unknown), time.monotonic() - began)


def _cells(tensors: Iterable[TensorEntry], located: Mapping[Extent, Extent]) -> dict[str, set[tuple[int, int]]]:
    """Returns where the cells of long packed payloads begin, and their bytes, by file."""
    cells: dict[str, set[tuple[int, int]]] = {}
    for chunk in (chunk for tensor in tensors for chunk in tensor.chunks if chunk.extent in located):
        payload = located[chunk.extent]
        count = num_cells(chunk.box, payload.nbytes)
        size = payload.nbytes // max(1, count)
        cells.setdefault(payload.file, set()).update((payload.start + number * size, size) for number in range(count))
    return cells


def _seal_files(work: Verification, sizes: Mapping[str, int], cells: Mapping[str, set[tuple[int, int]]]) -> dict[str, Sealed]:
    """Reads all files and returns their checksums, and those of the cells in them."""
    ranges: dict[str, Extent] = {}
    for name, nbytes in sizes.items():
        edges = sorted({0, nbytes, *(at for start, size in cells.get(name, ()) for at in (start, start + size))})
        ranges |= {f"{name}:{start}": Extent(name, start, end - start) for start, end in pairwise(edges)}
    crc64s, crc32s = work.hash_ranges(ranges, crc64nvme, crc32)
    pieces: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in sizes}
    for key, extent in ranges.items():
        pieces[extent.file].append((extent.start, extent.nbytes, crc64s[key], crc32s[key]))
    return {
        name: seal_file(nbytes, join_crc64((p[2], p[1]) for p in pieces[name]), [p for p in pieces[name] if p[:2] in cells.get(name, ())])
        for name, nbytes in sizes.items()
    }
