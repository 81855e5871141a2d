"""Describes the names and shards of each rank to rank 0, which joins them.

The first part of a description is the same on most ranks of a job, so rank 0 gets and reads it
once. Of boxes that many shards share, a rank describes one.
"""

from __future__ import annotations

import hashlib
import marshal
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ckpt_tools.core.box import Box
from ckpt_tools.core.chunk_table import Ints
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.state.shard_info import ReplicaKind, ShardInfo
from ckpt_tools.ranks.gloo import GlooGroup

_LEVEL = 1  # of zlib: names repeat, and boxes are mostly zeros
_SAME_KEYS = (
    "give every rank the same keys; a value of which each rank has its own goes into a PerRank"
)
_MARSHAL = 2  # the last version whose bytes depend on values alone, and not on shared references


class RankNames(NamedTuple):
    """The names in one rank's state.

    Attributes:
        infos: its shards.
        objects: the objects that it writes.
        values: all values that are not tensors, and whether each rank has its own. Rank 0 writes
            those that all ranks have.
        paths: the path of keys to every name.
        kinds: of tensors for which a difference between ranks is not just an error.
    """

    infos: tuple[ShardInfo, ...]
    objects: tuple[str, ...]
    values: tuple[tuple[str, bool], ...]
    paths: Mapping[str, tuple[str | int, ...]]
    kinds: Mapping[str, ReplicaKind] = {}


class RankDescription(NamedTuple):
    """The names and shards of one rank, as rank 0 gets them.

    Attributes:
        common: a compressed `CommonNames`. It depends on values alone: equal names, equal bytes.
        boxes: offsets and sizes of each different box, `[boxes, 2, dims]` int64, compressed.
            Missing dims have offset 0 and size 1.
        which: the number of each shard's box, `[shards]` uint32, compressed.
        objects: the objects that this rank writes.
        paths: of these objects: position among all paths of this rank, name, keys.
    """

    common: bytes
    boxes: bytes
    which: bytes
    objects: tuple[str, ...]
    paths: tuple[tuple[int, str, tuple[str | int, ...]], ...]


class CommonNames(NamedTuple):
    """The part of a description that many ranks share. One item per shard, but for the last three.

    `paths` are those of other names than the rank's own objects.
    """

    fqns: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    aliases: tuple[str, ...]
    files: tuple[int, ...]
    kinds: tuple[tuple[str, str], ...]
    values: tuple[tuple[str, bool], ...]
    paths: tuple[tuple[str, tuple[str | int, ...]], ...]

    @property
    def num_dims(self) -> int:
        """Returns the width of the boxes: the dims of the tensor that has most."""
        return max(map(len, self.shapes), default=0)


def describe_names(names: RankNames) -> RankDescription:
    """Returns the description of a rank."""
    own = {*names.objects}
    infos = names.infos
    common = CommonNames(
        tuple(str(info.fqn) for info in infos),
        tuple(info.dtype for info in infos),
        tuple(tuple(map(int, info.shape)) for info in infos),
        tuple(str(info.alias) for info in infos),
        tuple(int(info.file) for info in infos),
        tuple((str(fqn), kind.value) for fqn, kind in names.kinds.items()),
        tuple((str(fqn), is_own) for fqn, is_own in names.values),
        tuple((str(fqn), _keys(path)) for fqn, path in names.paths.items() if fqn not in own),
    )
    width = common.num_dims
    zeros, ones = (0,) * width, (1,) * width
    known: dict[Box, int] = {}
    which = np.array([known.setdefault(info.box, len(known)) for info in infos], np.uint32)
    boxes: Ints = np.array(
        [
            ((*offsets, *zeros[len(offsets) :]), (*sizes, *ones[len(sizes) :]))
            for offsets, sizes in known
        ],
        np.int64,
    )
    return RankDescription(
        zlib.compress(marshal.dumps(tuple(common), _MARSHAL), _LEVEL),
        zlib.compress(boxes.tobytes(), _LEVEL),
        zlib.compress(which.tobytes(), _LEVEL),
        names.objects,
        tuple(
            (at, fqn, _keys(path))
            for at, (fqn, path) in enumerate(names.paths.items())
            if fqn in own
        ),
    )


def gather_descriptions(
    group: GlooGroup, mine: RankDescription | None, what: str
) -> list[RankDescription | None]:
    """Returns the description of every rank on rank 0, and an empty list on the others.

    Of ranks with the same names, one sends them.

    Args:
        group: all ranks, which call it together.
        mine: of this rank; None if it has failed to make one.
        what: names the exchange in messages.
    """
    common = b"" if mine is None else mine.common
    digest = hashlib.blake2b(common, digest_size=16).digest()
    short = None if mine is None else mine._replace(common=digest)
    gathered = group.gather((short, len(common)), what)
    sends = [False] * len(gathered)
    rooms = dict[int, torch.Tensor]()
    known = {digest: common}
    for rank, (one, nbytes) in enumerate(gathered):
        if one is not None and one.common not in known:
            known[one.common] = b""
            rooms[rank], sends[rank] = torch.empty(nbytes, dtype=torch.uint8, device="cpu"), True
    if group.scatter(sends, what):
        group.exchange([(0, 0, torch.frombuffer(bytearray(common), dtype=torch.uint8))], [], what)
    if rooms:
        group.exchange([], [(rank, 0, room) for rank, room in rooms.items()], what)
    for rank, room in rooms.items():
        known[gathered[rank][0].common] = room.numpy().tobytes()  # type: ignore[union-attr]
    return [one and one._replace(common=known[one.common]) for one, _ in gathered]


def _common(data: bytes, interned: dict[Any, Any]) -> CommonNames:
    """Returns the common part of a description.

    Of equal names and shapes, it has one: that in `interned`, to which new ones are added.
    """
    read = CommonNames(*marshal.loads(zlib.decompress(data)))  # noqa: S302  # from this job
    same = interned.setdefault
    return read._replace(
        fqns=tuple(map(same, read.fqns, read.fqns)),
        dtypes=tuple(map(same, read.dtypes, read.dtypes)),
        shapes=tuple(map(same, read.shapes, read.shapes)),
        aliases=tuple(map(same, read.aliases, read.aliases)),
        paths=tuple((same(fqn, fqn), tuple(map(same, path, path))) for fqn, path in read.paths),
    )


def _keys(path: Sequence[str | int]) -> tuple[str | int, ...]:
    # of a subclass of str, such as a member of an enum, its text
    return tuple(str.__str__(key) if isinstance(key, str) else int(key) for key in path)


@dataclass(slots=True)
class RankGroup:
    """Ranks with the same common part: the part, the lowest and the highest of these ranks."""

    common: CommonNames
    first: int
    last: int


class JobNames:
    """The names of all ranks."""

    def __init__(self, gathered: Sequence[RankDescription], own: RankNames | None = None) -> None:
        """Reads each different common part once.

        Args:
            gathered: the descriptions of all ranks.
            own: the names of this rank. It only saves memory: they get no second copy.

        Raises:
            PlanError: two ranks give a tensor different types or shapes.
        """
        found: dict[bytes, RankGroup] = {}
        paths = {} if own is None else own.paths
        words = chain.from_iterable((fqn, *path) for fqn, path in paths.items())
        interned: dict[Any, Any] = {word: word for word in words if type(word) is str}
        for rank, one in enumerate(gathered):
            if one.common not in found:
                found[one.common] = RankGroup(_common(one.common, interned), rank, rank)
            found[one.common].last = rank
        self.groups = [*found.values()]
        number = {common: at for at, common in enumerate(found)}
        self.group_of = [number[one.common] for one in gathered]
        known: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for group in self.groups:
            part = group.common
            for fqn, dtype, shape in zip(part.fqns, part.dtypes, part.shapes, strict=True):
                before = known.setdefault(fqn, (dtype, shape, group.first))
                if before[:2] != (dtype, shape):
                    raise PlanError(
                        f"ranks disagree about {printable(fqn)!r}: rank {before[2]} has {before[0]}"
                        f" {list(before[1])}, rank {group.first} has {dtype} {list(shape)}"
                    )
        self.fqns = [*known]
        self.tensor_of = {fqn: at for at, fqn in enumerate(known)}
        self.dtypes = [dtype for dtype, _, _ in known.values()]
        self.shapes = [shape for _, shape, _ in known.values()]
        self.paths = _joined_paths(gathered, self.groups, self.group_of)
        self.has_own_objects = any(one.objects for one in gathered[1:])

    def check_values(self) -> None:
        """Refuses states in which the names of the values differ between ranks.

        Only rank 0's values would be stored, and no rank could load the others.

        Raises:
            PlanError: with the first name that differs.
        """
        values = {*self.groups[0].common.values}
        for group in self.groups:
            mine = {*group.common.values}
            if both := sorted(name for name, _ in mine if name in self.tensor_of):
                other = next(g for g in self.groups if both[0] in g.common.fqns)
                raise PlanError(
                    f"the states of rank {other.first} and rank {group.first} differ:"
                    f" {printable(both[0])!r} is a tensor on one rank and a value on another",
                    hint=_SAME_KEYS,
                )
            if differing := sorted(values ^ mine):
                name, _ = differing[0]
                what = "in the state of rank {} only"
                if {name} <= {n for n, _ in values} & {n for n, _ in mine}:
                    what = "a PerRank on one rank and a value of all on another"
                raise PlanError(
                    f"the states of rank 0 and rank {group.first} differ: {printable(name)!r} is"
                    f" {what.format(0 if differing[0] in values else group.first)}",
                    hint=_SAME_KEYS,
                )

    def check_objects(self, gathered: Sequence[RankDescription]) -> None:
        """Refuses two entries of different ranks that have one name.

        Raises:
            PlanError: with the first such name.
        """
        holder: dict[str, int] = {}
        for rank, one in enumerate(gathered):
            for name in one.objects:
                other = holder.setdefault(name, rank)
                if other != rank or name in self.tensor_of:
                    kind = "a tensor" if name in self.tensor_of else f"an entry of rank {other}"
                    raise PlanError(
                        f"two entries of the state have one name: {printable(name)!r} is {kind},"
                        f" and an object of rank {rank}",
                        hint="a PerRank is stored as NAME.rank_0, NAME.rank_1, …: choose other"
                        " keys",
                    )

    def check_containers(self) -> None:
        """Refuses a list on one rank in the place of a dict on another.

        Raises:
            PlanError: with the first such place.
        """
        if len(self.groups) == 1 and not self.has_own_objects:
            return
        kinds: dict[tuple[str | int, ...], type] = {}
        for path in self.paths.values():
            for depth, key in enumerate(path):
                if kinds.setdefault(path[:depth], type(key)) is not type(key):
                    where = ".".join(map(str, path[:depth]))
                    raise PlanError(
                        f"ranks have different containers at {printable(where)!r}: a list on one"
                        " rank, and a dict on another",
                        hint="give every rank the same containers",
                    )

    def check_tensors(self) -> None:
        """Refuses states in which the names of the tensors differ between ranks.

        Raises:
            PlanError: with the first name that differs.
        """
        names = {fqn for fqn, _ in self.groups[0].common.paths}
        for group in self.groups:
            mine = {fqn for fqn, _ in group.common.paths}
            if mine != names:
                name = min(mine ^ names)
                raise PlanError(
                    f"the states of rank 0 and rank {group.first} differ: the tensor"
                    f" {printable(name)!r} is in the state of rank"
                    f" {0 if name in names else group.first} only",
                    hint="give every rank the same keys; stages of a pipeline pass"
                    " names_differ=True",
                )

    def kinds(self) -> dict[str, ReplicaKind]:
        """Returns what a difference means, where it is not just an error on any rank."""
        told = [dict(group.common.kinds) for group in self.groups]
        strict = {
            fqn
            for group, kinds in zip(self.groups, told, strict=True)
            for fqn in group.common.fqns
            if fqn not in kinds
        }
        in_order = sorted(zip(self.groups, told, strict=True), key=lambda pair: pair[0].last)
        found = {fqn: ReplicaKind(kind) for _, kinds in in_order for fqn, kind in kinds.items()}
        return {
            f: kind for f, kind in found.items() if kind is not ReplicaKind.FREE or f not in strict
        }

    def aliases(self, has_elements: Sequence[npt.NDArray[np.bool_]]) -> dict[str, str]:
        """Returns the tensors that are tied to one other tensor on every rank that has elements.

        Args:
            has_elements: for each group, whether a rank of it has elements of each shard.
        """
        partners: dict[str, set[str]] = {}
        untied = set[str]()
        for group, some in zip(self.groups, has_elements, strict=True):
            part = group.common
            first: dict[str, str] = {}  # of tied names, the job's first: ranks may order them anew
            for fqn, alias in zip(part.fqns, part.aliases, strict=True):
                known = first.setdefault(alias or fqn, alias or fqn)
                if self.tensor_of[fqn] < self.tensor_of.get(known, 0):
                    first[alias or fqn] = fqn
            for fqn, alias, has in zip(part.fqns, part.aliases, some.tolist(), strict=True):
                partner = first[alias or fqn]
                if has and partner != fqn:
                    partners.setdefault(fqn, set()).add(partner)
                elif has:
                    untied.add(fqn)
        return {
            fqn: next(iter(found))
            for fqn, found in partners.items()
            if len(found) == 1 and fqn not in untied
        }


def _joined_paths(
    gathered: Sequence[RankDescription], groups: Sequence[RankGroup], group_of: Sequence[int]
) -> dict[str, tuple[str | int, ...]]:
    """Returns the paths of all ranks, as if each rank's replaced those of the next one."""
    order: dict[str, None] = {}
    seen = set[int]()
    for one, number in zip(reversed(gathered), reversed(group_of), strict=True):
        if number in seen:  # only the rank's own objects can be new
            order.update(dict.fromkeys(fqn for _, fqn, _ in one.paths))
            continue
        seen.add(number)
        names = [fqn for fqn, _ in groups[number].common.paths]
        for at, fqn, _ in one.paths:
            names.insert(at, fqn)
        order.update(dict.fromkeys(names))
    keys: dict[str, tuple[str | int, ...]] = {}
    for rank, (one, number) in enumerate(zip(gathered, group_of, strict=True)):
        if groups[number].first == rank:
            for fqn, path in groups[number].common.paths:
                keys.setdefault(fqn, path)
        for _, fqn, path in one.paths:
            keys.setdefault(fqn, path)
    return {fqn: keys[fqn] for fqn in order}
