"""Lets several processes write one result: it divides the work, begins and ends files, and joins
the notes.

A process by itself is a group of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ckpt_tools.core.plan import Plan
from ckpt_tools.engine.partition import cut_regions, within_regions
from ckpt_tools.engine.schedule import ALL, in_share, shares
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.publish.base import Attempt, Destination
from ckpt_tools.publish.bucket import SharedUploads
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage import WritableStore
from ckpt_tools.storage.s3.multipart import part_starts

T = TypeVar("T")


class RankWork:
    """One member's part of a plan: on a disk a run of it, in an object store some files and runs of
    parts of the long ones.

    Attributes:
        plan, share: what to schedule.
        taken: names of the entries of which this is a part.
    """

    def __init__(self, plan: Plan, group: Group, dst: Destination) -> None:
        self.on_disk, self._whole = not dst.names_attempts, plan.target
        self._regions = (
            None
            if group.size == 1 or self.on_disk
            else cut_regions(plan, group.size, part_starts if dst.takes_parts else None)[group.rank]
        )
        if self._regions is None:
            self.plan, self.share = plan, shares(plan, group.size)[group.rank]
            self.taken = {t.fqn for t in in_share(plan, self.share)}
        else:
            self.plan, self.share = within_regions(plan, self._regions), ALL
            self.taken = {t.fqn for t in self.plan.tensors}

    def sink(self, place: Attempt, shelf: WritableStore | None = None) -> WriteSink:
        """Returns what takes this member's part; it goes to the place unless to another shelf."""
        shared = place.shelf if self._regions is None else place.share(self._regions)
        return WriteSink(self.plan.target, shelf or shared, whole=self._whole)


def open_files(sink: WriteSink, group: Group) -> None:
    """Creates the files: member 0 first those that others write into, too."""
    ids: Mapping[str, str] = {}
    with group.phase("create files"):
        if group.rank == 0:
            sink.open()
            ids = sink.store.begin() if isinstance(sink.store, SharedUploads) else {}
    ids = group.broadcast(ids, "uploads")
    with group.phase("open files"):
        if group.rank:
            if isinstance(sink.store, SharedUploads):
                sink.store.upload_ids = ids
            sink.open()


def collect(sink: WriteSink, group: Group, more: T) -> list[T]:
    """Brings what all have written to member 0, which can finish it then; returns there what the
    others tell besides, else nothing.
    """
    with group.phase("finish"):
        mine = sink.hand_over() if group.rank else None
    handed = group.gather((mine, more), "gather checksums")
    for other, _ in handed:
        if other is not None:
            sink.absorb(other)
    return [told for _, told in handed[1:]]


@contextmanager
def staged(
    group: Group,
    dst: Destination,
    attempt: str,
    single: str,
    overwrite: bool = False,
    keeps: str = "",
    heir_of: Path | None = None,
) -> Iterator[Attempt]:
    """Yields the place that member 0 makes; everybody leaves it together, when it was published or
    given up.

    Args:
        group: all of whom call it.
        dst: where the result is to be.
        attempt, single, overwrite, keeps, heir_of: as for `Destination.stage`.
    """
    if group.rank:
        with group.phase("publish"):
            with group.phase("make room"):
                pass
            with group.phase("join"):
                place = dst.join(attempt, single, shares_files=True)
            yield place
        return
    with group.phase("publish"), dst.stage(attempt, overwrite, single, keeps, heir_of) as place:
        with group.phase("make room"):
            pass
        with group.phase("join"):
            pass
        yield place
