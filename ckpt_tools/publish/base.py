"""What every place to publish to can do: a destination, and one attempt to write to it.

A method that only one kind of place needs has a default here.

`disk.destination` implements them for a path, `bucket.destination` for a prefix of an object store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ckpt_tools.core.plan import Literal, Target
from ckpt_tools.engine.partition import Regions
from ckpt_tools.errors import StorageError
from ckpt_tools.storage import Capabilities, Store, WritableStore, Writer
from ckpt_tools.storage.object_info import ObjectInfo

if TYPE_CHECKING:
    from ckpt_tools.engine.sinks import WriteSink
    from ckpt_tools.storage.s3.open_uploads import OpenUpload


class NoLinksError(StorageError):
    """A store can neither link nor copy files itself, whichever they are."""


OLD_FILES_STAY = "files of what was there before could not be removed"  # begins a remark


class Leftover(NamedTuple):
    """Unfinished work of a dead job: a path, or the URL of an object or upload, and its kind.

    `problem` tells why it could not be looked at, or removed; "" if it was removed. `nbytes` are
    the bytes that were freed; None if they are unknown, as of an upload.
    """

    url: str
    what: str
    problem: str = ""
    nbytes: int | None = None


class RootLock(Protocol):
    """The right to save to a root."""

    @property
    def written(self) -> bytes:
        """Returns the contents of the lock's file, which the other ranks compare."""
        ...

    @property
    def is_inherited(self) -> bool:
        """Tells whether the holder before died, so that its unfinished work belongs to nobody."""
        ...

    def check(self) -> None:
        """Makes sure that this job still holds the root.

        Raises:
            StorageError: another job has the root.
        """
        ...

    def release(self) -> None:
        """Gives up the right."""
        ...


class UploadNotes(NamedTuple):
    """The notes of an attempt on its uploads.

    Attributes:
        attempt: its id.
        files: its data files that are there.
        uploads: id and mark of the upload of each long file.
    """

    attempt: str
    files: Sequence[str]
    uploads: Mapping[str, tuple[str, str]]


class SharedStore(WritableStore, Protocol):
    """The files of an attempt, for one of several processes that write them together."""

    def begin(self) -> Mapping[str, str]:
        """Begins the files that several processes write, and returns their ids for the others."""
        ...

    def join(self, ids: Mapping[str, str]) -> None:
        """Takes the ids from the process that began the files. Call it before `create`."""
        ...


class Attempt(ABC):
    """The files of one attempt, until they are published.

    Attributes:
        attempt: its id.
        folder: the directory on a disk; None in an object store.
    """

    attempt: str
    folder: Path | None

    @property
    @abstractmethod
    def writable(self) -> WritableStore:
        """Returns the store that accepts the files."""

    def sink(self, target: Target) -> WriteSink | None:
        """Returns the sink that takes the values instead of files; None if the files take them."""
        del target
        return None

    @abstractmethod
    def files(self) -> Store:
        """Returns the store of the files, to read them."""

    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """Lists the files that exist now, with their bytes."""

    @abstractmethod
    def sizes_of(self, names: Sequence[str]) -> Mapping[str, int]:
        """Returns the bytes of some files, as far as they exist now. Others may be included."""

    @property
    def kept_nbytes(self) -> int:
        """Returns the bytes of this process's parts of uploads that an earlier attempt had sent.

        On a disk, the journal has this number instead.
        """
        return 0

    @abstractmethod
    def keep_matching(self, files: Mapping[str, int], crcs: Mapping[str, int]) -> set[str]:
        """Keeps the files of an earlier attempt that are right, and returns their names.

        The others may be written: on a disk they are removed.

        Args:
            files: bytes of every data file of the result.
            crcs: CRC-64/NVME of each, as far as known.

        Raises:
            StorageError: another attempt is at work there.
        """

    def share(self, regions: Regions) -> SharedStore | None:
        """Returns the store into which one of several processes writes its regions.

        Returns None if every process may write anywhere in `writable`.
        """
        del regions
        return None

    def copy_target(self, origin: Store) -> CopyTarget | None:
        """Returns a target for the store's own copies; None if it cannot copy from `origin`."""
        del origin
        return None

    def identity(self, name: str) -> tuple[int | str, ...]:
        """Returns what stays while nobody changes a written file; () if it is unknown."""
        del name
        return ()

    def take_over(
        self, origin: Store, file: str, name: str, nbytes: int, identity: tuple[int | str, ...]
    ) -> str:
        """Makes a file of another checkpoint a file of this one. Its bytes do not pass here.

        Args:
            origin: the other checkpoint.
            file: its name there.
            name: its name here.
            nbytes: its bytes.
            identity: of the file, from the attempt that has written it. With (), a bucket does not
                compare it.

        Returns:
            How it was done: "linked", "cloned" or "copied".

        Raises:
            NoLinksError: this store can never do it.
            StorageError: it cannot do it now, or the file has changed. The reason has no path, so
                that it can be told once.
        """
        target = self.copy_target(origin)
        if target is None:
            raise NoLinksError("the store makes no copies itself")
        origin.list_files()  # with their versions
        if identity and identity != (origin.version(file),):
            raise StorageError("the file of the step before has changed, or is gone")
        target.copy_file(name, file, nbytes)
        return "copied"

    def prepare(self, files: Mapping[str, int]) -> None:
        """Prepares files that an earlier attempt has left, so that each can be written into.

        Args:
            files: bytes of every data file of the result.
        """

    def begin_uploads(
        self, work: str, files: Mapping[str, int], earlier: UploadNotes | None
    ) -> Mapping[str, OpenUpload]:
        """Begins the uploads of all long files, or continues those of an earlier attempt.

        It notes them for the next attempt. A disk has none.

        Args:
            work: identifies the work.
            files: bytes of every data file of the result.
            earlier: the attempt to continue.
        """
        del work, files, earlier
        return {}

    def join_uploads(self, uploads: Mapping[str, OpenUpload]) -> None:
        """Continues the uploads that rank 0 has begun."""

    def sync(self) -> None:
        """Makes the names of this process's files durable."""

    @abstractmethod
    def publish(
        self, manifest: Literal | None, index: Literal | None, files: Mapping[str, int]
    ) -> list[str]:
        """Writes the manifest, and then makes the result visible in one step.

        Returns notes for the user.

        Args:
            manifest: None for a copy of a checkpoint without one.
            index: None for a single file, and on a disk for a directory that needs no index.
            files: the bytes of each other file of the result, all of which must be there.

        Raises:
            StorageError: another writer was first, a file is missing, or the store refuses. Nothing
                is visible then.
        """


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
    """An attempt whose store can copy ranges of the source's files without this process."""

    @property
    def block_nbytes(self) -> int:
        """Returns of what both ends of a range are multiples, in both files.

        Returns 0 if the ranges are parts of an upload.
        """
        ...

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of the store."""
        ...

    def create(self, path: str, nbytes: int) -> Writer:
        """Starts a file without copied ranges."""
        ...

    def create_copied(
        self, path: str, nbytes: int, starts: Sequence[int], ranges: Iterable[CopiedRange]
    ) -> Writer:
        """Starts a file, and makes the store copy some ranges of it.

        Args:
            path: its name.
            nbytes: its bytes.
            starts: first byte of each part in which the file is sent or copied. A disk needs none.
            ranges: the ranges to copy, each one part.
        """
        ...

    def copy_file(self, name: str, file: str, nbytes: int) -> None:
        """Makes the store copy a whole file."""
        ...


class Destination(ABC):
    """The file or directory that an operation will write.

    Attributes:
        url: its path or URL.
        names_attempts: the names of data files contain the id of the attempt.
        needs_index: readers see each file at once, and the index makes it a checkpoint.
        takes_boxes: a process may bring any box of a tensor, which no file has in one piece.
    """

    url: str
    names_attempts = False
    needs_index = False
    takes_boxes = False

    @abstractmethod
    def exists(self) -> bool:
        """Tells whether a result exists. Leftovers of dead attempts do not count."""

    @property
    def can_resume(self) -> bool:
        """Tells whether an interrupted attempt can be continued here."""
        return True

    def find_uploads(self, work: str, single: str) -> UploadNotes | None:
        """Returns the notes of the newest attempt at the same work; None on a disk.

        Args:
            work: identifies the work.
            single: the name of the only file; "" if the result has an index.
        """
        del work, single
        return None

    @abstractmethod
    def check(self, overwrite: bool, known: Container[str] = ()) -> None:
        """Refuses early a destination to which nothing can be published.

        Args:
            overwrite: an existing checkpoint may be replaced.
            known: files of an earlier attempt, which do not count as a result.

        Raises:
            StorageError: it exists, holds foreign files, or cannot be written to.
        """

    def name(self, file: str, attempt: str) -> str:
        """Returns the name of a data file of an attempt."""
        del attempt
        return file

    @property
    def min_part_bytes(self) -> int:
        """Returns the least bytes of a copy on the server; 0 if the store never copies."""
        return 0

    def claim(self) -> RootLock | None:
        """Claims the destination for one writer; None if a writer needs no claim.

        Raises:
            StorageError: another writer has it.
        """
        return None

    def unfinished(self, names: Collection[str]) -> set[str]:
        """Returns which files at the destination are the work of interrupted attempts and copies.

        Publication removes them. The caller makes sure that there is no index.
        """
        del names
        return set()

    def object_infos(self, names: Iterable[str]) -> Mapping[str, ObjectInfo] | None:
        """Returns for files at the destination who wrote them; None if the store does not know."""
        del names
        return None

    @abstractmethod
    def add_note(self, name: str, data: bytes, attempt: str) -> None:
        """Adds a small file to the checkpoint that exists at the destination.

        Raises:
            StorageError: a file of that name exists already, or it cannot be written.
        """

    def give_up_uploads(self, names: Container[str]) -> None:
        """Ends unfinished uploads of some files, which this process alone may write."""

    def check_room(self, nbytes: int) -> None:
        """Refuses early a result for which there is no room, if the store tells its room.

        Raises:
            StorageError: there is less room than `nbytes`.
        """

    def dead_attempts(self) -> list[Path]:
        """Returns the staging directories of dead attempts; none for an object store."""
        return []

    @abstractmethod
    def right_files(
        self, attempt: str, files: Mapping[str, int], crcs: Mapping[str, int]
    ) -> set[str]:
        """Returns the files that an earlier attempt with this id has left, and that are right.

        It changes nothing.

        Args:
            attempt: its id.
            files: bytes of every data file of the result.
            crcs: CRC-64/NVME of each, as far as known.
        """

    @abstractmethod
    def existing_result(self) -> tuple[Store, str]:
        """Returns the store of the existing result, and its name if it is one file, else ""."""

    def identity(self, name: str) -> tuple[int | str, ...]:
        """Returns what stays while nobody changes a file of the existing result.

        Raises:
            StorageError: there is no such file, or the store cannot be reached.
        """
        del name
        return ()

    @abstractmethod
    def stage(
        self,
        attempt: str,
        overwrite: bool = False,
        single: str = "",
        kept_glob: str = "",
        takes_over: Path | None = None,
    ) -> AbstractContextManager[Attempt]:
        """Yields a new attempt. Afterwards, its leftovers are removed.

        Args:
            attempt: its id.
            overwrite: replace an existing result.
            single: the name of the only file, if the result has no index.
            kept_glob: if a file matches, the files stay for the next attempt with this id.
                Files of an earlier attempt with this id are continued.
            takes_over: the directory of a dead attempt, which this one takes over.
        """

    @property
    def takes_parts(self) -> bool:
        """Tells whether several processes can write one file."""
        return True

    @abstractmethod
    def join(self, attempt: str, single: str = "", shares_files: bool = False) -> Attempt:
        """Returns the attempt that another process has begun.

        Args:
            attempt: its id.
            single: as for `stage`.
            shares_files: write into the files that the other process creates.

        Raises:
            StorageError: this process does not see it.
        """
