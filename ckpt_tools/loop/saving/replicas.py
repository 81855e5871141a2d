"""Are the replicas that several ranks hold of one shard equal?

A save writes one replica of each shard. So it first proves that the others have the same bytes: a
checksum of each replica, and one exchange of a number per set. Only if the numbers differ do
the ranks exchange more, to name the tensor. Imports torch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import torch

from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.core.chunk_table import Ints
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.saving.shard_columns import CopySets, ShardColumns
from ckpt_tools.loop.saving.writers import ChosenRows
from ckpt_tools.loop.state.checksums import checksums_of
from ckpt_tools.loop.state.shard_info import ReplicaKind, ShardInfo
from ckpt_tools.ranks.gloo import GlooGroup

_TURNS_PER_REPLICA = (
    32  # a later save compares 1/32 of the bytes, divided by the number of replicas
)
_SLICED_BYTES = 16 << 20  # smaller shards are compared as a whole, when it is their turn
_ABSENT = np.iinfo(np.int64).min
_PIECE_BYTES = 32 << 20  # of values that two ranks compare
_BITS = (1 << 62) - 1
_NAMED = 4  # ranks that differ from the first one, in a message


class Proof(StrEnum):
    """When the replicas of a state are compared."""

    CHECK = "check"  # at every save
    FIRST_SAVE = "first-save"  # at the first save, then a part at each save, in turn
    TRUST = "trust"  # never

    @classmethod
    def of(cls, value: object) -> Proof:
        """Returns the choice of a caller.

        Raises:
            ValueError: there is no such choice.
        """
        if value not in tuple(cls):
            raise ValueError(
                f"replicas: expected {', '.join(repr(one.value) for one in cls)}, got {value!r}"
            )
        return cls(str(value))


class ReplicaSet(NamedTuple):
    """Copies that the same ranks hold, as one of these ranks sees them.

    Attributes:
        number: of the set among those of all ranks.
        num_holders: number of these ranks.
        shards: indices into the rank's `ShardInfo` list, in the same order on each of these ranks.
    """

    number: int
    kind: ReplicaKind
    num_holders: int
    shards: tuple[int, ...]


class ReplicaTask(NamedTuple):
    """The replicas that a rank holds.

    Attributes:
        sets: of this rank.
        num_sets: of the whole job.
        has_parts: the job has parts of weights that consist of several tensors.
    """

    sets: tuple[ReplicaSet, ...] = ()
    num_sets: int = 0
    has_parts: bool = False


def replica_tasks(
    shared: ChosenRows,
    fqns: Sequence[str],
    kinds: Mapping[str, ReplicaKind],
    columns: ShardColumns,
    sets: CopySets,
) -> list[ReplicaTask]:
    """Returns the task of each rank.

    Args:
        shared: the shards with several replicas.
        fqns: of all tensors.
        kinds: of the tensors for which a difference is not just an error.
        columns, sets: of all ranks.
    """
    found: list[list[ReplicaSet]] = [[] for _ in range(columns.num_ranks)]
    if not len(shared.sets):
        return [ReplicaTask()] * columns.num_ranks
    known: dict[bytes, int] = {}  # the same ranks
    holders: dict[int, Ints] = {}
    of_set: Ints = np.zeros(len(sets.cut), np.int64)
    for number in np.unique(shared.sets).tolist():
        holders[number] = sets.holders_of(number)
        ranks = columns.rank[holders[number]].tobytes()
        of_set[number] = known.setdefault(ranks, len(known))
    every = [*ReplicaKind]
    kind_of = [every.index(kinds.get(fqn, ReplicaKind.EQUAL)) for fqn in fqns]
    both = of_set[shared.sets] * len(every) + np.array(kind_of, np.int64)[shared.tensors]
    _, first, which = np.unique(both, return_index=True, return_inverse=True)
    by_group = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])
    in_order = [by_group[n] for n in np.argsort(first, kind="stable")]
    has_parts = False
    for number, pairs in enumerate(in_order):
        tensors, its_sets = shared.tensors[pairs], shared.sets[pairs]
        kind = every[kind_of[tensors[0]]]
        has_parts = has_parts or kind is ReplicaKind.PART
        different, which = np.unique(its_sets, return_inverse=True)
        rows = np.array([holders[one] for one in different.tolist()])
        ranks_alike: dict[tuple[int, bytes], ReplicaSet] = {}
        for mine in rows.T:  # a rank with two equal shards of a tensor has two sets of one number
            rank = int(columns.rank[mine[0]])
            key = int(columns.alike_of[rank]), columns.turn[mine].tobytes()
            if key not in ranks_alike:
                numbers = columns.numbers(mine[which], tensors)
                shards = tuple(numbers.tolist())
                ranks_alike[key] = ReplicaSet(number, kind, rows.shape[1], shards)
            found[rank].append(ranks_alike[key])
    return [ReplicaTask(tuple(mine), len(in_order), has_parts) for mine in found]


class ReplicaProof:
    """Proves at each save of one layout that replicas are equal.

    All ranks of a job make it, and call `prove`, in step.
    """

    def __init__(self, task: ReplicaTask, infos: Sequence[ShardInfo], proof: Proof) -> None:
        """Stores the replicas that this rank holds.

        Args:
            task: of this rank.
            infos: the shards of this rank.
            proof: how often replicas are compared.
        """
        self._task, self._infos, self._proof = task, infos, proof
        self._num_proved, self._told = 0, set[int]()

    def prove(self, group: GlooGroup, tensors: Sequence[torch.Tensor]) -> list[str]:
        """Compares the replicas of this save; returns notes on those that may differ, and do.

        All ranks call it. The tensors must not change meanwhile.

        Args:
            group: all ranks.
            tensors: the shards of this rank, in the order of their descriptions.

        Raises:
            PlanError: replicas differ. Every rank raises.
        """
        is_trusted = self._proof is Proof.TRUST and not self._task.has_parts
        if is_trusted or not self._task.num_sets:
            return []
        found, error = dict[int, dict[int, int]](), None
        try:
            found = self._checksums(tensors)
        except BaseException as failure:  # noqa: BLE001  # the phase below tells all ranks
            error = failure
        numbers = np.full(2 * self._task.num_sets + 1, _ABSENT)
        for number, mine in found.items():
            one = crc64nvme(struct.pack(f"<{len(mine)}Q", *mine.values())) & _BITS
            numbers[2 * number : 2 * number + 2] = one, -one
        numbers[-1] = error is not None
        *highest, has_failed = group.max(numbers, "compare copies")
        if has_failed:
            with group.phase("compare copies"):
                if error is not None:
                    raise error
        differing = {n for n in range(self._task.num_sets) if highest[2 * n] != -highest[2 * n + 1]}
        # of a set that nobody compares at this save, both numbers are absent
        differing -= {n for n in differing if highest[2 * n] == _ABSENT}
        notes = self._explain(group, differing, found, tensors) if differing else []
        self._num_proved += 1  # after a difference, the next save compares all again
        return notes

    def _checksums(self, tensors: Sequence[torch.Tensor]) -> dict[int, dict[int, int]]:
        """Returns the numbers of the replicas that this save compares, by set and place in it."""
        found, turn = {}, self._num_proved if self._proof is not Proof.CHECK else 0
        for mine in self._task.sets:
            is_trusted = self._proof is Proof.TRUST and mine.kind is not ReplicaKind.PART
            if mine.number in self._told or is_trusted:
                continue
            num_turns = 1
            if turn and mine.kind is not ReplicaKind.LOCAL:
                num_turns = _TURNS_PER_REPLICA * mine.num_holders
            parts = self._parts(mine, tensors, turn - 1, num_turns)
            found[mine.number] = dict(zip(parts, checksums_of([*parts.values()]), strict=True))
        return found

    def _parts(
        self, replicas: ReplicaSet, tensors: Sequence[torch.Tensor], turn: int, num_turns: int
    ) -> dict[int, torch.Tensor]:
        """Returns what one save compares, by the place of the replica in its set.

        In `num_turns` saves, each element has one turn. Every holder of the set has the same part.
        """
        if num_turns == 1:
            return {place: tensors[shard].detach() for place, shard in enumerate(replicas.shards)}
        # few tensors take shorter turns, so that each save compares at least one of them
        num_parts = min(num_turns, len(replicas.shards))
        found = {
            place: tensors[replicas.shards[place]].detach()
            for place in range(turn % num_parts, len(replicas.shards), num_parts)
        }
        for place, shard in enumerate(replicas.shards):
            info = self._infos[shard]
            if info.box.numel * BY_NAME[info.dtype].itemsize >= _SLICED_BYTES:
                at = turn % num_turns
                start, stop = (info.box.numel * n // num_turns for n in (at, at + 1))
                found[place] = tensors[shard].detach().reshape(-1)[start:stop]
        return dict(sorted(found.items()))

    def _explain(
        self,
        group: GlooGroup,
        differing: set[int],
        found: Mapping[int, Mapping[int, int]],
        tensors: Sequence[torch.Tensor],
    ) -> list[str]:
        """Finds the tensors that differ, and refuses them or returns a note. All ranks call it."""
        mine = {
            (one.number, place): (checksum, self._infos[shard].fqn, one.kind, shard)
            for one in self._task.sets
            if one.number in differing
            for place, checksum in found[one.number].items()
            for shard in [one.shards[place]]
        }
        ranks = group.all_gather(mine, "compare copies")
        wrong: list[tuple[str, list[int], list[int]]] = []  # name, ranks, index of the shard there
        free: dict[str, None] = {}
        for key in sorted({key for theirs in ranks for key in theirs}):
            replicas = [(rank, *theirs[key]) for rank, theirs in enumerate(ranks) if key in theirs]
            _, first, fqn, kind, _ = replicas[0]
            others = [replica for replica in replicas if replica[1] != first]
            if others and kind is ReplicaKind.FREE:
                self._told.add(key[0])
                free[fqn] = None
            elif others:
                held = [replicas[0], *others]
                wrong.append((fqn, [c[0] for c in held], [c[4] for c in held]))
        if wrong:
            fqn, holders, shards = wrong[0]
            pairs = list(zip(holders, shards, strict=True))
            compared = [
                _compare(group, (holders[0], rank), (shards[0], shard), tensors)
                for rank, shard in pairs[1 : _NAMED + 1]
            ]
            told = max(compared, key=lambda one: one.most)
            raise replicas_differ([(name, ranks) for name, ranks, _ in wrong], str(told))
        if not free or group.rank:
            return []
        return [differing_note(list(free))]


def differing_note(names: Sequence[str]) -> str:
    """Returns a note on buffers, or states of objects, that differ between ranks."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        "stored from the lowest rank that has them, since the ranks have different values:"
        f" {', '.join(map(printable, names[:3]))}{more}"
    )


def replicas_differ(wrong: Sequence[tuple[str, Sequence[int]]], told: str = "") -> PlanError:
    """Returns the error for replicas that differ.

    Args:
        wrong: names of tensors, and for each the first rank that has it with all that differ.
        told: how much the first one differs.
    """
    fqn, ranks = wrong[0]
    return PlanError(
        f"copies of a tensor differ between {_named(ranks)}{': ' if told else ''}{told}"
        f" ({printable(fqn)!r}{_others([name for name, _ in wrong])})",
        hint=(
            "a save stores one copy. Give values of which each rank has its own a name per rank,"
            " such as experts by their global number, or a PerRank; make the others equal."
            ' replicas="trust" stores one copy without a comparison'
        ),
    )


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[1 : _NAMED + 1]))
    shown += f" and {len(ranks) - _NAMED - 1} more" * (len(ranks) > _NAMED + 1)
    return f"rank {ranks[0]} and rank {shown}"


def _others(wrong: Sequence[str]) -> str:
    names = list(dict.fromkeys(wrong))[1:]
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"; also {', '.join(map(printable, names[:3]))}{more}"


class _Difference(NamedTuple):
    """How two replicas differ: the number of elements with other bits, of all, and by how much."""

    num: int
    numel: int
    most: float  # -1 for a type that nothing converts to numbers

    def __str__(self) -> str:
        by = f", by at most {self.most:.6g}" if self.most > 0 else ""
        by = ", in the sign of zero alone" if self.most == 0 else by
        return f"{self.num} of {self.numel} elements{by}"


def _compare(
    group: GlooGroup,
    ranks: tuple[int, int],
    shards: tuple[int, int],
    tensors: Sequence[torch.Tensor],
) -> _Difference:
    """Measures the difference between the replicas of two ranks. All ranks call it."""
    first, second = ranks
    found = _Difference(0, 0, -1.0)
    if group.rank in ranks:
        mine = tensors[shards[ranks.index(group.rank)]].detach()
        mine = mine.resolve_conj().resolve_neg().reshape(-1)
        step = max(_PIECE_BYTES // mine.element_size(), 1)
        for start in range(0, len(mine), step):
            piece = mine[start : start + step].cpu().contiguous()
            if group.rank == first:
                group.exchange([(second, 0, piece.view(torch.uint8))], [], "compare values")
                continue
            room = torch.empty_like(piece)
            group.exchange([], [(first, 0, room.view(torch.uint8))], "compare values")
            num, gap = _difference(room, piece)
            found = _Difference(found.num + num, len(mine), max(found.most, gap))
    return group.all_gather(found, "compare values")[second]


def _difference(one: torch.Tensor, other: torch.Tensor) -> tuple[int, float]:
    """Returns how many elements have other bits, and the largest difference between numbers.

    The difference is -1 if the type cannot be converted to numbers.
    """
    itemsize = one.element_size()
    bits = [t.view(torch.uint8).reshape(-1, itemsize) for t in (one, other)]
    differs = (bits[0] != bits[1]).any(dim=1)
    wide = torch.int64 if one.dtype in (torch.int64, torch.int32) else torch.float64
    try:
        values = [
            (torch.view_as_real(t) if t.is_complex() else t)[differs].to(wide) for t in (one, other)
        ]
    except (NotImplementedError, RuntimeError):  # such as float4_e2m1fn_x2
        return int(differs.sum()), -1.0
    gaps = (values[0] - values[1]).abs().double().nan_to_num(nan=float("inf"))
    return int(differs.sum()), float(gaps.max()) if gaps.numel() else 0.0
