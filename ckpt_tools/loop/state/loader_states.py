"""Redistributes the positions of torchdata's `StatefulDataLoader` to another number of ranks.

Its state is a dict of counters. The names of the counters are those of torchdata 0.11.
Imports nothing of the package but errors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tools.errors import PlanError

_HINT = (
    "PerRank(loader, on_resize='reset') starts the epoch again; a function can redistribute the"
    " states"
)


class _Position(NamedTuple):
    """Where a rank's loader stands: in batches of this epoch."""

    num_batches: int
    batch_size: int
    is_at_end: bool


def has_read_all(loader: Any, state: Any) -> bool:
    """Tells whether a loader's state is that of the last batch of an epoch, before its end.

    The next loop over it has no batch. torchdata begins the next epoch only after that.
    """
    if not isinstance(state, Mapping) or state.get("_iterator_finished") is not False:
        return False
    snapshot = state.get("_snapshot")
    if isinstance(snapshot, Mapping):  # with worker processes
        read = snapshot.get("_snapshot_step", -1) + state.get("_steps_since_snapshot", 0)
    else:
        read = state.get("_num_yielded", -1)
    try:
        return bool(read == len(loader) > 0)
    except TypeError:  # a stream has no length
        return False


def deal_in_turn(
    states: Sequence[Mapping[str, Any]], rank: int, world_size: int
) -> tuple[dict[str, Any], str]:
    """Returns the state of a new rank's loader, and a note about samples that come again.

    A `DistributedSampler` deals the samples of one common order to the ranks in turn. So ranks that
    have all taken `n` batches have together taken the first samples of that order, and any other
    number of ranks can continue after them.

    Args:
        states: those of the old ranks' loaders. They have a dataset with indices, and batches of
            one size.
        rank: the new rank.
        world_size: the number of new ranks.

    Raises:
        PlanError: a loader has a position of another kind, or the ranks stand at different places.
    """
    positions = {_position(state) for state in states}
    if len(positions) != 1:
        shown = ", ".join(str(p.num_batches) for p in sorted(positions))
        raise PlanError(
            f"the ranks' data loaders stand at different places, after {shown} batches", hint=_HINT
        )
    (position,) = positions
    state = copy.deepcopy(dict(states[rank % len(states)]))
    if position.is_at_end:  # the counters may lie beyond the new ranks' shares
        _set_position(state, 0, 0)
        state["_iterator_finished"] = False
        return state, "at the end of the epoch: the next one begins"
    total = position.num_batches * len(states)
    mine = total // world_size
    _set_position(state, mine, position.batch_size)
    again = (total - mine * world_size) * position.batch_size
    return state, f"{again} samples come again" if again else "no sample comes again"


def _counters(state: Mapping[str, Any]) -> Any:
    """Returns the dict with the counters: the state itself, or that of its main process."""
    snapshot = state.get("_snapshot")
    return snapshot["_main_snapshot"] if snapshot else state


def _position(state: Mapping[str, Any]) -> _Position:
    try:
        counters = _counters(state)
        samples, batches = counters["_sampler_iter_state"], counters["_sampler_iter_yielded"]
        if samples is None and batches:
            raise PlanError(
                "the data loader has a batch sampler, whose batches may have any size, so other"
                " ranks cannot divide its position",
                hint=f"give the loader sampler= and batch_size= instead; {_HINT}",
            )
        own = dict(samples.get("sampler_state") or {})
        since = state.get("_steps_since_snapshot", 0)
        if since and not batches:
            raise PlanError(
                "the data loader has taken no snapshot yet, so its position is unknown",
                hint="save after snapshot_every_n_steps batches, or set it to 1",
            )
        nbatches = batches + since
        size = samples["samples_yielded"] // batches if batches else 0
        others = [counters.get("_index_sampler_state"), own.keys() - {"yielded"}]
        others.append(samples.keys() - {"samples_yielded", "sampler_state"})
        for part in (counters, *_workers(state).values()):
            others += [part.get("dataset_state"), part.get("fetcher_state")]
        is_known = samples["samples_yielded"] == size * batches and not any(others)
        is_at_end = bool(state["_iterator_finished"])
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            f"this is no state of torchdata's StatefulDataLoader: {type(error).__name__} {error}",
            hint=_HINT,
        ) from error
    if not is_known:
        raise PlanError(
            "the data loader's position is not a number of batches: its dataset or sampler has a"
            " state of its own, or its batches have several sizes",
            hint=_HINT,
        )
    return _Position(nbatches, size, is_at_end)


def _workers(state: Mapping[str, Any]) -> Mapping[str, Any]:
    snapshot = state.get("_snapshot")
    return snapshot["_worker_snapshots"] if snapshot else {}


def _set_position(state: dict[str, Any], num_batches: int, batch_size: int) -> None:
    """Sets every counter of a state to a number of batches."""
    counters = _counters(state)
    samples = counters["_sampler_iter_state"]
    samples["samples_yielded"] = num_batches * batch_size
    if samples.get("sampler_state"):
        samples["sampler_state"]["yielded"] = num_batches * batch_size
    counters["_sampler_iter_yielded"] = num_batches
    if "_num_yielded" in state:
        state["_num_yielded"] = num_batches
    if snapshot := state.get("_snapshot"):
        snapshot["_snapshot_step"] = num_batches
        snapshot["_last_yielded_worker_id"] = (num_batches - 1) % counters["_num_workers"]
        state["_steps_since_snapshot"] = 0
