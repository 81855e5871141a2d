"""The path of every write that has a plan: check, copy, verify, publish.

`Transfer.run` has the phases, in the order in which they happen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tools.core.catalog import Catalog, Extent, Payloads
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.coverage import replicas
from ckpt_tools.core.plan import Literal, Plan, plan_transfer
from ckpt_tools.core.threads import num_threads
from ckpt_tools.engine.crc_watch import CrcWatch, read_whole
from ckpt_tools.engine.execute import Alter, Totals, execute_batches
from ckpt_tools.engine.schedule import (
    DEFAULT_MEMORY_BYTES,
    Batch,
    read_nbytes,
    tile_bytes,
)
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.errors import PlanError, StorageError, printable, redacted
from ckpt_tools.formats.base import Format, new_attempt, stores_aliases
from ckpt_tools.formats.registry import Request, Source
from ckpt_tools.publish.base import Attempt, Destination
from ckpt_tools.publish.find_manifest import manifest_of
from ckpt_tools.publish.manifest import (
    NUM_LOST,
    PROOF,
    ROOM_BYTES,
    Manifest,
    SealedFile,
    SealedTensor,
    file_name,
    seal_file,
    seal_objects,
    seal_pickles,
    seal_tensors,
)
from ckpt_tools.publish.sealed_source import checked_manifest
from ckpt_tools.publish.step_names import number_in
from ckpt_tools.ranks.base import ALONE, Group, check_agreement
from ckpt_tools.storage import Store, is_url, local_path
from ckpt_tools.storage.retries import read_again_if_wrong
from ckpt_tools.transfer.aliases import join_aliases
from ckpt_tools.transfer.distribute import RankWork, collect, stage_together
from ckpt_tools.transfer.exchange import in_rounds
from ckpt_tools.transfer.inverse import Inverse, InverseProof, inverse_of, prove_inverse
from ckpt_tools.transfer.options import Options, no_bar
from ckpt_tools.transfer.order import batches_for
from ckpt_tools.transfer.prove import (
    SealedFingerprint,
    prove_fingerprints,
    prove_planned_replicas,
    sealed_fingerprints,
)
from ckpt_tools.transfer.result import TransferResult, bytes_by_dtype, result_of
from ckpt_tools.transfer.resume import Resume, forget
from ckpt_tools.transfer.server_copy import ServerCopy, plan_within
from ckpt_tools.transfer.stretches import prove_apart, prove_stretches, stretch_proofs

_SHOWN = 6  # names of what the source lacks


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """The result that an operation wants.

    Attributes:
        operation: its name, for the progress bar and the manifest.
        source, catalog: the checkpoint, and the view of it that is taken.
        dst, format, layout: the destination, its format, and the tensors and objects there.
        options: see `Options`.
        left_out, stripped: for the report.
        alter: by tensor, what changes its values during the copy.
        changes: an opaque version of `alter`, which changes when the changes do.
        prove: called before anything is published; it raises if the bytes read were wrong.
        about: more facts on the source, for the manifest.
        in_place: the result replaces its own source.
        is_damaged: the source is known to be damaged, and the catalog has the rest.
        proves_inverse: make the source again of what was written, before anything is published.
        may_assume: in a remote store, read payloads from their usual positions, and check the
            positions afterwards.
    """

    operation: str
    source: Source
    catalog: Catalog
    dst: Destination
    format: Format
    layout: Request
    options: Options
    left_out: Mapping[str, int] = field(default_factory=dict)
    stripped: Mapping[str, int] = field(default_factory=dict)
    alter: Mapping[str, Alter] = field(default_factory=dict)
    changes: str = ""
    prove: Callable[[Group], None] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    in_place: bool = False
    is_damaged: bool = False
    proves_inverse: bool = False
    may_assume: bool = True


def transfer(request: TransferRequest) -> TransferResult:
    """Plans, copies, verifies and publishes. In a group, each rank copies its share.

    It tries a second time in two cases. Payloads were not where they were assumed to be: then they
    are located first. Bytes from an object store were wrong: that may have happened on the way.

    Raises:
        CheckpointError: it failed; nothing is visible at the destination.
    """
    result = read_again_if_wrong(
        request.source.store,
        lambda: Transfer(request).run(),
        request.options.get("group") or ALONE,
    )
    if result is None:
        result = Transfer(replace(request, may_assume=False)).run()
    assert result is not None  # nothing was assumed
    return result


class Transfer:
    """One rank's part of a transfer; all of it if the process is alone."""

    def __init__(self, request: TransferRequest) -> None:
        options = request.options
        if stores_aliases(request.format):
            layout = join_aliases(request.layout, request.catalog, request.alter)
            request = replace(request, layout=layout)
        self.request, self.source, self.dst = request, request.source, request.dst
        self.group: Group = options.get("group") or ALONE
        self.resume = Resume(self.dst, self.group, options.get("resume", False))
        self.is_dry_run = options.get("dry_run", False)
        self.totals, self.notes = Totals(), list[str]()
        self.sink: WriteSink | None = None
        self.proof: InverseProof | None = None
        self._advance: Callable[[int], None]

    def run(self) -> TransferResult | None:
        """Goes through the phases.

        Returns:
            None if payloads are not where they were assumed to be. Nothing is published then.
        """
        try:
            self._open()
            self._plan()
            if self.is_dry_run:
                with self.group.phase("look at what is read"):
                    self._note_what_the_source_lacks(manifest_of(self.source.store))
            elif not self.resume.is_done:
                self._check()
                with self._staged() as attempt:
                    self._copy(attempt)
                    if not self._verify(attempt):
                        return None
                    self._publish(attempt)
                self.source.store.close()
            return self._report()
        finally:
            self.resume.release()

    # ---- open: all ranks are here, source and destination are apart ------------------------------

    def _open(self) -> None:
        with self.group.phase("begin"):
            pass
        self.began = time.monotonic()
        overwrite = self.request.options.get("overwrite", False)
        with self.group.phase("check"):
            if not self.request.in_place:
                check_apart(self.source.path, self.dst.url)
            if not (self.request.in_place and self.is_dry_run):  # `thin` has checked the step
                self.resume.check(overwrite or self.is_dry_run)
            if self.is_dry_run and not overwrite and not self.request.in_place:
                try:
                    self.dst.check(False)
                except StorageError as error:
                    self.notes.append(f"without --dry-run, this would fail: {error}")

    # ---- plan: the same on all ranks, and that of an earlier attempt if one is continued ---------

    def _plan(self) -> None:
        self.attempt_id = self.group.broadcast(new_attempt(), "begin")
        adopts_id = self.resume.adopts_id
        with self.group.phase("plan"):
            plan = self._planned("" if adopts_id else self.attempt_id)
        earlier = "" if self.is_dry_run else self._find_earlier_attempt(plan)
        if adopts_id:
            self.attempt_id = earlier or self.attempt_id
            with self.group.phase("name files"):
                plan = self._planned(self.attempt_id)
        self.plan, self.target = plan, plan.target
        self.notes += plan.notes
        sizes, index = sorted(plan.target.file_sizes.items()), plan.target.index
        check_agreement(self.group, (sizes, index and index.data))
        self._divide()

    def _planned(self, attempt: str) -> Plan:
        """Returns the plan of an attempt, whose id may be in the names of files."""
        request = self.request
        named = replace(request.layout, name=lambda file: self.dst.name(file, attempt))
        dtypes = {t.fqn: t.dtype for t in request.layout.tensors}
        return plan_transfer(request.catalog, request.format.lay_out(named), dtypes)

    def _find_earlier_attempt(self, plan: Plan) -> str:
        request = self.request
        return self.resume.find_earlier_attempt(
            request.operation, self.source.store, request.changes, plan
        )

    def _divide(self) -> None:
        """Takes this rank's share of the plan, and cuts it into tiles."""
        options = self.request.options
        jobs = num_threads(options.get("jobs"))
        budget = options.get("memory_bytes") or DEFAULT_MEMORY_BYTES
        self.tiles, self.jobs = self.resume.cut(tile_bytes(budget, jobs), jobs, budget)
        self.work = RankWork(self.plan, self.group, self.dst, self.source.held)
        mine = tuple(t for t in self.plan.tensors if t.fqn in self.work.taken)
        self.part = replace(self.plan, tensors=mine)
        self.tensors = [self.request.catalog.tensors[t.fqn] for t in mine if not t.is_object]

    # ---- check: where payloads are, replicas, what the source's manifest says --------------------

    def _check(self) -> None:
        with self.group.phase("look at what is read"):
            self.assumes = self._may_assume()
            self.located: Payloads = (
                self.source.assume(self.tensors)
                if self.assumes
                else self.source.format.locate(self.source.store, self.tensors)
            )
            if self.request.is_damaged:
                self.sealed = manifest_of(self.source.store)
            else:
                self.sealed = checked_manifest(self.source)
            prove_planned_replicas(
                self.source, self.request.catalog, self.part, self.located, self.jobs, self.tiles
            )
            self._note_what_the_source_lacks(self.sealed)
            found = sealed_fingerprints(self.sealed, self.source, self.request.catalog, self.plan)
            self.sealed_fingerprints: Mapping[str, SealedFingerprint] = {
                fqn: sealed for fqn, sealed in found.items() if fqn not in self.request.alter
            }
            self.stretches = stretch_proofs(
                self.sealed, self.source, self.request.catalog, self.plan, self.request.alter
            )
            self.inverse = self._plan_inverse()
            proved = self.inverse.reordered if self.inverse is not None else ()
            every = [fqn for fqn in self.stretches.apart if fqn not in proved]
            apart = every[self.group.rank :: self.group.size]
            prove_apart(self.source, self.stretches, apart, self.jobs, self.tiles)
            self.totals.read_nbytes += sum(self.stretches.nbytes[fqn] for fqn in apart)
            if number := len(every):
                self.notes.append(
                    f"{number:,} tensors were read twice to compare their fingerprints: the result"
                    " does not have all of their elements, unchanged and in order"
                )

    def _plan_inverse(self) -> Inverse | None:
        """Returns how the source is made again of the result; None if it will not be."""
        request = self.request
        if not request.proves_inverse:
            return None
        if self.target.index is None and is_url(self.dst.url):
            self.notes.append(
                "not proved by the inverse: a file in an object store cannot be read before it"
                " appears"
            )
            return None
        return inverse_of(
            self.source, request.catalog, self.plan, request.layout.aliases, request.alter
        )

    def _note_what_the_source_lacks(self, sealed: Manifest | None) -> None:
        if sealed is not None and sealed.salvage_note:
            self.notes.append(f"the source is {sealed.salvage_note}")
        if sealed is not None and (gone := sealed.thinned):
            some = ", ".join(map(printable, gone[:_SHOWN])) + " …" * (len(gone) > _SHOWN)
            self.notes.append(f"the source was thinned: it lacks {some}")

    def _may_assume(self) -> bool:
        is_dear = self.source.store.capabilities.is_remote
        return self.request.may_assume and is_dear and not any(map(replicas, self.tensors))

    # ---- copy ------------------------------------------------------------------------------------

    @contextmanager
    def _staged(self) -> Iterator[Attempt]:
        """Yields this attempt, with the progress bar of the copy."""
        self.single = next(iter(self.target.file_sizes)) if self.target.index is None else ""
        overwrite = self.request.options.get("overwrite", False)
        bar = self.request.options.get("progress") or no_bar
        total = sum(bytes_by_dtype(self.plan).values())
        resume = self.resume
        with (
            stage_together(
                self.group,
                self.dst,
                self.attempt_id,
                self.single,
                overwrite,
                resume.kept_glob,
                resume.directory,
            ) as attempt,
            bar(self.request.operation, total) as advance,
        ):
            self._advance, self.sink = advance, None
            try:
                yield attempt
            except BaseException:
                if self.sink is not None:
                    self.sink.abort()
                raise
            finally:
                resume.end()

    def advance(self, nbytes: int) -> None:
        """Moves the progress bar. The other ranks have done about as much."""
        self._advance(nbytes * self.group.size)

    def _copy(self, attempt: Attempt) -> None:
        """Copies this rank's share, and what the store can copy without a client."""
        self.server_copy = self._plan_server_copy(attempt)
        cloned = self.server_copy.nbytes if self.server_copy else 0
        with self.group.phase("check the free space"):
            self.dst.check_room(self.target.nbytes + ROOM_BYTES - self.resume.nbytes - cloned)
        self.resume.begin(attempt, self.target.file_sizes, self.tiles, self.jobs)
        watched = read_whole(self.part, self.located, self.sealed_fingerprints)
        self.crcs = CrcWatch(watched, self.source.store)
        self.sink = sink = self.work.sink(attempt, self.server_copy)
        finished = self.resume.finished
        finished.restore(None if self.group.rank else sink, self.crcs, self.totals.overflowed)
        self.work.open_files(sink, self.group)
        if self.server_copy:
            self.server_copy.add_known_slots(sink)
            self.resume.forget_journal(attempt)  # it knows nothing of what the store copies
        plan = self.server_copy.rest if self.server_copy else self.work.plan
        batches = finished.without(
            batches_for(
                plan, self.located, self.tiles, attempt.writable, self.work.share, self.jobs
            ),
            self.advance,
        )
        store = self.source.store
        if self.work.exchanges:
            budget = self.request.options.get("memory_bytes") or DEFAULT_MEMORY_BYTES
            held = self.source.held or {}
            for some, fetched in in_rounds(batches, store, held, self.group, budget):
                with self.group.phase("copy"):
                    self._run(some, fetched, sink, attempt)
            return
        with self.group.phase("copy"):
            self._run(batches, store, sink, attempt)
            if self.server_copy:
                self.totals.store_nbytes = self.server_copy.nbytes
                self.advance(self.server_copy.nbytes)

    def _plan_server_copy(self, attempt: Attempt) -> ServerCopy | None:
        """Returns what the store of both ends copies without a client, None for nothing.

        A disk clones for one process alone, and not for a result that replaces its source: then the
        bytes are read, and compared with their checksums, before the source goes.
        """
        if self.sealed is None:
            return None
        is_disk = attempt.folder is not None
        if is_disk and (self.group.rank or self.resume.nbytes or self.request.in_place):
            return None
        to = attempt.copy_target(self.source.folder)
        if to is None:
            return None
        if self.group.size > 1:
            self.notes.append(
                "with several processes, all bytes pass through them; a single process lets the"
                " store copy most"
            )
            return None
        return plan_within(self.sealed, self.sealed_fingerprints, self.plan, self.located, to)

    def _run(
        self, batches: Iterable[Batch], store: Store, sink: WriteSink, attempt: Attempt
    ) -> None:
        with self.resume.forgotten_if_wrong(attempt):
            done = execute_batches(
                batches,
                store,
                sink,
                self.jobs,
                self.advance,
                crc_watch=self.crcs,
                alter=self.request.alter,
                note=self.resume.note,
            )
        self.totals.read_nbytes += done.read_nbytes
        _add(self.totals.overflowed, done.overflowed)

    # ---- verify: payloads were where they were read, checksums are right, files are whole --------

    def _verify(self, attempt: Attempt) -> bool:
        """Compares the bytes read with every known checksum, and finishes the files.

        Returns:
            False if payloads are not where they were assumed to be.
        """
        assert self.sink is not None
        with self.group.phase("look at what was read"):
            real = self.source.compare(self.tensors, self.located) if self.assumes else None
        wrong = real is not None and bool(real.moved)
        if any(self.group.all_gather(wrong, "compare places")):
            self.sink.abort()
            self.source.store.close()
            forget(attempt)
            return False
        crcs = dict(real.crcs) if real is not None else {}
        self.checksums = self._collect(self.sink, crcs, attempt)
        if self.group.rank == 0:
            copied = dict(self.server_copy.fingerprints) if self.server_copy else {}
            self.fingerprints = copied | self.sink.fingerprints.join()
            with self.resume.forgotten_if_wrong(attempt):
                prove_fingerprints(self.source, self.sealed_fingerprints, self.fingerprints)
                prove_stretches(self.source, self.stretches, self.fingerprints)
        if self.request.prove is not None:
            self.request.prove(self.group)
        if self.inverse is not None:
            self._prove_inverse(attempt, self.inverse)
        if self.request.in_place:
            self._refuse_overflow()
        return True

    def _prove_inverse(self, attempt: Attempt, inverse: Inverse) -> None:
        """Makes the source again of the files that were written."""
        sealed = self.sealed.tensors if self.sealed else {}
        copied = self.server_copy.fingerprints.keys() if self.server_copy else ()
        inverse = inverse.without(copied)
        known = inverse.stored.keys() & sealed.keys()
        with self.resume.forgotten_if_wrong(attempt):
            self.proof = prove_inverse(
                inverse,
                self.source,
                attempt.files(),
                {name: int(sealed[name].fingerprint, 16) for name in known},
                self.fingerprints if self.group.rank == 0 else {},
                self.group,
                self.jobs,
                self.tiles,
            )
        self.totals.read_nbytes += self.proof.read_nbytes
        if copied:
            self.notes.append(
                f"not read again for the proof: {len(copied):,} tensors that were cloned, or copied"
                " by the store"
            )
        self._note_unproved("are cast or computed", inverse.changed)
        self._note_unproved("are there in part", inverse.in_part)
        self._note_unproved("consist of too many pieces", self.proof.by_reading)

    def _note_unproved(self, why: str, names: Sequence[str]) -> None:
        if names:
            some = ", ".join(map(printable, names[:_SHOWN])) + " …" * (len(names) > _SHOWN)
            self.notes.append(f"not proved by the inverse: {some} ({len(names):,}, which {why})")

    def _refuse_overflow(self) -> None:
        """Refuses to replace finite values by infinity, since the source is lost with it.

        Raises:
            PlanError: a cast made finite values infinite.
        """
        for fqn, number in self.totals.overflowed.items():
            raise PlanError(
                f"{number:,} values of {printable(fqn)} would become infinite in the new type",
                hint="take a type with a larger range, such as bf16",
            )

    def _collect(
        self, sink: WriteSink, crcs: dict[Extent, int], attempt: Attempt
    ) -> Mapping[str, int]:
        """Brings the notes of all ranks to rank 0, which finishes the files.

        Returns:
            On rank 0 the checksum of each file.
        """
        group, totals = self.group, self.totals
        parts = self.crcs.partial_ranges(crcs) if group.size > 1 else []
        mine = (parts, totals.read_nbytes, totals.overflowed, attempt.kept_nbytes)
        told = collect(sink, group, mine)
        checksums: Mapping[str, int] = {}
        with group.phase("prove"), self.resume.forgotten_if_wrong(attempt):
            for theirs, nbytes, overflowed, sent in told:
                self.crcs.absorb(theirs, crcs)
                self.resume.kept_nbytes += sent
                totals.read_nbytes += nbytes
                _add(totals.overflowed, overflowed)
            if group.rank == 0:
                checksums = sink.finish()
                self.resume.kept_nbytes += attempt.kept_nbytes
            self.crcs.prove(crcs)
        return checksums

    # ---- publish: the manifest, then the one step by which everything appears --------------------

    def _publish(self, attempt: Attempt) -> None:
        sink, self.sink = self.sink, None  # its files are finished: an error does not abort them
        self.resume.end()
        if self.group.rank:
            return
        assert sink is not None
        files = {
            name: seal_file(nbytes, self.checksums[name], sink.ranges_of(name))
            for name, nbytes in self.target.file_sizes.items()
        }
        manifest = replace(
            self._manifest(files, seal_tensors(self.plan, self.fingerprints)),
            objects=seal_objects(self.plan, self.fingerprints),
            pickles=seal_pickles(self.target.literals),
        )
        literal = Literal(file_name(self.attempt_id, self.single), 0, manifest.render())
        self.resume.check_claim()
        self.notes += attempt.publish(literal, self.target.index, self.target.file_sizes)

    def _manifest(
        self, files: Mapping[str, SealedFile], tensors: Mapping[str, SealedTensor]
    ) -> Manifest:
        source, index = self.source, self.target.index
        about: dict[str, Any] = {
            "name": redacted(source.name),
            "format": source.catalog.format,
            "world_size": source.catalog.world_size,
            "save_id": source.catalog.extras.get("save_id"),
        }
        about |= self.request.about
        earlier = self.sealed.num_lost if self.sealed else 0
        if num_lost := self.request.about.get(NUM_LOST, 0) + earlier:
            about[NUM_LOST] = num_lost
        if self.proof is not None:
            about[PROOF] = self.proof.about
        if self.resume.work:
            about["work"] = self.resume.work
        sealed = SealedFile(len(index.data), hex64(crc64nvme(index.data))) if index else None
        step = _step_of(self.sealed, self.dst.url)
        manifest = Manifest.now(
            self.attempt_id,
            self.request.operation,
            self.target.format,
            about,
            world_size=self.target.world_size,
            files=files,
            index=(index.file, sealed) if index and sealed else None,
            tensors=self._with_aliases(self._with_statistics(tensors)),
            step=step,
        )
        if self.sealed is None or step is None:
            return manifest
        created = self.sealed.created if self.request.in_place else manifest.created
        return replace(manifest, metrics=self.sealed.metrics, created=created)

    def _with_statistics(self, tensors: Mapping[str, SealedTensor]) -> dict[str, SealedTensor]:
        """Adds the statistics of the source's manifest to the tensors that have the same values."""
        known = self.sealed.tensors if self.sealed is not None else {}
        return {
            fqn: tensor._replace(statistics=known[self.sealed_fingerprints[fqn].fqn].statistics)
            if fqn in self.sealed_fingerprints
            else tensor
            for fqn, tensor in tensors.items()
        }

    def _with_aliases(self, tensors: Mapping[str, SealedTensor]) -> dict[str, SealedTensor]:
        """Adds the other names of tensors."""
        aliases = self.request.layout.aliases.items()
        return {
            **tensors,
            **{fqn: tensors[n]._replace(tied_to=n) for fqn, n in aliases if n in tensors},
        }

    # ---- report ----------------------------------------------------------------------------------

    def _report(self) -> TransferResult:
        kept = self.resume.kept_nbytes
        if self.is_dry_run:
            self.totals = Totals(read_nbytes(self.plan, *self.tiles))
        elif self.resume.is_done:
            kept = sum(bytes_by_dtype(self.plan).values())
            self.notes.append("it is there since an earlier attempt; nothing was done")
        result = result_of(self.source, self.dst, self.plan, self.totals, kept)
        return replace(
            result,
            num_tensors=result.num_tensors + len(self.request.layout.aliases),
            proved_nbytes=self.proof.nbytes if self.proof else 0,
            num_proved=self.proof.num_tensors if self.proof else 0,
            left_out=self.request.left_out,
            stripped=self.request.stripped,
            notes=tuple(self.notes),
            seconds=time.monotonic() - self.began,
            is_dry_run=self.is_dry_run,
        )


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for fqn, count in more.items():
        counts[fqn] = counts.get(fqn, 0) + count


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
