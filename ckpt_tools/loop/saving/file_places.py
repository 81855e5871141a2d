"""Lays out the files of all ranks. Most ranks write the same shards, of the same sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ckpt_tools.core.box import Box
from ckpt_tools.core.chunk_table import Ints
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.loop.saving.description import JobNames
from ckpt_tools.loop.saving.shard_columns import Bools, ShardColumns
from ckpt_tools.loop.saving.write import shards_by_file
from ckpt_tools.loop.saving.writers import Writers
from ckpt_tools.loop.state.shard_info import FileKind


class WrittenShards(NamedTuple):
    """The shards that some ranks write: their indices on these ranks, ascending; their tensors."""

    numbers: Ints
    tensors: Ints


def shards_by_rank(
    columns: ShardColumns, writers: Writers, is_written: Bools
) -> list[WrittenShards]:
    """Returns what each rank writes. Ranks that write the same share one object."""
    numbers = columns.numbers(writers.chosen, writers.tensors)
    ranks = columns.rank[writers.chosen]
    order = np.lexsort((numbers, ranks))
    numbers = numbers[order]
    bounds = np.searchsorted(ranks[order], np.arange(columns.num_ranks + 1))
    known: dict[tuple[int, bytes, bytes], WrittenShards] = {}
    found = []
    for rank in range(columns.num_ranks):
        chosen = numbers[bounds[rank] : bounds[rank + 1]]
        alike = int(columns.alike_of[rank])
        key = alike, columns.chosen_rows(rank, writers.is_alone).tobytes(), chosen.tobytes()
        if key not in known:
            tensors = columns.alike[alike].tensors
            mine = columns.chosen_shards(rank, writers.is_alone) & is_written[tensors]
            mine[chosen] = True
            all_numbers = np.flatnonzero(mine)
            known[key] = WrittenShards(all_numbers, tensors[all_numbers])
        found.append(known[key])
    return found


class _Layout(NamedTuple):
    """The files of ranks that write the same shards of the same sizes.

    Attributes:
        nbytes: of each file that has shards, and of the first one.
        numbers: `[shards]`, the indices of the shards on these ranks, ascending.
        spans: `[shards, 3]`: number of the file, start and bytes of the archive in it.
    """

    nbytes: dict[FileKind, int]
    numbers: Ints
    spans: Ints


class FilePlaces:
    """Where the shards that each rank writes lie.

    Attributes:
        names: of all files.
        sizes: bytes of each, by name.
    """

    def __init__(
        self, job: JobNames, columns: ShardColumns, shards: Sequence[WrittenShards]
    ) -> None:
        """Lays out all files.

        Args:
            job, columns: of all ranks.
            shards: those that each rank writes.
        """
        self._columns = columns
        self.sizes: dict[str, int] = {}
        self._layout_of: Ints = np.zeros(len(shards), np.int64)
        self._first_file: Ints = np.zeros(len(shards), np.int64)
        layouts: list[_Layout] = []
        known: dict[tuple[int, bytes], int] = {}
        for rank, mine in enumerate(shards):
            key = id(mine), columns.box_sizes(rank).tobytes()
            if key not in known:
                known[key] = len(layouts)
                layouts.append(_lay_out(job, columns, rank, mine))
            self._layout_of[rank], self._first_file[rank] = known[key], len(self.sizes)
            for kind, nbytes in layouts[known[key]].nbytes.items():
                self.sizes[dcp.data_file_name(rank, kind)] = nbytes
        self.names = tuple(self.sizes)
        none: Ints = np.zeros(0, np.int64)
        self._stride = 1 + max((int(one.numbers.max(initial=0)) for one in layouts), default=0)
        self._keys = np.concatenate(
            [none, *(one.numbers + n * self._stride for n, one in enumerate(layouts))]
        )
        self._spans = np.concatenate([none.reshape(0, 3), *(one.spans for one in layouts)])

    def find(self, rows: Ints, tensors: Ints | int) -> tuple[Ints, Ints, Ints]:
        """Returns the file, the start and the bytes of the archives of some tensors' shards.

        Args:
            rows: `[…]`, which write these shards.
            tensors: `[…]`.
        """
        ranks = self._columns.rank[rows]
        keys = self._layout_of[ranks] * self._stride + self._columns.numbers(rows, tensors)
        spans = self._spans[np.searchsorted(self._keys, keys)]
        return self._first_file[ranks] + spans[..., 0], spans[..., 1], spans[..., 2]


def _lay_out(job: JobNames, columns: ShardColumns, rank: int, mine: WrittenShards) -> _Layout:
    alike = columns.alike[columns.alike_of[rank]]
    sizes = columns.box_sizes(rank)[alike.which[mine.numbers]]
    spans: Ints = np.zeros((len(mine.numbers), 3), np.int64)
    nbytes = dict[FileKind, int]()
    for file, (kind, places) in enumerate(shards_by_file(alike.files[mine.numbers]).items()):
        shards = []
        for tensor, lengths in zip(
            mine.tensors[places].tolist(), sizes[places].tolist(), strict=True
        ):
            own = tuple(lengths[: len(job.shapes[tensor])])
            shards.append((Box((0,) * len(own), own), BY_NAME[job.dtypes[tensor]]))
        laid_out, slots = dcp.lay_out_rank(rank, shards, kind)
        nbytes[kind] = laid_out.nbytes
        for place, (_, at) in zip(places.tolist(), slots, strict=True):
            spans[place] = file, at.start, at.nbytes
    return _Layout(nbytes, mine.numbers, spans)
