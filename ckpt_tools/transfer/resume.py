"""What a transfer leaves behind for a next try, and what it finds of an earlier one: `--resume`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_tools.core.plan import Plan
from ckpt_tools.engine.run import BatchResult
from ckpt_tools.engine.schedule import tile_bytes
from ckpt_tools.errors import CheckpointError, IntegrityError, PlanError, StorageError
from ckpt_tools.publish import journal, manifest
from ckpt_tools.publish.base import Attempt, Destination, LocalAttempt
from ckpt_tools.publish.bucket import RemoteAttempt, RemoteDestination, UploadNotes
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage import Store, is_url


class ResumeState:
    """One member's: the journal that it keeps on a disk, always, and what earlier ones tell, where
    that is wanted.

    Attributes:
        past: what is there already, on a disk.
        kept_nbytes: bytes of what is written that were there already.
        is_done: everything is: the destination is what the work would make.
        work: what the work is called, "" where it has no name.
        keeps: for `Destination.stage`: what makes it worth to leave the place to a next try.
    """

    def __init__(self, team: Group, is_wanted: bool) -> None:
        self.past, self.keeps = journal.FinishedTiles(()), journal.GLOB if is_wanted else ""
        self.is_done, self.work, self.kept_nbytes = False, "", 0
        self._team, self._is_wanted = team, is_wanted
        self._refusal: StorageError | None = None
        self._overwrite = False
        self._earlier: journal.DeadAttempt | None = None
        self._try: UploadNotes | None = None
        self._journal: journal.Journal | None = None

    def check(self, dst: Destination, overwrite: bool) -> None:
        """Refuses early what cannot be written, or gone on with; of what is there already
        `look_back` finds out more.

        Raises:
            PlanError: the destination is in an object store that cannot go on with what was begun.
            StorageError: see `Destination.check`.
        """
        if self._is_wanted and is_url(dst.url) and not dst.takes_parts:
            hint = (
                "leave --resume out, or write to a disk and then ckpt copy, which goes on from"
                " where it was"
            )
            raise PlanError(
                "what was begun in this store cannot be gone on with: it is no S3", hint=hint
            )
        self._overwrite = overwrite
        try:
            dst.check(overwrite)
        except StorageError as error:
            if not self._is_wanted or not dst.exists():
                raise
            self._refusal = error

    def look_back(
        self, dst: Destination, operation: str, source: Store, changes: str, plan: Plan
    ) -> str:
        """Finds out what the work is called, and an earlier attempt at it, if that is wanted;
        returns its id if that can be taken over.

        Raises:
            StorageError: something else is at the destination.
        """
        with self._team.phase("look back"):
            if self._team.rank == 0 and (self._is_wanted or not is_url(dst.url)):
                self.work = journal.identify(operation, plan, source, changes)
            if self._team.rank == 0 and self._is_wanted and self.work:
                self.is_done = self._refusal is not None and _is_made_by(dst, self.work)
                self._earlier = journal.find(dst.dead(), self.work)
                single = next(iter(plan.target.file_sizes)) if plan.target.index is None else ""
                self._try = (
                    dst.find_try(self.work, single) if isinstance(dst, RemoteDestination) else None
                )
            if self._refusal and self._team.rank == 0 and not self.is_done:
                if self._try is None or not isinstance(dst, RemoteDestination):
                    raise self._refusal
                # small files are there as soon as they are written
                dst.check(self._overwrite, self._try.files)
        told = (self.work, self._earlier, self._try, self.is_done)
        self.work, self._earlier, self._try, self.is_done = self._team.broadcast(told, "look back")
        return self._try.attempt if self._try else ""

    def adopts(self, dst: Destination) -> bool:
        """Tells whether an earlier attempt's id is to be this one's, should there be one: in an
        object store files are named after it.
        """
        return self._is_wanted and is_url(dst.url)

    @property
    def heir_of(self) -> Path | None:
        """The directory of the attempt to go on with."""
        return self._earlier.path if self._earlier else None

    @property
    def nbytes(self) -> int:
        """Bytes that the earlier attempt occupies."""
        return self._earlier.nbytes if self._earlier else 0

    def cut(self, tiles: tuple[int, int], jobs: int, budget: int) -> tuple[tuple[int, int], int]:
        """Returns tiles as an earlier attempt has cut them, and how many threads go on with them
        within a budget.

        Raises:
            PlanError: not one.
        """
        if self._earlier is None:
            return tiles, jobs
        tiles = self._earlier.tiles
        found = next((n for n in range(jobs, 0, -1) if tile_bytes(budget, n)[1] >= tiles[1]), 0)
        if not found:
            raise PlanError(
                f"the interrupted run had larger buffers: expected at least {tiles[1] * 3} bytes of"
                f" memory, got {budget}",
                hint=f"--memory {-(-tiles[1] * 3 >> 20)}MiB, or begin again without --resume",
            )
        return tiles, found

    def begin(
        self,
        place: Attempt,
        attempt: str,
        files: Mapping[str, int],
        tiles: tuple[int, int],
        jobs: int,
    ) -> None:
        """Looks at what is there of the files to be, and starts to take notes."""
        if isinstance(place, RemoteAttempt) and self._is_wanted and self.work:
            with self._team.phase("begin uploads"):
                begun = place.begin(self.work, files, self._try) if self._team.rank == 0 else {}
            place.begun = self._team.broadcast(begun, "uploads begun")
        if not isinstance(place, LocalAttempt) or not self.work:
            return
        if self._earlier:
            with self._team.phase("look at what is there"):
                if self._team.rank == 0:
                    place.go_on(files)
            with self._team.phase("read journals"):
                steps = journal.load(place.folder, self.work)
            self.past = journal.prove(steps, place.files(), tiles, jobs, self._team)
            self.kept_nbytes = self.past.nbytes
        name = f"{journal.GLOB[:-1]}{attempt[:8]}.{self._team.rank}"
        self._journal = journal.Journal(place.folder / name, self.work, tiles)

    @property
    def note(self) -> Callable[[BatchResult], None] | None:
        """Takes a finished step."""
        return self._journal.note if self._journal else None

    def end(self) -> None:
        """Takes no more notes."""
        if self._journal:
            self._journal.close()

    @contextmanager
    def forgotten_if_wrong(self, place: Attempt) -> Iterator[None]:
        """Makes sure that nobody goes on from bytes that were read wrong."""
        try:
            yield
        except IntegrityError:
            forget(place)
            raise


def _is_made_by(dst: Destination, work: str) -> bool:
    """Tells whether what is at a destination is the whole result of a piece of work, by its
    manifest and the sizes of its files.
    """
    with suppress(CheckpointError):
        store, beside = dst.made()
        found = manifest.find(store, beside)
        parts = [*found.files.items(), *([found.index] if found.index else [])] if found else []
        return (
            found is not None
            and found.source.get("work") == work
            and all(store.size(name) == part.nbytes for name, part in parts)
        )
    return False


def forget(place: Attempt) -> None:
    """Makes sure that nobody goes on from what is there."""
    if place.folder is not None:
        journal.remove(place.folder)
