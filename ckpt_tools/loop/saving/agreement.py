"""Agrees on the layout of a save: which rank writes which shard, and what `.metadata` says of it.

Each rank sends a `RankDescription` to rank 0, which decides. It works on columns with one row for
each shard of each rank, because a job of a thousand ranks has millions of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import Box
from ckpt_tools.core.catalog import TORCH_ZIP, Catalog, Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.chunk_table import ChunkTable, Ints
from ckpt_tools.core.coverage import check
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.memory import no_gc
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.dcp.metadata import ItemLocation, Metadata, Template, TensorMeta
from ckpt_tools.loop.saving.description import JobNames, RankDescription, RankNames, describe_names
from ckpt_tools.loop.saving.replicas import ReplicaTask, replica_tasks
from ckpt_tools.loop.saving.write import numbers_by_file
from ckpt_tools.loop.state.shard_info import ReplicaKind
from ckpt_tools.publish.manifest import SealedTensor
from ckpt_tools.ranks.gloo import GlooGroup

_WHAT = "agree on the layout"


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
    head = mine = None
    failed: Exception | None = None
    try:
        mine = describe_names(names)
    except Exception as error:  # noqa: BLE001  # the other ranks wait in the exchange
        failed = error
    with no_gc():
        gathered = group.gather(mine, _WHAT)
    with group.phase(_WHAT), no_gc():
        if failed is not None:
            raise failed
        if group.rank == 0:
            told = [one for one in gathered if one is not None]
            if len(told) == len(gathered):
                tasks, head = assign(told, names_differ, names)
    return group.scatter(tasks, _WHAT), head


def assign(
    gathered: Sequence[RankDescription],
    names_differ: bool = False,
    own: RankNames | None = None,
) -> tuple[list[WriteTask], MetadataHead]:
    """Decides which rank writes which shard.

    Each shard is written once. Copies are spread so that all ranks write about as many bytes. Those
    that may differ come from the lowest rank that holds them, so that they belong together.

    Args:
        gathered: the descriptions of all ranks.
        names_differ: ranks may have tensors that other ranks lack.
        own: the names of this rank. They only save memory; see `JobNames`.

    Returns:
        The task of each rank, and the metadata that rank 0 needs to commit.

    Raises:
        PlanError, CatalogError: ranks disagree about a tensor, or the shards do not cover it.
    """
    job = JobNames(gathered, own)
    job.check_values()
    job.check_objects(gathered)
    if not names_differ:
        job.check_tensors()
    job.check_containers()
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


class _Rows:
    """The shards of all ranks: first those of rank 0, in its order.

    Attributes:
        rank, number, tensor: `[n]`: the rank, the shard's index there, the tensor's index.
        offsets, sizes: `[n, d]`, in elements.
        numel: `[n]`.
        frozen: `[n]`: it goes into the rank's second file.
        has_elements: for each group of ranks, whether one has elements of each shard.
    """

    def __init__(self, job: JobNames, gathered: Sequence[RankDescription]) -> None:
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

    DCP keeps one chunk per offset. So an empty shard is left out if one with elements lies at the
    same place. Of several empty ones, the first is kept.

    Attributes:
        order: `[n]`, the rows.
        starts: of each set of copies in `order`; the next set begins where one ends.
        is_holder: `[n]`, in this order: this row can write the chunk.
    """

    def __init__(self, job: JobNames, rows: _Rows) -> None:
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
            self.is_holder = has
            return
        sizes, places = rows.sizes[order], np.arange(len(order))
        first = np.minimum.reduceat(np.where(has, places, len(order)), self.starts)
        is_held = first < len(order)  # of each set: some copy has elements
        model = np.where(is_held, first, self.starts)[which]
        is_same = (sizes == sizes[model]).all(axis=1)
        wrong = has & ~is_same
        if wrong.any():
            at = int(np.flatnonzero(wrong)[np.argmin(order[wrong])])
            self._refuse(int(order[at]), int(order[model[at]]))
        self.is_holder = np.where(is_held[which], has, is_same)

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
    job: JobNames,
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
    all_chunks = ChunkTable(
        rows.offsets[chunks],
        rows.sizes[chunks],
        names,
        file[chunks],
        start[chunks],
        nbytes[chunks],
        TORCH_ZIP,
    )
    found = _by_tensor(job, rows.tensor[chunks], all_chunks)
    metadata, entries = Metadata(paths=dict(job.paths)), dict[str, TensorEntry]()
    tables = dict[str, ChunkTable]()
    for fqn, dtype, shape in zip(job.fqns, job.dtypes, job.shapes, strict=True):
        mine = found[job.tensor_of[aliases.get(fqn, fqn)]]
        entries[fqn] = TensorEntry(fqn, BY_NAME[dtype], shape, mine)
        if isinstance(mine, ChunkTable):
            tables[fqn] = mine
            metadata.tensors[fqn] = TensorMeta(dtype, shape, ())
            continue
        metadata.tensors[fqn] = TensorMeta(dtype, shape, [box for box, _ in mine])
        for box, at in mine:
            metadata.places[fqn, box.offsets] = ItemLocation(at.file, at.start, at.nbytes)
    check(Catalog(dcp.NAME, entries, file_sizes=sizes))
    metadata.objects = [name for mine in objects for name in mine]
    sealed = tuple(
        (fqn, SealedTensor(dtype, shape, ""))
        for fqn, dtype, shape in zip(job.fqns, job.dtypes, job.shapes, strict=True)
        if fqn not in aliases
    )
    return MetadataHead(Template(metadata, tables), sealed, aliases, tuple(objects))


def _by_tensor(
    job: JobNames, tensor: npt.NDArray[np.int32], table: ChunkTable
) -> list[ChunkList | ChunkTable]:
    """Splits the chunks of all tensors, which are in order. Few are objects, many stay columns."""
    cuts = np.searchsorted(tensor, np.arange(len(job.fqns) + 1))
    counts = np.diff(cuts)
    few = np.flatnonzero((counts < dcp.COLUMNS_FROM)[tensor])
    rows = zip(
        table.offsets[few].tolist(),
        table.sizes[few].tolist(),
        table.files[few].tolist(),
        table.starts[few].tolist(),
        table.nbytes[few].tolist(),
        strict=True,
    )
    found: list[ChunkList | ChunkTable] = []
    for shape, low, count in zip(job.shapes, cuts[:-1].tolist(), counts.tolist(), strict=True):
        dims = len(shape)
        if count < dcp.COLUMNS_FROM:
            found.append(
                ChunkList(
                    Chunk(
                        Box(tuple(offsets[:dims]), tuple(sizes[:dims])),
                        Extent(table.names[file], start, nbytes, TORCH_ZIP),
                    )
                    for offsets, sizes, file, start, nbytes in islice(rows, count)
                )
            )
        else:
            at = slice(low, low + count)
            found.append(
                ChunkTable(
                    np.ascontiguousarray(table.offsets[at, :dims]),
                    np.ascontiguousarray(table.sizes[at, :dims]),
                    table.names,
                    table.files[at],
                    table.starts[at],
                    table.nbytes[at],
                    TORCH_ZIP,
                )
            )
    return found


def _placed(
    job: JobNames, rows: _Rows, written: Ints
) -> tuple[tuple[str, ...], dict[str, int], npt.NDArray[np.int32], Ints, Ints]:
    """Lays out the files of all ranks.

    Returns:
        The names of all files, and their bytes. For each row that is written, the number of its
        file, and where its archive begins there and how long it is.
    """
    sizes: dict[str, int] = {}
    file = np.zeros(len(rows.tensor), np.int32)
    start, nbytes = (np.zeros(len(rows.tensor), np.int64) for _ in range(2))
    types = [*BY_NAME]
    type_of = np.array([types.index(dtype) for dtype in job.dtypes], np.int16)
    dims_of = np.array([len(shape) for shape in job.shapes], np.int8)
    alike: dict[bytes, tuple[int, Ints]] = {}  # most files are laid out like that of another rank
    for rank, mine in rows.by_rank(written):
        for number, numbers in enumerate(numbers_by_file(rows.frozen[mine])):
            part = mine[numbers]
            tensors = rows.tensor[part]
            dims = dims_of[tensors]
            key = b"".join(array.tobytes() for array in (rows.sizes[part], type_of[tensors], dims))
            if key not in alike:
                boxes = (
                    rows.box(row, d) for row, d in zip(part.tolist(), dims.tolist(), strict=True)
                )
                kinds = (BY_NAME[job.dtypes[at]] for at in tensors.tolist())
                laid_out, slots = dcp.lay_out_rank(rank, zip(boxes, kinds, strict=True))
                spans = [(place.start, place.nbytes) for _, place in slots]
                alike[key] = laid_out.nbytes, np.array(spans, np.int64).reshape(-1, 2)
            name = dcp.data_file_name(rank, number)
            file[part] = len(sizes)
            sizes[name], found = alike[key]
            start[part], nbytes[part] = found[:, 0], found[:, 1]
    return tuple(sizes), sizes, file, start, nbytes
