"""Storage plugins for `dcp.save`, `dcp.async_save` and `dcp.load`.

They use the engine of this package and write the same files.

    dcp.save(state, storage_writer=StorageWriter("run/step-500"))
    dcp.load(state, storage_reader=StorageReader("run/step-500"))

torch plans and communicates between ranks. This module writes, commits and reads. Imports torch.

Source: torch 2.13 `torch/distributed/checkpoint/storage.py`, `planner.py`, `state_dict_saver.py`.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckpt_tools.core.box import Box
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.logs import log
from ckpt_tools.core.naming import is_norm_buffer
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.base import new_attempt
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.pickle.state import plain_path
from ckpt_tools.formats.registry import Source
from ckpt_tools.loop.loading.load_request import LoadReport
from ckpt_tools.loop.loading.proof import LoadProof
from ckpt_tools.loop.loading.read_shards import fill
from ckpt_tools.loop.saving.replicas import Proof, differing_note, replicas_differ
from ckpt_tools.loop.saving.write import (
    RankFile,
    SavedObject,
    commit,
    describe,
    plan_rank_files,
    write_index,
    write_part,
)
from ckpt_tools.loop.state.archives import check_loadable, unpack
from ckpt_tools.loop.state.checksums import checksums_of
from ckpt_tools.loop.state.ema import refuse_applied
from ckpt_tools.loop.state.shard_info import ShardInfo
from ckpt_tools.loop.state.shards import Shard, check_one_tensor
from ckpt_tools.loop.state.staging import Stager
from ckpt_tools.publish.base import Attempt as Staged
from ckpt_tools.publish.base import Destination
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.publish.manifest import SealedTensor
from ckpt_tools.publish.sealed_source import open_sealed, read_object
from ckpt_tools.transfer.prove import prove_replicas

_VERSION = "1.0.0"
_TRUST = "save plain values and tensors, or pass trust_pickle=True to the writer and to the reader"


class _Order(NamedTuple):
    """The coordinator's message to a rank: the attempt, and the rank's number.

    `replicas` has the numbers of the rank's tensors that other ranks hold, too.
    """

    attempt: str
    rank: int
    replicas: tuple[int, ...]


class _WriteResult(NamedTuple):
    """A rank's message to the coordinator about an item; the first one also describes its file."""

    info: _StorageInfo
    share: int
    part: RankFile | None


class _ReplicaResult(NamedTuple):
    """A rank's message to the coordinator: the checksums of the replicas that it holds."""

    checksums: dict[MetadataIndex, tuple[int, str, tuple[int, ...]]]  # with type and shape


class StorageWriter(storage.StorageWriter):
    """Writes one checkpoint: one file per rank, and a manifest.

    One rename commits it after every byte is durable.

    For `dcp.save` and `dcp.async_save` (thread or process). Contiguous CPU tensors are written from
    their own memory, without a copy.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "",
        *,
        overwrite: bool = False,
        jobs: int = 2,
        trust_pickle: bool = False,
        replicas: str = Proof.CHECK,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Stores the path and the options.

        Args:
            path: a path or a URL. It must not exist, unless `overwrite`. `checkpoint_id` of
                `dcp.save` overrides it.
            overwrite: replace an existing checkpoint. The old one stays until the new one is
                complete.
            jobs: threads on each rank.
            trust_pickle: save values that cannot be loaded without running a pickle's code. The
                reader then needs this option, too.
            replicas: `"check"` compares the copies of a tensor that several ranks hold, and refuses
                a difference; the statistics of batch norms come from the lowest rank. `"trust"`
                compares nothing.
            storage_options: of the object store, as fsspec takes them.
        """
        super().__init__()
        self._proof, self._items = Proof.of(replicas), list[WriteItem]()
        self.path, self.overwrite, self.jobs, self._options = path, overwrite, jobs, storage_options
        self._trust_pickle = trust_pickle
        self._is_collective = True
        self._stack: ExitStack | None = None
        self._staged: Staged | None = None
        self._num_ranks = 0
        self._stage = Stager()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins another save, and removes the files of a failed one."""
        if checkpoint_id:
            self.path = checkpoint_id
        self._close()

    def _target(self) -> Destination:
        return open_destination(self.path, self._options)

    def _close(self) -> None:
        stack, self._stack, self._staged = self._stack, None, None
        if stack is not None:
            stack.close()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del is_coordinator, args
        self._is_collective = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tells the coordinator all tensors of this rank: the planner drops all copies but one."""
        self._items = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        return dataclasses.replace(plan, storage_data=[item.index for item in self._items])

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Creates the staging directory, on the coordinator.

        Raises:
            StorageError: the destination exists or cannot be written to.
            PlanError: the ranks save without collectives, so no rank would commit. Or the planner
                keeps plans from save to save.
        """
        if (
            not self._is_collective
            and torch.distributed.is_initialized()
            and torch.distributed.get_world_size() > 1
        ):
            raise PlanError(
                "saving without collectives has no commit: one rank must know that all have written"
            )
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise PlanError(
                "a planner that keeps its plans cannot be used: each save has files of its own",
                hint="make the planner without enable_plan_caching",
            )
        target = self._target()
        target.check(self.overwrite)
        attempt, self._num_ranks = new_attempt(), len(plans)
        self._stack = ExitStack()
        self._staged = self._stack.enter_context(target.stage(attempt, self.overwrite))
        held = [plan.storage_data or [] for plan in plans]
        count = Counter(index for mine in held for index in mine)
        owners = {index: rank for rank, mine in reversed([*enumerate(held)]) for index in mine}
        moved = [
            (item, owners[item.index])
            for plan in plans
            for item in plan.items
            if count[item.index] > 1 and is_norm_buffer(item.index.fqn)
        ]
        found = []
        for rank, (plan, mine) in enumerate(zip(plans, held, strict=True)):
            others = [
                i for i in plan.items if count[i.index] < 2 or not is_norm_buffer(i.index.fqn)
            ]
            replicas = tuple(n for n, index in enumerate(mine) if count[index] > 1)
            found.append(
                dataclasses.replace(
                    plan,
                    items=[*others, *(item for item, owner in moved if owner == rank)],
                    storage_data=_Order(attempt, rank, replicas),
                )
            )
        return found

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items.

        Raises:
            PlanError: a value could not be loaded again.
            StorageError: there is no room, a write failed, or the directory is not shared.
        """
        order: _Order = plan.storage_data
        target = self._target()
        staged = self._staged or target.join(order.attempt)
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        pieces = [_info(item) for item in tensors]
        values = [planner.resolve_data(item) for item in plan.items]
        refuse_applied(value for value in values if isinstance(value, torch.Tensor))
        for item, value in zip(plan.items, values, strict=True):
            if isinstance(value, torch.Tensor):
                check_one_tensor(item.index.fqn, value)
            elif not self._trust_pickle:
                check_loadable(value.getvalue(), item.index.fqn, _TRUST)
        memory = self._stage.live(
            [v.detach() for v in values if isinstance(v, torch.Tensor)]
        ).wait()
        (file,) = plan_rank_files(order.rank, pieces)
        part = write_part(
            file,
            target,
            staged,
            memory,
            [v.getvalue() for v in values if isinstance(v, io.BytesIO)],
            self.jobs,
        )
        name = target.name(dcp.data_file_name(order.rank), order.attempt)
        # the share of all chunks of a tensor goes with the first one; that of an object is its CRC
        shares = dict(part.shares)
        told = [
            (item, place.start, place.nbytes, shares.pop(piece.fqn, 0))
            for item, piece, place in zip(tensors, pieces, file.places, strict=True)
        ]
        told += [(item, *saved) for item, saved in zip(objects, part.objects, strict=True)]
        alone = part._replace(objects=(), shares={})
        results = [
            WriteResult(
                item.index,
                nbytes,
                _WriteResult(_StorageInfo(name, start, nbytes), share, None if number else alone),
            )
            for number, (item, start, nbytes, share) in enumerate(told)
        ]
        if order.replicas and self._proof is not Proof.TRUST:
            replicas = [self._items[number] for number in order.replicas]
            held = [planner.resolve_data(item) for item in replicas]
            found = checksums_of(
                [value.detach() for value in held if isinstance(value, torch.Tensor)]
            )
            infos = map(_info, replicas)
            proof = _ReplicaResult(
                {
                    item.index: (checksum, info.dtype, info.shape)
                    for item, checksum, info in zip(replicas, found, infos, strict=True)
                }
            )
            results.append(WriteResult(replicas[0].index, 0, proof))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits, on the coordinator.

        Raises:
            StorageError: a file is not as its rank wrote it, or the commit failed. Then nothing is
                visible.
            PlanError: copies of a tensor differ between ranks.
        """
        assert self._staged is not None
        try:
            _check_replicas(results)
        except PlanError:
            self._close()
            raise
        parts: list[list[RankFile]] = [[] for _ in range(self._num_ranks)]
        fingerprints: dict[str, int] = {}
        metadata.storage_data = {}
        for rank, wrote in enumerate(results):
            for result in wrote:
                if isinstance(result.storage_data, _ReplicaResult):
                    continue
                info, share, part = result.storage_data
                if part is not None:
                    parts[rank].append(part)
                fingerprints[result.index.fqn] = fingerprints.get(result.index.fqn, 0) ^ share
                metadata.storage_data[result.index] = info
        metadata.version = _VERSION
        metadata.storage_meta = StorageMeta(checkpoint_id="", save_id=self._staged.attempt)
        tensors = {
            fqn: SealedTensor(
                str(m.properties.dtype).removeprefix("torch."),
                tuple(m.size),
                f"{fingerprints.get(fqn, 0):016x}",
            )
            for fqn, m in metadata.state_dict_metadata.items()
            if isinstance(m, TensorStorageMetadata)
        }
        objects = {
            index.fqn: SavedObject(info.offset, info.length, fingerprints[index.fqn])
            for index, info in metadata.storage_data.items()
            if index.fqn not in tensors
        }
        try:
            index = write_index(self._staged, [pickle.dumps(metadata, protocol=4)])
            manifest = describe(self._target(), self._staged, index, parts, tensors, objects)
            commit(self._staged, manifest, index)
        finally:
            self._close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "::" not in str(checkpoint_id)


def _check_replicas(results: Sequence[Sequence[WriteResult]]) -> None:
    """Compares the checksums of the replicas of all ranks.

    Raises:
        PlanError: they differ.
    """
    replicas: dict[MetadataIndex, list[tuple[int, object]]] = {}
    for rank, wrote in enumerate(results):
        for result in wrote:
            if isinstance(result.storage_data, _ReplicaResult):
                for index, checksum in result.storage_data.checksums.items():
                    replicas.setdefault(index, []).append((rank, checksum))
    wrong, free = list[tuple[str, list[int]]](), dict[str, None]()
    for index, found in replicas.items():
        (first, one), *others = found
        differing = [rank for rank, other in others if other != one]
        if differing and is_norm_buffer(index.fqn):
            free[index.fqn] = None
        elif differing:
            wrong.append((index.fqn, [first, *differing]))
    if wrong:
        raise replicas_differ(wrong)
    if free:
        log.warning("%s", differing_note(list(free)))


def _box(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _info(item: WriteItem) -> ShardInfo:
    data = item.tensor_data
    assert data is not None
    dtype = str(data.properties.dtype).removeprefix("torch.")
    if dtype not in BY_NAME:
        raise PlanError(
            f"a tensor of this kind cannot be stored: {dtype} ({printable(item.index.fqn)!r})"
        )
    return ShardInfo(item.index.fqn, dtype, tuple(data.size), _box(data.chunk))


class StorageReader(storage.StorageReader):
    """Reads any checkpoint that `ckpt` reads, for `dcp.load`.

    It reads straight into the tensors' memory, and runs no code of pickles.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "",
        *,
        cast: bool = False,
        trust_pickle: bool = False,
        jobs: int = 2,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Stores the path and the options.

        Args:
            path: a path or a URL. `checkpoint_id` of `dcp.load` overrides it.
            cast: let floating-point tensors change their type on the way. Stock readers do so
                silently.
            trust_pickle: run the code that objects of the checkpoint ask for.
            jobs: threads on each rank.
            storage_options: of the object store, as fsspec takes them.
        """
        super().__init__()
        self.path, self.cast, self.trust_pickle, self.jobs, self._options = (
            path,
            cast,
            trust_pickle,
            jobs,
            storage_options,
        )
        self.report = LoadReport(str(path))
        self._source: Source | None = None
        self._proof: LoadProof | None = None

    @property
    def source(self) -> Source:
        """Returns the checkpoint, which is opened once."""
        if self._source is None:
            self._source, manifest = open_sealed(self.path, self._options)
            catalog = self._source.catalog
            self._proof = LoadProof(manifest, catalog, catalog)
        return self._source

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins another load."""
        if self._source is not None:
            self._source.store.close()
        self._source = None
        if checkpoint_id:
            self.path = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the checkpoint's metadata in the form of torch's planners.

        Raises:
            NotACheckpointError, FormatError, CatalogError: see `ckpt_tools.inspect`.
        """
        del args, kwargs
        catalog = self.source.catalog
        entries: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in catalog.objects}
        for fqn, entry in catalog.tensors.items():
            boxes = dict.fromkeys(c.box for c in entry.chunks)
            entries[fqn] = TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, entry.dtype.name)),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes],
            )
        paths = {fqn: plain_path(path) for fqn, path in catalog.paths.items()}
        return Metadata(entries, planner_data=paths or {fqn: (fqn,) for fqn in entries})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: every rank opens the checkpoint for itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads this rank's items.

        Raises:
            IntegrityError: a chunk, or a sealed tensor, that was read in full is damaged.
            PlanError: a tensor has another type, and `cast` is False.
            UnsafePickleError: an object asks for code, and `trust_pickle` is False.
        """
        tensors = []
        shards = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                stored = self.source.catalog.objects[item.storage_index.fqn]
                data = read_object(self.source.store, stored)
                # the planner unpickles its input, so it gets an archive of ours
                if not self.trust_pickle:
                    data = _archive(unpack(data, item.storage_index.fqn, False))
                planner.load_bytes(item, io.BytesIO(data))
                continue
            tensor = planner.resolve_tensor(item).detach()
            chunk = item.storage_index.offset or (0,) * len(item.lengths)
            box = Box(
                tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True)),
                tuple(item.lengths),
            )
            shards.append(self._shard(item.storage_index.fqn, box, tensor))
            tensors.append((item, tensor))
        catalog, proof = self.source.catalog, self._proof
        assert proof is not None  # `source` made it
        names = dict.fromkeys(item.storage_index.fqn for item in plan.items)
        prove_replicas(
            self.source,
            [catalog.tensors[n] for n in names if n in catalog.tensors and not proof.has(n)],
            [catalog.objects[n] for n in names if n in catalog.objects],
            self.jobs,
        )
        fill(
            self.source,
            [s for s in shards if s.box.numel],
            self.jobs,
            DEFAULT_MEMORY_BYTES,
            self.report,
            self._proof,
        )
        for item, tensor in tensors:
            planner.commit_tensor(item, tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _shard(self, fqn: str, box: Box, tensor: torch.Tensor) -> Shard:
        entry = self.source.catalog.tensors[fqn]
        dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        if dtype is not entry.dtype and not (
            self.cast and dtype.is_castable and entry.dtype.is_castable
        ):
            raise PlanError(
                f"types differ: the checkpoint has {entry.dtype.name}, the state {dtype.name}"
                f" ({printable(fqn)!r})",
                hint="StorageReader(…, cast=True) converts between floating-point types on the way",
            )
        return Shard(fqn, dtype, entry.shape, box, tensor)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "::" not in str(checkpoint_id)


def _archive(value: Any) -> bytes:
    """Returns a safely read value as an archive that torch's planner loads."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
