"""Pairing: which chunk of a source feeds which slot of a target, in global element coordinates.

A plan is pure data and printable. Only the engine handles bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpt_tools.core.box import Box, BoxIndex, Overlap, OverlapList, Overlaps, whole
from ckpt_tools.core.catalog import BytesEntry, Catalog, Chunks, Extent, TensorEntry, one_chunk
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.errors import PlanError, printable

# S3 refuses shorter parts of an upload; the manifest must stay small
CELL_BYTES, MOST_CELLS = 5 << 20, 16
_MOST_ALIKE = 4096  # kinds of tensors whose overlaps are kept
Boxes = tuple[Box, ...]


def num_cells(box: Box, nbytes: int) -> int:
    """Returns the number of cells in a long payload; 0 for a short one.

    Each cell has its own checksums. Cells are halves, quarters … sixteenths of whole rows. A
    reshard to 2, 4 … times the ranks cuts the payload at the same rows.
    """
    if nbytes < CELL_BYTES:
        return 0
    count, rows = 1, box.sizes[0] if box.sizes else 1
    while count < MOST_CELLS and rows % (2 * count) == 0 and nbytes >= 2 * count * CELL_BYTES:
        count *= 2
    return count


class Slot(NamedTuple):
    """Space for a chunk in a target file: its elements, row-major, at `start`."""

    box: Box
    file: str
    start: int


class Literal(NamedTuple):
    """Bytes of a target file that are known before the copy: headers, footers, an index."""

    file: str
    start: int
    data: bytes


class Trailer(NamedTuple):
    """Bytes of a target file that contain the CRC-32 of the slot before them.

    A zip's central directory is an example.
    """

    file: str
    start: int
    nbytes: int
    slot_start: int
    render: Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """A set of target files, laid out by a format.

    `slots` has the places of each FQN's chunks. The target becomes visible when `index` appears; it
    is None if a single file is its own index.
    """

    format: str
    file_sizes: Mapping[str, int]
    slots: Mapping[str, tuple[Slot, ...]]
    literals: tuple[Literal, ...] = ()
    trailers: tuple[Trailer, ...] = ()
    index: Literal | None = None
    world_size: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files, the index included."""
        return sum(self.file_sizes.values()) + (len(self.index.data) if self.index else 0)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The way of one tensor (or object, as bytes) from its source chunks to its slots."""

    fqn: str
    shape: tuple[int, ...]
    src_dtype: DType
    dst_dtype: DType
    chunks: Chunks
    slots: tuple[Slot, ...]
    overlaps: Overlaps
    is_object: bool = False

    @property
    def payload_bytes(self) -> int:
        """The bytes of the source elements that are read."""
        return self.overlaps.numel * self.src_dtype.itemsize

    @property
    def is_complete(self) -> bool:
        """Tells whether the slots hold every element.

        If so, the whole tensor passes in row-major order.
        """
        return sum(s.box.numel for s in self.slots) >= whole(self.shape).numel


@dataclass(frozen=True, slots=True)
class Plan:
    """The complete decision about an operation: overlaps of each tensor, and target files."""

    tensors: tuple[TensorPlan, ...]
    target: Target
    notes: tuple[str, ...] = field(default=())

    @property
    def num_overlaps(self) -> int:
        """The number of pairs of a source chunk and a target slot that share elements."""
        return sum(len(t.overlaps) for t in self.tensors)

    @property
    def payload_bytes(self) -> int:
        """The bytes of the source elements that are read."""
        return sum(t.payload_bytes for t in self.tensors)


def plan_overlaps(src: Sequence[Box], dst: Sequence[Box]) -> OverlapList:
    """Pairs every target box with the source boxes that overlap it.

    The source boxes are sorted along the dim that cuts them most finely. A target looks only at the
    sources that can reach it. Equal source boxes are replicas, and the first one is used.

    Returns:
        Overlaps that tile each target box exactly, if the sources cover it.
    """
    first: dict[Box, int] = {}
    for number, box in enumerate(src):
        if box.numel:
            first.setdefault(box, number)
    boxes, numbers = list(first), list(first.values())
    index = BoxIndex(boxes)
    return OverlapList(
        Overlap(numbers[i], number, shared)
        for number, box in enumerate(dst)
        for i, shared in index.overlaps(box)
    )


def plan_transfer(
    catalog: Catalog,
    target: Target,
    dtypes: Mapping[str, DType] | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """Plans how to fill every slot of a target from a catalog.

    Args:
        catalog: the source, proved by `coverage.check`.
        target: files with slots; its FQNs are the catalog's.
        dtypes: element type to write, per FQN; the default is the stored type.
        notes: remarks to print with the plan.

    Raises:
        PlanError: the source lacks FQNs; the message names the first ten.
    """
    missing = [
        fqn for fqn in target.slots if fqn not in catalog.tensors and fqn not in catalog.objects
    ]
    if missing:
        raise PlanError(
            f"the source lacks {len(missing)} entries: "
            + ", ".join(repr(printable(m)) for m in missing[:10])
        )
    tensors = []
    alike = _AlikeOverlaps()
    for fqn, slots in target.slots.items():
        entry = catalog.tensors.get(fqn)
        tensors.append(
            _plan_tensor(entry, slots, (dtypes or {}).get(fqn), alike)
            if entry
            else _plan_object(catalog, fqn, slots)
        )
    return Plan(tuple(tensors), target, tuple(notes))


class _AlikeOverlaps:
    """Plans overlaps once for all tensors whose chunks and slots have the same boxes."""

    def __init__(self) -> None:
        self._known: dict[tuple[Boxes, Boxes], OverlapList] = {}

    def plan(self, src: Boxes, dst: Boxes) -> OverlapList:
        """Returns what `plan_overlaps` returns."""
        if (found := self._known.get((src, dst))) is None:
            if len(self._known) >= _MOST_ALIKE:
                self._known.clear()
            found = self._known[src, dst] = plan_overlaps(src, dst)
        return found


def _plan_tensor(
    entry: TensorEntry, slots: tuple[Slot, ...], dtype: DType | None, alike: _AlikeOverlaps
) -> TensorPlan:
    boxes = tuple([s.box for s in slots])
    found = entry.chunks.overlaps(boxes)
    if found is None:
        found = alike.plan(tuple([c.box for c in entry.chunks]), boxes)
    return TensorPlan(
        entry.fqn, entry.shape, entry.dtype, dtype or entry.dtype, entry.chunks, slots, found
    )


def _plan_object(catalog: Catalog, fqn: str, slots: tuple[Slot, ...]) -> TensorPlan:
    extent = catalog.objects[fqn].extent
    box, uint8 = whole((extent.nbytes,)), BY_NAME["uint8"]
    chunks = one_chunk(box, extent)
    return TensorPlan(
        fqn,
        box.sizes,
        uint8,
        uint8,
        chunks,
        slots,
        plan_overlaps([box], [s.box for s in slots]),
        is_object=True,
    )


def plan_objects(extents: Mapping[str, Extent], name: Callable[[str], str] = str) -> Plan:
    """Plans the copy of byte ranges, each to a file of its own.

    `name` returns the file name for a key.
    """
    items = {key: BytesEntry(key, extent) for key, extent in extents.items()}
    slots = {key: (Slot(whole((extent.nbytes,)), name(key), 0),) for key, extent in extents.items()}
    return plan_transfer(
        Catalog("objects", {}, items),
        Target("objects", {name(k): e.nbytes for k, e in extents.items()}, slots),
    )


def plan_files(files: Mapping[str, int], name: Callable[[str], str] = str) -> Plan:
    """Plans the copy of whole files, given by name and size in bytes; see `plan_objects`."""
    return plan_objects({file: Extent(file, 0, nbytes) for file, nbytes in files.items()}, name)


def plan_values(tensors: Iterable[TensorEntry]) -> Plan:
    """Plans to read tensors, each in one piece, for a sink that keeps nothing."""
    entries = {t.fqn: t for t in tensors}
    slots = {fqn: (Slot(whole(t.shape), fqn, 0),) for fqn, t in entries.items()}
    return plan_transfer(Catalog("values", entries), Target("values", {}, slots))
