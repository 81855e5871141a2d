"""Several processes that do one piece of work: what an operation needs to know of the others.

`live.group.Group` is one over torch.distributed; a process by itself is `ALONE`. Every method is
called by all members in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from ckpt_tools.errors import PlanError

T = TypeVar("T")


class Group(Protocol):
    """Members are numbered from 0; member 0 makes the destination's place and commits."""

    @property
    def rank(self) -> int:
        """This member's number."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def phase(self, what: str) -> AbstractContextManager[None]:
        """Runs the body on every member; an error of one is, on leaving, one on all.

        Raises:
            PeerError: another one failed, or did not answer in time.
        """
        ...

    def gather(self, value: T, what: str) -> list[T]:
        """Returns everybody's value on member 0, and an empty list on the others."""
        ...

    def all_gather(self, value: T, what: str) -> list[T]:
        """Returns everybody's value on all."""
        ...

    def broadcast(self, value: T, what: str) -> T:
        """Returns member 0's value on all."""
        ...


class _Alone:
    rank, size = 0, 1

    def phase(self, what: str) -> AbstractContextManager[None]:
        del what
        return nullcontext()

    def gather(self, value: T, what: str) -> list[T]:
        del what
        return [value]

    all_gather = gather

    def broadcast(self, value: T, what: str) -> T:
        del what
        return value


ALONE: Group = _Alone()


def agree(team: Group, value: object) -> None:
    """Makes sure that every member has the same plan: they may see different directories under one
    name.

    Raises:
        PlanError: they have not.
    """
    found = (
        team.all_gather(
            hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).digest(), "compare plans"
        )
        if team.size > 1
        else [b""]
    )
    if len(set(found)) > 1:
        wrong = ", ".join(str(rank) for rank, other in enumerate(found) if other != found[0])
        raise PlanError(
            f"processes see different sources: {wrong} another one than process 0",
            hint="all need the same files under one path",
        )


def is_launched(environment: Mapping[str, str]) -> bool:
    """Tells whether a launcher has started this process as one of several."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return int(environment.get("WORLD_SIZE", "1")) > 1
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1
