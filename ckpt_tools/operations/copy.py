"""Copies every file of a checkpoint unchanged, between disks and stores.

It copies only missing files, and commits last. The engine copies each file as an object. Within one
S3, the store copies on the server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Unpack

from ckpt_tools.core.catalog import Extent
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.plan import Literal, plan_files
from ckpt_tools.core.threads import num_threads
from ckpt_tools.engine.crc_watch import RecordCrcWatch
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, tile_bytes
from ckpt_tools.errors import (
    CheckpointError,
    IntegrityError,
    PlanError,
    StorageError,
    printable,
    redacted,
)
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.base import (
    ATTEMPT,
    LOCK,
    MANIFEST,
    attempt_for,
    new_attempt,
    note_of,
)
from ckpt_tools.formats.registry import INDEXES, Source, open_source
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.convert.flat_shapes import check_needed, lay_beside
from ckpt_tools.operations.verification import Verification
from ckpt_tools.publish.base import Attempt, CopyTarget, Destination, RootLock
from ckpt_tools.publish.bucket.leftovers import has_index
from ckpt_tools.publish.check_manifest import hash_files
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.publish.find_manifest import manifest_of
from ckpt_tools.publish.manifest import (
    Manifest,
    SealedFile,
    SealedPickle,
    file_name,
    of_other_attempts,
)
from ckpt_tools.publish.sealed_source import checked_manifest
from ckpt_tools.ranks.base import ALONE, Group, check_agreement
from ckpt_tools.storage import is_url, read, write_file
from ckpt_tools.storage.retries import appeared, read_again_if_wrong
from ckpt_tools.transfer.distribute import RankWork, collect, stage_together
from ckpt_tools.transfer.options import Options, Path_, Reading, no_bar
from ckpt_tools.transfer.order import batches_for
from ckpt_tools.transfer.transfer import check_apart

_ASKERS = 16
_MAX_LAST_BYTES = 64 << 20  # largest file that can be held in memory, to be written last


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The result of a copy, or with `dry_run`, its plan.

    Attributes:
        source, destination: paths or URLs.
        files: bytes of every file of the checkpoint.
        kept_nbytes: bytes that the destination had already, with right checksums.
        client_nbytes, store_nbytes: bytes that went through this process, and bytes that the store
            copied on the server.
        notes: remarks.
        seconds: wall-clock time.
        is_dry_run: whether nothing was written.
    """

    source: str
    destination: str
    files: Mapping[str, int]
    kept_nbytes: int = 0
    client_nbytes: int = 0
    store_nbytes: int = 0
    notes: Sequence[str] = ()
    seconds: float = 0.0
    is_dry_run: bool = False


class DestinationState(Enum):
    """What a destination holds before a copy.

    ALIKE are files of the same sizes, without a manifest. UNFINISHED are files of an attempt or a
    copy that was not committed.
    """

    NOTHING = auto()
    SAME = auto()
    ALIKE = auto()
    UNFINISHED = auto()
    ANOTHER = auto()


@checked(Options)
def copy(
    src: Path_,
    dst: Path_,
    *,
    to_storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[Options],
) -> CopyResult:
    """Copies a checkpoint unchanged.

    A second copy transfers files that are missing or differ. The checkpoint is visible only when it
    is complete.

    Args:
        src: a checkpoint, or a directory with one below; a path or a URL.
        dst: the directory (or file) to write; a path or a URL. If it ends in a slash, the copy lies
            below it, under its own name.
        to_storage_options: options of the destination's store, if they differ from the source's.
        **options: see `Options`. A copy never replaces a checkpoint, so `overwrite` is refused.

    Raises:
        IntegrityError: the source's bytes differ from its manifest.
        CheckpointError: see the tree in `errors`. Transferred files are kept for the next attempt.
    """
    return _copy(src, dst, to_storage_options, options)


def copy_beside(
    src: Path_, dst: Path_, beside: str, storage_options: Mapping[str, Any] | None
) -> CopyResult:
    """Copies a step as `copy` does. The store itself copies files that `beside` has already.

    Args:
        src, dst, storage_options: as for `copy`.
        beside: a copy of another step of the run; "" for none. A file that a save has linked from
            one step to the next is in both.
    """
    return _copy(src, dst, None, {"storage_options": storage_options}, beside)


def _copy(
    src: Path_,
    dst: Path_,
    to_storage_options: Mapping[str, Any] | None,
    options: Options,
    beside: str = "",
) -> CopyResult:
    began = time.monotonic()
    if options.get("overwrite"):
        raise PlanError(
            "a copy replaces nothing", hint="copy to another place, or remove what is there first"
        )
    with (options.get("group") or ALONE).phase("open both"):
        source = open_source(src, options.get("storage_options"), lay_beside(options.get("shapes")))
        check_needed(options.get("shapes"), source.catalog)
        to_options = (
            options.get("storage_options") if to_storage_options is None else to_storage_options
        )
        target = open_destination(_named(os.fspath(dst), source.path), to_options)
        _check_suffix(source, target.url)
    return copy_opened(source, target, options, began, beside, to_options)


def copy_opened(
    source: Source,
    target: Destination,
    options: Options,
    began: float,
    beside: str = "",
    to_options: Mapping[str, Any] | None = None,
    replaces: bool = False,
) -> CopyResult:
    """Copies an opened checkpoint.

    Args:
        source: the checkpoint.
        target: the destination.
        options: see `Options`.
        began: when the operation began, by the monotonic clock.
        beside, to_options: as for `copy_beside`; options of the destination's store.
        replaces: another checkpoint at the destination is replaced once the copy is complete.
    """
    group = options.get("group") or ALONE
    with group.phase("look at both"):
        check_apart(source.path, target.url)
        if replaces:
            target.check(overwrite=True)
        work = _CopyJob(source, target, options, group)
        work.replaces = replaces
        work.beside = open_destination(beside, to_options) if beside else None
        there = work.look_at() if target.exists() else DestinationState.NOTHING
    if there is DestinationState.ALIKE:
        there = DestinationState.SAME if work.is_same_there() else DestinationState.ANOTHER
    check_agreement(group, (sorted(work.files.items()), there.name))
    result = CopyResult(redacted(source.path), redacted(target.url), work.shown)
    if there is DestinationState.SAME:
        return replace(
            result,
            kept_nbytes=sum(work.files.values()),
            notes=("it is there already",),
            seconds=time.monotonic() - began,
        )
    if there is DestinationState.ANOTHER and not replaces:
        raise StorageError(
            f"the destination exists: {printable(target.url)}",
            hint="choose another, or remove it first",
        )
    if options.get("dry_run"):
        kept = work.kept_nbytes()
        return replace(
            result,
            kept_nbytes=kept,
            client_nbytes=sum(work.data.values()) - kept,
            seconds=time.monotonic() - began,
            is_dry_run=True,
        )
    notes = read_again_if_wrong(source.store, work.do, group)
    source.store.close()
    moved = sum(work.missing.values())
    return replace(
        result,
        kept_nbytes=sum(work.data.values()) - moved - work.taken_nbytes,
        client_nbytes=0 if work.is_within else moved,
        store_nbytes=(moved if work.is_within else 0) + work.taken_nbytes,
        notes=notes,
        seconds=time.monotonic() - began,
    )


def _check_suffix(source: Source, url: str) -> None:
    """Refuses a name with a suffix by which the file's format would not be recognised.

    Raises:
        PlanError: the suffix differs from the source's.
    """
    suffix = os.path.splitext(source.name)[1] if source.is_file else ""
    if (
        source.is_file
        and os.path.splitext(url.partition("?")[0] if is_url(url) else url)[1] != suffix
    ):
        raise PlanError(
            "a copy of a file is known by its suffix: expected a name that ends in"
            f" {printable(suffix)}, got {printable(url)}",
            hint=f"give the whole name: {printable(url.rstrip('/'))}/{printable(source.name)}",
        )


def _named(dst: str, source: str) -> str:
    """Returns a destination with the name of the source, if it ends in a slash and lacks it."""
    name = source.rstrip("/").rpartition("/")[2]
    is_folder = dst.endswith("/") and dst.rstrip("/").rpartition("/")[2] != name
    is_folder = is_folder and not dst.endswith("://")  # that is no place yet
    return dst + name if is_folder else dst


class _CopyJob:
    """One copy, or one process's part of it: all files, their checksums, and the missing files."""

    def __init__(
        self,
        source: Source,
        target: Destination,
        options: Options,
        group: Group,
    ) -> None:
        self.source, self.target, self.options, self.group = (
            source,
            target,
            options,
            group,
        )
        self.manifest = checked_manifest(source)
        files = {
            name: nbytes
            for name, nbytes in source.store.list_files(below=True).items()
            if name != LOCK and note_of(name) != (ATTEMPT, "")
        }
        if self.manifest:
            stale = set(of_other_attempts(self.manifest, files))
            files = {name: nbytes for name, nbytes in files.items() if name not in stale}
            files |= self._sealed_files(files)
        self.index = self._last_file(files)
        self.seal = next((name for name in files if note_of(name) == (MANIFEST, "")), "")
        self.single = target.url.rpartition("/")[2] if source.is_file else ""
        if not self.index and not source.is_file and target.needs_index:
            raise PlanError(
                "this layout has no index, so an object store would show it before it is complete"
                f" ({printable(source.path)})",
                hint="upload it with the store's own tool, or ckpt reshard it into the bucket",
            )
        self.files = files
        self.data = {
            name: nbytes for name, nbytes in files.items() if name not in (self.index, self.seal)
        }
        self.crcs = {name: int(s.crc64nvme, 16) for name, s in self._sealed().items()}
        if self.single and not self.crcs:
            self.crcs = dict(source.store.stored_crcs(files))
        self.missing = dict(self.data)
        self.is_within = self.replaces = False
        self.beside: Destination | None = None
        self.taken_nbytes = 0

    def _sealed(self) -> dict[str, SealedFile]:
        """Returns the sealed files, with the index."""
        if self.manifest is None:
            return {}
        index = self.manifest.index
        return {**self.manifest.files, **({index[0]: index[1]} if index else {})}

    def _sealed_files(self, found: Mapping[str, int]) -> dict[str, int]:
        """Returns the bytes of sealed files that a listing does not have, as they lie deeper.

        Raises:
            IntegrityError: a sealed file is missing.
        """
        deeper: dict[str, int] = {}
        for name in self._sealed():
            if name in found:
                continue
            try:
                deeper[name] = self.source.store.size(name)
            except StorageError as error:
                if not error.is_missing:
                    raise
                raise IntegrityError(
                    f"a sealed file is missing: {printable(name)} ({printable(self.source.path)})",
                    hint="restore it, take another checkpoint, or save the rest: ckpt salvage",
                ) from error
        return deeper

    def _last_file(self, files: Mapping[str, int]) -> str:
        """Returns the file to write last; "" for none.

        It is the index, else a small file without which the rest is not a checkpoint.
        """
        found = next((name for name in INDEXES if name in files), "")
        if found or self.source.is_file:
            return found
        if sum(name.rpartition("/")[2] in INDEXES for name in files) > 1:
            return ""  # each makes its own folder a checkpoint, and only one file can be last
        small = sorted(
            (nbytes, name) for name, nbytes in files.items() if nbytes <= _MAX_LAST_BYTES
        )
        return next(
            (
                name
                for _, name in small
                if not self.source.format.recognise({n: s for n, s in files.items() if n != name})
            ),
            "",
        )

    @property
    def shown(self) -> dict[str, int]:
        """Returns the bytes of each file, with secrets removed from the names."""
        return {redacted(name): nbytes for name, nbytes in self.files.items()}

    @property
    def notes(self) -> list[str]:
        """Returns notes on files that are not copied."""
        store = self.source.folder
        left = (
            []
            if self.source.is_file
            else sorted(f"{a}/{b}/" for a in store.folders() for b in store.enter(a).folders())
        )
        left = [folder for folder in left if not any(f.startswith(folder) for f in self.files)]
        links = [] if self.source.is_file else sorted(store.strays())
        notes = (
            [f"folders two levels down stay behind: {printable(', '.join(left[:5]))}"]
            if left
            else []
        )
        if links:
            names = printable(", ".join(links[:5]))
            notes.append(f"links that lead out, and what is no regular file, stay behind: {names}")
        if "compression" in self.source.catalog.extras:
            notes.append("the items were compressed with zstd, and the copy is not compressed")
        return notes

    def name(self, file: str) -> str:
        """Returns the name of a file at the destination."""
        return self.single or file

    @property
    def attempt(self) -> str:
        """Returns the id of copies of this checkpoint.

        It is the same for every copy, so that a copy recognises the files of an earlier one.
        """
        if self.single:
            return new_attempt()
        if self.manifest:
            return self.manifest.attempt
        last = crc64nvme(read(self.source.store, self.index)) if self.index else self.source.path
        return attempt_for(f"{last} {sorted(self.data.items())}")

    def look_at(self) -> DestinationState:
        """Tells what the destination holds."""
        store, name = self.target.existing_result()
        if self.single or name:
            is_alike = store.list_files().get(name) == sum(self.files.values())
            return (
                DestinationState.ALIKE
                if is_alike and name == self.single
                else DestinationState.ANOTHER
            )
        files = store.list_files(below=True)
        if self.target.needs_index and self.index not in files:
            others = [name for name in files if name not in self.files and name != LOCK]
            if has_index(others):
                return DestinationState.ANOTHER
            self._check_own([name for name in files if name in self.files])
            is_foreign = set(others) - self.target.unfinished(others)
            return DestinationState.ANOTHER if is_foreign else DestinationState.UNFINISHED
        is_same = all(files.get(name) == nbytes for name, nbytes in self.files.items())
        if self.manifest is None:
            return (
                DestinationState.ALIKE
                if is_same and manifest_of(store) is None
                else DestinationState.ANOTHER
            )
        return (
            DestinationState.SAME
            if is_same and manifest_of(store) == self.manifest
            else DestinationState.ANOTHER
        )

    def _check_own(self, names: Sequence[str]) -> None:
        """Refuses to overwrite objects of other tools that differ from the source.

        Raises:
            StorageError: there is such an object.
        """
        for name, about in (self.target.object_infos(names) or {}).items():
            if not about.is_marked and (about.crc64 is None or about.crc64 != self.crcs.get(name)):
                raise StorageError(
                    "the destination has a file that no copy wrote:"
                    f" {printable(name)} ({printable(self.target.url)})",
                    hint="choose another destination, or move it away",
                )

    def is_same_there(self) -> bool:
        """Tells whether the destination's files have the same bytes.

        It reads both sides, but uses the checksums that a store keeps.
        """
        there, _ = self.target.existing_result()
        jobs, memory = self.options.get("jobs"), self.options.get("memory_bytes")
        with (self.options.get("progress") or no_bar)(
            "compare", 2 * sum(self.files.values())
        ) as advance:
            mine, theirs = (
                hash_files(
                    store,
                    files,
                    jobs,
                    memory,
                    lambda nbytes: advance(nbytes * self.group.size),
                    self.group,
                )
                for store, files in (
                    (self.source.store, self.files),
                    (there, {self.name(n): size for n, size in self.files.items()}),
                )
            )
        return all(mine[name] == theirs[self.name(name)] for name in self.files)

    def kept_nbytes(self) -> int:
        """Returns the bytes of the files that an interrupted copy has left, and that are right."""
        if self.single or not self.crcs:
            return 0
        right = self.target.right_files(self.attempt, self.data, self.crcs)
        return sum(self.data[name] for name in right)

    # ---- moving ----------------------------------------------------------------------------------

    def do(self) -> list[str]:
        """Transfers the missing files and commits; returns notes."""
        group, bar = self.group, self.options.get("progress") or no_bar
        notes = self.notes
        attempt = group.broadcast(self.attempt, "begin")
        with (
            self._claimed() as claim,
            stage_together(
                group,
                self.target,
                attempt,
                self.single,
                self.replaces,
                # what is replaced lies there for a moment, and must not stay
                kept_glob="*" if self.crcs and not self.single and not self.replaces else "",
            ) as staged,
        ):
            crcs = {self.name(name): crc for name, crc in self.crcs.items()}
            right: set[str] = set()
            with group.phase("list the destination"):
                # another copy may have been published while this one waited for the staging name
                is_free = self.replaces or self.target.needs_index
                if group.rank == 0 and not is_free and self.target.exists():
                    raise appeared(self.target.url)
                # on a store, `expect` also finds out how objects may be written
                if group.rank == 0 or self.target.needs_index:
                    right = staged.keep_matching(
                        {self.name(name): nbytes for name, nbytes in self.data.items()}, crcs
                    )
            right = group.broadcast(right, "what is there")
            self.missing = {name: nbytes for name, nbytes in self.data.items() if name not in right}
            if self.beside is not None:
                self._take_over(staged, self.beside)
            within = self._copy_target(staged, notes)
            with group.phase("check the free space"):
                self.target.check_room(0 if within else sum(self.missing.values()))
            with bar("copy", sum(self.missing.values())) as advance:
                if within:
                    self.is_within = True
                    with group.phase("copy"):
                        self._write_notes(staged)
                        self._within(within, advance)
                else:
                    crcs |= self._through(staged, lambda nbytes: advance(nbytes * group.size))
            if group.rank:
                return []
            staged.sync()
            if claim is not None:
                claim.check()
            files = {self.name(name): nbytes for name, nbytes in self.data.items()}
            return notes + staged.publish(*self._last(attempt, crcs), files)

    def _take_over(self, staged: Attempt, beside: Destination) -> None:
        """Makes the store copy the files that a step beside this one has, too."""
        store, _ = beside.existing_result()
        try:
            there = None
            with suppress(CheckpointError):  # without it, all files are sent
                there = manifest_of(store)
            for name, mine in self._sealed().items():
                other = there.files.get(name) if there is not None else None
                is_same = other is not None and other[:2] == mine[:2]  # bytes and checksum
                if mine.linked and is_same and name in self.missing:
                    with suppress(StorageError):  # then it is sent
                        staged.take_over(store, name, name, mine.nbytes, ())
                        self.taken_nbytes += self.missing.pop(name)
        finally:
            store.close()

    def _copy_target(self, staged: Attempt, notes: list[str]) -> CopyTarget | None:
        """Returns the target for copies that the store makes; None if all bytes pass here."""
        if self.single and not self.crcs:
            return None
        # a disk has no checksums of its own, and ranks create no files in a directory of another
        if staged.folder is not None and (not self.crcs or self.group.size > 1):
            return None
        within = staged.copy_target(self.source.folder)
        is_s3 = within is not None and not within.block_nbytes
        if is_s3 and any("%" in name for name in self.missing):
            # for the reason, see RemoteStore.copy_source
            notes.append("copied through this machine, since a name has a %")
            return None
        return within

    @contextmanager
    def _claimed(self) -> Iterator[RootLock | None]:
        """Lets only one of several copies to the same prefix of a bucket continue.

        The others raise before they have written anything.

        Raises:
            StorageError: another copy is running there, or has just finished.
        """
        claim = None
        try:
            with self.group.phase("claim the destination"):
                if self.group.rank == 0 and not self.single:
                    claim = self.target.claim()
                if claim is not None:
                    if self.look_at() not in (
                        DestinationState.NOTHING,
                        DestinationState.UNFINISHED,
                    ):
                        raise appeared(self.target.url)
                    if claim.is_inherited:
                        self.target.give_up_uploads(self.data)
            yield claim
        finally:
            if claim is not None:
                claim.release()

    def _last(self, attempt: str, crcs: Mapping[str, int]) -> tuple[Literal | None, Literal | None]:
        """Returns manifest and index, which are written last."""
        store = self.source.store
        if not self.single:
            seal = Literal(self.seal, 0, read(store, self.seal)) if self.seal else None
            if not self.index:
                return seal, None
            index = read(store, self.index)
            self._prove({self.index: crc64nvme(index)})
            return seal, Literal(self.index, 0, index)
        (nbytes,) = self.files.values()
        manifest = Manifest.now(
            attempt,
            "copy",
            self.source.format.NAME,
            {"name": self.source.name, "format": self.source.format.NAME},
            world_size=None,
            files={self.single: SealedFile(nbytes, hex64(crcs[self.single]))},
            index=None,
            tensors=self.manifest.tensors if self.manifest else {},
            objects=self.manifest.objects if self.manifest else {},
            pickles=self._pickles(),
        )
        return Literal(file_name(attempt, self.single), 0, manifest.render()), None

    def _pickles(self) -> dict[str, SealedPickle]:
        """Returns the sealed pickle of the only file, under its new name."""
        pickles = self.manifest.pickles if self.manifest else {}
        return dict(zip((self.single,), pickles.values(), strict=False))

    def _through(self, staged: Attempt, advance: Callable[[int], None]) -> dict[str, int]:
        """Transfers files through this process, and returns their checksums by their new names.

        In a group, rank 0 gets the checksums of all files.
        """
        group, checksums = self.group, dict[str, int]()
        jobs = num_threads(self.options.get("jobs"))
        tiles = tile_bytes(self.options.get("memory_bytes") or DEFAULT_MEMORY_BYTES, jobs)
        plan = plan_files(self.missing, self.name)
        division = RankWork(plan, group, self.target)
        sink, crc_watch = division.sink(staged), RecordCrcWatch(self._records(), self.source.store)
        try:
            division.open_files(sink, group)
            batches = batches_for(division.plan, {}, tiles, staged.writable, division.share, jobs)
            with group.phase("copy"):
                execute_batches(
                    batches, self.source.store, sink, jobs, advance, crc_watch=crc_watch
                )
            told = collect(sink, group, crc_watch.partial_ranges({}))
            with group.phase("prove"):
                for parts in told:
                    crc_watch.absorb(parts, {})
                crc_watch.prove({})
                if group.rank == 0:
                    checksums = dict(sink.finish())
                self._prove(checksums)
        except BaseException:
            sink.abort()
            raise
        return checksums

    def _records(self) -> dict[Extent, str]:
        """Returns the records of archives with a CRC-32, to compare the bytes with during the copy.

        Returns nothing if there is a manifest, because its checksums are better. safetensors has
        none.

        Raises:
            IntegrityError: an archive is damaged around its records.
        """
        if self.manifest is not None or self.source.format is safetensors:
            return {}
        reading: Reading = {
            "storage_options": self.options.get("storage_options"),
            "shapes": self.options.get("shapes"),
        }
        work = Verification(self.source.path, reading)
        found: dict[Extent, str] = {}
        for batch in work.batches(
            {name: nbytes for name, nbytes in work.sizes.items() if name in self.missing},
            is_one=True,
        ):
            problems, _, records = work.look_at_archives(batch)
            if problems:
                raise IntegrityError(
                    f"a damaged checkpoint is not copied: {problems[0]}",
                    hint="ckpt verify names everything; ckpt salvage",
                )
            found |= {record.extent: key for key, record in records.items()}
        work.store.close()
        return found

    def _prove(self, checksums: Mapping[str, int]) -> None:
        """Compares the checksums of the read bytes with the sealed ones."""
        for name, crc in self.crcs.items():
            if checksums.get(self.name(name), crc) != crc:
                raise IntegrityError(
                    f"bytes were damaged since they were written: expected CRC-64 {hex64(crc)}, got"
                    f" {hex64(checksums[self.name(name)])} ({printable(name)} in"
                    f" {printable(self.source.path)})",
                    hint=(
                        "try again in case the network did it, else restore the file or take"
                        " another step"
                    ),
                )

    def _write_notes(self, staged: Attempt) -> None:
        """Writes the files that lie in memory over the source: its store cannot copy them."""
        store = self.source.store
        for name, nbytes in [*self.missing.items()]:
            if (data := store.view(name, 0, nbytes)) is not None:
                if self.group.rank == 0:
                    write_file(staged.writable, self.name(name), bytes(data))
                del self.missing[name]

    def _within(self, copy_target: CopyTarget, advance: Callable[[int], None]) -> None:
        """Makes the store copy files on the server."""

        def one(name: str) -> None:
            copy_target.copy_file(self.name(name), name, self.missing[name])
            advance(self.missing[name] * self.group.size)

        with ThreadPoolExecutor(_ASKERS, "ckpt-copy") as pool:
            for done in [
                pool.submit(one, name)
                for name in sorted(self.missing)[self.group.rank :: self.group.size]
            ]:
                done.result()
