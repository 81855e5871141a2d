"""The flat vectors of DeepSpeed's ranks, and the boxes of a parameter's elements in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ckpt_tools.core.box import flat_range_boxes
from ckpt_tools.core.catalog import RAW, Chunk, Extent
from ckpt_tools.core.dtypes import DType
from ckpt_tools.formats.pickle.state import Malformed, TensorView
from ckpt_tools.formats.torch_save import OpenedFile


class TensorSpan(NamedTuple):
    """A range of a rank's vector: its start there, and the tensor that holds it."""

    start: int
    view: TensorView
    file: OpenedFile

    @property
    def numel(self) -> int:
        return math.prod(self.view.sizes)


class FlatVectors:
    """One quantity (weights, or a moment) as the vectors of all ranks."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype
        self._spans: list[list[TensorSpan]] = []

    def add(self, rank: int, start: int, view: TensorView, file: OpenedFile) -> None:
        """Adds a range of a rank's vector.

        Raises:
            Malformed: the tensor is of another type, or not a contiguous vector.
        """
        if view.dtype != self.dtype or len(view.sizes) != 1 or view.strides != (1,):
            raise Malformed("a partition is not a vector of the type of the others")
        while len(self._spans) <= rank:
            self._spans.append([])
        self._spans[rank].append(TensorSpan(start, view, file))

    def chunks(
        self, rank: int, start: int, shape: Sequence[int], first: int, stop: int, fqn: str
    ) -> Iterator[Chunk]:
        """Yields the boxes of a parameter's elements `first` to `stop`.

        They begin at `start` in a rank's vector.
        """
        if rank >= len(self._spans):
            return
        for span in self._spans[rank]:
            low, high = max(start, span.start), min(start + stop - first, span.start + span.numel)
            if low >= high:
                continue
            extent = span.file.extent(span.view, fqn)
            at = extent.start + (low - span.start) * self.dtype.itemsize
            for box in flat_range_boxes(shape, first + low - start, first + high - start):
                nbytes = box.numel * self.dtype.itemsize
                yield Chunk(box, Extent(extent.file, at, nbytes, RAW))
                at += nbytes


def one_range(views: Sequence[Any], files: Sequence[OpenedFile], size: int) -> FlatVectors:
    """Returns a quantity with one range per rank; rank r's range begins at r times `size`."""
    flat = FlatVectors(views[0].dtype)
    for rank, (view, file) in enumerate(zip(views, files, strict=True)):
        flat.add(rank, rank * size, view, file)
    return flat


def several_ranges(views: Sequence[Sequence[Any]], files: Sequence[OpenedFile]) -> FlatVectors:
    """Returns a quantity with several consecutive ranges per rank."""
    flat = FlatVectors(views[0][0].dtype)
    for rank, (mine, file) in enumerate(zip(views, files, strict=True)):
        start = 0
        for view in mine:
            flat.add(rank, start, view, file)
            start += math.prod(view.sizes)
    return flat
