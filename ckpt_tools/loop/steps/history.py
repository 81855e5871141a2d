"""What a job knows of the steps of its run, and the choice of the step to resume from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_tools.core.logs import log
from ckpt_tools.errors import IntegrityError, NotACheckpointError, StorageError, printable
from ckpt_tools.loop.steps import rollback
from ckpt_tools.loop.steps.waiting import with_hint
from ckpt_tools.run.base import RunRoot
from ckpt_tools.run.step import Step, number_of, refuse_unreadable
from ckpt_tools.run.steps import Latest, find_latest, list_steps
from ckpt_tools.storage import place_of

_SHOWN = 3
Chosen = tuple[int, Path | str | None]


class RunHistory:
    """What a job knows of the steps of its run. Rank 0's counts; `last_step` is that of each rank.

    Attributes:
        root: of the run.
        passed: paths of unusable steps. When the job reaches their numbers again, it replaces them.
        branch: a rollback that no save has completed yet: the step resumed from, and the newer
            steps, each with its attempt.
        resumed: the step that was loaded, which stays until a newer one is committed.
        last_step: number of the step that was saved last or resumed from.
    """

    def __init__(
        self,
        root: RunRoot,
        mirror: RunRoot | None,
        options: Mapping[str, Any] | None,
        allow_not_finite: bool = False,
    ) -> None:
        """Stores the places of steps.

        Args:
            root: of the run.
            mirror: the root to which steps are copied.
            options: of the store of a path that `resume` gets, as fsspec takes them.
            allow_not_finite: take also a step whose save found NaN or infinity.
        """
        self._allow_not_finite = allow_not_finite
        self.root, self._mirror, self._options = root, mirror, options
        self.passed: set[str] = set()
        self.branch: tuple[int, Mapping[str, str]] | None = None
        self.resumed: Path | str | None = None
        self.last_step: int | None = None

    def choose(
        self, step: int | None, path: str | os.PathLike[str] | None, damaged: Sequence[Path | str]
    ) -> Chosen:
        """Returns the number and path of the step to resume from; None if the run has none yet.

        Args:
            step: take only the step with this number.
            path: take only this checkpoint.
            damaged: steps that a load has found damaged.

        Raises:
            NotACheckpointError: there is no such step.
            IntegrityError: all steps are damaged or not finite.
            StorageError: the root cannot be read.
        """
        self.branch = None
        if path is not None:
            number = number_of(path, self._options)
            newer = rollback.newer_than(self._steps_of_mirror(), number)
            self._leave(
                number, rollback.merged(newer, rollback.newer_than(list_steps(self.root), number))
            )
            return number, place_of(path)
        if step is not None:
            return step, self._by_number(step)
        choice = self._newest(damaged)
        if damaged and choice.step is None:
            names = ", ".join(os.path.basename(p) for p in damaged)
            raise IntegrityError(
                f"every step is damaged: {names} ({printable(str(self.root.path))})"
            )
        if choice.not_finite and choice.step is None:
            names = ", ".join(os.path.basename(p) for p in choice.not_finite)
            raise IntegrityError(
                f"no step is finite: {names} ({printable(str(self.root.path))})",
                hint=(
                    "ckpt check names the values; resume(step=N) loads a step anyway, and"
                    " allow_not_finite=True allows them all"
                ),
            )
        for passed, reason in choice.passed_over:
            self.pass_over(passed, reason)
        if choice.blocked:
            log.warning(
                "these are no steps but have their names, so saves of these steps will fail: %s"
                " (%s); move them away",
                printable(", ".join(choice.blocked[:_SHOWN])),
                printable(str(self.root.path)),
            )
        if choice.step is None and choice.damaged:
            raise IntegrityError(
                f"no step can be resumed, and some were complete once: {_some(choice)}"
                f" ({printable(str(self.root.path))})",
                hint=(
                    "restore what is missing, or ckpt salvage STEP writes the rest; to begin a new"
                    " run here, move these steps away"
                ),
            )
        if choice.step is None:
            return 0, None
        _tell_thinned(choice.step)
        return choice.step.number, choice.step.path

    def leave_newer(self, number: int) -> None:
        """Notes that the next save begins a branch after a step; -1 if it begins the run."""
        self.branch = None
        newer = rollback.newer_than(self._steps_of_mirror(), number)
        newer = rollback.merged(newer, rollback.newer_than(list_steps(self.root), number))
        self._leave(number, newer)

    def refuse_older(self, number: int) -> None:
        """Refuses a job's first step if it is below the newest one.

        Retention would count that step as the newest, and remove the new ones.

        Raises:
            StorageError: there is such a step, and the job neither resumed nor begins a branch.
        """
        if self.branch is not None or self.last_step is not None:
            return
        passed = tuple(map(place_of, self.passed))
        newest = find_latest(self.root, skip=passed, allow_not_finite=self._allow_not_finite).step
        if newest is not None and newest.manifest is not None and newest.number > number:
            raise StorageError(
                f"step {number} is older than the newest step of this run, {newest.number}, which"
                f" this job has not resumed from: {printable(str(newest.path))}",
                hint=(
                    "call resume(state) before the first save; or branch_from(None) for a new run,"
                    " which sets the newer steps aside; or save to another directory"
                ),
            )

    def pass_over(self, step: Path | str, reason: object) -> None:
        """Notes that a step is unusable, so that the job may save it again."""
        log.warning("passed over %s: %s", step, reason)
        self.passed.add(os.fspath(step))

    def _newest(self, damaged: Sequence[Path | str]) -> Latest:
        """Returns the newest step of root and mirror; if the mirror cannot be listed, of the root.

        Raises:
            StorageError: the mirror has a newer step, which cannot be read now.
        """
        how: dict[str, Any] = {"skip": damaged, "allow_not_finite": self._allow_not_finite}
        if self._mirror is None:
            return find_latest(self.root, **how)
        try:
            return find_latest(self.root, self._mirror, **how)
        except StorageError as error:
            choice = find_latest(self.root, **how)
            there = self._steps_of_mirror()
            if choice.step is None or any(s.error and s.number > choice.step.number for s in there):
                raise  # an older step would replace the newer one
            log.warning(
                "the mirror cannot be read, and may have a newer step: %s; resuming from the disk",
                with_hint(error),
            )
            return choice

    def _by_number(self, number: int) -> Path | str:
        """Finds one step in the root, or else in the mirror, and notes the newer steps."""
        steps = list_steps(self.root)
        found = next((s for s in steps if s.number == number), None)
        newer = rollback.newer_than(steps, number)
        there = self._steps_of_mirror()
        newer = rollback.merged(rollback.newer_than(there, number), newer)
        steps = [*steps, *there]
        if found is None or found.problem:
            found = next((s for s in there if s.number == number), found)
        if found is None:
            shown = ", ".join(str(n) for n in sorted({s.number for s in steps})) or "none"
            raise NotACheckpointError(
                f"no step {number} in {printable(str(self.root.path))}; there are: {shown}"
            )
        refuse_unreadable([found], "whether it is complete")
        if found.problem:
            raise NotACheckpointError(
                f"step {number} is not complete: {found.problem} ({printable(str(found.path))})"
            )
        self._leave(number, newer)
        _tell_thinned(found)
        return found.path

    def _steps_of_mirror(self) -> list[Step]:
        """Returns the steps in the mirror; none if there is no mirror, or it is unreadable."""
        if self._mirror is None:
            return []
        try:
            return list_steps(self._mirror)
        except StorageError as error:
            log.warning("the mirror cannot be read: %s", with_hint(error))
            return []

    def _leave(self, number: int, newer: Mapping[str, str]) -> None:
        """Notes the newer steps, which the next committed step supersedes."""
        if newer:
            self.branch = number, newer
            log.warning(
                "%s: when a new step is committed, these are set aside: %s",
                "a new run" if number < 0 else f"resuming from step {number}",
                ", ".join(sorted(newer)),
            )


def _some(choice: Latest) -> str:
    """Returns some damaged steps with their problems, for a message."""
    reasons = dict(choice.passed_over)
    shown = [f"{os.path.basename(p)}: {reasons[p]}" for p in choice.damaged[:_SHOWN]]
    more = f", and {len(choice.damaged) - _SHOWN} more" if len(choice.damaged) > _SHOWN else ""
    return printable("; ".join(shown)) + more


def _tell_thinned(step: Step) -> None:
    """Warns of a step without the state that a resume usually needs."""
    if step.thinned:
        log.warning(
            "step %d was thinned, and has no %s: a resume of the rest needs strict=False",
            step.number,
            printable(", ".join(step.thinned)),
        )
