"""Agrees on the layout of a save: which rank writes which shard, and what `.metadata` says of it.

Each rank sends a `RankDescription` to rank 0, which decides. It works on `ShardColumns`: a job of
many thousand ranks has millions of shards, and few ways in which a tensor is cut.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ckpt_tools.core.catalog import TORCH_ZIP, Catalog, Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.chunk_table import ChunkTable, Ints
from ckpt_tools.core.coverage import check_repeats, flaws
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.memory import no_gc
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.dcp.metadata import (
    ItemLocation,
    LateTable,
    Metadata,
    Template,
    TensorMeta,
)
from ckpt_tools.loop.saving.description import (
    JobNames,
    RankDescription,
    RankNames,
    describe_names,
    gather_descriptions,
)
from ckpt_tools.loop.saving.file_places import FilePlaces, shards_by_rank
from ckpt_tools.loop.saving.replicas import ReplicaTask, replica_tasks
from ckpt_tools.loop.saving.shard_columns import Bools, CopySets, ShardColumns
from ckpt_tools.loop.saving.writers import Writers
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
        gathered = gather_descriptions(group, mine, _WHAT)
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
    columns = ShardColumns(job, gathered)
    sets = CopySets(job, columns)
    aliases = job.aliases(columns.has_elements())
    kinds = job.kinds()
    is_written = np.array([fqn not in aliases for fqn in job.fqns], bool)
    writers = Writers(job, columns, sets, is_written, kinds)
    replicas = replica_tasks(writers.shared, job.fqns, kinds, columns, sets)
    shards = shards_by_rank(columns, writers, is_written)
    of_tensor, num_tensors = np.cumsum(is_written) - 1, int(is_written.sum())
    numbers = {
        id(mine): (tuple(mine.numbers.tolist()), tuple(of_tensor[mine.tensors].tolist()))
        for mine in {id(mine): mine for mine in shards}.values()
    }
    tasks = [
        WriteTask(*numbers[id(mine)], num_tensors, replicas[rank])
        for rank, mine in enumerate(shards)
    ]
    places = FilePlaces(job, columns, shards)
    chunks = _Chunks(job, columns, writers, places, is_written)
    return tasks, _head(job, chunks, places.sizes, aliases, [g.objects for g in gathered])


class _Chunks:
    """The chunks of each tensor: its boxes, and where they lie."""

    def __init__(
        self,
        job: JobNames,
        columns: ShardColumns,
        writers: Writers,
        places: FilePlaces,
        is_written: Bools,
    ) -> None:
        self._columns, self._writers, self._places = columns, writers, places
        self._dims, self._dtypes = [len(shape) for shape in job.shapes], job.dtypes
        # those that nobody writes have no chunks
        self.cuts: Ints = np.where(is_written, columns.cuts, -1)

    def all(self) -> list[ChunkList | LateTable]:
        """Returns the chunks of each tensor: few as objects, many as a table that is made later."""
        found: list[ChunkList | LateTable] = [ChunkList() for _ in self.cuts]
        by_cut = np.argsort(self.cuts, kind="stable")
        for some in np.split(by_cut, np.flatnonzero(np.diff(self.cuts[by_cut])) + 1):
            tensors, cut = some.tolist(), int(self.cuts[some[0]]) if len(some) else -1
            if cut < 0:
                continue
            if self._writers.num_chunks(cut) < dcp.COLUMNS_FROM:
                for tensor, mine in zip(tensors, self._few(some, cut), strict=True):
                    found[tensor] = mine
                continue
            kinds = [(cut, self._dtypes[t], self._writers.choice(t)) for t in tensors]
            counts = Counter(kinds)
            for tensor, own in zip(tensors, kinds, strict=True):
                kind = own if counts[own] > 1 else None
                make, starts = partial(self._table, tensor), partial(self._starts, tensor)
                found[tensor] = LateTable(cut, kind, make, starts)
        return found

    def _few(self, tensors: Ints, cut: int) -> Iterator[ChunkList]:
        rows = np.array([self._writers.rows(tensor, cut) for tensor in tensors.tolist()])
        dims, names = self._dims[tensors[0]], self._places.names
        boxes = [self._columns.box(row, dims) for row in rows[0].tolist()]
        found = self._places.find(rows, tensors[:, None])
        for spans in zip(*(column.tolist() for column in found), strict=True):
            yield ChunkList(
                Chunk(box, Extent(names[file], start, nbytes, TORCH_ZIP))
                for box, file, start, nbytes in zip(boxes, *spans, strict=True)
            )

    def _starts(self, tensor: int) -> Ints:
        rows = self._writers.rows(tensor, int(self.cuts[tensor]))
        return self._places.find(rows, tensor)[1]

    def _table(self, tensor: int) -> ChunkTable:
        """Returns the chunks of a tensor as a table."""
        rows = self._writers.rows(tensor, int(self.cuts[tensor]))
        files, starts, nbytes = self._places.find(rows, tensor)
        dims, columns = self._dims[tensor], self._columns
        return ChunkTable(
            np.ascontiguousarray(columns.offsets[rows, :dims]),
            np.ascontiguousarray(columns.sizes[rows, :dims]),
            self._places.names,
            files.astype(np.int32),
            starts,
            nbytes,
            TORCH_ZIP,
        )


def _head(
    job: JobNames,
    chunks: _Chunks,
    file_sizes: Mapping[str, int],
    aliases: Mapping[str, str],
    objects: Sequence[tuple[str, ...]],
) -> MetadataHead:
    """Checks that shards cover each tensor, and renders the metadata."""
    metadata, tables = Metadata(paths=dict(job.paths)), dict[str, LateTable]()
    # tensors with one cut are covered alike
    entries, proved = dict[str, TensorEntry](), set[tuple[object, ...]]()
    nbytes, found = 0, chunks.all()
    for fqn, dtype, shape in zip(job.fqns, job.dtypes, job.shapes, strict=True):
        nbytes += math.prod(shape) * BY_NAME[dtype].itemsize
        tensor = job.tensor_of[aliases.get(fqn, fqn)]
        mine, kind = found[tensor], (shape, int(chunks.cuts[tensor]))
        if kind not in proved:
            proved.add(kind)
            whole = mine.make() if isinstance(mine, LateTable) else mine
            entries[fqn] = TensorEntry(fqn, BY_NAME[dtype], shape, whole)
        if isinstance(mine, LateTable):
            tables[fqn], metadata.tensors[fqn] = mine, TensorMeta(dtype, shape, ())
            continue
        metadata.tensors[fqn] = TensorMeta(dtype, shape, [box for box, _ in mine])
        for box, at in mine:
            metadata.places[fqn, box.offsets] = ItemLocation(at.file, at.start, at.nbytes)
    for flaw in flaws(Catalog(dcp.NAME, entries, file_sizes=file_sizes)):
        raise flaw.error
    check_repeats(nbytes, sum(file_sizes.values()))
    metadata.objects = [name for mine in objects for name in mine]
    sealed = tuple(
        (fqn, SealedTensor(dtype, shape, ""))
        for fqn, dtype, shape in zip(job.fqns, job.dtypes, job.shapes, strict=True)
        if fqn not in aliases
    )
    return MetadataHead(Template(metadata, tables), sealed, aliases, tuple(objects))
