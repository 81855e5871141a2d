"""Chooses which rank writes each chunk of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ckpt_tools.core.chunk_table import Ints
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.loop.saving.description import JobNames
from ckpt_tools.loop.saving.shard_columns import Bools, CopySets, ShardColumns
from ckpt_tools.loop.state.shard_info import ReplicaKind

_NONE = -1


class ChosenRows(NamedTuple):
    """Pairs of a tensor and a set of copies, in the order in which ranks met them.

    Attributes:
        tensors, sets: `[pairs]`.
    """

    tensors: Ints
    sets: Ints


class Writers:
    """The row that writes each chunk.

    A chunk with one holder has its row in the table of the cut. For one with several, the copies of
    each tensor are chosen on their own, so that all ranks write about as many bytes.

    Attributes:
        is_alone: `[rows]`, the row is the only holder of its chunk.
        chosen, tensors: `[n]`, the rows that were chosen among several, each for one tensor.
        shared: the pairs with elements, which several ranks hold.
    """

    def __init__(
        self,
        job: JobNames,
        columns: ShardColumns,
        sets: CopySets,
        is_written: Bools,
        kinds: Mapping[str, ReplicaKind],
    ) -> None:
        """Chooses.

        Args:
            job, columns, sets: of all ranks.
            is_written: `[tensors]`; the others are tied to one that is.
            kinds: of tensors that are not simply equal. The lowest rank writes those that may
                differ, and parts of a weight, so that these are of one rank.
        """
        self._sets = sets
        num_cuts = int(columns.cuts.max(initial=-1)) + 1
        self._bounds = np.searchsorted(sets.cut, np.arange(num_cuts + 1))
        itemsizes: Ints = np.array([BY_NAME[dtype].itemsize for dtype in job.dtypes], np.int64)
        is_single = sets.counts == 1
        self._rows: Ints = np.full(len(sets.cut), _NONE)
        self._rows[is_single] = sets.holders[sets.ends[is_single] - 1]
        alone = self._rows[is_single]
        self.is_alone = np.zeros(len(columns.rank), bool)
        self.is_alone[alone] = True
        weights: Ints = np.zeros(num_cuts, np.int64)
        np.add.at(weights, columns.cuts[is_written], itemsizes[is_written])
        load: Ints = np.zeros(columns.num_ranks, np.int64)
        np.add.at(load, columns.rank[alone], columns.numel[alone] * weights[columns.cut[alone]])

        pairs = self._pairs(columns, is_written)
        self.tensors, self.chosen = pairs.tensors, np.zeros(len(pairs.sets), np.int64)
        self.shared = pairs
        if len(pairs.sets):
            lowest = (ReplicaKind.FREE, ReplicaKind.PART)
            is_lowest = np.array([kinds.get(fqn) in lowest for fqn in job.fqns], bool)
            self._choose(columns, pairs, itemsizes, load, is_lowest)

    def _choose(
        self,
        columns: ShardColumns,
        pairs: ChosenRows,
        itemsizes: Ints,
        load: Ints,
        is_lowest: Bools,
    ) -> None:
        """Chooses a row for each pair; the longest go first, to the rank with the least bytes.

        Args:
            columns: of all ranks.
            pairs: a chunk of each.
            itemsizes, is_lowest: `[tensors]`; of some, the lowest rank writes all.
            load: `[ranks]`, bytes that each writes already.
        """
        sets = self._sets
        nbytes = columns.numel[(sets.holders[sets.ends - sets.counts])[pairs.sets]]
        nbytes *= itemsizes[pairs.tensors]
        first = sets.first[pairs.sets]
        met = np.lexsort((columns.numbers(first, pairs.tensors), columns.rank[first]))
        by_size = met[np.argsort(-nbytes[met], kind="stable")]
        holders = {n: sets.holders_of(n) for n in np.unique(pairs.sets).tolist()}
        ranks = {n: columns.rank[rows] for n, rows in holders.items()}
        for pair, number, size, lowest in zip(
            by_size.tolist(),
            pairs.sets[by_size].tolist(),
            nbytes[by_size].tolist(),
            is_lowest[pairs.tensors[by_size]].tolist(),
            strict=True,
        ):
            mine = ranks[number]
            best = 0 if lowest else int(np.argmin(load[mine]))
            load[mine[best]] += size
            self.chosen[pair] = holders[number][best]
        met = met[nbytes[met] > 0]
        self.shared = ChosenRows(pairs.tensors[met], pairs.sets[met])

    def _pairs(self, columns: ShardColumns, is_written: Bools) -> ChosenRows:
        """Returns all pairs with several holders; those of a tensor lie behind each other."""
        several = np.flatnonzero(self._sets.counts > 1)
        bounds = np.searchsorted(self._sets.cut[several], np.arange(len(self._bounds)))
        counts = np.where(is_written, np.diff(bounds)[columns.cuts], 0)
        tensors = np.repeat(np.arange(columns.num_tensors), counts)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(len(tensors)) - self._starts[tensors]
        return ChosenRows(tensors, several[bounds[columns.cuts[tensors]] + places])

    def num_chunks(self, cut: int) -> int:
        """Returns the number of chunks of each tensor of a cut."""
        return int(self._bounds[cut + 1] - self._bounds[cut])

    def choice(self, tensor: int) -> bytes:
        """Returns what tensors of one cut share if the same rows write them."""
        return self.chosen[self._starts[tensor] : self._starts[tensor + 1]].tobytes()

    def rows(self, tensor: int, cut: int) -> Ints:
        """Returns the row that writes each chunk of a tensor, in order of the offsets."""
        rows = self._rows[self._bounds[cut] : self._bounds[cut + 1]]
        mine = self.chosen[self._starts[tensor] : self._starts[tensor + 1]]
        if not len(mine):
            return rows
        rows = rows.copy()
        rows[rows == _NONE] = mine
        return rows
