"""Finds, with all ranks, the step to resume from, and falls back from damaged steps to older ones.

Imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ckpt_tools.errors import CatalogError, FormatError, IntegrityError, PeerError, StorageError
from ckpt_tools.loop.steps.history import Chosen, RunHistory
from ckpt_tools.loop.steps.waiting import Outage, retry_outage
from ckpt_tools.operations.verify import verify as verify_checkpoint
from ckpt_tools.ranks.gloo import GlooGroup
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import damage
from ckpt_tools.run.steps import RunListing

Found = Path | str
T = TypeVar("T")


class StepSearch:
    """The search for a step. All ranks call its methods together."""

    def __init__(
        self, history: RunHistory, group: GlooGroup, options: Mapping[str, Any] | None
    ) -> None:
        """Stores what the search needs.

        Args:
            history: the steps of the run; rank 0's count.
            group: all ranks.
            options: of the object store, in fsspec's form.
        """
        self._history, self._group, self._options = history, group, options

    def load(
        self,
        load: Callable[[Found], T],
        step: int | None,
        path: str | os.PathLike[str] | None,
        retry_s: float,
    ) -> tuple[int, Found, T] | None:
        """Loads a step; returns its number, its path and the result; None if there is none.

        Args:
            load: loads a checkpoint into the state.
            step: load only the step with this number.
            path: load only this checkpoint.
            retry_s: seconds of retries while the store cannot be reached.

        Raises:
            CheckpointError: the step cannot be loaded. Without `step` and `path`, a damaged step is
                passed over instead.
        """
        damaged: list[Found] = []
        outage = Outage(retry_s)
        while True:
            what = "find the step to resume"
            number, found = self._choose(what, step, path, damaged, outage.left_s)
            if found is None:
                return None
            try:
                return number, found, load(found)
            except BaseException as error:
                self._history.branch = None  # nothing was loaded, so no branch begins
                what = f"cannot load step {number}"
                if outage.tries_again(self._group, error, what):
                    continue
                if step is not None or path is not None or not self._is_damage(found, error):
                    raise
                self._pass_over(found, error, damaged)

    def newest_sound(self, verify: bool, retry_s: float) -> tuple[int, Found] | None:
        """Returns the number and path of the newest step without damage; None for a new run.

        Args:
            verify: read every byte of the step, one share per rank.
            retry_s: seconds of retries while the store cannot be reached.

        Raises:
            IntegrityError: no step is left, and some were complete once.
        """
        damaged: list[Found] = []
        while True:
            number, found = self._choose("find the newest step", None, None, damaged, retry_s)
            if found is None:
                return None
            result = (
                verify_checkpoint(found, group=self._group, storage_options=self._options)
                if verify
                else None
            )
            if result is None or not result.problems:
                return number, found
            self._pass_over(found, result.problems[0], damaged)

    def _choose(
        self,
        what: str,
        step: int | None,
        path: str | os.PathLike[str] | None,
        damaged: list[Found],
        retry_s: float,
    ) -> Chosen:
        """Returns on all ranks what rank 0 chooses."""
        with self._group.phase(what):
            chosen: Chosen = (0, None)
            if self._group.rank == 0:
                chosen = retry_outage(
                    f"cannot {what}",
                    lambda: self._history.choose(step, path, damaged),
                    retry_s,
                )
        return self._group.broadcast(chosen, what)

    def _pass_over(self, found: Found, reason: object, damaged: list[Found]) -> None:
        if self._group.rank == 0:
            self._history.pass_over(found, reason)
        damaged.append(found)

    def _is_damage(self, found: Found, error: BaseException) -> bool:
        """Returns on all ranks whether damaged bytes made the load fail on any rank.

        A FormatError or CatalogError may come from damage, too. Then rank 0 reads the whole step.
        """
        what = "find out whether the step is damaged"
        try:
            reasons = [
                isinstance(error, IntegrityError),
                isinstance(error, FormatError | CatalogError | IntegrityError),
            ]
            known, suspected = self._group.sum(reasons, what)
            if known or not suspected:
                return bool(known)
            is_bad = False
            if self._group.rank == 0:
                folder, _, name = os.fspath(found).rstrip("/").rpartition("/")
                with suppress(StorageError):  # unreadable: then nothing shows that it is damaged
                    is_bad = bool(
                        damage(RunListing(open_root(folder or "/", self._options)).find(name))
                    )
            return self._group.broadcast(is_bad, what)
        except PeerError:
            return False
