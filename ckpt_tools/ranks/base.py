"""The protocol for several processes that work on one operation.

`ranks.gloo.GlooGroup` implements it over torch.distributed; `ALONE` is a single process. All ranks
call every method in the same order.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

from ckpt_tools.errors import PlanError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")
MAX_RANKS = 1_000_000  # of a job that a checkpoint is of


class Group(Protocol):
    """The ranks of an operation, numbered from 0. Rank 0 begins the attempt and commits."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def phase(self, what: str) -> AbstractContextManager[object]:
        """Runs the body on every rank; if one rank fails, every rank raises at the end.

        Raises:
            PeerError: another rank failed, or did not answer in time.
        """
        ...

    def gather(self, value: T, what: str) -> list[T]:
        """Returns the values of all ranks on rank 0, and an empty list on the others."""
        ...

    def all_gather(self, value: T, what: str) -> list[T]:
        """Returns the values of all ranks on every rank."""
        ...

    def broadcast(self, value: T, what: str) -> T:
        """Returns rank 0's value on every rank."""
        ...

    def deal_objects(self, values: Sequence[T], what: str) -> list[T]:
        """Sends each rank its item of `values`, and returns what all ranks have sent to this one.

        Both lists are in the order of the ranks.
        """
        ...

    def deal(
        self, parts: Sequence[npt.NDArray[np.uint64]], what: str
    ) -> list[npt.NDArray[np.uint64]]:
        """Sends each rank an array `[n, columns]`, as `deal_objects` sends objects.

        All ranks have the same number of columns.
        """
        ...


class _Alone:
    rank, size = 0, 1

    def phase(self, what: str) -> AbstractContextManager[object]:
        del what
        return nullcontext()

    def gather(self, value: T, what: str) -> list[T]:
        del what
        return [value]

    all_gather = gather

    def broadcast(self, value: T, what: str) -> T:
        del what
        return value

    def deal_objects(self, values: Sequence[T], what: str) -> list[T]:
        del what
        return [*values]

    def deal(
        self, parts: Sequence[npt.NDArray[np.uint64]], what: str
    ) -> list[npt.NDArray[np.uint64]]:
        del what
        return [*parts]


ALONE: Group = _Alone()


def check_agreement(group: Group, value: object) -> None:
    """Makes sure that every rank has the same plan.

    Ranks may see different directories under one path.

    Raises:
        PlanError: the plans differ.
    """
    if group.size == 1:
        return
    from hashlib import sha256  # with OpenSSL: 3.5 MiB

    digest = sha256(repr(value).encode("utf-8", "surrogatepass")).digest()
    found = group.all_gather(digest, "compare plans")
    if len(set(found)) > 1:
        wrong = ", ".join(str(rank) for rank, other in enumerate(found) if other != found[0])
        raise PlanError(
            f"processes see different sources: process {wrong} differs from process 0",
            hint="every process must see the same files under the path",
        )


def is_launched(environment: Mapping[str, str]) -> bool:
    """Tells whether a launcher has started this process as one of several."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return int(environment.get("WORLD_SIZE", "1")) > 1
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def tell_launcher(text: str) -> None:
    """Gives torchrun the reason why this process fails, for the summary that torchrun prints.

    It does nothing for other launchers, and never raises. Source: torch 2.13,
    `torch/distributed/elastic/multiprocessing/errors`.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError), open(file, "w") as out:
            json.dump({"message": text, "timestamp": str(int(time.time()))}, out)
