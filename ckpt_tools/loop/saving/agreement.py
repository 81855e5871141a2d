"""Agrees on the layout of a save: which rank writes which shard, and what `.metadata` says of it.

Each rank sends a `RankDescription`. Its first part is the same on most ranks of a job, so rank 0
reads it once. Boxes are arrays. Rank 0 works on columns with one row for each shard of each rank,
because a job of a thousand ranks has millions of them.
"""

from __future__ import annotations

import marshal
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import Box
from ckpt_tools.core.catalog import TORCH_ZIP, Catalog, ChunkList, TensorEntry
from ckpt_tools.core.chunk_table import ChunkTable, Ints
from ckpt_tools.core.coverage import check
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.memory import no_gc
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.dcp.metadata import ItemLocation, Metadata, Template, TensorMeta
from ckpt_tools.loop.saving.replicas import ReplicaTask, replica_tasks
from ckpt_tools.loop.state.shard_info import ReplicaKind, ShardInfo
from ckpt_tools.publish.manifest import SealedTensor
from ckpt_tools.ranks.gloo import GlooGroup

_WHAT = "agree on the layout"
_LEVEL = 1  # of zlib: names repeat, and boxes are mostly zeros
_FEW = 16  # chunks of a tensor that are kept as objects, because those cost less to query
_MARSHAL = 2  # the last version whose bytes depend on values alone, and not on shared references


class WriteTask(NamedTuple):
    """The shards that a rank writes.

    Attributes:
        shards: indices into the rank's `ShardInfo` list.
        numbers: for each of them, the tensor's number among all tensors.
        num_tensors: number of all tensors.
        replicas: shards that other ranks hold, too, whichever of them writes.
    """

    shards: tuple[int, ...]
    numbers: tuple[int, ...]
    num_tensors: int
    replicas: ReplicaTask = ReplicaTask()


class MetadataHead(NamedTuple):
    """The metadata without objects, and the sealed tensors without fingerprints.

    Only rank 0 has it.
    """

    template: Template
    tensors: tuple[tuple[str, SealedTensor], ...]
    aliases: Mapping[str, str]
    objects: tuple[tuple[str, ...], ...]


class RankNames(NamedTuple):
    """The names in one rank's state.

    Attributes:
        infos: its shards.
        objects: the objects that it writes.
        values: all values that are not tensors. Rank 0 writes those that are not per rank.
        paths: the path of keys to every name.
        kinds: of tensors for which a difference between ranks is not just an error.
    """

    infos: tuple[ShardInfo, ...]
    objects: tuple[str, ...]
    values: tuple[str, ...]
    paths: Mapping[str, tuple[str | int, ...]]
    kinds: Mapping[str, ReplicaKind] = {}


class RankDescription(NamedTuple):
    """The names and shards of one rank, as rank 0 gets them.

    Attributes:
        common: a compressed `_Common`. It depends on values alone, so equal names give equal bytes.
        boxes: offsets and sizes of each shard, `[shards, 2, dims]` int64, compressed. Missing dims
            have offset 0 and size 1.
        objects: the objects that this rank writes.
        paths: of these objects: position among all paths of this rank, name, keys.
    """

    common: bytes
    boxes: bytes
    objects: tuple[str, ...]
    paths: tuple[tuple[int, str, tuple[str | int, ...]], ...]


class _Common(NamedTuple):
    """The part of a description that many ranks share. One item per shard, but for the last three.

    `paths` are those of other names than the rank's own objects.
    """

    fqns: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    aliases: tuple[str, ...]
    frozen: tuple[bool, ...]
    kinds: tuple[tuple[str, str], ...]
    values: tuple[str, ...]
    paths: tuple[tuple[str, tuple[str | int, ...]], ...]

    @property
    def num_dims(self) -> int:
        """Returns the width of the boxes: the dims of the tensor that has most."""
        return max(map(len, self.shapes), default=0)


def described(names: RankNames) -> RankDescription:
    """Returns the description of a rank."""
    own = {*names.objects}
    infos = names.infos
    common = _Common(
        tuple(str(info.fqn) for info in infos),
        tuple(info.dtype for info in infos),
        tuple(tuple(info.shape) for info in infos),
        tuple(str(info.alias) for info in infos),
        tuple(info.is_frozen for info in infos),
        tuple((str(fqn), kind.value) for fqn, kind in names.kinds.items()),
        tuple(map(str, names.values)),
        tuple((str(fqn), _keys(path)) for fqn, path in names.paths.items() if fqn not in own),
    )
    width = common.num_dims
    zeros, ones = (0,) * width, (1,) * width
    boxes: Ints = np.array(
        [
            ((*offsets, *zeros[len(offsets) :]), (*sizes, *ones[len(sizes) :]))
            for offsets, sizes in (info.box for info in infos)
        ],
        np.int64,
    )
    return RankDescription(
        zlib.compress(marshal.dumps(tuple(common), _MARSHAL), _LEVEL),
        zlib.compress(boxes.tobytes(), _LEVEL),
        names.objects,
        tuple(
            (at, fqn, _keys(path))
            for at, (fqn, path) in enumerate(names.paths.items())
            if fqn in own
        ),
    )


def _keys(path: Sequence[str | int]) -> tuple[str | int, ...]:
    return tuple(str(key) if isinstance(key, str) else int(key) for key in path)


def agree(
    group: GlooGroup, names: RankNames, names_differ: bool
) -> tuple[WriteTask, MetadataHead | None]:
    """Returns this rank's task; on rank 0, also the metadata. All ranks call it.

    Args:
        group: all ranks.
        names: of this rank.
        names_differ: ranks may have tensors that other ranks lack.

    Raises:
        PlanError: ranks disagree about a tensor, have different values, or the shards leave a hole.
            Every rank raises.
    """
    tasks: list[WriteTask] = []
    head = None
    with no_gc():
        gathered = group.gather(described(names), _WHAT)
    with group.phase(_WHAT), no_gc():
        if group.rank == 0:
            tasks, head = assign(gathered, names_differ)
    return group.scatter(tasks, _WHAT), head


def assign(
    gathered: Sequence[RankDescription], names_differ: bool = False
) -> tuple[list[WriteTask], MetadataHead]:
    """Decides which rank writes which shard.

    Each shard is written once. Copies are spread so that all ranks write about as many bytes. Those
    that may differ come from the lowest rank that holds them, so that they belong together.

    Args:
        gathered: the descriptions of all ranks.
        names_differ: ranks may have tensors that other ranks lack.

    Returns:
        The task of each rank, and the metadata that rank 0 needs to commit.

    Raises:
        PlanError, CatalogError: ranks disagree about a tensor, or the shards do not cover it.
    """
    job = _Job(gathered)
    job.check_values()
    if not names_differ:
        job.check_tensors()
    rows = _Rows(job, gathered)
    held = _Held(job, rows)
    aliases = job.aliases(rows.has_elements)
    kinds = job.kinds()
    is_alias = np.array([fqn in aliases for fqn in job.fqns], bool)
    written, shared = held.spread(is_alias, kinds)
    numbers = np.cumsum(~is_alias) - 1  # of each tensor that is written
    replicas = replica_tasks(shared, kinds, len(gathered))
    num_tensors = int(numbers[-1]) + 1 if len(numbers) else 0
    tasks = [
        WriteTask(
            tuple(rows.number[mine].tolist()),
            tuple(numbers[rows.tensor[mine]].tolist()),
            num_tensors,
            replicas[rank],
        )
        for rank, mine in rows.by_rank(written)
    ]
    return tasks, _head(job, rows, held, written, aliases, [g.objects for g in gathered])


@dataclass(slots=True)
class _Group:
    """Ranks with the same common part: the part, the lowest and the highest of these ranks."""

    common: _Common
    first: int
    last: int


class _Job:
    """The names of all ranks."""

    def __init__(self, gathered: Sequence[RankDescription]) -> None:
        """Reads each different common part once.

        Raises:
            PlanError: two ranks give a tensor different types or shapes.
        """
        found: dict[bytes, _Group] = {}
        for rank, one in enumerate(gathered):
            if one.common not in found:
                common = _Common(*marshal.loads(zlib.decompress(one.common)))  # noqa: S302  # from this job
                found[one.common] = _Group(common, rank, rank)
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

    def check_values(self) -> None:
        """Refuses states in which the names of the values differ between ranks.

        Only rank 0's values would be stored, and no rank could load the others.

        Raises:
            PlanError: with the first name that differs.
        """
        values = {*self.groups[0].common.values}
        for group in self.groups:
            mine = {*group.common.values}
            differing = sorted(values ^ mine) or sorted(self.tensor_of.keys() & mine)
            if differing:
                name = differing[0]
                holder = 0 if name in values else group.first
                who = (
                    "a tensor on one rank and a value on another"
                    if name in self.tensor_of
                    else f"in the state of rank {holder} only"
                )
                raise PlanError(
                    f"the states of rank 0 and rank {group.first} differ: {printable(name)!r} is"
                    f" {who}",
                    hint=(
                        "give every rank the same keys; a value of which each rank has its own goes"
                        " into a PerRank"
                    ),
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
            f: kind for f, kind in found.items() if kind is ReplicaKind.LOCAL or f not in strict
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
            for fqn, alias, has in zip(part.fqns, part.aliases, some.tolist(), strict=True):
                if has and alias:
                    partners.setdefault(fqn, set()).add(alias)
                elif has:
                    untied.add(fqn)
        return {
            fqn: next(iter(found))
            for fqn, found in partners.items()
            if len(found) == 1 and fqn not in untied
        }


def _joined_paths(
    gathered: Sequence[RankDescription], groups: Sequence[_Group], group_of: Sequence[int]
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


class _Rows:
    """The shards of all ranks: first those of rank 0, in its order.

    Attributes:
        rank, number, tensor: `[n]`: the rank, the shard's index there, the tensor's index.
        offsets, sizes: `[n, d]`, in elements.
        numel: `[n]`.
        frozen: `[n]`: it goes into the rank's second file.
        has_elements: for each group of ranks, whether one has elements of each shard.
    """

    def __init__(self, job: _Job, gathered: Sequence[RankDescription]) -> None:
        parts = [group.common for group in job.groups]
        width = max((part.num_dims for part in parts), default=0)
        counts = [len(parts[number].fqns) for number in job.group_of]
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        total = int(self.starts[-1])
        self.offsets: Ints = np.zeros((total, width), np.int64)
        self.sizes: Ints = np.ones((total, width), np.int64)
        tensors = [np.array([job.tensor_of[f] for f in p.fqns], np.int32) for p in parts]
        frozen = [np.array(p.frozen, bool) for p in parts]
        for rank, one in enumerate(gathered):
            at = slice(self.starts[rank], self.starts[rank + 1])
            dims = parts[job.group_of[rank]].num_dims
            boxes = np.frombuffer(zlib.decompress(one.boxes), np.int64).reshape(
                counts[rank], 2, dims
            )
            self.offsets[at, :dims], self.sizes[at, :dims] = boxes[:, 0], boxes[:, 1]
        self.rank = np.repeat(np.arange(len(gathered), dtype=np.int32), counts)
        self.number = (np.arange(total) - self.starts[self.rank]).astype(np.int32)
        self.tensor = np.concatenate([np.zeros(0, np.int32), *(tensors[n] for n in job.group_of)])
        self.frozen = np.concatenate([np.zeros(0, bool), *(frozen[n] for n in job.group_of)])
        self.numel = self.sizes.prod(axis=1)
        self.has_elements = [np.zeros(len(part.fqns), bool) for part in parts]
        for rank, number in enumerate(job.group_of):
            self.has_elements[number] |= self.numel[self.starts[rank] : self.starts[rank + 1]] > 0

    def by_rank(self, some: Ints) -> Iterator[tuple[int, Ints]]:
        """Yields each rank with its own among some rows, which are in order."""
        cuts = np.searchsorted(some, self.starts)
        for rank in range(len(self.starts) - 1):
            yield rank, some[cuts[rank] : cuts[rank + 1]]

    def box(self, row: int, dims: int) -> Box:
        """Returns the box of a row whose tensor has some dims."""
        return Box(tuple(self.offsets[row, :dims].tolist()), tuple(self.sizes[row, :dims].tolist()))


class _Held:
    """The rows in order of tensor, offsets and rank: shards with one offset are copies.

    DCP keeps one chunk per offset. So of a shard with elements and an empty one at the same place,
    the empty one is left out, and of several empty ones the first is kept.

    Attributes:
        order: `[n]`, the rows.
        starts: of each set of copies in `order`; the next set begins where one ends.
        is_holder: `[n]`, in this order: this row can write the chunk.
    """

    def __init__(self, job: _Job, rows: _Rows) -> None:
        """Groups the rows.

        Raises:
            PlanError: two shards begin at one offset, and have different sizes.
        """
        self.job, self.rows = job, rows
        order = np.lexsort((*rows.offsets.T[::-1], rows.tensor))
        tensor, offsets = rows.tensor[order], rows.offsets[order]
        is_new = np.ones(len(order), bool)
        is_new[1:] = (tensor[1:] != tensor[:-1]) | (offsets[1:] != offsets[:-1]).any(axis=1)
        self.order, self.starts = order, np.flatnonzero(is_new)
        which = np.cumsum(is_new) - 1
        has = rows.numel[order] > 0
        if not len(order):
            self.is_holder, self.has = has, has
            return
        sizes, places = rows.sizes[order], np.arange(len(order))
        first = np.minimum.reduceat(np.where(has, places, len(order)), self.starts)
        self.has = first < len(order)  # of each set: some copy has elements
        model = np.where(self.has, first, self.starts)[which]
        is_same = (sizes == sizes[model]).all(axis=1)
        wrong = has & ~is_same
        if wrong.any():
            at = int(np.flatnonzero(wrong)[np.argmin(order[wrong])])
            self._refuse(int(order[at]), int(order[model[at]]))
        self.is_holder = np.where(self.has[which], has, is_same)

    def _refuse(self, row: int, other: int) -> None:
        rows = self.rows
        tensor = int(rows.tensor[row])
        dims = len(self.job.shapes[tensor])
        box, known = rows.box(row, dims), rows.box(other, dims)
        raise PlanError(
            f"ranks split {printable(self.job.fqns[tensor])!r} differently: at"
            f" {list(known.offsets)}, rank {rows.rank[other]} has {list(known.sizes)}, rank"
            f" {rows.rank[row]} has {list(box.sizes)}",
            hint="put it on one mesh, or give the tensor of each mesh a name of its own",
        )

    def spread(
        self, is_alias: npt.NDArray[np.bool_], kinds: Mapping[str, ReplicaKind]
    ) -> tuple[Ints, list[tuple[str, list[tuple[int, int]]]]]:
        """Chooses the row that writes each chunk.

        Returns:
            The rows, in order; and for each shard with elements and several copies, the tensor's
            name, and rank and index of each copy.
        """
        rows, order = self.rows, self.order
        if not len(order):
            return order, []
        of_set = rows.tensor[order[self.starts]]
        counts = np.add.reduceat(self.is_holder, self.starts, dtype=np.int64)
        itemsizes = np.array([BY_NAME[dtype].itemsize for dtype in self.job.dtypes], np.int64)
        holders = order[self.is_holder]
        ends = np.cumsum(counts)
        nbytes = rows.numel[holders[ends - counts]] * itemsizes[of_set]
        is_written = ~is_alias[of_set]
        alone = is_written & (counts == 1)
        single = holders[ends[alone] - 1]
        load = np.zeros(len(rows.starts) - 1, np.int64)
        np.add.at(load, rows.rank[single], nbytes[alone])
        sets = np.flatnonzero(is_written & (counts > 1))
        sets = sets[np.argsort(order[self.starts[sets]], kind="stable")]  # as they were met
        chosen, shared = [], []
        copies = {int(n): holders[ends[n] - counts[n] : ends[n]] for n in sets}
        for number in sets[np.argsort(-nbytes[sets], kind="stable")].tolist():
            mine = copies[number]
            ranks = rows.rank[mine]
            is_free = kinds.get(self.job.fqns[of_set[number]]) is ReplicaKind.FREE
            best = 0 if is_free else int(np.argmin(load[ranks]))
            load[ranks[best]] += nbytes[number]
            chosen.append(int(mine[best]))
        for number, mine in copies.items():
            if nbytes[number]:
                pairs = zip(rows.rank[mine].tolist(), rows.number[mine].tolist(), strict=True)
                shared.append((self.job.fqns[of_set[number]], [*pairs]))
        return np.sort(np.concatenate([single, np.array(chosen, np.int64)])), shared


def _head(
    job: _Job,
    rows: _Rows,
    held: _Held,
    written: Ints,
    aliases: Mapping[str, str],
    objects: Sequence[tuple[str, ...]],
) -> MetadataHead:
    """Plans every rank's files, checks that shards cover each tensor, and renders the metadata."""
    names, sizes, file, start, nbytes = _placed(job, rows, written)
    is_written = np.zeros(len(rows.tensor), bool)
    is_written[written] = True
    chunks = held.order[is_written[held.order]]  # by tensor and offset
    cuts = np.searchsorted(rows.tensor[chunks], np.arange(len(job.fqns) + 1))
    metadata, entries = Metadata(paths=dict(job.paths)), dict[str, TensorEntry]()
    tables = dict[str, ChunkTable]()
    for fqn, dtype, shape in zip(job.fqns, job.dtypes, job.shapes, strict=True):
        at = job.tensor_of[aliases.get(fqn, fqn)]
        mine, dims = chunks[cuts[at] : cuts[at + 1]], len(shape)
        table = ChunkTable(
            rows.offsets[mine, :dims],
            rows.sizes[mine, :dims],
            names,
            file[mine],
            start[mine],
            nbytes[mine],
            TORCH_ZIP,
        )
        if len(table) < _FEW:
            few = ChunkList(table)
            metadata.places.update(
                ((fqn, c.box.offsets), ItemLocation(c.extent.file, c.extent.start, c.extent.nbytes))
                for c in few
            )
            metadata.tensors[fqn] = TensorMeta(dtype, shape, [c.box for c in few])
            entries[fqn] = TensorEntry(fqn, BY_NAME[dtype], shape, few)
        else:
            tables[fqn] = table
            metadata.tensors[fqn] = TensorMeta(dtype, shape, ())
            entries[fqn] = TensorEntry(fqn, BY_NAME[dtype], shape, table)
    check(Catalog(dcp.NAME, entries, file_sizes=sizes))
    metadata.objects = [name for mine in objects for name in mine]
    sealed = tuple(
        (fqn, SealedTensor(dtype, shape, ""))
        for fqn, dtype, shape in zip(job.fqns, job.dtypes, job.shapes, strict=True)
        if fqn not in aliases
    )
    return MetadataHead(Template(metadata, tables), sealed, aliases, tuple(objects))


def _placed(
    job: _Job, rows: _Rows, written: Ints
) -> tuple[tuple[str, ...], dict[str, int], npt.NDArray[np.int32], Ints, Ints]:
    """Lays out the files of all ranks.

    Returns:
        The names of all files, and their bytes. For each row that is written, the number of its
        file, and where its archive begins there and how long it is.
    """
    sizes: dict[str, int] = {}
    file = np.zeros(len(rows.tensor), np.int32)
    start, nbytes = (np.zeros(len(rows.tensor), np.int64) for _ in range(2))
    type_of = np.array([[*BY_NAME].index(dtype) for dtype in job.dtypes], np.int16)
    alike: dict[bytes, tuple[int, Ints]] = {}  # most files are laid out like that of another rank
    for rank, mine in rows.by_rank(written):
        is_frozen = rows.frozen[mine]
        parts = [mine[~is_frozen], mine[is_frozen]] if is_frozen.any() else [mine]
        for number, part in enumerate(parts):
            dims = [len(job.shapes[at]) for at in rows.tensor[part].tolist()]
            key = b"".join(
                (rows.sizes[part].tobytes(), type_of[rows.tensor[part]].tobytes(), bytes(dims))
            )
            if key not in alike:
                boxes = (rows.box(row, d) for row, d in zip(part.tolist(), dims, strict=True))
                types = (BY_NAME[job.dtypes[at]] for at in rows.tensor[part].tolist())
                laid_out, slots = dcp.lay_out_rank(rank, zip(boxes, types, strict=True))
                spans = [(place.start, place.nbytes) for _, place in slots]
                alike[key] = laid_out.nbytes, np.array(spans, np.int64).reshape(-1, 2)
            name = dcp.data_file_name(rank, number)
            file[part] = len(sizes)
            sizes[name], found = alike[key]
            start[part], nbytes[part] = found[:, 0], found[:, 1]
    return tuple(sizes), sizes, file, start, nbytes
