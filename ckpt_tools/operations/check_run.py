"""Checks the steps of a run for a cron job or CI: each problem is one line.

It reads names, sizes and manifests. Only `verify` reads the data.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

from ckpt_tools.core.counts import check_count
from ckpt_tools.core.naming import is_norm_buffer
from ckpt_tools.errors import PlanError, StorageError, printable
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.run_bytes import WEIGHTS, optimizers_in, state_kind
from ckpt_tools.operations.verify import step_damage
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import Step, lasting_damage
from ckpt_tools.run.steps import list_steps, no_steps
from ckpt_tools.transfer.options import Path_

_MOMENT = re.compile(r"(?:^|\.)state\.(.+)\.(?:exp_avg|momentum_buffer)$")
_LEAST_STEPS = 3  # with measured changes, before another one is called unusual
_WINDOW, _NEWEST = 8, 3  # changes to compare with, and steps to look at: an alarm must end


class RunProblem(NamedTuple):
    """A problem of a run.

    Attributes:
        step: the number of the step.
        kind: unreadable, incomplete, unsealed, salvaged, twice, damaged, missing, not finite,
            unchanged, jump, or another model.
        text: the problem, for people.
    """

    step: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.text}"


UNCHANGED_STEPS, JUMP = 3, 10.0  # what `ckpt check` calls a problem


@checked()
def check_run(
    root: Path_,
    *,
    verify: bool = False,
    every: int | None = None,
    base: str | os.PathLike[str] | None = None,
    unchanged_steps: int = UNCHANGED_STEPS,
    jump: float = JUMP,
    jobs: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[RunProblem]:
    """Returns the problems of a run's steps, by step; an empty list if there are none.

    NaN, infinity and updates are known of steps that were saved with `statistics=True`.

    Args:
        root: directory of the run, a path or a URL.
        verify: also read every byte, and compare the checksums.
        every: the distance of steps; a missing one between the first and the last is a problem.
        base: a local directory with a model's `config.json`. Names and shapes of the newest
            complete step are compared with it, sealed or not.
        unchanged_steps: a trained tensor that is the same in so many steps in a row is a problem. A
            tensor counts as trained if the optimizer has a moment of it, as Adam and SGD with
            momentum do. Of other optimizers, it is a problem if all weights are the same.
        jump: an update of a weight in the newest three steps that is so many times larger than the
            median of the updates before is a problem.
        jobs: threads that read with `verify`.
        storage_options: of the object store, as fsspec takes them.

    Raises:
        NotACheckpointError: there are no steps.
        StorageError: the directory cannot be read.
    """
    return check_steps(
        root,
        verify=verify,
        every=every,
        base=base,
        unchanged_steps=unchanged_steps,
        jump=jump,
        jobs=jobs,
        storage_options=storage_options,
    )[0]


def check_steps(
    root: Path_,
    *,
    verify: bool,
    every: int | None,
    base: str | os.PathLike[str] | None = None,
    unchanged_steps: int = UNCHANGED_STEPS,
    jump: float = JUMP,
    jobs: int | None = None,
    storage_options: Mapping[str, Any] | None,
) -> tuple[list[RunProblem], list[Step]]:
    """Returns the problems of a run's steps, as `check_run` does, and the steps."""
    check_count("unchanged_steps", unchanged_steps, PlanError, least=2)
    check_count("every", every, PlanError, or_none=True)
    if isinstance(jump, bool) or not isinstance(jump, Real) or not jump > 1:
        raise PlanError(f"jump: expected a number above 1, got {jump!r}")
    where = open_root(root, storage_options)
    steps = list_steps(where)
    if not steps:
        raise no_steps(where)
    read = step_damage(storage_options) if verify else None
    found = [problem for step in steps for problem in step_problems(step, read, jobs)]
    if every is not None:
        found += _missing(steps, every)
    found += training_problems(steps, unchanged_steps, jump)
    if base is not None:
        found += _model_problems(steps, base, storage_options)
    return sorted(found, key=lambda problem: problem.step), steps


def _model_problems(
    steps: Sequence[Step],
    base: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None,
) -> Iterator[RunProblem]:
    """Yields how the newest complete step differs from the model of a configuration."""
    from ckpt_tools.operations.convert.huggingface import read_config
    from ckpt_tools.operations.inspect import inspect

    read_config(base)  # a directory without one is refused, even if no step can be compared
    newest = next((s for s in reversed(steps) if not s.problem and not s.superseded_by), None)
    if newest is None:
        yield RunProblem(steps[-1].number, "another model", "no complete step to compare")
        return
    presence = inspect(newest.path, storage_options, base=base).presence
    assert presence is not None
    for line in presence.lines() if not presence.is_complete else ():
        if not line.startswith(" "):  # names are for `inspect`
            yield RunProblem(newest.number, "another model", line)


def training_problems(
    steps: Sequence[Step], unchanged_steps: int = UNCHANGED_STEPS, jump: float = JUMP
) -> Iterator[RunProblem]:
    """Yields what the values of the steps tell of the training.

    Args:
        steps: of a run, by number.
        unchanged_steps, jump: see `check_run`.
    """
    sound = [step for step in steps if step.counts]
    yield from _unchanged(sound, unchanged_steps)
    yield from _large_updates(sound, jump)


def step_problems(
    step: Step, read: Callable[[Step, int | None], str] | None = None, jobs: int | None = None
) -> Iterator[RunProblem]:
    """Yields the problems of one step.

    Args:
        step: the step.
        read: reads every byte, and returns a problem; see `verify.step_damage`.
        jobs: threads that read.
    """
    if step.problem:
        yield RunProblem(step.number, "unreadable" if step.error else "incomplete", step.problem)
        return
    if step.manifest is None:
        yield RunProblem(step.number, "unsealed", "it has no manifest; ckpt seal adds one")
        yield from _damage(step, read, jobs)
        return
    if note := step.manifest.salvage_note.removeprefix("salvaged: "):
        yield RunProblem(step.number, "salvaged", f"{note}: a resume needs strict=False")
    if step.twin:
        yield RunProblem(step.number, "twice", f"{printable(step.name)}: {step.twin_note}")
    for fqn in step.manifest.not_finite:
        found = step.manifest.tensors[fqn].statistics
        assert found is not None
        text = f"{printable(fqn)}: {found.num_nan:,} NaN, {found.num_inf:,} infinite"
        yield RunProblem(step.number, "not finite", text)
    yield from _damage(step, read, jobs)


def _damage(
    step: Step, read: Callable[[Step, int | None], str] | None, jobs: int | None
) -> Iterator[RunProblem]:
    try:
        problem = lasting_damage(step, jobs, read) if read is not None else ""
    except StorageError as error:
        yield RunProblem(step.number, "unreadable", str(error))
        return
    if problem:
        yield RunProblem(step.number, "damaged", problem)


def _missing(steps: Sequence[Step], every: int) -> Iterator[RunProblem]:
    """Yields the first missing step of each gap; a step of the far future is one gap."""
    numbers = sorted({step.number for step in steps if step.number % every == 0})
    first = -(-min(step.number for step in steps) // every) * every
    last = max(step.number for step in steps) // every * every
    for before, after in pairwise([first - every, *numbers, last + every]):
        count = (after - before) // every - 1
        if count > 0:
            more = f", nor the next {count - 1:,} up to {after - every}" * (count > 1)
            text = f"there is no such step{more}, and --every is {every}"
            yield RunProblem(before + every, "missing", text)


def trained_names(step: Step) -> set[str]:
    """Returns the tensors of a model that have a moment of their optimizer."""
    assert step.manifest is not None
    names = step.manifest.tensors
    parameters = {match[1] for name in names if (match := _MOMENT.search(name))}
    return {
        name
        for name in names
        if not _MOMENT.search(name) and (name in parameters or name.partition(".")[2] in parameters)
    }


def _unchanged(steps: Sequence[Step], count: int) -> Iterator[RunProblem]:
    """Yields trained tensors with the same fingerprint in the newest steps."""
    newest = steps[-count:]
    if len(newest) < count:
        return
    numbers, trained = f"{newest[0].number} to {newest[-1].number}", trained_names(newest[-1])
    for name in sorted(trained):
        if _is_same(name, newest):
            text = f"{printable(name)} has been the same in steps {numbers}"
            yield RunProblem(newest[-1].number, "unchanged", text)
    weights = _weights_in(newest[-1]) if optimizers_in(newest[-1].manifest) else set()
    if not trained and weights and all(_is_same(name, newest) for name in weights):
        text = f"all {len(weights):,} weights have been the same in steps {numbers}"
        yield RunProblem(newest[-1].number, "unchanged", text)


def _is_same(name: str, steps: Sequence[Step]) -> bool:
    tensors = [step.manifest.tensors.get(name) for step in steps if step.manifest]
    return None not in tensors and len({t.fingerprint for t in tensors if t}) == 1


def _weights_in(step: Step) -> set[str]:
    """Returns the trained tensors of a step; all its weights if the optimizer has no moments."""
    if trained := trained_names(step):
        return trained
    assert step.manifest is not None
    optimizers = optimizers_in(step.manifest)
    return {
        name
        for name in step.manifest.tensors
        if state_kind(name, optimizers) == WEIGHTS and not is_norm_buffer(name)
    }


def _large_updates(steps: Sequence[Step], jump: float) -> Iterator[RunProblem]:
    """Yields updates of weights in the newest steps that are far above those before.

    Each is divided by the distance to the step before, because the steps may be unevenly spaced.
    """
    changes: dict[str, list[tuple[int, float]]] = {}
    for before, step in pairwise(steps):
        weights = _weights_in(step)
        for name, tensor in step.manifest.tensors.items() if step.manifest else ():
            change = tensor.statistics.change_rms if tensor.statistics else None
            if change is not None and name in weights:
                distance = max(1, step.number - before.number)
                changes.setdefault(name, []).append((step.number, change / distance))
    newest = {step.number for step in steps[-_NEWEST:]}
    for name, found in changes.items():
        for place, (number, change) in enumerate(found):
            earlier = [value for _, value in found[max(0, place - _WINDOW) : place]]
            if number not in newest or len(earlier) < _LEAST_STEPS:
                continue
            usual = statistics.median(earlier)
            if change > jump * usual > 0:
                text = f"{printable(name)} changed by {change:.3g} a step (RMS)"
                yield RunProblem(number, "jump", f"{text}, before by {usual:.3g}")
