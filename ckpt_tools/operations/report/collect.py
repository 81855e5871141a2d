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
from ckpt_tools.operations.convert.flat_shapes import lay_beside
from ckpt_tools.operations.diff import diff
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
from ckpt_tools.publish.destinations import open_root
from ckpt_tools.publish.find_manifest import manifest_of
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.steps import Step, list_all
from ckpt_tools.transfer.options import Path_, Reading
from ckpt_tools.version import __version__

Values = dict[str, Any]
_DIGITS = 4


def steps_of(path: Path_, options: Mapping[str, Any] | None) -> list[Step]:
    """Returns the steps of a run; none if a path is not the directory of a run.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        return list_all(open_root(path, options))[0]
    except CheckpointError as error:
        if is_unreadable(error):
            raise
        return []


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
    except CheckpointError:
        if not problems:
            raise
        return _of_damaged(redacted(str(src)), problems)
    source = open_source(src, storage_options, lay_beside(shapes))
    try:
        manifest, known = manifest_of(source.store), sealed_statistics(source)
    finally:
        source.store.close()
    if not known and reads:
        known = dict(stats(src, **options).tensors)
    tensors = [
        _tensor(fqn, entry.dtype.name, entry.shape, entry.nbytes, known.get(fqn))
        for fqn, entry in report.catalog.tensors.items()
    ]
    files = [
        {"name": printable(f.name), "rank": f.rank, "nbytes": f.nbytes, "chunks": f.num_chunks}
        for f in report.files
    ]
    not_finite = [t["name"] for t in tensors if t["nan"] or t["inf"]]
    return {
        **_head("checkpoint", redacted(str(src))),
        "format": report.format,
        "world_size": report.world_size,
        "created": manifest.created if manifest else None,
        "is_sealed": manifest is not None,
        "is_measured": bool(known),
        "problems": problems,
        "not_finite": not_finite,
        "verdict": _verdict(problems, not_finite, manifest, bool(known), report.world_size),
        "next": _next(redacted(str(src)), problems, not_finite, manifest, bool(known)),
        "metrics": dict(manifest.metrics) if manifest else {},
        "tensors": tensors,
        "num_objects": len(report.catalog.objects),
        "files": files,
    }


def _of_damaged(path: str, problems: Sequence[str]) -> Values:
    """Returns a report on a checkpoint whose structure cannot be read."""
    return {
        **_head("checkpoint", path),
        "problems": problems,
        "not_finite": [],
        "is_measured": False,
        "verdict": _verdict(problems, [], None, False, None),
        "next": _next(path, problems, [], None, False),
        "tensors": [],
        "files": [],
    }


def of_run(root: Path_, steps_there: Sequence[Step]) -> Values:
    """Returns the numbers of a run: of each step, and of each tensor over the steps.

    Args:
        root: directory of the run.
        steps_there: its steps.
    """
    found = bytes_of(steps_there)
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
    problems = [f"step {s.step.number}: {s.step.problem}" for s in found if s.step.problem]
    return {
        **_head("run", redacted(str(root))),
        "steps": steps,
        "reclaimable": sum(one.reclaimable for one in found),
        "problems": problems,
        "unreadable": [s.step.number for s in found if s.step.error is not None],
        "not_finite": not_finite,
        "newest": newest.number if newest is not None else None,
        "is_measured": bool(measured),
        "verdict": _verdict_of_run(found_steps=[one.step for one in found]),
        "next": _next_of_run(redacted(str(root)), [one.step for one in found]),
        "tensors": tensors,
        "over_steps": _over_steps(measured, [t["name"] for t in tensors]),
        "measured_steps": [step.number for step in measured],
        "files": [],
    }


def of_difference(a: Path_, b: Path_, **options: Unpack[Reading]) -> Values:
    """Returns the differences of two checkpoints, the largest first.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    result = diff(a, b, **options)
    rows: list[Values] = [
        {
            "name": printable(d.fqn),
            "numel": d.numel,
            "different": d.num_different,
            "max_abs": _number(d.max_abs),
            "max_rel": _number(d.max_rel),
            "angle": None if d.cosine is None else _number(1 - d.cosine),
        }
        for d in result.differences
    ]
    rows.sort(key=_by_size)
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
        "verdict": "the same" if result.is_same else _summary(rows, result.num_equal),
        "next": [],
        "problems": [],
        "not_finite": [],
    }


def _by_size(row: Values) -> float:
    """Returns a key that sorts the largest relative difference first, and NaN before all."""
    found = row["max_rel"]
    return -math.inf if found is None else -float(found)


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
    world_size: int | None,
) -> str:
    if problems:
        return f"damaged: {problems[0]}"
    if not_finite:
        more = f" and {len(not_finite) - 1} more" if len(not_finite) > 1 else ""
        return f"not finite: NaN or infinity in {not_finite[0]}{more}"
    sealed = (
        "sealed (a report reads no data: ckpt verify does)"
        if manifest is not None
        else "complete, without a manifest"
    )
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
    bad = [s for s in found_steps if s.problem]
    not_finite = [s.number for s in found_steps if s.is_finite is False]
    unknown = sum(s.is_finite is None and not s.problem for s in found_steps)
    unread = sum(s.error is not None for s in bad)
    parts = [f"{len(found_steps) - len(bad)} complete steps"]
    if unread:
        parts.append(f"{unread} cannot be read")
    if len(bad) > unread:
        parts.append(f"{len(bad) - unread} incomplete")
    if not_finite:
        parts.append(f"not finite: step {', '.join(map(str, not_finite[:8]))}")
    if unknown:
        parts.append(f"{unknown} without statistics")
    return ", ".join(parts)


def _next_of_run(root: str, steps: Sequence[Step]) -> list[str]:
    full = [s for s in steps if not s.problem and not s.thinned and not s.superseded_by]
    lines = [f"ckpt check {root}"]
    if len(full) > 1:
        lines.append(f"ckpt thin {root} --keep-full 1 --dry-run")
    return [*lines, f"ckpt prune {root} --keep-last 3 --dry-run"]


def _summary(rows: Sequence[Values], num_equal: int) -> str:
    first = f"; most in {rows[0]['name']}" if rows else ""
    return f"tensors that differ: {len(rows)}; equal, objects included: {num_equal}{first}"
