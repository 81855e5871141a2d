"""The one path of merge, reshard, convert: plan, schedule, run into a place, prove, publish."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from itertools import chain
from typing import Any, ParamSpec, TypedDict, TypeVar

from ckpt_tools.core.catalog import Catalog, Extent
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.coverage import replicas
from ckpt_tools.core.plan import Literal, Plan, Target, plan_transfer
from ckpt_tools.engine.crc_watch import CrcWatch, known_crcs, read_whole
from ckpt_tools.engine.run import Alter, Totals, run
from ckpt_tools.engine.schedule import (
    ALL,
    DEFAULT_MEMORY_BYTES,
    Batch,
    Share,
    by_files,
    read_nbytes,
    schedule,
    tile_bytes,
)
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.errors import FormatError, IntegrityError, StorageError, printable, redacted
from ckpt_tools.formats.base import Format
from ckpt_tools.formats.registry import Request, Source
from ckpt_tools.publish.base import Attempt, Destination
from ckpt_tools.publish.bucket import copies_within
from ckpt_tools.publish.manifest import (
    Manifest,
    SealedFile,
    SealedTensor,
    file_name,
    of_source,
    seal_file,
    seal_tensors,
)
from ckpt_tools.publish.steps import number_in
from ckpt_tools.ranks.base import ALONE, Group, agree
from ckpt_tools.storage import WritableStore, is_url, local_path
from ckpt_tools.transfer.distribute import RankWork, collect, open_files, staged
from ckpt_tools.transfer.prove import (
    SealedFingerprint,
    prove_copies,
    prove_fingerprints,
    sealed_prints,
)
from ckpt_tools.transfer.result import TransferResult, bytes_by_dtype, result_of
from ckpt_tools.transfer.resume import ResumeState, forget
from ckpt_tools.transfer.server_copy import ServerCopy, plan_within

Path_ = str | os.PathLike[str]
P = ParamSpec("P")
T = TypeVar("T")
ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
_MANIFEST_ROOM_BYTES = 1 << 20
# each holds a part of 8 MiB, or two; 4 take a tenth less memory and read columns more often
_STREAMS = 12


class Reading(TypedDict, total=False):
    """How to read; every operation takes these.

    Attributes:
        jobs: number of threads; the number of processors, at most 8, where absent.
        memory_bytes: budget of all buffers together; 64 MiB where absent.
        shapes: a file of the parameters' shapes, for FSDP1's flat parameters, which lack them; see
            `lay_beside`.
        storage_options: of the source's object store, as fsspec takes them; the rest is its own
            configuration's.
        team: the processes that share the work; this one alone where absent. All call the operation
            with the same arguments.
        progress: called with a label and a total in bytes; gives a context with a callable that
            takes bytes done.
    """

    jobs: int | None
    memory_bytes: int | None
    shapes: Path_ | None
    storage_options: Mapping[str, Any] | None
    progress: ProgressBar | None
    team: Group | None


class Options(Reading, total=False):
    """How to read and write; every operation that writes a checkpoint takes these, and those of
    `Reading`.

    Attributes:
        overwrite: replace a checkpoint at the destination, once the new one is complete.
        dry_run: plan only, write nothing.
        resume: go on from what an earlier, interrupted run of the same operation has finished at
            the destination, and leave to the next what this one finishes, should it be interrupted.
            On a disk or in S3; `copy` does so anyway.
    """

    overwrite: bool
    dry_run: bool
    resume: bool


def _fetched_again(work: Callable[P, T]) -> Callable[P, T]:
    """Repeats a transfer from an object store once where bytes were wrong: it may have happened on
    the way.
    """

    @wraps(work)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except (IntegrityError, FormatError):
            source = args[1]
            team = next((a.get("team") for a in args if isinstance(a, dict)), None)
            if not isinstance(source, Source) or source.remote is None or team is not None:
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
    changes: str = "",
) -> TransferResult:
    """Plans, copies, proves and publishes; of a team, every member moves its share, and member 0
    publishes.

    Args:
        operation: its name, for the bar and the manifest.
        source, catalog: what is read, and the view of it that is taken.
        dst, form, request: where it goes to, as what.
        options: see `Options`.
        left_out, stripped: for the report.
        may_assume: read payloads from where they should lie, and look afterwards, where looking is
            dear.
        alter: by tensor, what is done to its values on the way.
        changes: a text that is another one when `alter` does anything else.
    """
    team, is_dry_run = options.get("team") or ALONE, options.get("dry_run", False)
    trail = ResumeState(team, options.get("resume", False))
    with team.phase("begin"):
        pass
    began = time.monotonic()  # all are here

    def planned(attempt: str) -> Plan:
        layout = form.lay_out(replace(request, name=lambda file: dst.name(file, attempt)))
        return plan_transfer(catalog, layout, {t.fqn: t.dtype for t in request.tensors})

    with team.phase("check"):
        check_apart(source.path, dst.url)
        trail.check(dst, options.get("overwrite", False) or is_dry_run)
    look_back = partial(trail.look_back, dst, operation, source.store, changes)
    attempt, plan = _settle(team, planned, None if is_dry_run else look_back, trail.adopts(dst))
    layout = plan.target
    work = _Work(operation, source, catalog, plan, team, options, alter or {}, trail, dst)
    totals, notes = (
        Totals(read_nbytes(plan, *work.tiles)) if is_dry_run else Totals(),
        list(plan.notes),
    )
    if trail.is_done:
        notes.append("it is there since an earlier run; nothing was done")
    elif not is_dry_run:
        with team.phase("look at what is to be read"):
            dst.check_room(layout.nbytes + _MANIFEST_ROOM_BYTES - trail.nbytes)
            work.locate(may_assume)
        if not work.copy(dst, attempt, totals, notes):
            source.store.close()
            return transfer(
                operation,
                source,
                catalog,
                dst,
                form,
                request,
                options,
                left_out,
                stripped,
                False,
                alter,
                changes,
            )
        source.store.close()
    kept = sum(bytes_by_dtype(plan).values()) if trail.is_done else trail.kept_nbytes
    return replace(
        result_of(source, dst, plan, totals, kept),
        left_out=left_out or {},
        stripped=stripped or {},
        notes=tuple(notes),
        seconds=time.monotonic() - began,
        is_dry_run=is_dry_run,
    )


def _settle(
    team: Group,
    planned: Callable[[str], Plan],
    look_back: Callable[[Plan], str] | None,
    adopts: bool,
) -> tuple[str, Plan]:
    """Returns the id of the attempt and its plan, the same for all members.

    Args:
        team: the members.
        planned: makes the plan of an attempt, whose id is in the names of files.
        look_back: finds out from a plan without one the id of an earlier try to go on with, "" for
            none.
        adopts: that id is to be this attempt's.
    """
    attempt = team.broadcast(str(uuid.uuid4()), "begin")
    with team.phase("plan"):
        plan = planned("" if adopts else attempt)
    earlier = look_back(plan) if look_back else ""
    if adopts:
        attempt = earlier or attempt
        with team.phase("name files"):
            plan = planned(attempt)
    agree(
        team, (sorted(plan.target.file_sizes.items()), plan.target.index and plan.target.index.data)
    )
    return attempt, plan


class _Work:
    """One member's part of a transfer, all of it where the process is alone."""

    def __init__(
        self,
        operation: str,
        source: Source,
        catalog: Catalog,
        plan: Plan,
        team: Group,
        options: Options,
        alter: Mapping[str, Alter],
        trail: ResumeState,
        dst: Destination,
    ) -> None:
        self.operation, self.source, self.catalog, self.plan, self.team, self.alter = (
            operation,
            source,
            catalog,
            plan,
            team,
            alter,
        )
        self.options = options
        jobs, budget = (
            options.get("jobs") or min(8, os.cpu_count() or 1),
            options.get("memory_bytes") or DEFAULT_MEMORY_BYTES,
        )
        self.tiles, self.jobs = trail.cut(tile_bytes(budget, jobs), jobs, budget)
        self.division = RankWork(plan, team, dst)
        self.located: Mapping[Extent, Extent] = {}
        self.prints: Mapping[str, SealedFingerprint] = {}
        self._part = replace(
            plan, tensors=tuple(t for t in plan.tensors if t.fqn in self.division.taken)
        )
        self._tensors = [catalog.tensors[t.fqn] for t in self._part.tensors if not t.is_object]
        self._assumes = False
        self.trail = trail
        self.sealed: Manifest | None = None

    def locate(self, may_assume: bool) -> None:
        """Finds what this member is to read, and proves what is carried without another look."""
        source = self.source
        self._assumes = (
            may_assume
            and source.store.capabilities.fetches_ahead
            and not any(map(replicas, self._tensors))
        )
        self.located = (
            source.assume(self._tensors)
            if self._assumes
            else source.format.locate(source.store, self._tensors)
        )
        prove_copies(source, self.catalog, self._part, self.located, self.jobs, self.tiles)
        self.sealed = of_source(source)
        prints = sealed_prints(self.sealed, source, self.catalog, self.plan)
        self.prints = {fqn: p for fqn, p in prints.items() if fqn not in self.alter}

    def copy(self, dst: Destination, attempt: str, totals: Totals, notes: list[str]) -> bool:
        """Writes and publishes everything; False where payloads do not lie where they were assumed
        to, and nothing was published.
        """
        source, plan, team, trail = self.source, self.plan, self.team, self.trail
        layout = plan.target
        single = next(iter(layout.file_sizes)) if layout.index is None else ""
        bar = self.options.get("progress") or no_bar
        total = sum(bytes_by_dtype(plan).values())
        overwrite = self.options.get("overwrite", False)
        room = staged(team, dst, attempt, single, overwrite, trail.keeps, trail.heir_of)
        with room as place, bar(self.operation, total) as advance:
            trail.begin(place, attempt, layout.file_sizes, self.tiles, self.jobs)
            within = self._within(place, notes)
            seals = CrcWatch(
                {
                    extent: fqn
                    for extent, fqn in read_whole(self._part, self.located).items()
                    if fqn not in self.prints
                }
            )
            sink = self.division.sink(place, within)
            trail.past.tell(None if team.rank else sink, seals, totals.overflowed)
            try:
                self._fill(
                    sink, place, within, seals, totals, lambda nbytes: advance(nbytes * team.size)
                )
                with team.phase("look at what was read"):
                    found = (
                        source.format.locate(source.store, self._tensors)
                        if self._assumes
                        else self.located
                    )
                wrong = self._assumes and not _is_as_assumed(self.located, found)
                if any(team.all_gather(wrong, "compare places")):
                    sink.abort()
                    forget(place)
                    return False
                checksums = self._gather(
                    sink,
                    seals,
                    known_crcs(self.located, found) if self._assumes else {},
                    totals,
                    place,
                )
            except BaseException:
                sink.abort()
                raise
            finally:
                trail.end()
            if team.rank == 0:
                fingerprints = (
                    dict(within.fingerprints) if within else {}
                ) | sink.fingerprints.join()
                with trail.forgotten_if_wrong(place):
                    prove_fingerprints(source, self.prints, fingerprints)
                files = {
                    name: seal_file(nbytes, checksums[name], sink.runs_of(name))
                    for name, nbytes in layout.file_sizes.items()
                }
                manifest = _manifest(
                    self.operation,
                    attempt,
                    source,
                    layout,
                    seal_tensors(plan, fingerprints),
                    files,
                    trail.work,
                    _step_of(self.sealed, dst.url),
                )
                notes += place.publish(
                    Literal(file_name(attempt, single), 0, manifest.render()), layout.index
                )
        return True

    def _within(self, place: Attempt, notes: list[str]) -> ServerCopy | None:
        """Returns what the store of both ends copies by itself, None for nothing."""
        source, here = self.source, copies_within(place, self.source.remote)
        if here is None or source.remote is None or self.sealed is None:
            return None
        if self.team.size > 1:
            notes.append("one process alone would have the store copy by itself what it can")
            return None
        return plan_within(self.sealed, self.prints, self.plan, self.located, here, source.remote)

    def _fill(
        self,
        sink: WriteSink,
        place: Attempt,
        within: ServerCopy | None,
        seals: CrcWatch,
        totals: Totals,
        advance: Callable[[int], None],
    ) -> None:
        """Writes this member's share."""
        open_files(sink, self.team)
        if within:
            within.vouch(sink)
        with self.team.phase("copy"):
            division = self.division
            steps = steps_for(
                within.rest if within else division.plan,
                self.located,
                self.tiles,
                place.shelf,
                division.share,
            )
            left = self.trail.past.without(steps, advance)
            with self.trail.forgotten_if_wrong(place):
                done = run(
                    left,
                    self.source.store,
                    sink,
                    self.jobs,
                    advance,
                    seals=seals,
                    alter=self.alter,
                    note=self.trail.note,
                )
            if within:
                done.store_nbytes = within.nbytes
                advance(within.nbytes)
            totals.read_nbytes, totals.store_nbytes = done.read_nbytes, done.store_nbytes
            _add(totals.overflowed, done.overflowed)

    def _gather(
        self,
        sink: WriteSink,
        seals: CrcWatch,
        crcs: dict[Extent, int],
        totals: Totals,
        place: Attempt,
    ) -> Mapping[str, int]:
        """Brings everything that was noted to member 0, which finishes the files; returns the
        checksum of each there.
        """
        team = self.team
        parts = seals.hand_over(crcs) if team.size > 1 else []
        told = collect(
            sink, team, (parts, totals.read_nbytes, totals.overflowed, place.kept_nbytes)
        )
        checksums: Mapping[str, int] = {}
        with team.phase("prove"), self.trail.forgotten_if_wrong(place):
            for theirs, nbytes, overflowed, sent in told:
                seals.absorb(theirs, crcs)
                self.trail.kept_nbytes += sent
                totals.read_nbytes += nbytes
                _add(totals.overflowed, overflowed)
            if team.rank == 0:
                checksums = sink.finish()
                self.trail.kept_nbytes += place.kept_nbytes
            seals.prove(crcs)
        return checksums


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for fqn, count in more.items():
        counts[fqn] = counts.get(fqn, 0) + count


def steps_for(
    plan: Plan,
    located: Mapping[Extent, Extent],
    tiles: tuple[int, int],
    store: WritableStore,
    share: Share = ALL,
) -> Iterator[Batch]:
    """Schedules a plan, for a store that takes streams a few files at a time."""
    plans = [plan] if store.capabilities.can_write_anywhere else by_files(plan, _STREAMS)
    return chain.from_iterable(schedule(part, located, *tiles, share) for part in plans)


def _is_as_assumed(assumed: Mapping[Extent, Extent], found: Mapping[Extent, Extent]) -> bool:
    """Tells whether payloads lie where they were read. In an object store, looking first would cost
    a request each.
    """
    return all(extent[:5] == assumed[at][:5] for at, extent in found.items())


def no_bar(label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    del label, total
    return nullcontext(lambda _: None)


def check_apart(src: str, dst: str) -> None:
    """Refuses a destination within the source, and a source within the destination."""
    real_src, real_dst = (
        path.rstrip("/") if is_url(path) else os.path.realpath(local_path(path))
        for path in (src, dst)
    )
    if f"{real_dst}/".startswith(f"{real_src}/"):
        raise StorageError(
            f"the destination lies in the source: {printable(dst)}",
            hint="write beside it, not into it",
        )
    if f"{real_src}/".startswith(f"{real_dst}/"):
        raise StorageError(
            f"the source lies in the destination: {printable(src)}",
            hint="replacing the destination would destroy the source",
        )


def _step_of(sealed: Manifest | None, url: str) -> int | None:
    """Returns the step number of a result: the source's, if the destination's name says the same.

    Under another number the result is a checkpoint of its own, which no retention counts.
    """
    number = number_in(url.rstrip("/").rpartition("/")[2])
    return number if sealed is not None and sealed.step == number else None


def _manifest(
    operation: str,
    attempt: str,
    source: Source,
    target: Target,
    tensors: Mapping[str, SealedTensor],
    files: Mapping[str, SealedFile],
    work: str,
    step: int | None,
) -> Manifest:
    catalog, index = source.catalog, target.index
    return Manifest.now(
        attempt,
        operation,
        target.format,
        {
            "name": redacted(source.name),
            "format": catalog.format,
            "world_size": catalog.world_size,
            "save_id": catalog.extras.get("save_id"),
        }
        | ({"work": work} if work else {}),
        world_size=target.world_size,
        files=files,
        index=(
            (index.file, SealedFile(len(index.data), hex64(crc64nvme(index.data))))
            if index
            else None
        ),
        tensors=tensors,
        step=step,
    )
