"""The rules by which the steps of a run stay. They combine: a step stays if any rule keeps it."""

from __future__ import annotations

import datetime as dt
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckpt_tools.core.counts import check_count
from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.run.base import RunRoot
from ckpt_tools.run.step import Step, lasting_damage, refuse_unreadable
from ckpt_tools.run.steps import list_steps, no_steps

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True, slots=True)
class Retention:
    """Which complete steps of a run stay.

    Whatever the rules say, the newest step stays, and so does the newest one that is not known to
    have NaN or infinity.

    Attributes:
        last: how many of the newest steps stay, at least 1; all if None.
        every: steps whose number is a multiple of this stay.
        every_s: of each period of so many seconds, the step nearest to its middle stays. Periods
            begin at multiples of this, in UTC.
        younger_s: steps that were saved less than so many seconds ago stay.
        best: how many of the best steps by `metric` stay. Steps without a finite value of the
            metric, and steps that are not finite themselves, are not among them.
        metric: a name in the `metrics` of `save`.
        higher_is_better: whether a larger value of the metric is better.
        full: how many of the newest steps keep everything. Older ones keep their models only, as
            after `thin`. If None, all keep everything.
    """

    last: int | None = 3
    every: int | None = None
    every_s: float | None = None
    younger_s: float | None = None
    best: int | None = None
    metric: str | None = None
    higher_is_better: bool = False
    full: int | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "best", "full"):
            check_count(name, getattr(self, name), ValueError, or_none="for no such rule")
        for name in ("every_s", "younger_s"):
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
                raise ValueError(f"{name}: expected a number of seconds above 0, got {value!r}")
        if (self.best is None) != (not self.metric):
            raise ValueError("best and metric: expected both or neither")

    @property
    def removes_something(self) -> bool:
        """Tells whether a step may go, or be thinned: without `last`, all steps stay."""
        return self.last is not None or self.full is not None

    def reasons(self, steps: Sequence[Step], now: dt.datetime) -> dict[str, str]:
        """Returns the path of each step that stays, with the rules that keep it.

        Args:
            steps: complete and sealed, by number.
            now: the present time, with a time zone.
        """
        found: dict[str, list[str]] = {}
        for step, reason in self._kept(steps, now):
            found.setdefault(str(step.path), []).append(reason)
        return {path: ", ".join(reasons) for path, reasons in found.items()}

    def reasons_alone(self, step: Step, now: dt.datetime) -> Iterator[str]:
        """Yields the rules that keep a step whatever the other steps are."""
        if self.every and step.number % self.every == 0:
            yield f"a multiple of {self.every}"
        if self.younger_s and _age_s(step, now) < self.younger_s:
            yield f"younger than {format_period(self.younger_s)}"

    def _kept(self, steps: Sequence[Step], now: dt.datetime) -> Iterator[tuple[Step, str]]:
        alone = [(step, reason) for step in steps for reason in self.reasons_alone(step, now)]
        yield from [*self.reasons_beside(steps), *alone]

    def reasons_beside(self, steps: Sequence[Step]) -> Iterator[tuple[Step, str]]:
        """Yields steps with the rules that keep them beside others, which they would replace."""
        last = len(steps) if self.last is None else self.last
        for step in steps[-last:] if last else ():
            yield step, "all stay" if self.last is None else f"the newest {last}"
        yield from _newest_finite(steps)
        if self.every_s:
            for step in _spaced(steps, self.every_s):
                yield step, f"one of each {format_period(self.every_s)}"
        if self.best and self.metric:
            for step in ranked(steps, self.metric, self.higher_is_better)[: self.best]:
                value = metric_of(step, self.metric)
                yield step, f"the best {self.best} by {self.metric} ({value:g})"


def check_rules(rules: object) -> None:
    """Refuses what is no `Retention`.

    Raises:
        TypeError: it is, for example, a number.
    """
    if not isinstance(rules, Retention):
        raise TypeError(
            f"retention: expected a Retention, such as Retention(last=3), got {rules!r}"
        )


def format_period(seconds: float) -> str:
    """Returns a number of seconds for people: `6 h`."""
    for size, unit in _UNITS:
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def metric_of(step: Step, metric: str) -> float:
    """Returns a metric of a step; NaN if it has none."""
    value = step.manifest.metrics.get(metric) if step.manifest is not None else None
    return math.nan if value is None else value


def ranked(steps: Iterable[Step], metric: str, higher_is_better: bool) -> list[Step]:
    """Returns the steps that have a metric, the best first; of equal ones, the newer first.

    A step that is known to have NaN or infinity is not among them: the loss may have been computed
    before the update that spoiled it.
    """
    sign = -1.0 if higher_is_better else 1.0
    with_it = [
        step
        for step in steps
        if step.is_finite is not False and not math.isnan(metric_of(step, metric))
    ]
    return sorted(with_it, key=lambda step: (sign * metric_of(step, metric), -step.number))


def has_metric(root: RunRoot, metric: str) -> bool:
    """Tells whether a step of a run was saved with a metric of this name."""
    return any(step.manifest and metric in step.manifest.metrics for step in list_steps(root))


def metrics_of(steps: Iterable[Step]) -> list[str]:
    """Returns the names of the metrics that some steps were saved with, sorted."""
    return sorted({name for step in steps if step.manifest for name in step.manifest.metrics})


def refuse_unknown_metric(root: RunRoot, metric: str) -> list[Step]:
    """Returns the steps of a run, if one of them was saved with a metric of this name.

    Raises:
        NotACheckpointError: there are no steps.
        PlanError: none has the metric.
    """
    steps = list_steps(root)
    if not steps:
        raise no_steps(root)
    known = metrics_of(steps)
    if metric not in known:
        refuse_unreadable(steps, f"whether a step has the metric {printable(metric)!r}")
        raise PlanError(
            f"no step was saved with a metric named {printable(metric)!r}",
            hint=f"there are: {printable(', '.join(known))}"
            if known
            else "give save() metrics={…} to have some",
        )
    return steps


def saved_at(step: Step) -> dt.datetime | None:
    """Returns the time at which a step was saved; None if its manifest does not tell."""
    if step.manifest is None:
        return None
    try:
        time = dt.datetime.fromisoformat(step.manifest.created)
    except ValueError:
        return None
    return time if time.tzinfo is not None else None


def _age_s(step: Step, now: dt.datetime) -> float:
    time = saved_at(step)
    return math.inf if time is None else (now - time).total_seconds()


def sound_steps(
    steps: Sequence[Step],
    needed: Callable[[Sequence[Step]], Iterable[Step]],
    damaged: dict[str, str],
    unreadable: dict[str, str],
    jobs: int | None = None,
) -> list[Step]:
    """Reads the steps that a decision rests on, and returns all steps but the unsound ones.

    Args:
        steps: of a run.
        needed: returns the steps that must be sound, if the others are removed or thinned. It is
            asked again when one of them is not.
        damaged, unreadable: get the paths of those that are damaged, or cannot be read, with the
            reason.
        jobs: threads that read.
    """
    left, read = list(steps), set[str]()
    while step := next((s for s in needed(left) if str(s.path) not in read), None):
        path = str(step.path)
        read.add(path)
        try:
            problem = lasting_damage(step, jobs)
        except StorageError as error:
            unreadable[path] = problem = str(error)
        else:
            damaged |= {path: problem} if problem else {}
        if problem is None or problem:  # None: another process has removed it
            left.remove(step)
    return left


def _newest_finite(steps: Sequence[Step]) -> Iterator[tuple[Step, str]]:
    """Yields the newest step that is not known to be bad, and the newest that is known as good."""
    hopeful = next((step for step in reversed(steps) if step.is_finite is not False), None)
    finite = next((step for step in reversed(steps) if step.is_finite), None)
    if hopeful is not None and hopeful is not steps[-1]:
        yield hopeful, "the newest without known NaN or infinity"
    if finite is not None and finite is not hopeful:
        yield finite, "the newest that is known to be finite"


def _spaced(steps: Sequence[Step], period_s: float) -> list[Step]:
    """Returns of each period the step nearest to its middle.

    The periods do not depend on the steps. So a step that was removed cannot change what stays.
    """
    nearest: dict[int, tuple[float, str, Step]] = {}
    for step in steps:
        time = saved_at(step)
        if time is None:
            continue
        number, offset = divmod(time.timestamp(), period_s)
        found = abs(offset - period_s / 2), os.fspath(step.path), step
        if int(number) not in nearest or found[:2] < nearest[int(number)][:2]:
            nearest[int(number)] = found
    return [step for _, _, step in nearest.values()]
