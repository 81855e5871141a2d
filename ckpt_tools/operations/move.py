"""The one path of merge, reshard, convert: plan, schedule, run into a place, prove, publish.

May import levels 0 to 4 and the parts of this folder that it is made of.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import chain
from typing import Any, ParamSpec, TypedDict, TypeVar

from ckpt_tools.box import whole
from ckpt_tools.bucket import copies_within
from ckpt_tools.catalog import Catalog, Extent
from ckpt_tools.checksum import crc64nvme, hex64
from ckpt_tools.destination import Destination, Place
from ckpt_tools.engine.run import Alter, Totals, run
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, Step, by_files, read_nbytes, schedule, tile_bytes
from ckpt_tools.engine.seals import Seals, known_crcs, read_whole
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.errors import FormatError, IntegrityError, StorageError, printable
from ckpt_tools.formats import Request, Source
from ckpt_tools.formats.base import Format
from ckpt_tools.manifest import Manifest, Sealed, SealedTensor, file_name, seal_tensors
from ckpt_tools.operations.proof import prove_copies, prove_fingerprints, sealed_prints
from ckpt_tools.operations.within import Within, plan_within
from ckpt_tools.plan import Literal, Plan, Target, plan_transfer
from ckpt_tools.soundness import replicas
from ckpt_tools.storage import Shelf, is_url

Path_ = str | os.PathLike[str]
P = ParamSpec("P")
T = TypeVar("T")
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
        store_nbytes: bytes of those written that an object store copied by itself, without their passing through this process.
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
    store_nbytes: int
    bytes_by_dtype: Mapping[str, int]
    left_out: Mapping[str, int] = field(default_factory=dict)
    stripped: Mapping[str, int] = field(default_factory=dict)
    overflowed: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    seconds: float = 0.0
    is_dry_run: bool = False

    @property
    def read_amplification(self) -> float:
        """Bytes read over bytes needed here."""
        needed = self.needed_nbytes - self.store_nbytes
        return self.read_nbytes / needed if needed > 0 else 1.0


def _fetched_again(work: Callable[P, T]) -> Callable[P, T]:
    """Repeats a transfer from an object store once where bytes were wrong: it may have happened on the way."""

    @wraps(work)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except (IntegrityError, FormatError):
            source = args[1]
            if not isinstance(source, Source) or source.remote is None:
                raise
            source.store.close()
            return work(*args, **kwargs)

    return again


@_fetched_again
def transfer(
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
    alter: Mapping[str, Alter] | None = None,
) -> TransferResult:
    began = time.monotonic()
    jobs, memory = options.get("jobs") or min(8, os.cpu_count() or 1), options.get("memory_bytes") or DEFAULT_MEMORY_BYTES
    overwrite, is_dry_run = options.get("overwrite", False), options.get("dry_run", False)
    check_apart(source.path, dst.url)
    dst.check(overwrite or is_dry_run)
    attempt = str(uuid.uuid4())
    layout = form.lay_out(replace(request, attempt=attempt, name=lambda file: dst.name(file, attempt)))
    plan = plan_transfer(catalog, layout, {t.fqn: t.dtype for t in request.tensors})
    tiles = tile_bytes(memory, jobs)

    def result(totals: Totals, files: Mapping[str, int]) -> TransferResult:
        return TransferResult(
            source.path, dst.url, form.NAME, files,
            sum(not t.is_object for t in plan.tensors), sum(t.is_object for t in plan.tensors), plan.num_copies,
            totals.read_nbytes, sum(files.values()), plan.payload_bytes, totals.store_nbytes, _bytes_by_dtype(plan),
            left_out or {}, stripped or {}, totals.overflowed, (*plan.notes, *notes), time.monotonic() - began, is_dry_run,
        )  # fmt: skip

    notes: list[str] = []
    files = dict(layout.file_sizes) | ({layout.index.file: len(layout.index.data)} if layout.index else {})
    if is_dry_run:
        return result(Totals(read_nbytes(plan, *tiles)), files)
    tensors = [catalog.tensors[t.fqn] for t in plan.tensors if not t.is_object]
    assumes = may_assume and source.store.capabilities.fetches_ahead and not any(map(replicas, tensors))
    located = source.assume(tensors) if assumes else source.format.locate(source.store, tensors)
    dst.check_room(layout.nbytes + _MANIFEST_ROOM_BYTES)
    prove_copies(source, catalog, plan, located, jobs, tiles)
    prints = {fqn: p for fqn, p in sealed_prints(source, catalog, plan).items() if fqn not in (alter or {})}
    bar = options.get("progress") or (no_bar)
    single = next(iter(layout.file_sizes)) if layout.index is None else ""
    with dst.stage(attempt, overwrite, single) as place, bar(operation, sum(_bytes_by_dtype(plan).values())) as advance:
        here = copies_within(place, source.remote)
        within = plan_within(prints, plan, located, here, source.remote) if here and source.remote else None
        seals = Seals({extent: fqn for extent, fqn in read_whole(plan, located).items() if fqn not in prints})
        totals, checksums, fingerprints = _fill(source, plan, located, place, within, jobs, tiles, advance, seals, alter)
        found = source.format.locate(source.store, tensors) if assumes else located
        wrong = assumes and not _is_as_assumed(located, found)
        if not wrong:
            seals.prove(known_crcs(located, found))
            prove_fingerprints(source, prints, fingerprints)
            manifest = _manifest(operation, attempt, source, layout, seal_tensors(plan, fingerprints), checksums)
            notes += place.publish(Literal(file_name(attempt, single), 0, manifest.render()), layout.index)
    if wrong:
        source.store.close()
        return transfer(operation, source, catalog, dst, form, request, options, left_out, stripped, False, alter)
    source.store.close()
    return result(totals, files)


def _fill(
    source: Source, plan: Plan, located: Mapping[Extent, Extent], place: Place, within: Within | None, jobs: int, tiles: tuple[int, int],
    advance: Callable[[int], None], seals: Seals, alter: Mapping[str, Alter] | None,
) -> tuple[Totals, Mapping[str, int], Mapping[str, int]]:  # fmt: skip
    """Writes all data files; returns totals, the checksum of each file, and the fingerprint of each tensor."""
    sink = WriteSink(plan.target, within or place.shelf)
    try:
        sink.open()
        steps = steps_for(within.rest if within else plan, located, tiles, place.shelf)
        totals = run(steps, source.store, sink, jobs, advance, seals=seals, alter=alter)
        if within:
            within.vouch(sink)
            totals.store_nbytes = within.nbytes
            advance(within.nbytes)
        checksums = sink.finish()
    except BaseException:
        sink.abort()
        raise
    return totals, checksums, (dict(within.fingerprints) if within else {}) | sink.fingerprints.join()


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
