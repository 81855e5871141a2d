"""In which order is a plan carried out? That depends on what the store of the result can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from ckpt_tools.core.catalog import Payloads
from ckpt_tools.core.plan import Plan
from ckpt_tools.engine.schedule import ALL, Batch, Share, by_files, schedule
from ckpt_tools.storage import WritableStore

# each holds a part of 8 MiB, or two; 4 take a tenth less memory and read columns more often
_STREAMS = 12
_MOST_IN_TURN = 4  # parts of a plan
_LONG_BYTES = 256 << 10  # of a chunk or slot; handling it once more takes some 10 microseconds


def batches_for(
    plan: Plan,
    located: Payloads,
    tiles: tuple[int, int],
    store: WritableStore,
    share: Share = ALL,
    jobs: int = 1,
) -> Iterator[Batch]:
    """Schedules a plan.

    A store that takes streams gets a few files at a time. On a disk, threads take turns between
    files, since a file system lets one thread write to a file at a time.

    Args:
        plan, located, tiles, share: as for `schedule`.
        store: of the result.
        jobs: threads.
    """
    if not store.capabilities.can_write_anywhere:
        plans = by_files(plan, _STREAMS)
        return chain.from_iterable(schedule(part, located, *tiles, share) for part in plans)
    count = min(jobs, _MOST_IN_TURN, len(plan.target.file_sizes))
    if count < 2 or share != ALL or not _can_take_turns(plan):
        return schedule(plan, located, *tiles, share)
    plans = by_files(plan, -(-len(plan.target.file_sizes) // count))
    return _in_turn([schedule(part, located, *tiles) for part in plans])


def _can_take_turns(plan: Plan) -> bool:
    """Tells whether the parts of a plan have the same tiles as the whole, and cost little more.

    Slots must have whole rows, where tiles end anyway: so an attempt can be continued by another
    number of threads. Chunks and slots must be long, since each part handles them anew.
    """
    number = sum(len(tensor.chunks) + len(tensor.slots) for tensor in plan.tensors)
    return plan.payload_bytes >= number * _LONG_BYTES and all(
        slot.box.sizes[1:] == tensor.shape[1:] for tensor in plan.tensors for slot in tensor.slots
    )


def _in_turn(schedules: Sequence[Iterator[Batch]]) -> Iterator[Batch]:
    """Yields a batch of each schedule, and begins again."""
    return (batch for found in zip_longest(*schedules) for batch in found if batch is not None)
