"""A result in an object store: a prefix that its index publishes, or one object.

An object store has no rename. The names of data files contain the id of the attempt, so attempts
never touch each other's bytes. The manifest follows. The index comes last, on the condition that
there is none: at that instant, the checkpoint appears. A single file appears with the last request
of its upload. A copy keeps the names of its files, so each object carries the id of its owner.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_tools.core import ending
from ckpt_tools.core.plan import Literal
from ckpt_tools.engine.partition import Regions
from ckpt_tools.errors import CheckpointError, StorageError, printable
from ckpt_tools.formats.base import (
    LOCK,
    MANIFEST,
    UPLOADS,
    attempt_name,
    attempt_of,
    is_attempt_id,
    is_note,
    note_name,
    note_of,
    short_name,
)
from ckpt_tools.formats.registry import INDEXES
from ckpt_tools.publish.base import (
    OLD_FILES_STAY,
    Attempt,
    CopiedRange,
    CopyTarget,
    Destination,
    SharedStore,
    UploadNotes,
)
from ckpt_tools.publish.bucket.lease import Lease
from ckpt_tools.publish.bucket.leftovers import (
    files_of_attempts,
    files_of_copies,
    give_up_uploads,
    has_index,
)
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.publish.own_files import foreign_in, is_result
from ckpt_tools.publish.refusals import refuse_existing, refuse_foreign, refuse_incomplete
from ckpt_tools.storage import RemoteStore, Store, WritableStore, Writer, read
from ckpt_tools.storage.base import MAX_NOTE_BYTES
from ckpt_tools.storage.object_info import ObjectInfo
from ckpt_tools.storage.retries import appeared
from ckpt_tools.storage.s3.multipart import Upload, UploadOptions
from ckpt_tools.storage.s3.open_uploads import OpenUpload, list_parts
from ckpt_tools.storage.s3.parts import MAX_PARTS, MIN_PART_BYTES, part_starts

_UPLOAD_ID = re.compile(r"[!-~]{1,2000}")
_ASKERS = 16
_FEW = 16  # of so many objects each is asked for; a listing costs as much as a dozen questions
_COPY_BYTES = 64 << 20  # one request within a store


class RemoteDestination(Destination):
    """See `base.Destination`."""

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        self.url, self._options = url.rstrip("/"), options
        self._parent, _, self._name = self.url.rpartition("/")
        self._others: list[str] = []  # what was there when it was looked at
        self._removable: set[str] = set()  # of that, what a publication may remove

    def _look(self, store: RemoteStore, known: Container[str] = ()) -> tuple[list[str], bool]:
        """Returns the names in the prefix that are not in `known`, and whether one is an index."""
        self._others = [n for n in store.list_files() if n not in known]
        files = [n for n in self._others if n != LOCK]
        return files, has_index(files)

    def exists(self) -> bool:
        store = RemoteStore(self.url, self._options)
        files, is_there = self._look(store)
        if is_there or store.folders() or store.is_file():
            return True
        self._removable = files_of_attempts(store, files)
        return not self._removable.issuperset(files)

    def unfinished(self, names: Collection[str]) -> set[str]:
        store = RemoteStore(self.url, self._options)
        left = files_of_attempts(store, names) | files_of_copies(store, names)
        self._removable |= left
        return left

    def _changed_by_others(self, store: RemoteStore, names: Sequence[str]) -> list[str]:
        """Returns the names without files that an attempt at this very checkpoint has written.

        An attempt that was killed may have replaced a file that the manifest lists.
        """
        listed: Container[str] = ()
        with suppress(CheckpointError):
            manifest = find_manifest(store) if names else None
            listed = manifest.files if manifest is not None else ()
        infos = store.object_infos(n for n in names if n in listed)
        return [n for n in names if n not in infos or not infos[n].owner]

    def check(self, overwrite: bool, known: Container[str] = ()) -> None:
        """See `Destination.check`; `known` are the files of an earlier attempt."""
        store = RemoteStore(self.url, self._options)
        if _is_single(store):
            folder = RemoteStore(self._parent, self._options)
            files, foreign = [self._name], [] if is_result(folder, self._name) else [self._name]
        else:
            files, is_there = self._look(store, known)
            left = set() if is_there else files_of_attempts(store, files)
            self._removable, files = left, [n for n in files if n not in left]
            foreign = foreign_in(store, files) if files else []
            if is_there:  # beside the checkpoint there may be work of attempts that failed
                left = files_of_attempts(store, foreign)
                foreign = self._changed_by_others(store, [n for n in foreign if n not in left])
            foreign += store.folders()
        if (files or foreign) and not overwrite:
            raise refuse_existing(self.url, can_be_replaced=not foreign)
        if foreign:
            raise refuse_foreign(self.url, foreign)
        self._removable = self._removable | set(files)

    def name(self, file: str, attempt: str) -> str:
        return attempt_name(file, attempt)

    def right_files(
        self, attempt: str, files: Mapping[str, int], crcs: Mapping[str, int]
    ) -> set[str]:
        return _right_files(RemoteStore(self.url, self._options), attempt, files, crcs)

    def existing_result(self) -> tuple[Store, str]:
        store = RemoteStore(self.url, self._options)
        return (
            (RemoteStore(self._parent, self._options), self._name)
            if _is_single(store)
            else (store, "")
        )

    def identity(self, name: str) -> tuple[int | str, ...]:
        store = RemoteStore(self.url, self._options)
        store.list_files()
        return (store.version(name),)

    @property
    def can_resume(self) -> bool:
        return self.takes_parts

    names_attempts = True

    def find_uploads(self, work: str, single: str) -> UploadNotes | None:
        store = RemoteStore(self._parent if single else self.url, self._options)
        files = store.list_files()
        notes = [n for n in files if note_of(n) == (UPLOADS, short_name(single))]
        marked = store.object_infos(n for n in notes if files[n] <= MAX_NOTE_BYTES)
        for name in sorted(marked, key=lambda n: str(store.modified(n)), reverse=True):
            found = _try(read(store, name), work) if marked[name].is_marked else None
            if found is None or name != note_name(UPLOADS, found.attempt, single):
                continue
            if has_index(files) and note_name(MANIFEST, found.attempt, single) in files:
                continue  # that attempt has committed
            there = store.object_infos(n for n in found.files if n in files and not has_index([n]))
            own = [n for n, about in there.items() if about.owner == found.attempt]
            return found._replace(files=own)
        return None

    needs_index = True

    @property
    def min_part_bytes(self) -> int:
        return MIN_PART_BYTES

    def claim(self) -> Lease:
        return Lease(self.url, self._options)

    def object_infos(self, names: Iterable[str]) -> Mapping[str, ObjectInfo] | None:
        store = RemoteStore(self.url, self._options)
        return store.object_infos(names) if store.s3 is not None else None

    def add_note(self, name: str, data: bytes, attempt: str) -> None:
        del attempt
        is_file = _is_single(RemoteStore(self.url, self._options))
        folder = RemoteStore(self._parent if is_file else self.url, self._options)
        folder.put(name, data, is_exclusive=True)

    def give_up_uploads(self, names: Container[str]) -> None:
        give_up_uploads(RemoteStore(self.url, self._options), names)

    @contextmanager
    def stage(
        self,
        attempt: str,
        overwrite: bool = False,
        single: str = "",
        kept_glob: str = "",
        takes_over: Path | None = None,
    ) -> Iterator[RemoteAttempt]:
        del takes_over
        staged = RemoteAttempt(
            RemoteStore(self._parent if single else self.url, self._options),
            attempt,
            overwrite,
            single,
            self._others,
            self._removable,
        )
        try:
            yield staged
        finally:
            if not staged.is_published:
                staged.give_up(bool(kept_glob))

    @property
    def takes_parts(self) -> bool:
        return RemoteStore(self.url, self._options).s3 is not None

    def join(self, attempt: str, single: str = "", shares_files: bool = False) -> RemoteAttempt:
        del shares_files
        return RemoteAttempt(
            RemoteStore(self._parent if single else self.url, self._options), attempt, False, single
        )


def _is_single(store: RemoteStore) -> bool:
    """Tells whether the result at a place is one object. A checkpoint below it hides the object."""
    return not has_index(store.list_files()) and store.is_file()


def _try(data: bytes, work: str) -> UploadNotes | None:
    """Returns the notes on uploads; None if they are malformed or belong to other work."""
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        body = json.loads(data)
        if body["work"] == work and is_attempt_id(body["attempt"]):
            uploads = {
                str(file): (str(upload_id), str(mark))
                for file, (upload_id, mark) in body["uploads"].items()
            }
            if all(_UPLOAD_ID.fullmatch(upload_id) for upload_id, _ in uploads.values()):
                return UploadNotes(body["attempt"], list(map(str, body["files"])), uploads)
    return None


def _right_files(
    store: RemoteStore, attempt: str, files: Mapping[str, int], crcs: Mapping[str, int]
) -> set[str]:
    """Returns the names of the objects with the expected size and checksum.

    A store that computes no CRC-64 has only that of the writer. It counts for objects of the same
    attempt.
    """
    sizes = store.list_files(below=True)
    there = store.object_infos(name for name in files if name in sizes)
    return {
        n
        for n, about in there.items()
        if sizes[n] == files[n]
        and n in crcs
        and about.crc64 == crcs[n]
        and (not about.is_claimed or about.owner == attempt)
    }


class RemoteAttempt(Attempt):
    """See `base.Attempt`."""

    def __init__(
        self,
        store: RemoteStore,
        attempt: str,
        overwrite: bool,
        single: str,
        others: Sequence[str] = (),
        removable: Container[str] = (),
    ) -> None:
        """Stores where the files go, the names that existed before, and those that may be removed.

        See `Destination.stage`.
        """
        self.store, self.attempt, self._others = store, attempt, others
        self._removable = removable
        self._overwrite, self._single = overwrite, single
        self._manifest, self._note, self.is_published = "", "", False
        self._index: Literal | None = None
        self._expected: set[str] = set()  # what belongs to the result, whatever its name looks like
        self._crcs: Mapping[str, int] = {}
        self._replaces = ""  # the version of what is replaced, so that only one of two does it
        if overwrite:
            there = store.list_files()
            self._replaces = store.version(next((n for n in (single, *INDEXES) if n in there), ""))
        self.folder = None
        # uploads that are left to the next try if this one fails
        self.begun: Mapping[str, OpenUpload] = {}
        # nothing to replace
        self._is_exclusive = not overwrite or (store.s3 is not None and not self._replaces)
        self.capabilities = store.capabilities

    @property
    def writable(self) -> WritableStore:
        return self

    def is_single(self, path: str) -> bool:
        """Tells whether a file is all of the result, so that its last request publishes it."""
        return path == self._single

    def create(self, path: str, nbytes: int) -> Writer:
        """Starts an object. The only object of a result waits for `publish`."""
        return self.store.create(path, nbytes, self.how(path))

    def create_shared(
        self, path: str, nbytes: int, mine: tuple[int, int], upload_id: str
    ) -> Upload:
        """Starts an object of which several processes send parts, and continues the upload that one
        of them has begun.
        """
        upload = self.store.create(
            path, nbytes, replace(self.how(path), mine=mine, upload_id=upload_id)
        )
        assert isinstance(upload, Upload)
        return upload

    def how(self, path: str) -> UploadOptions:
        """Returns the options of an upload: a new object, or over a file of an earlier attempt."""
        crc = self._crcs.get(path)
        begun = self.begun.get(path)
        if path == self._single:
            return UploadOptions(
                None, True, self._is_exclusive, self._replaces, crc, self.attempt, begun=begun
            )
        if attempt_of(path) == self.attempt[:8]:
            return UploadOptions(None, False, False, "", crc, self.attempt, begun=begun)
        there = self._replaceable(path)
        is_new = not there and not self._replaces
        return UploadOptions(None, False, is_new, there, crc, self.attempt, begun=begun)

    def _replaceable(self, path: str) -> str:
        """Returns the version of an object that this attempt may replace; "" for none.

        Another attempt may use the same name. So the object was there at the start and is no file
        of somebody else, or an earlier try of this very attempt wrote it.
        """
        if path in self._expected:
            return self.store.version(path)
        is_own = path in self._removable or self.store.object_info(path).owner == self.attempt
        return self.store.version(path) or self.store.current_version(path) if is_own else ""

    def begin_uploads(
        self, work: str, files: Mapping[str, int], earlier: UploadNotes | None
    ) -> Mapping[str, OpenUpload]:
        store, s3 = self.store, self.store.s3
        assert s3 is not None

        def one(name: str) -> OpenUpload:
            path, url = f"{store.root}/{name}", f"{store.url}/{name}"
            found = earlier.uploads.get(name) if earlier else None
            parts = list_parts(s3, url, path, found[0]) if found else None
            if found and parts is not None:
                return OpenUpload(*found, parts)
            upload = Upload(s3, path, url, files[name], self.how(name))
            return OpenUpload(upload.begin(), upload.mark, {})

        large = [name for name, nbytes in files.items() if len(part_starts(nbytes)) > 1]
        with ThreadPoolExecutor(_ASKERS, "ckpt-begin") as pool:
            self.begun = dict(zip(large, pool.map(one, large), strict=True))
        uploads = {name: (begun.upload_id, begun.mark) for name, begun in self.begun.items()}
        notes = {"work": work, "attempt": self.attempt, "files": list(files), "uploads": uploads}
        self._note = note_name(UPLOADS, self.attempt, self._single)
        store.put(self._note, json.dumps(notes).encode())
        return self.begun

    def join_uploads(self, uploads: Mapping[str, OpenUpload]) -> None:
        self.begun = uploads

    def share(self, regions: Regions) -> SharedStore:
        return SharedUploads(self, regions)

    def identity(self, name: str) -> tuple[int | str, ...]:
        store = self.store.fresh()
        store.list_files()
        return (store.version(name),)

    def copy_target(self, origin: Store) -> CopyTarget | None:
        source = self.store.copy_source(origin)
        return BucketCopies(self, source) if source is not None else None

    @property
    def kept_nbytes(self) -> int:
        return sum(w.kept_nbytes for w in self.store.written.values() if isinstance(w, Upload))

    def keep_matching(self, files: Mapping[str, int], crcs: Mapping[str, int]) -> set[str]:
        self._expected, self._crcs = set(files), crcs
        several = {name: n for name, n in files.items() if name != self._single}
        return _right_files(self.store, self.attempt, several, crcs)

    def files(self) -> Store:
        return self.store

    def sizes(self) -> Mapping[str, int]:
        return self.store.fresh().list_files()

    def sizes_of(self, names: Sequence[str]) -> Mapping[str, int]:
        few = len(names) <= _FEW
        return self.store.sizes_of(names) if few else self.store.fresh().list_deep()

    def publish(
        self, manifest: Literal | None, index: Literal | None, files: Mapping[str, int]
    ) -> list[str]:
        target = self._single if index is None else index.file
        kinds = [
            name
            for name in self._others
            if name in INDEXES and index is not None and name != index.file
        ]
        if kinds:
            what = (
                f"a checkpoint of another kind is there, with {kinds[0]}, which no store replaces"
                " in one step"
            )
            raise StorageError(
                f"{what} ({printable(self.store.url)})",
                hint="choose another destination, or remove it first",
            )
        if not self._overwrite:
            self._check_unchanged(target)
        writer = self.store.written.get(target)
        is_sure = False
        if manifest is not None:
            self._manifest = manifest.file
            self.store.put(manifest.file, manifest.data)
            is_sure = self.store.excludes(manifest.file, manifest.data, writer)
        visible = {name: nbytes for name, nbytes in files.items() if name != self._single}
        refuse_incomplete(visible, self.sizes_of, self.store.url)
        if self._overwrite or not is_sure:
            self._check_unchanged(target)  # as late as possible
        if index is None:
            assert writer is not None
            writer.complete()
        else:
            self._index = index
            self.store.put(index.file, index.data, self._is_exclusive, self._replaces)
            # a copy of what has no manifest
            is_sure = is_sure or self.store.excludes(index.file, index.data, None)
        self.is_published = True
        ending.published()
        notes = self._tidy(index)
        where = "/".join(self.store.url.split("/")[:3])
        unsure = (
            f"{printable(where)} does not refuse a second writer: one at the same instant would not"
            " be noticed"
        )
        return notes if is_sure else [*notes, unsure]

    def _check_unchanged(self, target: str) -> None:
        """Refuses to commit if another writer was faster.

        Raises:
            StorageError: there is a result where none was at the start, or another one.
        """
        if not self._overwrite:
            if self.store.has(target):
                raise appeared(f"{self.store.url}/{target}")
        elif self._replaces and self.store.current_version(target) != self._replaces:
            raise StorageError(
                "another writer replaced the destination while this was at work:"
                f" {printable(self.store.url)}/{printable(target)}",
                hint="look at its result, and start again if you still want to replace it",
            )

    def _tidy(self, index: Literal | None) -> list[str]:
        """Removes what other attempts at the same target left: none of them can be committed any
        more; returns remarks.
        """
        try:
            if index is None:
                stale = [
                    n for n in self.sizes() if n != self._manifest and is_note(n, self._single)
                ]
            else:
                kept = (*INDEXES, index.file, self._manifest)
                stale = [
                    name
                    for name in self._others
                    if name in self._removable
                    and name not in self._expected
                    and name not in self.store.written
                    and name not in kept
                    and attempt_of(name) != self.attempt[:8]
                ]
            about = {} if self._overwrite else self.store.object_infos(stale)
            old = [name for name in stale if self._overwrite or about[name].is_marked]
            self.store.remove(sorted({*old, self._note} - {""}))
        except CheckpointError as error:
            return [f"{OLD_FILES_STAY}: {error}"]
        return []

    def give_up(self, is_kept: bool) -> None:
        """Removes the files of this attempt, unless it was committed after all.

        A reply can be lost, and a signal can come late.
        """
        for writer in self.store.written.values():
            writer.abort()
        try:
            if is_kept or self._is_committed():
                return
            known = [
                name
                for name in (*self.store.written, self._manifest)
                if attempt_of(name) == self.attempt[:8] or name == self._manifest
            ]
            found = (
                []
                if self._single
                else [name for name in self.sizes() if attempt_of(name) == self.attempt[:8]]
            )
            # a listing may be late, and not show what was just written
            self.store.remove(sorted({*known, *found} - {""}))
        except CheckpointError:
            return  # nobody sees it; `ckpt prune` finds it

    def _is_committed(self) -> bool:
        store = self.store.fresh()
        if self._single:
            writer = self.store.written.get(self._single)
            return writer is not None and writer.is_complete
        index = self._index  # in its text are the names of this attempt's files
        if index is None or store.list_files().get(index.file) != len(index.data):
            return False
        return read(store, index.file) == index.data


class BucketCopies:
    """See `CopyTarget`: copies within one S3."""

    block_nbytes = 0

    def __init__(self, attempt: RemoteAttempt, source: RemoteStore) -> None:
        self._attempt, self._source = attempt, source
        self.capabilities = attempt.capabilities
        self.create = attempt.create

    def create_copied(
        self, path: str, nbytes: int, starts: Sequence[int], ranges: Iterable[CopiedRange]
    ) -> Writer:
        how = replace(self._attempt.how(path), starts=starts)
        upload = self._attempt.store.create(path, nbytes, how)
        assert isinstance(upload, Upload)
        source = self._source
        with _aborting(upload):
            for start, size, file, file_start in ranges:
                upload.copy(start, size, f"{source.root}/{file}", file_start, source.version(file))
        return upload

    def copy_file(self, name: str, file: str, nbytes: int) -> None:
        attempt, source = self._attempt, self._source
        if 0 < nbytes <= _COPY_BYTES and not attempt.is_single(name):
            how = replace(attempt.how(name), starts=(0,))
            upload = attempt.store.create(name, nbytes, how)
            assert isinstance(upload, Upload)
            with _aborting(upload):
                upload.copy_whole(f"{source.root}/{file}", source.version(file))
                upload.finish()
            return
        starts = range(0, nbytes, max(_COPY_BYTES, -(-nbytes // MAX_PARTS)))
        ranges = [CopiedRange(at, min(starts.step, nbytes - at), file, at) for at in starts]
        writer = self.create_copied(name, nbytes, starts, ranges)
        with _aborting(writer):
            writer.finish()


@contextmanager
def _aborting(writer: Writer) -> Iterator[None]:
    """Gives the upload up if the block fails: the file may be written in another way."""
    try:
        yield
    except BaseException:
        writer.abort()
        raise


class SharedUploads:
    """The part of an attempt that one of several processes writes: some parts of some files."""

    def __init__(self, staged: RemoteAttempt, regions: Regions) -> None:
        """Takes where the files go, and which bytes of each this process sends."""
        self._staged, self._regions = staged, regions
        self.capabilities = staged.capabilities
        self._upload_ids: Mapping[str, str] = {}
        self._begun: dict[str, Upload] = {}

    def create(self, path: str, nbytes: int) -> Writer:
        """Starts an object, or continues one that another process has begun."""
        if self._regions[path] == (0, nbytes):
            return self._staged.create(path, nbytes)
        upload = self._begun[path] = self._staged.create_shared(
            path, nbytes, self._regions[path], self._upload_ids.get(path, "")
        )
        return upload

    def begin(self) -> dict[str, str]:
        """Begins the shared uploads, and returns their ids for the other processes."""
        return {path: upload.begin() for path, upload in self._begun.items()}

    def join(self, ids: Mapping[str, str]) -> None:
        """Takes the ids of the shared uploads."""
        self._upload_ids = ids
