"""Merge and reshard: read a catalog, view it, lay a target out, copy, commit.

Both are presets of one path, `_transfer`. May import levels 0 to 4.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypedDict, Unpack

from ckpt_tools.box import Box, whole
from ckpt_tools.catalog import Catalog, Extent, TensorEntry, keep, key_path, matcher, model_only, rename, replicas, strip_wrappers
from ckpt_tools.checksum import crc64nvme, hex64
from ckpt_tools.destination import Destination, open_destination
from ckpt_tools.dtypes import BY_NAME, SHORT_NAMES, DType
from ckpt_tools.engine.run import Totals, run
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, Step, by_files, schedule, tile_bytes
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.formats import Request, Source, TargetTensor, accelerate, dcp, open_source, safetensors, whole_tensor
from ckpt_tools.formats.base import Format
from ckpt_tools.layout import reshard_boxes, split
from ckpt_tools.manifest import Manifest, Sealed, SealedTensor, file_name, seal_tensors
from ckpt_tools.operations.proof import prove_fingerprints, prove_replicas
from ckpt_tools.plan import Literal, Plan, Target, plan_transfer
from ckpt_tools.storage import Shelf, is_url

Path_ = str | os.PathLike[str]
ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
_MANIFEST_ROOM_BYTES = 1 << 20
_STREAMS = 12  # each holds a part of 8 MiB, or two


class Options(TypedDict, total=False):
    """How to do it; every operation takes these.

    Attributes:
        jobs: number of threads; the number of processors, at most 8, where absent.
        memory_bytes: budget of all buffers together; 64 MiB where absent.
        overwrite: replace a checkpoint at the destination, once the new one is complete.
        dry_run: plan only, write nothing.
        storage_options: of the source's object store, as fsspec takes them; the rest is its own configuration's.
        progress: called with a label and a total in bytes; gives a context with a callable that takes bytes done.
    """

    jobs: int | None
    memory_bytes: int | None
    overwrite: bool
    dry_run: bool
    storage_options: Mapping[str, Any] | None
    progress: ProgressBar | None


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What a merge or reshard did, or with `dry_run` would do.

    Attributes:
        source, destination, format: from where, to where, in which format.
        files: bytes of every file written, the index included, the manifest not.
        num_tensors, num_objects, num_copies: counts of the plan; a copy is one overlap of a source and a target chunk.
        read_nbytes, written_nbytes, needed_nbytes: bytes read, written, and of the elements that were needed.
        bytes_by_dtype: bytes written, by element type.
        left_out: top-level keys that were not taken, with their bytes.
        stripped: how many names lost a prefix, by prefix.
        overflowed: finite values that a cast made infinite, by tensor.
        notes: remarks.
        seconds: wall-clock time.
        is_dry_run: whether nothing was written.
    """

    source: str
    destination: str
    format: str
    files: Mapping[str, int]
    num_tensors: int
    num_objects: int
    num_copies: int
    read_nbytes: int
    written_nbytes: int
    needed_nbytes: int
    bytes_by_dtype: Mapping[str, int]
    left_out: Mapping[str, int] = field(default_factory=dict)
    stripped: Mapping[str, int] = field(default_factory=dict)
    overflowed: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    seconds: float = 0.0
    is_dry_run: bool = False

    @property
    def read_amplification(self) -> float:
        """Bytes read over bytes needed."""
        return self.read_nbytes / self.needed_nbytes if self.needed_nbytes else 1.0


# ---- the presets ---------------------------------------------------------------------------------------------------------


def merge(
    src: Path_,
    dst: Path_,
    *,
    select: Sequence[str] = (),
    dtype: str | None = None,
    keep_dtype: Sequence[str] = (),
    max_shard_bytes: int | None = None,
    keep_prefix: bool = False,
    **options: Unpack[Options],
) -> TransferResult:
    """Joins the shards of a model into one safetensors file, ready for inference. (It does not average models.)

    Args:
        src: a checkpoint, or a directory with one below.
        dst: the file to write; with `max_shard_bytes` the directory to write shards and an index to.
        select: globs; only tensors whose name, before or after stripping, matches one are taken.
        dtype: `bf16`, `fp16`, `fp32` or `fp64`; nothing is cast where None. Only these four types are cast.
        keep_dtype: globs of names that stay as they are.
        max_shard_bytes: upper bound of a shard's payload; a larger tensor stands alone.
        keep_prefix: keep the model's key and wrappers' prefixes in the names.
        **options: see `Options`.

    Raises:
        CheckpointError: see the tree in `errors`; nothing is then at `dst` that was not there before.
    """
    source, target = open_source(src, options.get("storage_options")), _destination(dst, options)
    if max_shard_bytes is None and not target.url.endswith(".safetensors"):
        raise PlanError(
            f"merge writes one .safetensors file, got {printable(str(dst))!r}", hint="name it so, or give --max-shard-size for a directory"
        )
    catalog, stripped = _model_view(source.catalog, keep_prefix)
    if select:
        catalog = _select(catalog, select, source.catalog)
    if not catalog.tensors:
        raise PlanError(
            f"no tensor of a model is left of {len(source.catalog.tensors)} ({printable(str(source.path))})",
            hint=f"ckpt inspect {source.path}",
        )
    targets = [whole_tensor(t, _target_dtype(t, dtype, matcher(keep_dtype))) for t in catalog.tensors.values()]
    request = _shards(targets, max_shard_bytes, target.url.rpartition("/")[2])
    return _transfer(
        "merge", source, catalog, target, safetensors, request,
        options, left_out=_left_out(source.catalog, catalog), stripped=stripped,
    )  # fmt: skip


def reshard(src: Path_, dst: Path_, *, to_ranks: int, from_ranks: int | None = None, **options: Unpack[Options]) -> TransferResult:
    """Rewrites a DCP checkpoint with the chunks that a job of another number of ranks would have saved.

    Args:
        src: a DCP checkpoint, or a directory with one below.
        dst: the directory to write.
        to_ranks: number of ranks to split for.
        from_ranks: number of ranks that wrote the source, to be checked.
        **options: see `Options`.

    Raises:
        CheckpointError: see the tree in `errors`; nothing is then at `dst` that was not there before.
    """
    source = open_source(src, options.get("storage_options"))
    catalog = source.catalog
    if source.format not in (dcp, accelerate):
        raise PlanError(f"reshard reads DCP and Accelerate, got {source.format.NAME} ({printable(str(source.path))})")
    if to_ranks < 1:
        raise PlanError(f"a checkpoint is split for at least 1 rank, got {to_ranks}")
    if from_ranks is not None and from_ranks != catalog.world_size:
        raise PlanError(
            f"the source was written by another number of ranks: expected {from_ranks}, got {catalog.world_size}"
            f" ({printable(str(source.path))})",
            hint=f"--from {catalog.world_size}, or leave it out",
        )
    world_size = catalog.world_size
    targets = [TargetTensor(t.fqn, t.dtype, t.shape, tuple(_rank_boxes(t, world_size, to_ranks))) for t in catalog.tensors.values()]
    request = Request(targets, to_ranks, {o.fqn: o.extent.nbytes for o in catalog.objects.values()}, catalog.paths)
    return _transfer("reshard", source, catalog, _destination(dst, options), dcp, request, options)


def _destination(dst: Path_, options: Options) -> Destination:
    return open_destination(dst, options.get("storage_options"))


# ---- what to take, and as what ---------------------------------------------------------------------------------------------


def _model_view(catalog: Catalog, keep_prefix: bool) -> tuple[Catalog, dict[str, int]]:
    """Returns the model's tensors under their inference names, and how many names lost which prefix."""
    model, prefix = model_only(catalog)
    if keep_prefix:
        cut = len(".".join(prefix)) + 1 if prefix else 0
        return rename(model, lambda fqn: ".".join(prefix) + "." + fqn if cut else fqn), {}
    stripped = {".".join(prefix) + ".": len(model.tensors)} if prefix else {}
    for fqn in model.tensors:
        gone = strip_wrappers(fqn)
        for segment in set(fqn.split(".")) if gone != fqn else ():
            if fqn.split(".").count(segment) != gone.split(".").count(segment):
                stripped[f"{segment}."] = stripped.get(f"{segment}.", 0) + 1
    return rename(model, strip_wrappers), stripped


def _select(catalog: Catalog, globs: Sequence[str], original: Catalog) -> Catalog:
    """Returns the tensors that a glob matches by their new or their stored name."""
    wanted = matcher(globs)
    stored = {t.chunks[0].extent: fqn for fqn, t in original.tensors.items() if t.chunks}
    kept = keep(catalog, lambda fqn: wanted(fqn) or bool((c := catalog.tensors[fqn].chunks) and wanted(stored.get(c[0].extent, ""))))
    if not kept.tensors:
        some = ", ".join(printable(f) for f in list(catalog.tensors)[:5])
        raise PlanError(
            f"--select matches none of {len(catalog.tensors)} tensors: {printable(' '.join(globs))}", hint=f"names look like: {some}"
        )
    return kept


def _target_dtype(entry: TensorEntry, dtype: str | None, is_kept: Callable[[str], bool]) -> DType:
    if dtype is None or not entry.dtype.is_castable or is_kept(entry.fqn):
        return entry.dtype
    name = SHORT_NAMES.get(dtype, dtype)
    if name not in SHORT_NAMES.values():
        raise PlanError(f"cannot cast to {printable(dtype)!r}: expected one of {', '.join(SHORT_NAMES)}")
    return BY_NAME[name]


def _shards(targets: list[TargetTensor], max_shard_bytes: int | None, name: str) -> Request:
    """Puts tensors into shards in their order; a shard is closed by the tensor that no longer fits."""
    if max_shard_bytes is None:
        return Request(targets, file_name=name)
    numbers, number, filled = [], 0, 0
    for tensor in targets:
        nbytes = whole(tensor.shape).numel * tensor.dtype.itemsize
        if filled and filled + nbytes > max_shard_bytes:
            number, filled = number + 1, 0
        filled += nbytes
        numbers.append(number)
    spread = [
        TargetTensor(t.fqn, t.dtype, t.shape, tuple(t.boxes[0] if i == mine else None for i in range(number + 1)))
        for t, mine in zip(targets, numbers, strict=True)
    ]
    return Request(spread, number + 1, with_index=True)


def _rank_boxes(entry: TensorEntry, world_size: int | None, to_ranks: int) -> Sequence[Box | None]:
    boxes = [c.box for c in entry.chunks]
    if world_size == 1 and entry.shape and to_ranks > 1:  # one rank holds everything whole; FSDP would have split it along dim 0
        boxes = [split(whole(entry.shape), 0, 2, part) for part in range(2)]
    return reshard_boxes(boxes, entry.shape, to_ranks)


def _left_out(before: Catalog, after: Catalog) -> dict[str, int]:
    """Returns the top-level keys of which nothing was taken, with their bytes."""
    taken = {c.extent for t in after.tensors.values() for c in t.chunks}
    left: dict[str, int] = {}
    for fqn, entry in before.tensors.items():
        if not entry.chunks or entry.chunks[0].extent not in taken:
            key = key_path(before, fqn)[0]
            left[key] = left.get(key, 0) + entry.nbytes
    for fqn, item in before.objects.items():
        key = key_path(before, fqn)[0]
        left[key] = left.get(key, 0) + item.extent.nbytes
    return left


# ---- the one path ----------------------------------------------------------------------------------------------------------


def _transfer(
    operation: str,
    source: Source,
    catalog: Catalog,
    dst: Destination,
    form: Format,
    request: Request,
    options: Options,
    left_out: Mapping[str, int] | None = None,
    stripped: Mapping[str, int] | None = None,
    may_assume: bool = True,
) -> TransferResult:
    began = time.monotonic()
    jobs = options.get("jobs") or min(8, os.cpu_count() or 1)
    memory = options.get("memory_bytes") or DEFAULT_MEMORY_BYTES
    overwrite, is_dry_run = options.get("overwrite", False), options.get("dry_run", False)
    check_apart(source.path, dst.url)
    dst.check(overwrite or is_dry_run)
    attempt = str(uuid.uuid4())
    layout = form.lay_out(replace(request, attempt=attempt, name=lambda file: dst.name(file, attempt)))
    plan = plan_transfer(catalog, layout, {t.fqn: t.dtype for t in request.tensors})
    tensors = [catalog.tensors[t.fqn] for t in plan.tensors if not t.is_object]
    assumes = may_assume and source.store.capabilities.fetches_ahead and not any(map(replicas, tensors))
    located = source.assume(tensors) if assumes else source.format.locate(source.store, tensors)
    tiles = tile_bytes(memory, jobs)

    def result(totals: Totals, files: Mapping[str, int]) -> TransferResult:
        return TransferResult(
            source.path, dst.url, form.NAME, files,
            sum(not t.is_object for t in plan.tensors), sum(t.is_object for t in plan.tensors), plan.num_copies,
            totals.read_nbytes, sum(files.values()), plan.payload_bytes, _bytes_by_dtype(plan),
            left_out or {}, stripped or {}, totals.overflowed, (*plan.notes, *notes), time.monotonic() - began, is_dry_run,
        )  # fmt: skip

    notes: list[str] = []
    files = dict(layout.file_sizes) | ({layout.index.file: len(layout.index.data)} if layout.index else {})
    if is_dry_run:
        return result(Totals(sum(step.read_nbytes for step in schedule(plan, located, *tiles))), files)
    dst.check_room(layout.nbytes + _MANIFEST_ROOM_BYTES)
    prove_replicas(source, catalog, plan, located, jobs, tiles)
    bar = options.get("progress") or (no_bar)
    single = next(iter(layout.file_sizes)) if layout.index is None else ""
    with dst.stage(attempt, overwrite, single) as place, bar(operation, sum(_bytes_by_dtype(plan).values())) as advance:
        sink = WriteSink(layout, place.shelf)
        try:
            sink.open()
            totals = run(steps_for(plan, located, tiles, place.shelf), source.store, sink, jobs, advance)
            checksums = sink.finish()
            wrong = assumes and not _is_as_assumed(located, source.format.locate(source.store, tensors))
            if not wrong:
                fingerprints = sink.fingerprints.join()
                prove_fingerprints(source, catalog, plan, fingerprints)
                manifest = _manifest(operation, attempt, source, layout, seal_tensors(plan, fingerprints), checksums)
                notes += place.publish(Literal(file_name(attempt, single), 0, manifest.render()), layout.index)
        finally:
            sink.abort()
    if wrong:
        return _transfer(operation, source, catalog, dst, form, request, options, left_out, stripped, may_assume=False)
    source.store.close()
    return result(totals, files)


def steps_for(plan: Plan, located: Mapping[Extent, Extent], tiles: tuple[int, int], store: Shelf) -> Iterator[Step]:
    """Schedules a plan, for a store that takes streams a few files at a time."""
    plans = [plan] if store.capabilities.can_write_anywhere else by_files(plan, _STREAMS)
    return chain.from_iterable(schedule(part, located, *tiles) for part in plans)


def _is_as_assumed(assumed: Mapping[Extent, Extent], found: Mapping[Extent, Extent]) -> bool:
    """Tells whether payloads lie where they were read. In an object store, looking first would cost a request each."""
    return all(extent[:5] == assumed[at][:5] for at, extent in found.items())


def no_bar(label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    del label, total
    return nullcontext(lambda _: None)


def _bytes_by_dtype(plan: Plan) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor in plan.tensors:
        key = "objects" if tensor.is_object else tensor.dst_dtype.name
        sizes[key] = sizes.get(key, 0) + whole(tensor.shape).numel * tensor.dst_dtype.itemsize
    return sizes


def check_apart(src: str, dst: str) -> None:
    """Refuses a destination within the source, and a source within the destination."""
    real_src, real_dst = (path.rstrip("/") if is_url(path) else os.path.realpath(path.removeprefix("file://")) for path in (src, dst))
    if f"{real_dst}/".startswith(f"{real_src}/"):
        raise StorageError(f"the destination lies in the source: {printable(dst)}", hint="write beside it, not into it")
    if f"{real_src}/".startswith(f"{real_dst}/"):
        raise StorageError(
            f"the source lies in the destination: {printable(src)}", hint="replacing the destination would destroy the source"
        )


def _manifest(
    operation: str, attempt: str, source: Source, target: Target, tensors: Mapping[str, SealedTensor], checksums: Mapping[str, int]
) -> Manifest:
    catalog, index = source.catalog, target.index
    return Manifest.now(
        attempt,
        operation,
        target.format,
        {
            "name": source.name,
            "format": catalog.format,
            "world_size": catalog.world_size,
            "save_id": catalog.extras.get("save_id"),
        },
        world_size=target.world_size,
        files={name: Sealed(nbytes, hex64(checksums[name])) for name, nbytes in target.file_sizes.items()},
        index=(index.file, Sealed(len(index.data), hex64(crc64nvme(index.data)))) if index else None,
        tensors=tensors,
    )
