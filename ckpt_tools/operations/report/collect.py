"""Collects the numbers of a report, as plain values that JSON can hold."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from ckpt_tools.core.statistics import TensorStatistics
from ckpt_tools.errors import CheckpointError, is_unreadable, printable, redacted
from ckpt_tools.formats.registry import open_source
from ckpt_tools.operations.check_run import step_problems, training_problems
from ckpt_tools.operations.convert.flat_shapes import lay_beside
from ckpt_tools.operations.diff import DiffResult, diff
from ckpt_tools.operations.inspect import inspect
from ckpt_tools.operations.run_bytes import (
    WEIGHTS,
    bytes_of,
    nbytes_of,
    optimizers_in,
    state_kind,
)
from ckpt_tools.operations.stats import sealed_statistics, stats
from ckpt_tools.operations.verify import verify
from ckpt_tools.publish.find_manifest import manifest_of
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.run.base import RunRoot
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import Step
from ckpt_tools.run.steps import RunListing
from ckpt_tools.storage.kept import KEPT
from ckpt_tools.transfer.options import Path_, Reading
from ckpt_tools.version import __version__

Values = dict[str, Any]
_DIGITS = 4
_GROUPS = 20  # of equal tensors, on the page


def of_run_at(path: Path_, options: Mapping[str, Any] | None) -> Values | None:
    """Returns the numbers of a run, as `of_run` does; None if a path is not that of a run.

    Raises:
        StorageError: it cannot be read.
    """
    with KEPT.during():
        try:
            root = open_root(path, options)
            steps = RunListing(root).all_steps
        except CheckpointError as error:
            if is_unreadable(error):
                raise
            return None
        return of_run(root, redacted(str(path)), steps) if steps else None


def of_checkpoint(src: Path_, reads: bool, **options: Unpack[Reading]) -> Values:
    """Returns the numbers of one checkpoint.

    Args:
        src: a checkpoint.
        reads: measure the values if the manifest does not have their statistics.
        **options: see `Reading`.

    Raises:
        CheckpointError: it cannot be read.
    """
    storage_options, shapes = options.get("storage_options"), options.get("shapes")
    checked = verify(src, quick=True, storage_options=storage_options, shapes=shapes)
    texts = Counter(map(str, checked.problems))  # one damaged file may concern many entries
    problems = [f"{text} ({n:,} entries)" if n > 1 else text for text, n in texts.items()]
    try:
        report = inspect(src, storage_options, shapes)
    except CheckpointError as error:
        if not problems:
            raise
        return of_damaged(redacted(str(src)), problems, [redacted(str(src))], error.hint)
    source = open_source(src, storage_options, lay_beside(shapes))
    try:
        manifest, known = manifest_of(source.store), sealed_statistics(source)
    finally:
        source.store.close()
    has_read, broken = not known and reads, list[str]()
    if has_read:
        try:
            measured = stats(src, **options)
            known = {measured.codes.get(fqn, fqn): s for fqn, s in measured.tensors.items()}
            broken = [*map(printable, measured.broken_parts)]
        except CheckpointError as error:  # a damaged file is what the page is for
            if is_unreadable(error):
                raise
            has_read = False
            problems += [] if problems else [printable(str(error))]
    tensors = [
        _tensor(fqn, entry.dtype.name, entry.shape, entry.nbytes, known.get(fqn))
        for fqn, entry in report.catalog.tensors.items()
    ]
    files = [
        {"name": printable(f.name), "rank": f.rank, "nbytes": f.nbytes, "chunks": f.num_chunks}
        for f in report.files
    ]
    not_finite = [*(t["name"] for t in tensors if t["nan"] or t["inf"]), *broken]
    return {
        **_head("checkpoint", redacted(str(src))),
        "format": report.format,
        "world_size": report.world_size,
        "created": manifest.created if manifest else None,
        "is_sealed": manifest is not None,
        "is_measured": bool(known),
        "problems": problems,
        "not_finite": not_finite,
        "verdict": _verdict(
            problems, not_finite, manifest, bool(known), has_read, report.world_size
        ),
        "next": _next(redacted(str(src)), problems, not_finite, manifest, bool(known)),
        "metrics": dict(manifest.metrics) if manifest else {},
        "tensors": tensors,
        "num_objects": len(report.catalog.objects),
        "files": files,
        "duplicates": _duplicates(manifest),
    }


def of_damaged(
    name: str, problems: Sequence[str], paths: Sequence[str], hint: str | None = None
) -> Values:
    """Returns a report on checkpoints of which one cannot be read, at these paths.

    A hint that says what to run is what to type next.
    """
    run = (hint or "").partition("run: ")[2]
    return {
        **_head("checkpoint", name),
        "problems": problems,
        "not_finite": [],
        "is_measured": False,
        "verdict": _verdict(problems, [], None, False, False, None),
        "next": [run]
        if run
        else [line for path in paths for line in _next(path, problems, [], None, False)],
        "tensors": [],
        "files": [],
    }


def of_run(root: RunRoot, name: str, steps_there: Sequence[Step]) -> Values:
    """Returns the numbers of a run: of each step, and of each tensor over the steps.

    Args:
        root: of the run.
        name: its path, for people.
        steps_there: its steps.
    """
    found = bytes_of(root, steps_there)
    sound = [one.step for one in found if not one.step.problem and not one.step.superseded_by]
    measured = [step for step in sound if step.is_finite is not None]
    newest = next(iter([*measured[-1:], *sound[-1:]]), None)
    manifest = newest.manifest if newest is not None else None
    tensors = (
        [
            _tensor(fqn, t.dtype, t.shape, nbytes_of(t), t.statistics)
            for fqn, t in manifest.tensors.items()
        ]
        if manifest is not None
        else []
    )
    steps = [
        {
            "step": one.step.number,
            "nbytes": one.step.nbytes,
            "model": one.model,
            "optimizer": one.optimizer,
            "other": one.other,
            "reclaimable": one.reclaimable,
            "created": one.step.manifest.created if one.step.manifest else None,
            "world_size": one.step.manifest.world_size if one.step.manifest else None,
            "problem": one.step.problem,
            "is_finite": one.step.is_finite,
            "is_pinned": one.step.is_pinned,
            "superseded": bool(one.step.superseded_by),
            "thinned": list(one.step.thinned),
            "metrics": dict(one.step.manifest.metrics) if one.step.manifest else {},
            "drift": _drift(one.step),
        }
        for one in found
    ]
    not_finite = [t["name"] for t in tensors if t["nan"] or t["inf"]]
    problems = [
        f"step {problem.step}: {problem.text}"
        for one in found
        for problem in step_problems(one.step)
        if problem.kind != "not finite"  # it has a place of its own
    ]
    return {
        **_head("run", name),
        "steps": steps,
        "reclaimable": sum(one.reclaimable for one in found),
        "problems": problems,
        "findings": [str(problem) for problem in training_problems(steps_there)],
        "duplicates": _duplicates(manifest),
        "unchanged": _unchanged([s for s in sound if s.manifest is not None]),
        "unreadable": [s.step.number for s in found if s.step.error is not None],
        "not_finite": not_finite,
        "newest": newest.number if newest is not None else None,
        "is_measured": bool(measured),
        "verdict": _verdict_of_run(found_steps=[one.step for one in found]),
        "next": _next_of_run(name, [one.step for one in found]),
        "tensors": tensors,
        "over_steps": _over_steps(measured, [t["name"] for t in tensors]),
        "measured_steps": [step.number for step in measured],
        "files": [],
    }


def of_difference(a: Path_, b: Path_, **options: Unpack[Reading]) -> Values:
    """Returns the differences of two checkpoints: weights first, and of them the largest.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    result = diff(a, b, **options)
    ordered = sorted(
        result.differences,
        key=lambda d: (d.is_code or d.is_object, state_kind(d.fqn) != WEIGHTS, -d.size),
    )
    rows: list[Values] = [
        {
            "name": printable(d.fqn),
            "numel": d.numel,
            "different": d.num_different,
            "max_abs": _number(d.max_abs),
            "max_rel": _number(d.max_rel),
            "rel_norm": None if d.rel_norm is None else _number(d.rel_norm),
            "one_minus_cosine": None if d.cosine is None else _number(1 - d.cosine),
            "kind": "object" if d.is_object else state_kind(d.fqn),
            "is_code": d.is_code,
            "is_object": d.is_object,
        }
        for d in ordered
    ]
    changed = [
        {
            "name": printable(c.fqn),
            "a": f"{c.a_dtype} {list(c.a_shape)}",
            "b": f"{c.b_dtype} {list(c.b_shape)}",
        }
        for c in result.changes
    ]
    return {
        **_head("difference", f"{result.a} and {result.b}"),
        "a": result.a,
        "b": result.b,
        "only_a": [printable(name) for name in result.only_a],
        "only_b": [printable(name) for name in result.only_b],
        "changes": changed,
        "differences": rows,
        "num_equal": result.num_equal,
        "notes": list(result.notes),
        "is_same": result.is_same,
        "verdict": "the same" if result.is_same else _summary(result, rows),
        "next": [],
        "problems": [],
        "not_finite": [],
    }


# ---- parts ---------------------------------------------------------------------------------------


def _head(kind: str, name: str) -> Values:
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return {"kind": kind, "name": printable(name), "made": now, "tool": f"ckpt-tools {__version__}"}


def _number(value: float | None) -> float | None:
    """Returns a number as JSON holds it: rounded, and None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")


def _tensor(
    fqn: str,
    dtype: str,
    shape: Sequence[int],
    nbytes: int,
    found: TensorStatistics | None,
) -> Values:
    return {
        "name": printable(fqn),
        "dtype": dtype,
        "shape": list(shape),
        "nbytes": nbytes,
        "kind": state_kind(fqn),
        "rms": _number(found.rms) if found else None,
        "max": _number(found.max_abs) if found else None,
        "zeros": _number(found.num_zeros / max(1, found.numel)) if found else None,
        "nan": found.num_nan if found else None,
        "inf": found.num_inf if found else None,
        "change": _number(found.change_rms) if found else None,
    }


def _duplicates(manifest: Manifest | None) -> Values:
    """Returns which bytes of a checkpoint are there more than once, by the fingerprints.

    `nbytes` are the bytes of the repetitions, and `groups` the largest groups of equal tensors,
    each with the names of the first two.
    """
    if manifest is None:
        return {"nbytes": 0, "groups": []}
    alike: dict[tuple[object, ...], list[str]] = {}
    for fqn, tensor in manifest.tensors.items():
        if nbytes_of(tensor) and math.prod(tensor.shape) > 1:  # counters are equal, of course
            key = tensor.fingerprint, tensor.dtype, tensor.shape
            alike.setdefault(key, []).append(fqn)
    found = sorted(
        (
            (
                (len(same) - 1) * nbytes_of(manifest.tensors[same[0]]),
                len(same),
                [printable(name) for name in same[:2]],
            )
            for same in alike.values()
            if len(same) > 1
        ),
        reverse=True,
    )
    return {
        "nbytes": sum(nbytes for nbytes, _, _ in found),
        "groups": [
            {"nbytes": nbytes, "count": count, "names": names}
            for nbytes, count, names in found[:_GROUPS]
        ],
    }


def _unchanged(steps: Sequence[Step]) -> Values | None:
    """Returns the tensors of the newest step that equal those of the step before."""
    if len(steps) < 2:
        return None
    before, newest = (step.manifest for step in steps[-2:])
    assert before is not None and newest is not None
    same = [
        tensor
        for fqn, tensor in newest.tensors.items()
        if fqn in before.tensors and before.tensors[fqn].fingerprint == tensor.fingerprint
    ]
    return {
        "step": steps[-1].number,
        "before": steps[-2].number,
        "count": len(same),
        "of": len(newest.tensors),
        "nbytes": sum(map(nbytes_of, same)),
    }


def _is_float(dtype: str) -> bool:
    return "float" in dtype or "complex" in dtype


def _drift(step: Step) -> float | None:
    """Returns the norm of the change of the weights since the step before, by their norm.

    Counters, such as those of BatchNorm, are no weights.
    """
    change = norm = 0.0
    optimizers = optimizers_in(step.manifest)
    for fqn, tensor in step.manifest.tensors.items() if step.manifest else ():
        found = tensor.statistics
        is_weight = state_kind(fqn, optimizers) == WEIGHTS
        is_weight = is_weight and _is_float(tensor.dtype) and not tensor.tied_to
        if found is not None and found.change_rms is not None and is_weight:
            change += found.change_rms * found.change_rms * found.numel  # ** would raise
            norm += found.rms * found.rms * found.numel
    return _number(math.sqrt(change / norm)) if norm else None


def _over_steps(steps: Sequence[Step], names: Sequence[str]) -> Values:
    """Returns RMS and change of each tensor, one number for each measured step."""
    rms: dict[str, list[float | None]] = {name: [] for name in names}
    change: dict[str, list[float | None]] = {name: [] for name in names}
    for step in steps:
        tensors = step.manifest.tensors if step.manifest else {}
        found = {printable(fqn): t.statistics for fqn, t in tensors.items()}
        for name in names:
            one = found.get(name)
            rms[name].append(_number(one.rms) if one else None)
            change[name].append(_number(one.change_rms) if one else None)
    return {"rms": rms, "change": change}


# ---- words ---------------------------------------------------------------------------------------


def _verdict(
    problems: Sequence[str],
    not_finite: Sequence[str],
    manifest: Manifest | None,
    is_measured: bool,
    has_read: bool,
    world_size: int | None,
) -> str:
    if problems:
        return f"damaged: {problems[0]}"
    if not_finite:
        more = f" and {len(not_finite) - 1} more" if len(not_finite) > 1 else ""
        return f"not finite: NaN or infinity in {not_finite[0]}{more}"
    sealed = "sealed" if manifest is not None else "complete, without a manifest"
    if has_read:
        sealed += ", its tensors are as they were written" * (manifest is not None)
    else:
        sealed += " (no data were read: ckpt verify reads all)" * (manifest is not None)
    finite = "finite" if is_measured else "values not measured"
    noun = "rank" if world_size == 1 else "ranks"
    any_number = ", and resumes on any number" if manifest is not None else ""
    ranks = f"written by {world_size} {noun}{any_number}" if world_size else ""
    return ", ".join(part for part in (sealed, finite, ranks) if part)


def _next(
    path: str,
    problems: Sequence[str],
    not_finite: Sequence[str],
    manifest: Manifest | None,
    is_measured: bool,
) -> list[str]:
    if problems:
        return [f"ckpt verify {path}", f"ckpt salvage {path} OUT"]
    lines = [f"ckpt stats {path}"] if not_finite or not is_measured else []
    return [*lines, f"ckpt verify {path}" if manifest is not None else f"ckpt seal {path}"]


def _verdict_of_run(found_steps: Sequence[Step]) -> str:
    bad = [s for s in found_steps if s.problem or s.twin or s.superseded_by]
    not_finite = [s.number for s in found_steps if s.is_finite is False]
    unknown = sum(s.is_finite is None and not s.problem for s in found_steps)
    unread = sum(s.error is not None for s in bad)
    unsealed = sum(s.manifest is None for s in found_steps if s not in bad)
    parts = [f"{len(found_steps) - len(bad) - unsealed} complete steps"]
    if unread:
        parts.append(f"{unread} cannot be read")
    for number, what in (
        (sum(bool(s.problem) for s in bad) - unread, "incomplete"),
        (unsealed, "without a manifest, not counted"),
        (len({s.number for s in bad if s.twin and not s.problem}), "there twice"),
        (sum(bool(s.superseded_by) and not s.problem for s in bad), "set aside by a rollback"),
    ):
        if number:
            parts.append(f"{number} {what}")
    if not_finite:
        parts.append(f"not finite: step {', '.join(map(str, not_finite[:8]))}")
    if unknown:
        parts.append(f"{unknown} without statistics")
    return ", ".join(parts)


def _next_of_run(root: str, steps: Sequence[Step]) -> list[str]:
    full = [s for s in steps if s.counts and not s.thinned]
    lines = [f"ckpt check {root}"]
    if len(full) > 1:
        lines.append(f"ckpt thin {root} --keep-full 1 --dry-run")
    return [*lines, f"ckpt prune {root} --keep-last 3 --dry-run"]


def _summary(result: DiffResult, rows: Sequence[Values]) -> str:
    first = f"; most in {rows[0]['name']}" if rows else ""
    objects = sum(row["is_object"] for row in rows)
    counts = (
        (len(rows) - objects, "tensors with other values"),
        (objects, "objects with other values"),
        (len(result.changes), "of another type or shape"),
        (len(result.only_a), "only in the first"),
        (len(result.only_b), "only in the second"),
    )
    what = ", ".join(f"{number} {name}" for number, name in counts if number)
    return f"differ: {what}; equal, objects included: {result.num_equal}{first}"
