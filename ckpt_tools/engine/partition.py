"""Divides a plan among processes: by parts of streamed files, or by who holds the source.

On a disk, every process can write anywhere, and a share is a range of the plan (`schedule.shares`).
An object store takes files in parts, so there a share consists of parts. This module does no I/O.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ckpt_tools.core.box import (
    Box,
    Overlap,
    OverlapList,
    flat_parts,
    flat_range_boxes,
    flat_start,
)
from ckpt_tools.core.plan import Plan, Slot, Target, TensorPlan, plan_overlaps

Regions = Mapping[str, tuple[int, int]]  # by file: bytes `start <= i < stop`


PartStarts = Callable[[int], Sequence[int]]  # of a file's length: where its parts begin


def cut_regions(plan: Plan, count: int, part_starts: PartStarts | None) -> Sequence[Regions]:
    """Cuts the files of a plan's target into `count` shares of about equal bytes.

    Args:
        plan: the plan to divide.
        count: number of shares.
        part_starts: where several processes may cut a file. If None, each file belongs to one
            share.

    Returns:
        For each share, its byte range of every file that it writes. A file that contains checksums
        of its own payloads is never cut.
    """
    target = plan.target
    whole = {t.file for t in target.trailers} if part_starts else set(target.file_sizes)
    slots = _slots_by_file(plan)
    total = sum(target.file_sizes.values())
    edges = [total * (number + 1) // count for number in range(count - 1)]
    found: list[dict[str, tuple[int, int]]] = [{} for _ in range(count)]
    start = 0
    for file, nbytes in target.file_sizes.items():
        if file in whole and len(target.file_sizes) == 1:
            found[0][file] = (0, nbytes)  # process 0 commits, so it completes the file
        elif part_starts is None or file in whole:
            found[bisect_right(edges, start + nbytes // 2)][file] = (0, nbytes)
        else:
            first, last = bisect_right(edges, start), bisect_right(edges, start + nbytes)
            cuts = [
                0,
                *(
                    _cut(edge - start, nbytes, slots.get(file, []), part_starts(nbytes))
                    for edge in edges[first:last]
                ),
                nbytes,
            ]
            for number, (low, high) in enumerate(pairwise(cuts), first):
                if low < high or low == high == nbytes == 0:
                    found[number][file] = (low, high)
            if len(cuts) > 2:
                found[0].setdefault(file, (0, 0))  # process 0 begins and completes the upload
        start += nbytes
    return found


def _slots_by_file(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """Returns, for each file, the start of every slot and the itemsize of its elements."""
    slots: dict[str, list[tuple[int, int]]] = {}
    for tensor in plan.tensors:
        for slot in tensor.slots:
            slots.setdefault(slot.file, []).append((slot.start, tensor.dst_dtype.itemsize))
    return {file: sorted(found) for file, found in slots.items()}


def _cut(wanted: int, nbytes: int, slots: Sequence[tuple[int, int]], starts: Sequence[int]) -> int:
    """Returns the first part start at or after `wanted` that cuts no element; or the file's end."""
    for start in starts[bisect_right(starts, max(0, wanted - 1)) :]:
        number = bisect_right(slots, (start, 0)) - 1
        if number >= 0 and (start - slots[number][0]) % slots[number][1] == 0:
            return start
    return nbytes


def within_regions(plan: Plan, regions: Regions) -> Plan:
    """Returns the part of a plan that writes certain regions.

    Its target keeps the literals and trailers of these regions.
    """
    tensors = []
    for tensor in plan.tensors:
        slots = tuple(
            piece
            for slot in tensor.slots
            if slot.file in regions
            for piece in cut_slot(tensor, slot, [regions[slot.file]])
        )
        if slots == tensor.slots:
            tensors.append(tensor)
        elif slots:
            overlaps = plan_overlaps([c.box for c in tensor.chunks], [s.box for s in slots])
            tensors.append(replace(tensor, slots=slots, overlaps=overlaps))
    return replace(plan, tensors=tuple(tensors), target=_target(plan.target, regions))


def _target(target: Target, regions: Regions) -> Target:
    return replace(
        target,
        file_sizes={file: nbytes for file, nbytes in target.file_sizes.items() if file in regions},
        literals=tuple(
            x
            for x in target.literals
            if x.file in regions and regions[x.file][0] <= x.start < regions[x.file][1]
        ),
        trailers=tuple(t for t in target.trailers if t.file in regions),
    )


def within_held(plan: Plan, held: Mapping[str, int], rank: int, in_runs: bool) -> Plan:
    """Returns the part of a plan that reads the files which a rank holds. Its target is the whole.

    Args:
        plan: the plan to divide.
        held: the rank that holds each file of the source. Rank 0 reads the others.
        rank: the rank.
        in_runs: cut what is not contiguous in its file. If not, its slots have no place there.
    """
    tensors = []
    for tensor in plan.tensors:
        mine = {
            i for i, chunk in enumerate(tensor.chunks) if held.get(chunk.extent.file, 0) == rank
        }
        slots, overlaps = list[Slot](), list[Overlap]()
        for overlap in tensor.overlaps:
            if overlap.src not in mine:
                continue
            slot, itemsize = tensor.slots[overlap.dst], tensor.dst_dtype.itemsize
            runs = flat_parts(overlap.box, slot.box) if in_runs else (overlap.box,)
            for box in runs:
                at = flat_start(box.within(slot.box), slot.box.sizes) * itemsize
                overlaps.append(Overlap(overlap.src, len(slots), box))
                slots.append(Slot(box, slot.file, slot.start + at))
        if slots:
            tensors.append(replace(tensor, slots=tuple(slots), overlaps=OverlapList(overlaps)))
    return replace(plan, tensors=tuple(tensors))


def cut_slot(tensor: TensorPlan, slot: Slot, ranges: Sequence[tuple[int, int]]) -> Iterator[Slot]:
    """Yields the parts of a slot in byte ranges of its file.

    The ranges must end between elements.
    """
    itemsize, nbytes = tensor.dst_dtype.itemsize, slot.box.numel * tensor.dst_dtype.itemsize
    for first, last in ranges:
        first, last = (
            max(first, slot.start) - slot.start,
            min(last, slot.start + nbytes) - slot.start,
        )
        if (first, last) == (0, nbytes):
            yield slot
        elif first < last:
            for box in flat_range_boxes(slot.box.sizes, first // itemsize, last // itemsize):
                at = tuple(o + s for o, s in zip(box.offsets, slot.box.offsets, strict=True))
                yield Slot(
                    Box(at, box.sizes),
                    slot.file,
                    slot.start + flat_start(box, slot.box.sizes) * itemsize,
                )
