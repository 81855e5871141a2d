"""The proof that a catalog is complete: each element is held once, each byte lies in its file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import Catalog, Chunk, Extent, TensorEntry
from ckpt_tools.core.tables import is_table
from ckpt_tools.errors import CatalogError, printable

_MOST_PROVED = 4096
MAX_REPEATED_BYTES = 2 << 30  # views of one storage, expanded tensors


class Flaw(NamedTuple):
    """A flaw of one catalog entry; `file` is "" if no single file is at fault."""

    fqn: str
    file: str
    error: CatalogError


def check(catalog: Catalog, shares: bool = False) -> None:
    """Proves that every tensor is covered exactly once and that every extent lies in its file.

    Equal boxes count as replicas.

    Args:
        catalog: the catalog to check.
        shares: entries may share bytes of a file, as views of storages do.

    Raises:
        CatalogError: a chunk exceeds its tensor, two chunks overlap, elements are missing, or an
            extent is out of bounds.
    """
    for flaw in flaws(catalog, shares):
        raise flaw.error
    nbytes = sum(entry.nbytes for entry in catalog.tensors.values())
    check_repeats(nbytes, sum(catalog.file_sizes.values()))


def check_repeats(nbytes: int, stored: int) -> None:
    """Refuses tensors of far more bytes than the files have that store them.

    Raises:
        CatalogError: the tensors have more than four times as many.
    """
    if nbytes > 4 * stored + MAX_REPEATED_BYTES:
        raise CatalogError(
            f"tensors repeat their elements too often: {nbytes:,} bytes in files of {stored:,}"
        )


def flaws(catalog: Catalog, shares: bool = False) -> Iterator[Flaw]:
    """Yields every flaw that `check` would refuse."""
    covers = _Covers(catalog)
    for entry in catalog.tensors.values():
        if not entry.chunks.covers(entry.shape) and (error := covers.check(entry)):
            yield Flaw(entry.fqn, "", error)
        if entry.chunks.fit(catalog.file_sizes, entry.dtype.itemsize):
            continue
        for chunk in entry.chunks:
            if error := _check_extent(
                catalog, entry.fqn, chunk.extent, chunk.box.numel * entry.dtype.itemsize
            ):
                yield Flaw(entry.fqn, chunk.extent.file, error)
    for item in catalog.objects.values():
        if error := _check_extent(catalog, item.fqn, item.extent, 0):
            yield Flaw(item.fqn, item.extent.file, error)
    if not shares and not _are_apart(catalog):
        yield from _overlaps(catalog)


class _Covers:
    """Checks that chunks cover their tensors. Most tensors of a model are cut alike."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog, self._proved = catalog, set[tuple[object, ...]]()

    def check(self, entry: TensorEntry) -> CatalogError | None:
        """Returns the error of a tensor that its chunks do not cover exactly."""
        kind = entry.shape, *[box for box, _ in entry.chunks]
        if kind in self._proved:
            return None
        error = cover_error(self._catalog, entry)
        if error is None and len(self._proved) < _MOST_PROVED:
            self._proved.add(kind)
        return error


def _check_extent(catalog: Catalog, fqn: str, extent: Extent, least: int) -> CatalogError | None:
    size = (
        len(catalog.memory_files[extent.file])
        if extent.file in catalog.memory_files
        else catalog.file_sizes.get(extent.file)
    )
    if size is None:
        return CatalogError(
            "a data file is missing",
            place=f"{catalog.where(extent.file)}, needed by {printable(fqn)!r}",
        )
    if extent.start < 0 or extent.nbytes < 0 or extent.start + extent.nbytes > size:
        return CatalogError(
            f"bytes {extent.start}:{extent.start + extent.nbytes} are outside its file, which has"
            f" {size}: it is truncated, or belongs to another save",
            place=f"{catalog.where(extent.file)}, {printable(fqn)!r}",
            hint=(
                "restore the file; `ckpt verify` shows what is damaged, `ckpt salvage` saves the"
                " rest"
            ),
        )
    if extent.nbytes < least and extent.strides is None:
        return CatalogError(
            f"a chunk claims {least} bytes, but its item has {extent.nbytes}",
            place=f"{catalog.where(extent.file)}, {printable(fqn)!r}",
        )
    return None


def _are_apart(catalog: Catalog) -> bool:
    """Tells whether no two entries share bytes. False may also mean that the arrays cannot tell."""
    many = [t.chunks for t in catalog.tensors.values() if is_table(t.chunks)]
    if not many or catalog.archives or catalog.memory_files:
        return False
    few = [c.extent for t in catalog.tensors.values() if not is_table(t.chunks) for c in t.chunks]
    few += [o.extent for o in catalog.objects.values()]
    # two tables of names (a model's folder and an optimizer's) may not share a file
    tables = {id(chunks.names): chunks.names for chunks in many}
    if sum(map(len, tables.values())) > len(set().union(*tables.values())):
        return False
    groups = ([chunks for chunks in many if id(chunks.names) == table] for table in tables)
    return all(group[0].are_apart(group, few) for group in groups)


def _overlaps(catalog: Catalog) -> Iterator[Flaw]:
    """Yields entries that share bytes of a file with another entry.

    Entries with identical ranges are tied tensors and are fine.
    """
    spans: dict[str, dict[tuple[int, int], str]] = {}
    shared = {*catalog.memory_files, *(archive.file for archive in catalog.archives)}
    for entry in catalog.tensors.values():
        for chunk in entry.chunks:
            if chunk.extent.nbytes:
                spans.setdefault(chunk.extent.file, {})[chunk.extent.start, chunk.extent.nbytes] = (
                    entry.fqn
                )
    for item in catalog.objects.values():
        spans.setdefault(item.extent.file, {})[item.extent.start, item.extent.nbytes] = item.fqn
    for file, ranges in spans.items():
        if file in shared:
            continue
        end, last = 0, ""
        for start, nbytes in sorted(ranges):
            if start < end:
                error = CatalogError(
                    f"two items share bytes of one file: {start}:{end}", place=catalog.where(file)
                )
                yield from (Flaw(fqn, file, error) for fqn in (last, ranges[start, nbytes]))
            if start + nbytes >= end:
                end, last = start + nbytes, ranges[start, nbytes]


def cover_error(catalog: Catalog, entry: TensorEntry) -> CatalogError | None:
    """Returns the error of a tensor that its chunks do not cover; equal boxes count once."""
    name, ndim, end = printable(entry.fqn), len(entry.shape), entry.shape
    for box, extent in entry.chunks:
        if len(box.offsets) != ndim or len(box.sizes) != ndim:
            return CatalogError(
                f"a chunk has the wrong number of dims: expected {ndim}, got {box} ({name!r})"
            )
        for low, size, full in zip(box.offsets, box.sizes, end, strict=True):
            if low < 0 or size < 0 or low + size > full:
                return CatalogError(
                    f"a chunk exceeds its tensor: expected within {list(entry.shape)}, got {box}"
                    f" ({name!r}, {catalog.where(extent.file)})"
                )
    boxes = [box for box in {c.box for c in entry.chunks} if box.numel]
    total, covered = whole(entry.shape).numel, sum(box.numel for box in boxes)
    clash = _first_overlap(boxes) if len(boxes) > 1 else None
    if clash:
        return CatalogError(
            f"two chunks overlap: {clash[0]} and {clash[1]} ({name!r}, shape {list(entry.shape)})"
        )
    if covered != total:
        held = ", ".join(str(b) for b in sorted(boxes)[:8]) or "nothing"
        return CatalogError(
            f"chunks leave a hole: expected {total} elements, got {covered} ({name!r}, shape"
            f" {list(entry.shape)}, held: {held})",
            hint="a rank's part is missing; its elements exist nowhere in this checkpoint",
        )
    return None


def _first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Returns the first two boxes that overlap, or None.

    Sweeps along the dim with the most distinct offsets, and compares only boxes that overlap in
    that dim.
    """
    dims = range(len(boxes[0].offsets))
    dim = max(dims, key=lambda d: len({b.offsets[d] for b in boxes}), default=None)
    if dim is None:
        return None
    alive: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        alive = [
            other for other in alive if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]
        ]
        for other in alive:
            if box.intersect(other):
                return other, box
        alive.append(box)
    return None


def replicas(entry: TensorEntry) -> list[list[Chunk]]:
    """Returns the groups of several chunks that hold the same elements."""
    if entry.chunks.covers(entry.shape):
        return []
    if len({c.box for c in entry.chunks}) == len(entry.chunks):
        return []
    groups: dict[Box, list[Chunk]] = {}
    for chunk in entry.chunks:
        if chunk.box.numel:
            groups.setdefault(chunk.box, []).append(chunk)
    return [group for group in groups.values() if len({c.extent for c in group}) > 1]
