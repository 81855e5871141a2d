"""Lets several processes write one result: it divides the work, begins and ends files, and joins
the notes.

A process by itself is a group of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from ckpt_tools.core.plan import Plan
from ckpt_tools.engine.partition import cut_regions, within_held, within_regions
from ckpt_tools.engine.schedule import ALL, in_share, shares
from ckpt_tools.engine.sinks import WriteSink
from ckpt_tools.publish.base import Attempt, Destination, SharedStore
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage import WritableStore
from ckpt_tools.storage.s3.parts import part_starts

T = TypeVar("T")


class RankWork:
    """One rank's part of a plan.

    On a disk, it is a share of the bytes. In an object store, it is some files, and some parts of
    the long files. If each rank holds a part of the source, it is what reads that part; for an
    object store, which takes no pieces of a part from several processes, ranks exchange pieces.

    Attributes:
        plan, share: what to schedule.
        taken: names of the entries of which this is a part.
        exchanges: what this rank writes is read from other ranks, too.
    """

    def __init__(
        self, plan: Plan, group: Group, dst: Destination, held: Mapping[str, int] | None = None
    ) -> None:
        """Takes the plan, and the rank that holds each file of the source if all do not."""
        self.on_disk, self._whole = not dst.names_attempts, plan.target
        self._shared: SharedStore | None = None
        self._regions = (
            None
            if group.size == 1 or self.on_disk
            else cut_regions(plan, group.size, part_starts if dst.takes_parts else None)[group.rank]
        )
        held = None if group.size == 1 else held
        self.exchanges = held is not None and not self.on_disk
        if held is not None and self.on_disk:
            in_runs = not dst.takes_boxes
            self.plan, self.share = within_held(plan, held, group.rank, in_runs), ALL
            self.taken = {t.fqn for t in self.plan.tensors}
        elif self._regions is None:
            self.plan, self.share = plan, shares(plan, group.size)[group.rank]
            self.taken = {t.fqn for t in in_share(plan, self.share)}
        else:
            self.plan, self.share = within_regions(plan, self._regions), ALL
            self.taken = {t.fqn for t in self.plan.tensors}

    def sink(self, staged: Attempt, writable: WritableStore | None = None) -> WriteSink:
        """Returns the sink for this rank. It writes to `writable`, or else to the attempt."""
        if writable is None and (own := staged.sink(self._whole)) is not None:
            return own
        if writable is None and self._regions is not None:
            self._shared = staged.share(self._regions)
        store = writable or self._shared or staged.writable
        return WriteSink(self.plan.target, store, whole=self._whole)

    def open_files(self, sink: WriteSink, group: Group) -> None:
        """Creates the files. Rank 0 comes first, because other ranks write into its files."""
        ids: Mapping[str, str] = {}
        with group.phase("create files"):
            if group.rank == 0:
                sink.open()
                ids = self._shared.begin() if self._shared is not None else {}
        ids = group.broadcast(ids, "uploads")
        with group.phase("open files"):
            if group.rank:
                if self._shared is not None:
                    self._shared.join(ids)
                sink.open()


def collect(sink: WriteSink, group: Group, more: T) -> list[T]:
    """Brings the notes of all ranks to rank 0, which can then finish the files.

    On rank 0, returns `more` of the other ranks; elsewhere an empty list.
    """
    with group.phase("finish"):
        mine = sink.export_state() if group.rank else None
    handed = group.gather((mine, more), "gather checksums")
    for other, _ in handed:
        if other is not None:
            sink.absorb(other)
    return [told for _, told in handed[1:]]


@contextmanager
def stage_together(
    group: Group,
    dst: Destination,
    attempt: str,
    single: str,
    overwrite: bool = False,
    kept_glob: str = "",
    takes_over: Path | None = None,
) -> Iterator[Attempt]:
    """Yields the attempt that rank 0 begins. All ranks leave together, after success or failure.

    Args:
        group: the ranks, which all call it.
        dst: the destination.
        attempt, single, overwrite, kept_glob, takes_over: as for `Destination.stage`.
    """
    if group.rank:
        with group.phase("publish"):
            with group.phase("make room"):
                pass
            with group.phase("join"):
                staged = dst.join(attempt, single, shares_files=True)
            yield staged
        return
    with group.phase("publish"), ExitStack() as stack:
        with group.phase("make room"):
            begun = dst.stage(attempt, overwrite, single, kept_glob, takes_over)
            staged = stack.enter_context(begun)
        with group.phase("join"):
            pass
        yield staged
