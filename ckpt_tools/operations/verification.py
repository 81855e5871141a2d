"""Checks a checkpoint against its manifest, or by its structure and the CRC-32 of zip records.

The engine reads and hashes the bytes. A quick check asks an object store for its own checksums
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ckpt_tools.core.catalog import RAW, Catalog, Extent, Payloads, TensorEntry, check_names
from ckpt_tools.core.checksum import crc32, crc64nvme, hex64
from ckpt_tools.core.coverage import flaws
from ckpt_tools.core.plan import plan_objects, plan_values
from ckpt_tools.core.threads import num_threads
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.scan import Finding, ScanSink
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, in_share, schedule, shares, tile_bytes
from ckpt_tools.engine.sinks import Checksum, HashSink
from ckpt_tools.errors import (
    CatalogError,
    CheckpointError,
    FormatError,
    IntegrityError,
    UnsafePickleError,
    is_unreadable,
    printable,
)
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.base import MANIFEST, PIN, index_of_format, note_of, reader_of_damaged
from ckpt_tools.formats.builder import UnreadValues
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.look_alikes import other_kind
from ckpt_tools.formats.registry import Format, decompressed, detect, is_ours
from ckpt_tools.formats.zip.verify import examine
from ckpt_tools.operations.batches import ReadBatch, cut_batches, one_batch
from ckpt_tools.operations.convert.flat_shapes import check_needed, lay_beside
from ckpt_tools.operations.convert.object_reader import ObjectReader
from ckpt_tools.operations.hub_cache import find_damaged
from ckpt_tools.publish.check_manifest import (
    Problem,
    compare_bytes,
    compare_names,
    execute_shared,
    hash_files,
    list_sealed,
)
from ckpt_tools.publish.find_manifest import manifest_of, names_in, noted_by_host
from ckpt_tools.publish.manifest import Manifest, of_other_attempts, parse_manifest
from ckpt_tools.publish.sealed_source import check_pickles, strays_of
from ckpt_tools.ranks.base import ALONE
from ckpt_tools.storage import Overlay, Store, read
from ckpt_tools.storage.one_file import folder_of
from ckpt_tools.storage.retries import read_again_if_wrong
from ckpt_tools.transfer.options import Path_, Reading, no_bar

_MOST_OBJECTS = 10_000  # that are searched for code; equal ones are unpacked once


class RecordCheck(NamedTuple):
    """A record of an archive, with its expected CRC-32."""

    extent: Extent
    archive: Extent


class Verification:
    """A check of a checkpoint that may be damaged: its files, manifest and readable catalog.

    Attributes:
        store, format: the store and the format of the checkpoint.
        is_remote: whether bytes may be damaged on their way from the store.
        is_compressed: whether the files are shown without their compression.
        manifest: None if there is none.
        catalog: None if the index is unreadable. It may have holes.
    """

    def __init__(self, src: Path_, options: Reading) -> None:
        self.options = options
        store, self.format = detect(
            src, options.get("storage_options"), lay_beside(options.get("shapes"))
        )
        self.store: Store = store
        self._unreadable: list[Problem] = []
        self.notes: list[str] = []
        folder, name = folder_of(self.store)
        self.is_remote = folder.capabilities.is_remote
        self.is_compressed = False
        self.manifest: Manifest | None = None
        self.catalog: Catalog | None = None
        try:
            self.manifest = manifest_of(self.store)
            if self.manifest is not None:
                self.notes += self.manifest.notes
        except FormatError as error:
            self._unreadable += [
                Problem(name, f"cannot be read: {error}") for name in names_in(folder, name)
            ]
        try:
            try:
                self.catalog = self._read_catalog(self.format)
            except dcp.CompressedError:
                self.store, self.is_compressed = decompressed(self.store), True
                self.notes.append("the items are compressed with zstd, and were decompressed")
                self.catalog = self._read_catalog(self.format)
            check_needed(options.get("shapes"), self.catalog)
            if self.manifest is not None:
                strays = strays_of(self.manifest, self.catalog)
                self._unreadable += [Problem(n, "was not sealed, and gives values") for n in strays]
            if unknown := self.catalog.unknown:
                kinds = ", ".join(sorted(set(unknown.values()))[:4])
                self.notes.append(
                    f"{len(unknown)} values are of other types ({printable(kinds)}), and are not"
                    " read; torch.load(weights_only=False) would run code for them"
                )
        except (FormatError, CatalogError) as error:
            self.catalog = self._read_rest()
            if self.catalog is None:
                index = self._index()
                cause = other_kind(self.store, index) or error
                advice = f"; {cause.hint}" if cause.hint else ""
                self._unreadable.append(Problem(index, f"cannot be read: {cause}{advice}"))
        self.store = Overlay(self.store, self.catalog.memory_files if self.catalog else {})
        self._flaws = list(flaws(self.catalog)) if self.catalog else []
        self._jobs = num_threads(options.get("jobs"))
        self._memory = options.get("memory_bytes") or DEFAULT_MEMORY_BYTES
        self._bar = options.get("progress") or no_bar
        self.group = options.get("group") or ALONE

    def _read_catalog(self, form: Format) -> Catalog:
        catalog = read_again_if_wrong(self.store, lambda: form.read_catalog(self.store))
        check_names(catalog)
        return catalog

    def _index(self) -> str:
        """Returns the name of the file that has the index, or should have it."""
        if self.manifest and self.manifest.index:
            return self.manifest.index[0]
        files = self.store.list_files()
        index = index_of_format(self.format)
        return index if index in files else next(iter(files), index)

    def _read_rest(self) -> Catalog | None:
        """Returns the catalog of the readable files; None if there are none.

        Only for formats in which each file describes its own content.
        """
        read_readable = reader_of_damaged(self.format)
        if read_readable is None:
            return None
        try:
            catalog, broken, lost = read_readable(self.store)
        except (FormatError, CatalogError):
            return None
        for file, error in broken.items():
            names = [fqn for fqn, at in lost.items() if at == file]
            cause = other_kind(self.store, file) or error
            self._unreadable += [
                Problem(file, f"cannot be read: {cause}", fqn) for fqn in names or [""]
            ]
        self._unreadable += [
            Problem(file, "the index places this tensor in a file that does not hold it", fqn)
            for fqn, file in lost.items()
            if file not in broken
        ]
        return catalog

    @property
    def num_entries(self) -> int:
        """Returns the number of tensors and objects, with those that the index has besides."""
        if self.catalog is None:
            return 0
        names = {problem.fqn for problem in self._unreadable if problem.fqn}
        return len({*self.catalog.tensors, *self.catalog.objects, *names})

    @property
    def sizes(self) -> Mapping[str, int]:
        """Returns the bytes of every data file of the checkpoint."""
        if self.manifest:
            return {name: sealed.nbytes for name, sealed in self.manifest.files.items()}
        return self.catalog.file_sizes if self.catalog else {}

    def require_catalog(self) -> Catalog:
        """Returns the catalog.

        Raises:
            FormatError: the index is unreadable.
        """
        if self.catalog is None:
            raise FormatError(
                f"cannot locate tensors: the index is unreadable: {self._unreadable[-1]}",
                hint="the index is lost; restore it from a copy",
            )
        return self.catalog

    def _problem(self, file: str, what: str, fqn: str, extent: Extent | None = None) -> Problem:
        rank = self.catalog.ranks.get(file) if self.catalog else None
        return Problem(
            file,
            what,
            fqn,
            extent.start if extent else None,
            extent.nbytes if extent else None,
            rank,
        )

    def structure(self) -> list[Problem]:
        """Returns the problems that can be found without reading data."""
        return self._unreadable + self.flaws()

    def flaws(self) -> list[Problem]:
        """Returns structural problems: chunks that are missing, overlap or are out of bounds."""
        return [self._problem(f.file, f.error.what, f.fqn) for f in self._flaws]

    # ---- against the manifest --------------------------------------------------------------------

    def compare(self, quick: bool) -> tuple[list[Problem], list[str]]:
        """Compares files with the manifest.

        Returns the problems, with the entries they affect, and the files that could not be
        compared.
        """
        assert self.manifest is not None
        manifest = self.manifest
        files = list_sealed(manifest, self.store)
        problems = [
            *compare_names(manifest, self.store),
            *self._unreadable,
            *_extra(manifest, files, self._of_host(manifest, files)),
        ]
        same = {name: s.nbytes for name, s in manifest.files.items() if files.get(name) == s.nbytes}
        crcs = dict(self.store.stored_crcs(same)) if quick else self.hash(same)
        damaged = list(compare_bytes(manifest, crcs))
        if damaged and not quick and self.is_remote:  # it may have happened on the way
            self.store.close()
            crcs |= self.hash({p.file: same[p.file] for p in damaged})
            damaged = list(compare_bytes(manifest, crcs))
        found = self.flaws() + ([] if quick else self._locate({p.file for p in damaged}))
        return problems + damaged + found, [name for name in same if crcs.get(name) is None]

    def _of_host(self, manifest: Manifest, files: Mapping[str, int]) -> set[str]:
        """Returns the files that the host of the job has added, as long as they were."""
        noted = noted_by_host(self.store, manifest.attempt)
        return {n for n, (nbytes, _) in noted.items() if files.get(n) == nbytes}

    def extra(self) -> list[str]:
        """Returns the files of a sealed directory that no save wrote.

        Files that look like a part of the checkpoint are reported as problems instead.
        """
        manifest = self.manifest
        if manifest is None or manifest.index is None:
            return []
        files = self.store.list_files(below=True)
        if others := of_other_attempts(manifest, files):
            self.notes.append(
                f"{len(others)} files are of other attempts at it, and are not read:"
                f" {printable(', '.join(others[:3]))}; ckpt prune removes them from a run"
            )
        known = {*manifest.files, manifest.index[0]}
        of_host = self._of_host(manifest, files)
        regular = [
            n
            for n in files
            if n not in known and (not is_ours(n) or n in of_host) and n != PIN and not note_of(n)
        ]
        return [*regular, *self.store.strays()]

    def hash(self, files: Mapping[str, int]) -> dict[str, int | None]:
        """Reads files and returns their CRC-64/NVME."""
        with self._bar("verify", sum(files.values())) as advance:
            return {
                **hash_files(
                    self.store, files, self._jobs, self._memory, self._scaled(advance), self.group
                )
            }

    def _scaled(self, advance: Callable[[int], None]) -> Callable[[int], None]:
        """Returns a function that advances the group's progress bar.

        Only rank 0 shows the bar. It counts each byte once per rank, because all ranks are about
        equally fast.
        """
        return lambda nbytes: advance(nbytes * self.group.size)

    def _locate(self, files: set[str]) -> list[Problem]:
        """Returns the entries that the damage in some files affects."""
        if not files or not self.catalog:
            return []
        problems, _ = self._examine(files)
        bad = {p.fqn for p in problems}
        assert self.manifest is not None
        sealed = self.manifest.tensors
        # tensors in no zip archive, or in one without checksums
        others = [t for t in self._whole_tensors(files) if t.fqn in sealed and t.fqn not in bad]
        fingerprints = self.fingerprints(others, self.format.locate(self.store, others))
        for tensor in others:
            if hex64(fingerprints.get(tensor.fqn, 0)) != sealed[tensor.fqn].fingerprint:
                extent = next(c.extent for c in tensor.chunks if c.extent.file in files)
                problems.append(
                    self._problem(
                        extent.file,
                        "is damaged: its fingerprint is not what the manifest says",
                        tensor.fqn,
                        extent,
                    )
                )
        objects = {
            fqn: item.extent
            for fqn, item in self.catalog.objects.items()
            if fqn in self.manifest.objects and fqn not in bad and item.extent.file in files
        }
        (crcs,) = self.hash_ranges(objects, crc64nvme)
        problems += [
            self._problem(
                extent.file, "is damaged: its checksum is not what the manifest says", fqn, extent
            )
            for fqn, extent in objects.items()
            if hex64(crcs[fqn]) != self.manifest.objects[fqn].crc64nvme
        ]
        return problems + self._doubtful_values()

    def _doubtful_values(self) -> list[Problem]:
        """Returns a problem for each plain value, if a pickle is not the sealed one."""
        assert self.manifest is not None and self.catalog is not None
        try:
            check_pickles(self.manifest, self.store, self.catalog)
        except IntegrityError as error:
            catalog = self.catalog
            extents = [(fqn, item.extent) for fqn, item in catalog.objects.items()]
            extents += [(t.fqn, c.extent) for t in catalog.tensors.values() for c in t.chunks[:1]]
            file = next(iter(self.manifest.pickles), "")
            return [
                self._problem(file, f"gives a value that cannot be trusted: {error}", fqn)
                for fqn, extent in extents
                if extent.file in catalog.memory_files
            ]
        return []

    def _whole_tensors(self, files: set[str] | None = None) -> list[TensorEntry]:
        """Returns the tensors without structural flaws; only those in `files`, if given."""
        assert self.catalog is not None
        broken = {f.fqn for f in self._flaws}
        return [
            t
            for t in self.catalog.tensors.values()
            if t.fqn not in broken
            and (files is None or any(c.extent.file in files for c in t.chunks))
        ]

    def fingerprints(self, tensors: Sequence[TensorEntry], located: Payloads) -> Mapping[str, int]:
        """Reads tensors and returns their fingerprints. `located` has the positions of payloads."""
        sink = HashSink()
        tiles = tile_bytes(self._memory, self._jobs)
        execute_shared(
            plan_values(tensors), located, tiles, self.store, sink, self._jobs, None, self.group
        )
        return sink.fingerprints.join()

    # ---- without ---------------------------------------------------------------------------------

    def examine_all(self, quick: bool) -> tuple[list[Problem], list[str]]:
        """Checks structure and zip records; returns problems, and files without full checksums."""
        problems = self.structure()
        if self.catalog is None:
            return problems, []
        if quick:
            return problems, sorted(self.catalog.file_sizes)
        found, unknown = self._examine(set(self.catalog.file_sizes))
        cached = self._compare_blobs([*unknown, safetensors.INDEX])
        found += [
            Problem(file, "is damaged: its hash is not the name of its blob")
            for file, is_damaged in cached.items()
            if is_damaged
        ]
        left = [file for file in unknown if file not in cached]
        return problems + found, [] if left and self._is_renamed() else left

    def _is_renamed(self) -> bool:
        """Tells whether this is one renamed file whose bytes match the manifest of its old name."""
        folder, name = folder_of(self.store)
        sizes = folder.list_files() if name else {}
        for note in sizes:
            kind, beside = note_of(note) or ("", "")
            if kind != MANIFEST or not beside or beside in sizes:
                continue
            with suppress(FormatError):  # a malformed manifest does not describe this file
                manifest = parse_manifest(read(folder, note), note)
                (file,) = manifest.files.values() if len(manifest.files) == 1 else (None,)
                if file is None or file.nbytes != sizes[name]:
                    continue
                if list(
                    compare_bytes(
                        manifest, {next(iter(manifest.files)): self.hash({name: file.nbytes})[name]}
                    )
                ):
                    self.notes.append(
                        f"{printable(note)} is the manifest of another file of this length, or of"
                        " this one before it changed"
                    )
                    continue
                self.notes.append(
                    f"it was renamed: {printable(note)} is its manifest, and its bytes are right;"
                    " ckpt seal writes a new one"
                )
                return True
        return False

    def _compare_blobs(self, files: Sequence[str]) -> dict[str, bool]:
        """Tells which files of a Hugging Face cache are damaged; the ranks share the work."""
        folder, _ = folder_of(self.store)
        sizes = {
            name: nbytes
            for name, nbytes in self.store.list_files().items()
            if name in files and folder.blob_name(name)
        }
        mine = list(sizes)[self.group.rank :: self.group.size]
        with self._bar("verify", sum(sizes.values())) as advance:
            found = find_damaged(folder, mine, self._jobs, self._scaled(advance)) if mine else {}
        return {
            name: bad
            for part in self.group.all_gather(found, "compare blobs")
            for name, bad in part.items()
        }

    def find_unread(self, lost: Container[str]) -> dict[str, str]:
        """Returns the tensors whose archives hold another kind than the index says, with the kind.

        For example a conjugated view.
        """
        found = {}
        whole = [tensor for tensor in self._whole_tensors() if tensor.fqn not in lost]
        try:
            self.format.locate(self.store, whole)
        except FormatError:
            for tensor in whole:
                try:
                    self.format.locate(self.store, [tensor])
                except FormatError as error:
                    found[tensor.fqn] = str(error)
        return found

    def look_for_code(self, lost: Container[str]) -> None:
        """Notes the objects that `dcp.load` would run code for: they ask for unknown types."""
        assert self.catalog is not None
        reader, found = ObjectReader(self.store), dict[str, str]()
        names = [fqn for fqn in self.catalog.objects if fqn not in lost]
        for fqn in names[:_MOST_OBJECTS]:
            others = UnreadValues()
            try:
                reader.leaves(self.catalog.objects[fqn], others)
            except UnsafePickleError as error:
                found[fqn] = str(error)
            except CheckpointError as error:
                if is_unreadable(error):
                    raise
                continue  # no archive of torch: an object of another tool
            if kinds := [printable(kind) for kind in others if "." in kind]:
                found[fqn] = ", ".join(kinds[:4])
        if found:
            some = ", ".join(f"{printable(fqn)!r}: {kind}" for fqn, kind in [*found.items()][:4])
            self.notes.append(
                f"{len(found)} of {len(names)} objects ask for unknown types ({some}); dcp.load"
                " would run code for them"
            )
        if len(names) > _MOST_OBJECTS:
            self.notes.append(
                f"only the first {_MOST_OBJECTS} of {len(names)} objects were searched for code"
            )

    def _examine(self, files: set[str]) -> tuple[list[Problem], list[str]]:
        """Compares the CRC-32 of every archive record in some files."""
        problems, unknown = [], set[str]()
        for batch in self.batches(
            {name: nbytes for name, nbytes in self.sizes.items() if name in files},
            only_archives=True,
        ):
            wrong, without, left = self.look_at_archives(batch)
            (crcs,) = self.hash_ranges(
                {key: record for key, (record, _) in left.items()}, crc32, store=batch.store
            )
            problems += wrong + self.compare_records(left, crcs)
            unknown |= without
        return problems, sorted(unknown | self.files_without_archives(files))

    def batches(
        self, sizes: Mapping[str, int], only_archives: bool = False, is_one: bool = False
    ) -> Iterator[ReadBatch]:
        """Yields the bytes of some files, each once.

        An object store is read in batches that are held in memory.

        If several processes share the work, each of them would fetch each batch. Then everything is
        one batch, which is not held.

        Args:
            sizes: bytes of each file.
            only_archives: leave out bytes outside of archives.
            is_one: yield everything as one batch for any store.
        """
        assert self.catalog is not None
        owners = {extent: fqn for fqn, extent in self._items() if extent.file in sizes}
        shared = [e for e in self.catalog.archives if e.file in sizes]
        archives = shared + [
            e for e, fqn in owners.items() if e.packing != RAW or self._is_object(fqn)
        ]
        if not self.is_remote or self.group.size > 1 or is_one:
            return one_batch(self.store, sizes, archives)
        return cut_batches(self.store, sizes, archives, only_archives)

    def files_without_archives(self, files: set[str]) -> set[str]:
        """Returns those of `files` with bytes of values outside of archives.

        Such bytes have no checksum.
        """
        assert self.catalog is not None
        bare = {
            e.file
            for fqn, e in self._items()
            if e.file in files and e.packing == RAW and not self._is_object(fqn)
        }
        # a format may make all values of a file in memory
        used = {e.file for _, e in self._items()} | {e.file for e in self.catalog.archives}
        sizes, entries = self.catalog.file_sizes, self.num_entries
        unused = {file for file in files if entries and file not in used and sizes.get(file)}
        return (bare | unused) - {e.file for e in self.catalog.archives}

    def look_at_archives(
        self, batch: ReadBatch
    ) -> tuple[list[Problem], set[str], dict[str, RecordCheck]]:
        """Checks archives around their records.

        Returns the problems, the files of archives without checksums, and the records whose CRC-32
        must still be compared.
        """
        problems: list[Problem] = []
        unknown: set[str] = set()
        left: dict[str, RecordCheck] = {}
        for found in examine(batch.store, batch.archives):
            if found.problem:
                problems += self._of_entries(found.problem, found.extent, found.extent)
            if not found.is_sealed:
                unknown.add(found.extent.file)
            left |= {f"{e.file}:{e.start}": RecordCheck(e, found.extent) for e in found.left}
        return problems, unknown, left

    def compare_records(
        self, left: Mapping[str, RecordCheck], crcs: Mapping[str, int]
    ) -> list[Problem]:
        """Returns a problem for each record whose CRC-32 differs from the one in its archive."""
        wrong = {key: record for key, (record, _) in left.items() if crcs[key] != record.crc32}
        if wrong and self.is_remote:  # it may have happened on the way
            self.store.close()
            crcs = {**crcs, **self.hash_ranges(wrong, crc32)[0]}
        problems: list[Problem] = []
        for key, record in wrong.items():
            if crcs[key] != record.crc32:
                what = f"is damaged: expected CRC-32 {record.crc32:08x}, got {crcs[key]:08x}"
                problems += self._of_entries(what, record, left[key].archive)
        return problems

    def _of_entries(self, what: str, where: Extent, archive: Extent) -> list[Problem]:
        """Returns a problem for each entry in a damaged range or archive; else for the file."""
        names = [
            fqn
            for fqn, e in self._items()
            if e == archive or (e.packing == RAW and where != archive and _is_part(e, where))
        ]
        return [self._problem(where.file, what, fqn, where) for fqn in names or [""]]

    def _items(self) -> Iterable[tuple[str, Extent]]:
        """Yields every extent that lies within its file, with the name of its entry."""
        assert self.catalog is not None
        sizes = self.catalog.file_sizes
        for tensor in self.catalog.tensors.values():
            yield from (
                (tensor.fqn, c.extent) for c in tensor.chunks if _is_within(c.extent, sizes)
            )
        for item in self.catalog.objects.values():
            yield from (
                (item.fqn, e) for e in (item.extent, *item.replicas) if _is_within(e, sizes)
            )

    def _is_object(self, fqn: str) -> bool:
        return self.catalog is not None and fqn in self.catalog.objects

    def hash_ranges(
        self, extents: Mapping[str, Extent], *checksums: Checksum, store: Store | None = None
    ) -> list[Mapping[str, int]]:
        """Reads ranges of files; returns for each kind of checksum the values by key.

        It reads from `store`, by default from the checkpoint's.
        """
        sink = HashSink(*checksums)
        with self._bar("verify", sum(e.nbytes for e in extents.values())) as advance:
            tiles = tile_bytes(self._memory, self._jobs)
            execute_shared(
                plan_objects(extents),
                {},
                tiles,
                store or self.store,
                sink,
                self._jobs,
                self._scaled(advance),
                self.group,
            )
        # the checksum of an empty range is 0
        return [{**dict.fromkeys(extents, 0), **found.join()} for found in sink.found]

    # ---- the values ------------------------------------------------------------------------------

    def scan(self, lost: set[str]) -> list[Finding]:
        """Scans the values of all readable tensors, and returns findings."""
        tensors, group = [t for t in self._whole_tensors() if t.fqn not in lost], self.group
        plan, sink = plan_values(tensors), ScanSink()
        share = shares(plan, group.size)[group.rank]
        taken = {t.fqn for t in in_share(plan, share)}
        with self._bar("scan", sum(t.nbytes for t in tensors)) as advance, group.phase("scan"):
            located = self.format.locate(self.store, [t for t in tensors if t.fqn in taken])
            batches = schedule(plan, located, *tile_bytes(self._memory, self._jobs), share)
            execute_batches(batches, self.store, sink, self._jobs, self._scaled(advance))
        sink.share(group)
        return sink.findings(tensors)


def _extra(manifest: Manifest, files: Iterable[str], of_host: Iterable[str]) -> list[Problem]:
    """Returns a problem for each file that looks like a part of the checkpoint but is not.

    A checkpoint in a single file may have other files beside it.
    """
    if manifest.index is None:
        return []
    files = list(files)
    # another attempt may be at work, or a killed one has left what this one replaced
    known = {*manifest.files, manifest.index[0], *of_other_attempts(manifest, files), *of_host}
    strange = [n for n in files if is_ours(n) and n not in known and not note_of(n)]
    return [Problem(n, "is no part of this checkpoint") for n in strange]


def _is_within(extent: Extent, sizes: Mapping[str, int]) -> bool:
    return extent.nbytes > 0 <= extent.start and extent.start + extent.nbytes <= sizes.get(
        extent.file, -1
    )


def _is_part(extent: Extent, record: Extent) -> bool:
    return (
        extent.file == record.file and record.start <= extent.start < record.start + record.nbytes
    )
