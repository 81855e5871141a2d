"""The agreement of a save as it was before columns: one object for each shard of each rank.

It is the oracle of `test_agreement.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckpt_tools.core.box import Box
from ckpt_tools.core.catalog import TORCH_ZIP, Catalog, Chunk, ChunkList, Extent, TensorEntry
from ckpt_tools.core.coverage import check
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.dcp.metadata import ItemLocation, Metadata, Template, TensorMeta
from ckpt_tools.loop.saving.agreement import MetadataHead, WriteTask
from ckpt_tools.loop.saving.description import RankNames
from ckpt_tools.loop.saving.replicas import ReplicaSet, ReplicaTask
from ckpt_tools.loop.state.shard_info import FileKind, ReplicaKind, ShardInfo
from ckpt_tools.publish.manifest import SealedTensor


def agreed(
    gathered: Sequence[RankNames], names_differ: bool
) -> tuple[list[WriteTask], MetadataHead]:
    """Returns what all ranks agree on."""
    _check_values([g.values for g in gathered], {info.fqn for g in gathered for info in g.infos})
    if not names_differ:
        _check_tensors([g.paths.keys() - {*g.objects} for g in gathered])
    return assign(
        [g.infos for g in gathered],
        [g.objects for g in gathered],
        {k: v for g in reversed(gathered) for k, v in g.paths.items()},
        _kinds(gathered),
    )


def _kinds(gathered: Sequence[RankNames]) -> dict[str, ReplicaKind]:
    """Returns what a difference means, where it is not just an error on any rank."""
    strict = {info.fqn for g in gathered for info in g.infos if info.fqn not in g.kinds}
    return {
        fqn: kind
        for g in gathered
        for fqn, kind in g.kinds.items()
        if kind is not ReplicaKind.FREE or fqn not in strict
    }


def _check_values(values: Sequence[tuple[tuple[str, bool], ...]], tensors: set[str]) -> None:
    """Refuses states in which the names of the values differ between ranks.

    Only rank 0's values would be stored, and no rank could load the others.

    Raises:
        PlanError: with the first name that differs.
    """
    for rank, mine in enumerate(values):
        differing = [n for n, _ in sorted({*values[0]} ^ {*mine})]
        if differing:
            name = differing[0]
            holder = 0 if name in dict(values[0]) else rank
            who = (
                "a tensor on one rank and a value on another"
                if name in tensors
                else f"in the state of rank {holder} only"
            )
            raise PlanError(
                f"the states of rank 0 and rank {rank} differ: {printable(name)!r} is {who}",
                hint=(
                    "give every rank the same keys; a value of which each rank has its own goes"
                    " into a PerRank"
                ),
            )


def _check_tensors(names: Sequence[set[str]]) -> None:
    """Refuses states in which the names of the tensors differ between ranks.

    Raises:
        PlanError: with the first name that differs.
    """
    for rank, mine in enumerate(names):
        if mine != names[0]:
            name = min(mine ^ names[0])
            raise PlanError(
                f"the states of rank 0 and rank {rank} differ: the tensor {printable(name)!r} is in"
                f" the state of rank {0 if name in names[0] else rank} only",
                hint="give every rank the same keys; stages of a pipeline pass names_differ=True",
            )


def assign(
    infos: Sequence[Sequence[ShardInfo]],
    objects: Sequence[tuple[str, ...]],
    paths: Mapping[str, tuple[str | int, ...]],
    kinds: Mapping[str, ReplicaKind] | None = None,
) -> tuple[list[WriteTask], MetadataHead]:
    """Decides which rank writes which shard.

    Each shard is written once. Copies are spread so that all ranks write about as many bytes. Those
    that may differ come from the lowest rank that holds them, so that they belong together.

    Args:
        infos: the shards of each rank.
        objects: per rank, the names of the objects that it writes.
        paths: the path of keys to every name.
        kinds: of the tensors whose replicas may differ.

    Returns:
        The task of each rank, and the metadata that rank 0 needs to commit.

    Raises:
        PlanError, CatalogError: ranks disagree about a tensor, or the shards do not cover it.
    """
    every = dict.fromkeys(info.fqn for mine in infos for info in mine)
    order = {fqn: at for at, fqn in enumerate(every)}
    first: dict[str, tuple[ShardInfo, int]] = {}
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    boxes: dict[tuple[str, tuple[int, ...]], Box] = {}
    partners: dict[str, set[str]] = {}
    untied = set[str]()  # on some rank, with elements
    for rank, mine in enumerate(infos):
        for number, info in enumerate(mine):
            known, known_rank = first.setdefault(info.fqn, (info, rank))
            if (known.dtype, known.shape) != (info.dtype, info.shape):
                raise PlanError(
                    f"ranks disagree about {printable(info.fqn)!r}: rank {known_rank} has"
                    f" {known.dtype} {list(known.shape)}, rank {rank} has {info.dtype}"
                    f" {list(info.shape)}"
                )
            # DCP keeps one chunk per offset: of several empty ones, the first
            key = (info.fqn, info.box.offsets)
            box = boxes.get(key)
            if box == info.box:
                holders[key].append((rank, number))
            elif box is not None:
                _check_same_split(info, rank, box, holders[key])
            if box is None or box.numel < info.box.numel:
                boxes[key], holders[key] = info.box, [(rank, number)]
            tied = tie_of(mine, info, order)
            if tied != info.fqn and info.box.numel:
                partners.setdefault(info.fqn, set()).add(tied)
            elif info.fqn not in untied and info.box.numel:
                untied.add(info.fqn)
    # tied on every rank
    aliases = {
        fqn: next(iter(found))
        for fqn, found in partners.items()
        if len(found) == 1 and fqn not in untied
    }
    return _spread(infos, objects, paths, first, holders, boxes, aliases, kinds or {})


def tie_of(mine: Sequence[ShardInfo], info: ShardInfo, order: Mapping[str, int]) -> str:
    """Returns the first name, in the order of all ranks, that is tied to a shard on its rank."""
    name = info.alias or info.fqn
    tied = [one.fqn for one in mine if name in (one.alias, one.fqn)]
    return name if name not in order else min([name, *tied], key=order.__getitem__)


def _check_same_split(
    info: ShardInfo, rank: int, other: Box, holders: Sequence[tuple[int, int]]
) -> None:
    """Refuses two shards with the same offsets and different sizes, unless one is empty."""
    if info.box.numel and other.numel:
        raise PlanError(
            f"ranks split {printable(info.fqn)!r} differently: at {list(other.offsets)}, rank"
            f" {holders[0][0]} has {list(other.sizes)}, rank {rank} has {list(info.box.sizes)}",
            hint="put it on one mesh, or give the tensor of each mesh a name of its own",
        )


def _spread(
    infos: Sequence[Sequence[ShardInfo]],
    objects: Sequence[tuple[str, ...]],
    paths: Mapping[str, tuple[str | int, ...]],
    first: Mapping[str, tuple[ShardInfo, int]],
    holders: Mapping[tuple[str, tuple[int, ...]], list[tuple[int, int]]],
    boxes: Mapping[tuple[str, tuple[int, ...]], Box],
    aliases: Mapping[str, str],
    kinds: Mapping[str, ReplicaKind],
) -> tuple[list[WriteTask], MetadataHead]:
    load = [0] * len(infos)
    chosen: list[list[int]] = [[] for _ in infos]
    pieces = [
        (boxes[key].numel * BY_NAME[first[key[0]][0].dtype].itemsize, key)
        for key in holders
        if key[0] not in aliases
    ]
    shared = [p for p in pieces if len(holders[p[1]]) > 1]
    for nbytes, key in (p for p in pieces if len(holders[p[1]]) == 1):
        rank, number = holders[key][0]
        load[rank] += nbytes
        chosen[rank].append(number)
    for nbytes, key in sorted(shared, key=lambda p: -p[0]):
        is_of_lowest = kinds.get(key[0]) in (ReplicaKind.FREE, ReplicaKind.PART)
        rank, number = min(holders[key], key=lambda h: (0 if is_of_lowest else load[h[0]], h[0]))
        load[rank] += nbytes
        chosen[rank].append(number)
    names = [fqn for fqn in first if fqn not in aliases]
    numbers = {fqn: i for i, fqn in enumerate(names)}
    replicas = replica_tasks(
        [(fqn, holders[fqn, offsets]) for nbytes, (fqn, offsets) in shared if nbytes],
        kinds,
        len(infos),
    )
    tasks = [
        WriteTask(
            tuple(sorted(mine)),
            tuple(numbers[infos[r][i].fqn] for i in sorted(mine)),
            len(names),
            replicas[r],
        )
        for r, mine in enumerate(chosen)
    ]
    return tasks, _head(
        infos, tasks, objects, paths, {fqn: info for fqn, (info, _) in first.items()}, aliases
    )


def _numbers_by_file(shards: Sequence[ShardInfo]) -> dict[int, list[int]]:
    found = {int(kind): [n for n, s in enumerate(shards) if s.file == kind] for kind in FileKind}
    return {kind: numbers for kind, numbers in found.items() if numbers or kind == 0}


def _head(
    infos: Sequence[Sequence[ShardInfo]],
    tasks: Sequence[WriteTask],
    objects: Sequence[tuple[str, ...]],
    paths: Mapping[str, tuple[str | int, ...]],
    first: Mapping[str, ShardInfo],
    aliases: Mapping[str, str],
) -> MetadataHead:
    """Plans every rank's file, checks that shards cover each tensor, and renders the metadata."""
    placed: dict[str, list[tuple[Box, ItemLocation]]] = {fqn: [] for fqn in first}
    sizes: dict[str, int] = {}
    alike: dict[tuple[tuple[tuple[int, ...], str], ...], tuple[int, list[tuple[int, int]]]] = {}
    for rank, (mine, task) in enumerate(zip(infos, tasks, strict=True)):
        shards = [mine[number] for number in task.shards]
        for file_number, numbers in _numbers_by_file(shards).items():
            pieces = [shards[number] for number in numbers]
            key = tuple((p.box.sizes, p.dtype) for p in pieces)
            if key not in alike:  # most files are laid out like that of another rank
                file, laid_out = dcp.lay_out_rank(rank, ((p.box, BY_NAME[p.dtype]) for p in pieces))
                alike[key] = file.nbytes, [(place.start, place.nbytes) for _, place in laid_out]
            name = dcp.data_file_name(rank, file_number)
            sizes[name], spans = alike[key]
            for piece, (start, nbytes) in zip(pieces, spans, strict=True):
                placed[piece.fqn].append((piece.box, ItemLocation(name, start, nbytes)))
    for fqn, other in aliases.items():
        placed[fqn] = placed[other]
    metadata = Metadata(paths=dict(paths))
    entries = {}
    for fqn, info in first.items():
        found = sorted(placed[fqn], key=lambda p: p[0].offsets)
        metadata.tensors[fqn] = TensorMeta(info.dtype, info.shape, [box for box, _ in found])
        for box, place in found:
            metadata.places[fqn, box.offsets] = place
        chunks = ChunkList(
            Chunk(box, Extent(place.file, place.start, place.nbytes, TORCH_ZIP))
            for box, place in found
        )
        entries[fqn] = TensorEntry(fqn, BY_NAME[info.dtype], info.shape, chunks)
    check(Catalog(dcp.NAME, entries, file_sizes=sizes))
    metadata.objects = [name for names in objects for name in names]
    tensors = tuple(
        (fqn, SealedTensor(o.dtype, o.shape, "")) for fqn, o in first.items() if fqn not in aliases
    )
    return MetadataHead(Template(metadata), tensors, aliases, tuple(objects))


def replica_tasks(
    shared: Iterable[tuple[str, Sequence[tuple[int, int]]]],
    kinds: Mapping[str, ReplicaKind],
    num_ranks: int,
) -> list[ReplicaTask]:
    """Returns the task of each rank.

    Args:
        shared: per shard with several replicas, the name of the tensor, and rank and index of each.
        kinds: of the tensors for which a difference is not just an error.
        num_ranks: of the job.
    """
    found: dict[tuple[tuple[int, ...], ReplicaKind], list[Sequence[tuple[int, int]]]] = {}
    for fqn, holders in shared:
        kind = kinds.get(fqn, ReplicaKind.EQUAL)
        found.setdefault((tuple(rank for rank, _ in holders), kind), []).append(holders)
    sets: list[list[ReplicaSet]] = [[] for _ in range(num_ranks)]
    for number, ((ranks, kind), shards) in enumerate(found.items()):
        for place, rank in enumerate(ranks):
            mine = tuple(holders[place][1] for holders in shards)
            sets[rank].append(ReplicaSet(number, kind, len(ranks), mine))
    has_parts = any(kind is ReplicaKind.PART for _, kind in found)
    return [ReplicaTask(tuple(mine), len(found), has_parts) for mine in sets]
