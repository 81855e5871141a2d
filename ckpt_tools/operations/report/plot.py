"""Draws statistics of tensors over the steps of a run."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_tools.core.selection import check_globs, matcher
from ckpt_tools.core.statistics import TensorStatistics
from ckpt_tools.errors import (
    CheckpointError,
    NotACheckpointError,
    PlanError,
    StorageError,
    printable,
)
from ckpt_tools.formats.base import new_attempt
from ckpt_tools.operations.arguments import checked
from ckpt_tools.publish.disk.commit import add_file
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import refuse_unreadable
from ckpt_tools.run.steps import list_steps
from ckpt_tools.transfer.options import Path_

VALUES = ("rms", "max", "zeros", "change")
_LABELS = {
    "rms": "RMS",
    "max": "largest magnitude",
    "zeros": "share of zeros",
    "change": "RMS of the change since the step before",
}
_MAX_LINES = 12
_SUFFIXES = (".png", ".svg", ".pdf")


@checked()
def plot(
    root: Path_,
    *,
    tensor: Sequence[str],
    output: Path_,
    value: str = "rms",
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Draws a statistic of tensors over the steps that were saved with statistics.

    Args:
        root: directory of the run, a path or a URL.
        tensor: globs of names. Of more than 12 tensors, the range and the median are drawn.
        output: the picture: `.png`, `.svg` or `.pdf`.
        value: one of `VALUES`.
        overwrite: replace an existing file.
        storage_options: of the object store, as fsspec takes them.

    Returns:
        The names of the tensors.

    Raises:
        PlanError: a glob matches nothing, or an argument does not fit.
        NotACheckpointError: no step has statistics.
        StorageError: the file exists.
        CheckpointError: matplotlib is not installed.
    """
    path = Path(os.fspath(output))
    if value not in VALUES:
        raise PlanError(f"value: expected one of {', '.join(VALUES)}, got {printable(value)!r}")
    if path.suffix not in _SUFFIXES or not path.absolute().parent.is_dir():
        raise PlanError(
            f"a picture: expected a name that ends in {', '.join(_SUFFIXES)}, in a directory that"
            f" exists, got {printable(str(path))!r}"
        )
    if os.path.lexists(path) and not overwrite:
        raise StorageError(f"it exists: {printable(str(path))}", hint="--overwrite replaces it")
    there = list_steps(open_root(root, storage_options))
    refuse_unreadable(there, "which values to draw")
    steps = [step for step in there if step.is_finite is not None]
    if not steps:
        raise NotACheckpointError(
            f"no step of {printable(str(root))} was saved with statistics",
            hint="CheckpointManager(…, statistics=True)",
        )
    names = list(dict.fromkeys(n for s in steps if s.manifest for n in s.manifest.tensors))
    check_globs(tensor, names, "--select")
    chosen = [name for name in names if matcher(tensor)(name)]
    numbers = [step.number for step in steps]
    lines = {
        name: [
            _value(step.manifest.tensors[name].statistics, value)
            if step.manifest and name in step.manifest.tensors
            else float("nan")
            for step in steps
        ]
        for name in chosen
    }
    _draw(path, numbers, lines, _LABELS[value], overwrite)
    return chosen


def _value(found: TensorStatistics | None, value: str) -> float:
    if found is None:
        return float("nan")
    if value == "change":
        return float("nan") if found.change_rms is None else found.change_rms
    if value == "zeros":
        return found.num_zeros / max(1, found.numel)
    return found.rms if value == "rms" else found.max_abs


def _draw(
    path: Path,
    numbers: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    label: str,
    overwrite: bool,
) -> None:
    try:
        import matplotlib as mpl
        import numpy as np
    except ImportError as error:
        raise CheckpointError(
            "a plot needs matplotlib", hint="pip install 'ckpt-tools[report]'"
        ) from error
    mpl.use("Agg")
    mpl.rcParams["text.parse_math"] = False  # a name may have two dollar signs
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    if len(lines) <= _MAX_LINES:
        for name, values in lines.items():
            axes.plot(numbers, values, marker=".", label=printable(name))
    else:
        table = np.array(list(lines.values()))
        seen = ~np.isnan(table).all(0)  # the first step has no change
        table, numbers = (
            table[:, seen],
            [n for n, is_seen in zip(numbers, seen, strict=True) if is_seen],
        )
        axes.fill_between(
            numbers,
            np.nanmin(table, 0),
            np.nanmax(table, 0),
            alpha=0.3,
            label=f"range of {len(lines)} tensors",
        )
        axes.plot(numbers, np.nanmedian(table, 0), label="median")
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    page = io.BytesIO()
    figure.savefig(page, format=path.suffix[1:])
    plt.close(figure)
    add_file(path.absolute().parent, path.name, page.getvalue(), new_attempt(), overwrite)
