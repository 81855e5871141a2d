"""The shards of all ranks in columns, with one row for all tensors that are cut alike.

A model has many tensors and few shapes. Tensors whose shards have the same boxes on every rank have
one *cut*, and rank 0 works on ranks × cuts and not on ranks × tensors.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import Box
from ckpt_tools.core.chunk_table import Ints
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.saving.description import JobNames, RankDescription
from ckpt_tools.loop.state.shard_info import FileKind

Bools = npt.NDArray[np.bool_]


class RanksAlike(NamedTuple):
    """Ranks that have the same names, and the same shards with equal boxes.

    Attributes:
        group: number of the ranks' `RankGroup`.
        ranks: `[ranks]`, ascending.
        tensors: `[shards]`, of each shard, the number of its tensor.
        turns: `[shards]`, how many shards of the tensor come before: mostly 0.
        files: `[shards]`, the file of each, a `FileKind`.
        which: `[shards]`, the number of its box.
        boxes: `[ranks, boxes, 2, dims]`, offsets and sizes.
    """

    group: int
    ranks: Ints
    tensors: Ints
    turns: Ints
    files: Ints
    which: Ints
    boxes: Ints


class _Slots(NamedTuple):
    """The different cuts and turns among the shards of ranks alike.

    Attributes:
        of_shard: `[shards]`, the number of each shard's slot.
        first: `[slots]`, the first shard of each.
        base: the row of the first slot of the first rank.
    """

    of_shard: Ints
    first: Ints
    base: int


class ShardColumns:
    """The shards of all ranks. One row stands for the shards of all tensors of a cut on one rank.

    Attributes:
        cuts: `[tensors]`, of each tensor, the number of its cut.
        rank, cut, turn: `[rows]`.
        offsets, sizes: `[rows, dims]`, in elements.
        numel: `[rows]`.
        alike: which ranks are alike.
        alike_of, place_of: `[ranks]`, the number of those that a rank belongs to, and its place
            among them.
    """

    def __init__(self, job: JobNames, gathered: Sequence[RankDescription]) -> None:
        self.num_ranks, self.num_tensors = len(gathered), len(job.fqns)
        self._job = job
        self._width = max((group.common.num_dims for group in job.groups), default=0)
        self.alike = self._read(gathered)
        self.alike_of, self.place_of = (np.zeros(len(gathered), np.int64) for _ in range(2))
        self._num_turns = 1 + max((int(one.turns.max(initial=0)) for one in self.alike), default=0)
        self.cuts = self._find_cuts()
        self._slots = list[_Slots]()
        rows = list[tuple[Ints, ...]]()
        base = 0
        for number, one in enumerate(self.alike):
            self.alike_of[one.ranks], self.place_of[one.ranks] = number, np.arange(len(one.ranks))
            keys = self.cuts[one.tensors] * self._num_turns + one.turns
            values, first, of_shard = np.unique(keys, return_index=True, return_inverse=True)
            self._slots.append(_Slots(of_shard, first, base))
            shape = (len(one.ranks), len(values))
            boxes = one.boxes[:, one.which[first]].reshape(math.prod(shape), 2, self._width)
            columns = (one.ranks[:, None], values // self._num_turns, values % self._num_turns)
            rows.append((*(np.broadcast_to(c, shape).ravel() for c in columns), boxes))
            base += shape[0] * shape[1]
        none: Ints = np.zeros(0, np.int64)
        self.rank, self.cut, self.turn = (
            np.concatenate([none, *(row[n] for row in rows)]) for n in range(3)
        )
        both = np.concatenate([none.reshape(0, 2, self._width), *(row[3] for row in rows)])
        self.offsets, self.sizes = both[:, 0], both[:, 1]
        self.numel: Ints = self.sizes.prod(axis=1)

    def _read(self, gathered: Sequence[RankDescription]) -> list[RanksAlike]:
        found: dict[tuple[int, bytes], list[int]] = {}
        for rank, one in enumerate(gathered):
            found.setdefault((self._job.group_of[rank], one.which), []).append(rank)
        tensor_of = self._job.tensor_of
        tensors = [
            np.array([tensor_of[fqn] for fqn in group.common.fqns], np.int64)
            for group in self._job.groups
        ]
        turns = [_turns(some) for some in tensors]
        files = [np.array(group.common.files, np.int64) for group in self._job.groups]
        alike = []
        for (group, packed), ranks in found.items():
            dims = self._job.groups[group].common.num_dims
            which = np.frombuffer(zlib.decompress(packed), np.uint32).astype(np.int64)
            count = int(which.max(initial=-1)) + 1
            boxes = np.zeros((len(ranks), count, 2, self._width), np.int64)
            boxes[:, :, 1] = 1
            for number, rank in enumerate(ranks):
                flat = np.frombuffer(zlib.decompress(gathered[rank].boxes), np.int64)
                boxes[number, :, :, :dims] = flat.reshape(count, 2, dims)
            shared = tensors[group], turns[group], files[group]
            alike.append(RanksAlike(group, np.array(ranks, np.int64), *shared, which, boxes))
        return alike

    def _find_cuts(self) -> Ints:
        """Returns the cut of each tensor.

        It stands for the shape, and the number of the box and the file on every rank.
        """
        shapes: dict[tuple[int, ...], int] = {}
        kinds = len(FileKind)
        found: Ints = np.array(
            [shapes.setdefault(shape, len(shapes)) for shape in self._job.shapes], np.int64
        )
        for one in self.alike:
            for turn in range(int(one.turns.max(initial=-1)) + 1):
                mine = one.turns == turn
                column: Ints = np.zeros(self.num_tensors, np.int64)
                column[one.tensors[mine]] = 1 + kinds * one.which[mine] + one.files[mine]
                both = found * (kinds * one.boxes.shape[1] + 1) + column
                found = np.unique(both, return_inverse=True)[1]
        return found

    @cached_property
    def _numbers(self) -> tuple[Ints, npt.NDArray[np.int32]]:
        """For each rank, where its part begins; and each turn and tensor's number there."""
        room = self._num_turns * self.num_tensors
        found = np.full(len(self.alike) * room, -1, np.int32)
        for number, one in enumerate(self.alike):
            at = number * room + one.turns * self.num_tensors + one.tensors
            found[at] = np.arange(len(at))
        return self.alike_of * room, found

    def numbers(self, rows: Ints, tensors: Ints | int) -> Ints:
        """Returns the index of each tensor's shard on the rank of each row, in the rank's order."""
        starts, found = self._numbers
        at = starts[self.rank[rows]] + self.turn[rows] * self.num_tensors + tensors
        numbers: Ints = found[at].astype(np.int64)
        return numbers

    def has_elements(self) -> list[Bools]:
        """Returns for each group of ranks whether one has elements of each shard."""
        found = [np.zeros(len(group.common.fqns), bool) for group in self._job.groups]
        for one in self.alike:
            some = (one.boxes[:, :, 1].prod(axis=2) > 0).any(axis=0)
            found[one.group] |= some[one.which]
        return found

    def first_shard(self, row: int) -> tuple[int, int]:
        """Returns the index of the first shard of a row on its rank, and the shard's tensor."""
        one, slots = next(
            pair
            for pair in zip(reversed(self.alike), reversed(self._slots), strict=True)
            if pair[1].base <= row
        )
        number = int(slots.first[(row - slots.base) % len(slots.first)])
        return number, int(one.tensors[number])

    def chosen_rows(self, rank: int, is_chosen: Bools) -> Bools:
        """Tells which rows of a rank are among those that are chosen."""
        slots = self._slots[self.alike_of[rank]]
        start = slots.base + int(self.place_of[rank]) * len(slots.first)
        return is_chosen[start : start + len(slots.first)]

    def chosen_shards(self, rank: int, is_chosen: Bools) -> Bools:
        """Tells which shards of a rank belong to rows that are chosen."""
        of_shard = self._slots[self.alike_of[rank]].of_shard
        mine: Bools = self.chosen_rows(rank, is_chosen)[of_shard]
        return mine

    def box_sizes(self, rank: int) -> Ints:
        """Returns the sizes of the different boxes of a rank, `[boxes, dims]`."""
        sizes: Ints = self.alike[self.alike_of[rank]].boxes[self.place_of[rank], :, 1]
        return sizes

    def box(self, row: int, dims: int) -> Box:
        """Returns the box of a row whose tensors have some dims."""
        return Box(tuple(self.offsets[row, :dims].tolist()), tuple(self.sizes[row, :dims].tolist()))


def _turns(tensors: Ints) -> Ints:
    """Returns, for each item, how many equal ones come before it."""
    order = np.argsort(tensors, kind="stable")
    in_order = tensors[order]
    starts = np.searchsorted(in_order, in_order)
    turns: Ints = np.empty(len(tensors), np.int64)
    turns[order] = np.arange(len(tensors)) - starts
    return turns


class CopySets:
    """The rows in order of cut, offsets and rank: shards of a tensor with one offset are copies.

    DCP keeps one chunk per offset. So an empty shard is left out if one with elements lies at the
    same place. Of several empty ones, the first is kept.

    Attributes:
        first: `[sets]`, the row that comes first in each, whether or not it can write the chunk.
        cut: `[sets]`.
        holders: `[n]`, the rows that can write a chunk, set by set.
        ends: `[sets]`, where the holders of the next set begin.
        counts: `[sets]`, the number of holders: at least one.
    """

    def __init__(self, job: JobNames, columns: ShardColumns) -> None:
        """Groups the rows.

        Raises:
            PlanError: two shards begin at one offset, and have different sizes.
        """
        self._job, self._columns = job, columns
        offsets = columns.offsets
        order = np.lexsort((columns.turn, columns.rank, *offsets.T[::-1], columns.cut))
        is_new = np.ones(len(order), bool)
        is_new[1:] = np.diff(columns.cut[order]) != 0
        is_new[1:] |= (np.diff(offsets[order], axis=0) != 0).any(axis=1)
        starts = np.flatnonzero(is_new)
        self.first = order[starts]
        self.cut = columns.cut[self.first]
        self.holders: Ints = order
        self.counts: Ints = order  # of no rows, all are empty
        self.ends: Ints = order
        if not len(order):
            return
        which = np.cumsum(is_new) - 1
        has = columns.numel[order] > 0
        sizes, places = columns.sizes[order], np.arange(len(order))
        first = np.minimum.reduceat(np.where(has, places, len(order)), starts)
        is_held = first < len(order)  # of each set: some copy has elements
        model = np.where(is_held, first, starts)[which]
        is_same = (sizes == sizes[model]).all(axis=1)
        if (has & ~is_same).any():
            wrong = np.flatnonzero(has & ~is_same)
            self._refuse(order[wrong], order[model[wrong]])
        is_holder = np.where(is_held[which], has, is_same)
        self.holders = order[is_holder]
        self.counts = np.add.reduceat(is_holder, starts, dtype=np.int64)
        self.ends = np.cumsum(self.counts)

    def holders_of(self, number: int) -> Ints:
        """Returns the rows that can write the chunk of a set."""
        end = int(self.ends[number])
        return self.holders[end - int(self.counts[number]) : end]

    def _refuse(self, rows: Ints, others: Ints) -> None:
        """Refuses rows that do not fit another; names the first shard of the lowest rank."""
        columns = self._columns
        rank = int(columns.rank[rows].min())
        (_, tensor), row, other = min(
            (columns.first_shard(row), row, other)
            for row, other in zip(rows.tolist(), others.tolist(), strict=True)
            if columns.rank[row] == rank
        )
        dims = len(self._job.shapes[tensor])
        box, known = columns.box(row, dims), columns.box(other, dims)
        raise PlanError(
            f"ranks split {printable(self._job.fqns[tensor])!r} differently: at"
            f" {list(known.offsets)}, rank {columns.rank[other]} has {list(known.sizes)}, rank"
            f" {rank} has {list(box.sizes)}",
            hint="put it on one mesh, or give the tensor of each mesh a name of its own",
        )
