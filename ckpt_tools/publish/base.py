"""The protocols of publishing: a destination, and one attempt to write to it.

`local_destination` implements them for a path, `bucket` for a prefix of an object store.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from ckpt_tools.core.plan import Literal
from ckpt_tools.engine.partition import Regions
from ckpt_tools.publish.lock import RootLock
from ckpt_tools.storage import Capabilities, Store, WritableStore, Writer
from ckpt_tools.storage.object_info import ObjectInfo
from ckpt_tools.storage.s3.open_uploads import OpenUpload


class UploadNotes(NamedTuple):
    """What an attempt noted of its uploads.

    Attributes:
        attempt: its id.
        files: its data files.
        uploads: id and mark of the upload of each long file.
    """

    attempt: str
    files: Sequence[str]
    uploads: Mapping[str, tuple[str, str]]


class Attempt(Protocol):
    """Where one attempt gathers its files."""

    @property
    def attempt(self) -> str:
        """Its id."""
        ...

    @property
    def shelf(self) -> WritableStore:
        """Takes the files."""
        ...

    @property
    def folder(self) -> Path | None:
        """The directory on a disk, None in an object store."""
        ...

    def files(self) -> Store:
        """Returns what lies there, to be read."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Looks at what lies there now: bytes by name."""
        ...

    def sizes_of(self, names: Sequence[str]) -> Mapping[str, int]:
        """Looks at what lies there now of some files: bytes by name; there may be others in it."""
        ...

    @property
    def kept_nbytes(self) -> int:
        """Bytes of this process's parts of objects that an earlier try had sent; on a disk the
        journal knows.
        """
        ...

    def expect(self, files: Mapping[str, int], crcs: Mapping[str, int]) -> set[str]:
        """Goes on from what an earlier try has left there: returns which files are right already;
        the others may be written.

        Args:
            files: bytes of every data file that will be there.
            crcs: CRC-64/NVME of each, as far as known.

        Raises:
            StorageError: another attempt is at work there.
        """
        ...

    def share(self, regions: Regions) -> WritableStore:
        """Returns where one of several processes writes its regions of the files."""
        ...

    def copy_target(self, origin: Store) -> CopyTarget | None:
        """Returns a target for server-side copies from `origin`; None if the store cannot copy."""
        ...

    def prepare(self, files: Mapping[str, int]) -> None:
        """Prepares files that an earlier attempt has left, so that each can be written into.

        Args:
            files: bytes of every data file that will be there.
        """
        ...

    def begin_uploads(
        self, work: str, files: Mapping[str, int], earlier: UploadNotes | None
    ) -> Mapping[str, OpenUpload]:
        """Begins the uploads of all long files, or continues those of an earlier attempt.

        It notes them for the next attempt. A disk has none.

        Args:
            work: identifies the work.
            files: bytes of every data file that will be there.
            earlier: the attempt to continue.
        """
        ...

    def join_uploads(self, uploads: Mapping[str, OpenUpload]) -> None:
        """Takes the uploads that rank 0 has begun."""
        ...

    def sync(self) -> None:
        """Makes the names of this process's files durable."""
        ...

    def publish(self, manifest: Literal | None, index: Literal | None) -> list[str]:
        """Manifest, then the one step by which everything appears; returns remarks.

        Args:
            manifest: None for a copy of what has none.
            index: None where a single file is its own, or on a disk, where a directory needs none.

        Raises:
            StorageError: another writer was first, or the store refuses; nothing is visible then.
        """
        ...


class CopiedRange(NamedTuple):
    """A range of a new file that the store copies from a file of the source.

    Attributes:
        start, nbytes: bytes in the new file.
        file, file_start: where the bytes lie in the source.
    """

    start: int
    nbytes: int
    file: str
    file_start: int


class CopyTarget(Protocol):
    """An attempt whose store can copy ranges of the source's files on the server."""

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of the store."""
        ...

    def create(self, path: str, nbytes: int) -> Writer:
        """Starts a file of which nothing is copied."""
        ...

    def create_copied(
        self, path: str, nbytes: int, starts: Sequence[int], ranges: Iterable[CopiedRange]
    ) -> Writer:
        """Starts a file, and makes the store copy some ranges of it.

        Args:
            path: its name.
            nbytes: its bytes.
            starts: first byte of each part in which the file is sent or copied.
            ranges: the ranges to copy, each one part.
        """
        ...

    def copy_file(self, name: str, file: str, nbytes: int) -> None:
        """Makes the store copy a whole file."""
        ...


class Destination(Protocol):
    """A file or directory to be."""

    @property
    def url(self) -> str:
        """Path or URL."""
        ...

    def exists(self) -> bool:
        """Tells whether something is there, other than what attempts that never committed have
        left.
        """
        ...

    @property
    def can_resume(self) -> bool:
        """Tells whether an interrupted attempt can be continued here."""
        ...

    @property
    def names_attempts(self) -> bool:
        """Tells whether the names of data files contain the id of the attempt."""
        ...

    def find_uploads(self, work: str, single: str) -> UploadNotes | None:
        """Returns the newest attempt at a piece of work that noted its uploads, None on a disk.

        Args:
            work: identifies the work.
            single: the name of the one file, "" where there is an index.
        """
        ...

    def check(self, overwrite: bool, known: Container[str] = ()) -> None:
        """Refuses early what cannot be published to.

        Args:
            overwrite: a checkpoint that is there may be replaced.
            known: files of an earlier attempt, which count as nothing.

        Raises:
            StorageError: it exists, holds foreign files, or cannot be written to.
        """
        ...

    def name(self, file: str, attempt: str) -> str:
        """Returns the name under which an attempt's data file will lie."""
        ...

    @property
    def min_part_bytes(self) -> int:
        """Returns the least bytes of a copy on the server; 0 if the store never copies."""
        ...

    @property
    def needs_index(self) -> bool:
        """Tells whether a directory is visible file by file, until one last file makes it whole."""
        ...

    def claim(self) -> RootLock | None:
        """Claims the destination for one writer; None if a writer needs no claim.

        Raises:
            StorageError: another writer has it.
        """
        ...

    def marks(self, names: Iterable[str]) -> Mapping[str, ObjectInfo] | None:
        """Returns for files at the destination who wrote them; None if the store does not know."""
        ...

    def add_note(self, name: str, data: bytes, attempt: str) -> None:
        """Adds a small file to the checkpoint that exists at the destination.

        Raises:
            StorageError: a file of that name exists already, or it cannot be written.
        """
        ...

    def give_up_uploads(self, names: Container[str]) -> None:
        """Ends unfinished uploads of some files, which this process alone may write."""
        ...

    def check_room(self, nbytes: int) -> None:
        """Refuses early what there is no room for, where that can be known.

        Raises:
            StorageError: there is less.
        """
        ...

    def dead(self) -> list[Path]:
        """Returns the directories in which attempts gathered files until they died; nothing for an
        object store.
        """
        ...

    def made(self) -> tuple[Store, str]:
        """Returns where what is there lies, to be read, and its name if it is one file."""
        ...

    def stage(
        self,
        attempt: str,
        overwrite: bool = False,
        single: str = "",
        keeps: str = "",
        heir_of: Path | None = None,
    ) -> AbstractContextManager[Attempt]:
        """Yields the place of an attempt; what is left of it is removed on the way out.

        Args:
            attempt: its id.
            overwrite: take the place of what is there.
            single: the one file's name, where there is no index.
            keeps: leave what there is to the next one if a file there matches this glob, and go on
                with what an earlier try of the same attempt has left.
            heir_of: a dead attempt's directory, to be this one's.
        """
        ...

    @property
    def takes_parts(self) -> bool:
        """Tells whether several processes can write one file."""
        ...

    def join(self, attempt: str, single: str = "", shares_files: bool = False) -> Attempt:
        """Returns the place that another process has made.

        Args:
            attempt: its id.
            single: as for `stage`.
            shares_files: write into the files that the other one creates there.

        Raises:
            StorageError: this one does not see it.
        """
        ...
