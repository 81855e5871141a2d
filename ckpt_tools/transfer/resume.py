"""Resumes an interrupted operation: finds an earlier attempt, and notes the work of this one.

On a disk, each process keeps a journal of finished batches in the staging directory. In S3, the
attempt notes its open uploads in a small object, and the store knows the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_tools.core.plan import Plan
from ckpt_tools.engine.execute import BatchResult
from ckpt_tools.engine.schedule import tile_bytes
from ckpt_tools.errors import CheckpointError, IntegrityError, PlanError, StorageError
from ckpt_tools.publish import journal
from ckpt_tools.publish.base import Attempt, Destination, RootLock, UploadNotes
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage import Store


class Resume:
    """The resume state of one process.

    A journal is always kept on a disk. Earlier attempts are only looked for with `--resume`.

    Attributes:
        finished: what an earlier attempt has finished, on a disk.
        kept_nbytes: bytes of the result that an earlier attempt had written.
        is_done: the destination already is the result of this work.
        work: identifies the work, "" if nothing identifies it.
        kept_glob: glob of files that make a staging directory worth keeping for the next attempt.
    """

    def __init__(self, dst: Destination, group: Group, is_wanted: bool) -> None:
        self.finished, self.kept_glob = journal.FinishedTiles(()), journal.GLOB if is_wanted else ""
        self.is_done, self.work, self.kept_nbytes = False, "", 0
        self._dst, self._group, self._is_wanted = dst, group, is_wanted
        self._refusal: StorageError | None = None
        self._overwrite = False
        self._dead: journal.DeadAttempt | None = None
        self._uploads: UploadNotes | None = None
        self._journal: journal.Journal | None = None
        self._claim: RootLock | None = None

    def check(self, overwrite: bool) -> None:
        """Refuses a destination that cannot be written or resumed.

        `find_earlier_attempt` checks the rest.

        Raises:
            PlanError: the store cannot resume.
            StorageError: see `Destination.check`.
        """
        if self._is_wanted and not self._dst.can_resume:
            raise PlanError(
                "--resume needs a local path or S3",
                hint=(
                    "leave --resume out, or write to a disk and upload the result with ckpt copy,"
                    " which resumes by itself"
                ),
            )
        self._overwrite = overwrite
        try:
            self._dst.check(overwrite)
        except StorageError as error:
            if not self._is_wanted or not self._dst.exists():
                raise
            self._refusal = error

    @property
    def adopts_id(self) -> bool:
        """Tells whether this attempt takes the id of an earlier one: files are named after it."""
        return self._is_wanted and self._dst.names_attempts

    def find_earlier_attempt(self, operation: str, source: Store, changes: str, plan: Plan) -> str:
        """Identifies the work, and finds an earlier attempt at it if that is wanted.

        Returns:
            The id of an earlier attempt that this one takes over, "" for none.

        Raises:
            StorageError: something else is at the destination.
        """
        with self._group.phase("look back"):
            if self._group.rank == 0:
                self._find(operation, source, changes, plan)
        told = (self.work, self._dead, self._uploads, self.is_done)
        self.work, self._dead, self._uploads, self.is_done = self._group.broadcast(
            told, "look back"
        )
        return self._uploads.attempt if self._uploads else ""

    def _find(self, operation: str, source: Store, changes: str, plan: Plan) -> None:
        if self._is_wanted or not self._dst.names_attempts:
            self.work = journal.identify(operation, plan, source, changes)
        if self._is_wanted and self.work and plan.target.index is not None:
            self._claim = self._dst.claim()  # two processes must not continue one attempt
        if self._is_wanted and self.work:
            self.is_done = self._refusal is not None and _is_made_by(self._dst, self.work)
            self._dead = journal.find_dead_attempt(self._dst.dead_attempts(), self.work)
            single = next(iter(plan.target.file_sizes)) if plan.target.index is None else ""
            self._uploads = self._dst.find_uploads(self.work, single)
        if self._refusal and not self.is_done:
            if self._uploads is None:
                raise self._refusal
            # small files of the earlier attempt are there already
            self._dst.check(self._overwrite, self._uploads.files)

    @property
    def directory(self) -> Path | None:
        """The staging directory of the attempt to continue."""
        return self._dead.path if self._dead else None

    @property
    def nbytes(self) -> int:
        """Bytes that the earlier attempt occupies."""
        return self._dead.nbytes if self._dead else 0

    def cut(self, tiles: tuple[int, int], jobs: int, budget: int) -> tuple[tuple[int, int], int]:
        """Returns the tile sizes of the earlier attempt, and how many threads fit the budget then.

        Raises:
            PlanError: the budget is too small for one thread.
        """
        if self._dead is None:
            return tiles, jobs
        tiles = self._dead.tiles
        found = next((n for n in range(jobs, 0, -1) if tile_bytes(budget, n)[1] >= tiles[1]), 0)
        if not found:
            raise PlanError(
                f"the interrupted attempt had larger buffers: expected at least {tiles[1] * 3}"
                f" bytes of memory, got {budget}",
                hint=f"--memory {-(-tiles[1] * 3 >> 20)}MiB, or begin again without --resume",
            )
        return tiles, found

    def begin(
        self,
        attempt: Attempt,
        files: Mapping[str, int],
        tiles: tuple[int, int],
        jobs: int,
    ) -> None:
        """Takes over the finished work of the earlier attempt, and starts to note that of this one.

        Args:
            attempt: this one.
            files: bytes of every data file that will be there.
            tiles: tile sizes of this attempt.
            jobs: threads that read what is there.
        """
        if not self.work:
            return
        if attempt.folder is None:
            self._begin_uploads(attempt, files)
            return
        if self._dead:
            with self._group.phase("list the destination"):
                if self._group.rank == 0:
                    attempt.prepare(files)
            with self._group.phase("read journals"):
                batches = journal.read_journals(attempt.folder, self.work)
            self.finished = journal.prove_tiles(batches, attempt.files(), tiles, jobs, self._group)
            self.kept_nbytes = self.finished.nbytes
        name = f"{journal.GLOB[:-1]}{attempt.attempt[:8]}.{self._group.rank}"
        self._journal = journal.Journal(attempt.folder / name, self.work, tiles)

    def _begin_uploads(self, attempt: Attempt, files: Mapping[str, int]) -> None:
        if not self._is_wanted:
            return
        begun = {}
        with self._group.phase("begin uploads"):
            if self._group.rank == 0:
                begun = dict(attempt.begin_uploads(self.work, files, self._uploads))
        attempt.join_uploads(self._group.broadcast(begun, "uploads begun"))

    @property
    def note(self) -> Callable[[BatchResult], None] | None:
        """Takes a finished batch."""
        return self._journal.note if self._journal else None

    def forget_journal(self, attempt: Attempt) -> None:
        """Keeps no journal of this attempt: no later one continues from it."""
        self.end()
        self._journal = None
        forget(attempt)

    def check_claim(self) -> None:
        """Makes sure that no other process has taken over this attempt.

        Raises:
            StorageError: another one has.
        """
        if self._claim is not None:
            self._claim.check()

    def release(self) -> None:
        """Gives up the claim of the destination."""
        if self._claim is not None:
            self._claim.release()

    def end(self) -> None:
        """Closes the journal."""
        if self._journal:
            self._journal.close()

    @contextmanager
    def forgotten_if_wrong(self, attempt: Attempt) -> Iterator[None]:
        """Makes sure that no later attempt continues from bytes that were read wrong."""
        try:
            yield
        except IntegrityError:
            forget(attempt)
            raise


def _is_made_by(dst: Destination, work: str) -> bool:
    """Tells whether a destination is the whole result of a piece of work.

    Its manifest and the sizes of its files say so.
    """
    with suppress(CheckpointError):
        store, beside = dst.existing_result()
        try:
            found = find_manifest(store, beside)
            parts = [*found.files.items(), *([found.index] if found.index else [])] if found else []
            return (
                found is not None
                and found.source.get("work") == work
                and all(store.size(name) == part.nbytes for name, part in parts)
            )
        finally:
            store.close()
    return False


def forget(attempt: Attempt) -> None:
    """Removes the journals of an attempt, so that no later one continues from it."""
    if attempt.folder is not None:
        journal.remove_journals(attempt.folder)
