"""torchdata's loader continues on another number of ranks: its own order of samples is the oracle."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset

from ckpt_tools import PlanError
from ckpt_tools.loop.state.loader_states import deal_in_turn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

NUM_SAMPLES, BATCH = 96, 2


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def loader(rank: int, num_ranks: int, sampler: type, workers: int, seed: int = 3) -> Any:
    order = sampler(Numbers(), num_ranks, rank, shuffle=True, seed=seed)
    return StatefulDataLoader(Numbers(), BATCH, sampler=order, num_workers=workers)


def take(found: Any, num_batches: int) -> list[int]:
    rows = iter(found)
    return [int(value) for _ in range(num_batches) for value in next(rows)]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [DistributedSampler, StatefulDistributedSampler])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 3), (3, 1), (1, 2)])
def test_no_sample_is_lost_or_comes_twice(
    sampler: type, workers: int, before: int, after: int
) -> None:
    old = [loader(rank, before, sampler, workers) for rank in range(before)]
    # a multiple of both numbers of ranks
    taken = [sample for one in old for sample in take(one, 12 // before)]
    states = [copy.deepcopy(one.state_dict()) for one in old]
    for rank in range(after):
        state, note = deal_in_turn(states, rank, after)
        assert note == "no sample comes again"
        new = loader(rank, after, sampler, workers)
        new.load_state_dict(state)
        taken += [int(value) for batch in new for value in batch]
    assert Counter(taken) == Counter(range(NUM_SAMPLES))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_cannot_be_dealt_comes_again_and_is_told(workers: int) -> None:
    old = [loader(rank, 2, DistributedSampler, workers) for rank in range(2)]
    taken = [sample for one in old for sample in take(one, 5)]  # 10 batches for 4 ranks
    states, again = [one.state_dict() for one in old], list(taken)
    for rank in range(4):
        state, note = deal_in_turn(states, rank, 4)
        assert note == "4 samples come again"
        new = loader(rank, 4, DistributedSampler, workers)
        new.load_state_dict(state)
        again += [int(value) for batch in new for value in batch]
    counts = Counter(again)
    assert set(counts) == set(range(NUM_SAMPLES))
    assert sorted(counts.values()) == [1] * (NUM_SAMPLES - 4) + [2] * 4


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [DistributedSampler, StatefulDistributedSampler])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("after", [1, 3, 4])
def test_after_an_epoch_the_next_one_is_complete(sampler: type, workers: int, after: int) -> None:
    old = [loader(rank, 2, sampler, workers) for rank in range(2)]
    for one in old:
        list(one)
    states, taken = [copy.deepcopy(one.state_dict()) for one in old], []
    for rank in range(after):
        state, note = deal_in_turn(states, rank, after)
        assert note == "at the end of the epoch: the next one begins"
        new = loader(rank, after, sampler, workers)
        new.sampler.set_epoch(1)
        new.load_state_dict(state)
        taken += [int(value) for batch in new for value in batch]
    assert Counter(taken) == Counter(range(NUM_SAMPLES))


def test_without_a_snapshot_the_position_is_unknown() -> None:
    order = DistributedSampler(Numbers(), 1, 0, shuffle=True)
    one = StatefulDataLoader(
        Numbers(), BATCH, sampler=order, num_workers=1, snapshot_every_n_steps=5
    )
    take(one, 2)
    with pytest.raises(PlanError, match="has taken no snapshot yet"):
        deal_in_turn([one.state_dict()], 0, 2)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_positions_of_another_kind_are_refused() -> None:
    apart = [loader(rank, 2, DistributedSampler, 0) for rank in range(2)]
    take(apart[0], 3)
    take(apart[1], 4)
    with pytest.raises(PlanError, match="stand at different places, after 3, 4 batches"):
        deal_in_turn([one.state_dict() for one in apart], 0, 1)
    with pytest.raises(PlanError, match="no state of torchdata's StatefulDataLoader: KeyError"):
        deal_in_turn([{"epoch": 1}] * 2, 0, 1)
    shuffled = StatefulDataLoader(Numbers(), BATCH, shuffle=True)  # a generator of its own
    take(shuffled, 3)
    with pytest.raises(PlanError, match="not a number of batches"):
        deal_in_turn([shuffled.state_dict()], 0, 2)
    in_batches = BatchSampler(DistributedSampler(Numbers(), 2, 0), BATCH, drop_last=False)
    batched = StatefulDataLoader(Numbers(), batch_sampler=in_batches)
    take(batched, 3)
    with pytest.raises(PlanError, match="has a batch sampler, whose batches may have any size"):
        deal_in_turn([batched.state_dict()], 0, 2)
    stream = StatefulDataLoader(Stream(), BATCH)
    take(stream, 3)
    with pytest.raises(PlanError, match="not a number of batches|no state of torchdata"):
        deal_in_turn([stream.state_dict()], 0, 2)
