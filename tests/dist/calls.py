"""Ranks that do not make the same calls: every rank is told who did what, and what it can do next.

    torchrun --nproc-per-node 3 calls.py FOLDER SCENARIO
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ckpt_tools import CheckpointError, CheckpointManager, PeerError, PerRank
from tests.dist import device

STATE = {"w": torch.ones(6, device="cpu")}


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except PeerError as error:
        return f"{error}\nhint: {error.hint}"
    raise AssertionError("not refused")


def different_steps(checkpoints: CheckpointManager, rank: int) -> None:
    """Another step on every rank is told, and the manager goes on."""
    text = refused(lambda: checkpoints.save(10 + rank, STATE, asynchronous=False))
    assert all(f"rank {r}: save({10 + r}, asynchronous=False)" in text for r in range(3)), text
    text = refused(lambda: checkpoints.should_save(20) if rank == 1 else checkpoints.save(20, STATE))
    assert "rank 0: save(20)" in text and "rank 1: should_save(20)" in text and "rank 2: save(20)" in text, text
    text = refused(lambda: checkpoints.resume(dict(STATE)) if rank == 2 else checkpoints.should_save(1))
    assert "rank 2: resume()" in text, text
    checkpoints.save(30, STATE, asynchronous=False)
    assert checkpoints.resume(dict(STATE)) == 30 and checkpoints.preempted() == 0


def different_arguments(checkpoints: CheckpointManager, rank: int) -> None:
    """Each argument that would change what a rank loads or how it saves is compared."""
    for step in (1, 2):
        checkpoints.save(step, STATE, asynchronous=False)
    for mine, other in (
        ({"select": ["w"]}, {}), ({"step": 1}, {}), ({"step": 1}, {"step": 2}), ({"path": checkpoints.root / "step-00000001"}, {}),
        ({"cast": True}, {}), ({"strict": False}, {}), ({"rename": {"w": "w"}}, {}), ({"on_mismatch": {"w": "skip"}}, {"on_mismatch": {"w": "grow"}}),
    ):
        text = refused(lambda mine=mine, other=other: checkpoints.resume(dict(STATE), **(mine if rank == 1 else other)))
        assert "rank 0: resume(" in text and f"rank 1: resume({next(iter(mine))}=" in text, text
    text = refused(lambda: checkpoints.save(3, STATE, asynchronous=bool(rank)))
    assert "rank 0: save(3, asynchronous=False)" in text and "rank 1: save(3)" in text, text
    checkpoints.save(3, STATE)
    assert checkpoints.resume(dict(STATE)) == 3


def different_values(checkpoints: CheckpointManager, rank: int) -> None:
    """A state that no rank could load again is refused by the save, on every rank."""
    for step, (first, others) in enumerate(
        (
            ({"b": PerRank(2)}, {}), ({}, {"b": PerRank(2)}), ({}, {"b": 2}), ({"b": 1}, {"b": torch.ones(2, device="cpu")}), ({"b": 1}, {"b": PerRank(5)}),
            ({"b": 1}, {"b": lambda: 0}),
        )
    ):
        try:
            checkpoints.save(step, {"a": 1, **(others if rank == 1 else first)}, asynchronous=False)
        except CheckpointError as error:
            assert "'b" in str(error) or "['b']" in str(error), error
        else:
            raise AssertionError(f"case {step} was not refused")
    assert checkpoints.steps() == []
    checkpoints.save(9, {"a": 1, "b": PerRank(rank)}, asynchronous=False)
    state = {"a": 0, "b": PerRank(None)}
    assert checkpoints.resume(state) == 9 and state["b"].value == rank


def one_rank_only(checkpoints: CheckpointManager, rank: int) -> None:
    """The ranks that do not come are named with their last call, to those that come late, too; then
    the manager says that it cannot go on.
    """
    checkpoints.save(1, STATE, asynchronous=False)
    if rank == 0:
        text = refused(lambda: checkpoints.save(2, STATE))
        assert re.search(r"rank 1, 2 did not answer \(last call: rank 1 save\(\d.* at .*, rank 2 save\(\d.* at ", text), text
        assert "make a new manager or publisher on all ranks" in text, text
    else:
        time.sleep(8)
        text = refused(lambda: checkpoints.save(2, STATE))
        assert f"this rank, {rank}, came too late: rank 0 waited" in text and "at save 2" in text, text
    text = refused(lambda: checkpoints.save(3, STATE))
    assert "cannot exchange anything any more: " in text and "make a new one on all ranks" in text, text
    dist.barrier()
    checkpoints.close()
    with CheckpointManager(checkpoints.root, timeout_s=60) as new:
        new.save(4, STATE, asynchronous=False)
        assert new.resume(dict(STATE)) == 4


def user_code_fails_on_one_rank(checkpoints: CheckpointManager, rank: int) -> None:
    """Its exception is that rank's own; the others are told whose it was, and nobody waits for
    anybody.
    """

    class Sampler:
        def state_dict(self) -> dict[str, int]:
            return {"at": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if rank == 1:
                raise ValueError("not today")

    state = {"sampler": Sampler()}
    checkpoints.save(1, state, asynchronous=False)
    began = time.monotonic()
    try:
        checkpoints.resume(state)
    except ValueError as error:
        assert rank == 1 and error.__notes__ == ["raised by Sampler.load_state_dict() of state['sampler']"]
    except PeerError as error:
        assert rank != 1 and "rank 1: ValueError: not today (raised by Sampler.load_state_dict() of state['sampler'])" in str(error), error
    else:
        raise AssertionError("not refused")
    assert time.monotonic() - began < 4  # the manager's time-out is 5
    checkpoints.save(2, state, asynchronous=False)


def main() -> None:
    folder, scenario = Path(sys.argv[1]), sys.argv[2]
    device.begin()
    checkpoints = CheckpointManager(folder / scenario, timeout_s=5)
    globals()[scenario](checkpoints, dist.get_rank())
    dist.barrier()
    checkpoints.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
