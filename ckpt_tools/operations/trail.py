"""What a transfer leaves behind for a next try, and what it finds of an earlier one: `--resume`.

May import levels 0 to 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ckpt_tools import journal
from ckpt_tools.destination import Destination, LocalPlace, Place
from ckpt_tools.engine.run import Moved
from ckpt_tools.engine.schedule import tile_bytes
from ckpt_tools.errors import IntegrityError, PlanError
from ckpt_tools.plan import Plan
from ckpt_tools.storage import Store, is_url
from ckpt_tools.team import Team


class Trail:
    """One member's: the journal that it keeps on a disk, always, and what earlier ones tell, where that is wanted.

    Attributes:
        past: what is there already.
        keeps: for `Destination.stage`: what makes it worth to leave the place to a next try.
    """

    def __init__(self, team: Team, is_wanted: bool) -> None:
        self.past, self.keeps = journal.Past(()), journal.GLOB if is_wanted else ""
        self._team, self._is_wanted, self._work = team, is_wanted, ""
        self._earlier: journal.Earlier | None = None
        self._journal: journal.Journal | None = None

    def check(self, dst: Destination) -> None:
        """Refuses early what cannot be gone on with.

        Raises:
            PlanError: the destination is an object store's.
        """
        if self._is_wanted and is_url(dst.url):
            hint = "leave --resume out, or write to a disk and then ckpt copy, which goes on from where it was"
            raise PlanError("what was begun in an object store is not gone on with yet", hint=hint)

    def look_back(self, dst: Destination, operation: str, plan: Plan, source: Store, changes: str) -> None:
        """Finds out what the work is called in journals, and an earlier attempt at it, if that is wanted."""
        with self._team.phase("look back"):
            if self._team.rank == 0 and not is_url(dst.url):
                self._work = journal.identify(operation, plan, source, changes)
                self._earlier = journal.find(dst.dead(), self._work) if self._is_wanted else None
        self._work, self._earlier = self._team.broadcast((self._work, self._earlier), "look back")

    @property
    def heir_of(self) -> Path | None:
        """The directory of the attempt to go on with."""
        return self._earlier.path if self._earlier else None

    @property
    def nbytes(self) -> int:
        """Bytes that the earlier attempt occupies."""
        return self._earlier.nbytes if self._earlier else 0

    def cut(self, tiles: tuple[int, int], jobs: int, budget: int) -> tuple[tuple[int, int], int]:
        """Returns tiles as an earlier attempt has cut them, and how many threads go on with them within a budget.

        Raises:
            PlanError: not one.
        """
        if self._earlier is None:
            return tiles, jobs
        tiles = self._earlier.tiles
        found = next((n for n in range(jobs, 0, -1) if tile_bytes(budget, n)[1] >= tiles[1]), 0)
        if not found:
            raise PlanError(
                f"the interrupted run had larger buffers: expected at least {tiles[1] * 3} bytes of memory, got {budget}",
                hint=f"--memory {-(-tiles[1] * 3 >> 20)}MiB, or begin again without --resume",
            )
        return tiles, found

    def begin(self, place: Place, attempt: str, files: Mapping[str, int], tiles: tuple[int, int], jobs: int) -> None:
        """Looks at what is there of the files to be, and starts to take notes."""
        if not isinstance(place, LocalPlace) or not self._work:
            return
        if self._earlier:
            with self._team.phase("look at what is there"):
                if self._team.rank == 0:
                    place.go_on(files)
            with self._team.phase("read journals"):
                steps = journal.load(place.folder, self._work)
            self.past = journal.prove(steps, place.files(), tiles, jobs, self._team)
        name = f"{journal.GLOB[:-1]}{attempt[:8]}.{self._team.rank}"
        self._journal = journal.Journal(place.folder / name, self._work, tiles)

    @property
    def note(self) -> Callable[[Moved], None] | None:
        """Takes a finished step."""
        return self._journal.note if self._journal else None

    def end(self) -> None:
        """Takes no more notes."""
        if self._journal:
            self._journal.close()

    @contextmanager
    def forgotten_if_wrong(self, place: Place) -> Iterator[None]:
        """Makes sure that nobody goes on from bytes that were read wrong."""
        try:
            yield
        except IntegrityError:
            forget(place)
            raise


def forget(place: Place) -> None:
    """Makes sure that nobody goes on from what is there."""
    if place.folder is not None:
        journal.remove(place.folder)
