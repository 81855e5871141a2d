"""Completes the values of options in a shell. Paths are completed by the shell itself."""

from __future__ import annotations

import os
from collections.abc import Iterable

from typer import Context

DTYPES = ("bf16", "fp16", "fp32", "fp64")


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def dtypes(incomplete: str) -> list[str]:
    """Returns the short names of types that `--dtype` takes."""
    return _starting(DTYPES, incomplete)


def schedules(incomplete: str) -> list[str]:
    """Returns the schedules of `average`."""
    from ckpt_tools.operations.average import SCHEDULES

    return _starting(SCHEDULES, incomplete)


def chart_values(incomplete: str) -> list[str]:
    """Returns what `report --png` can draw."""
    from ckpt_tools.operations.report.plot import VALUES

    return _starting(VALUES, incomplete)


def layouts(incomplete: str) -> list[str]:
    """Returns the layouts that `convert` writes."""
    from ckpt_tools.operations.convert.targets import TARGETS

    return _starting(TARGETS, incomplete)


def metrics(context: Context, incomplete: str) -> list[str]:
    """Returns the metrics of the run on the command line; none of a run in a bucket.

    There, each press of a key would cost requests.
    """
    from ckpt_tools.errors import CheckpointError
    from ckpt_tools.run.retention import metrics_of
    from ckpt_tools.run.roots import open_root
    from ckpt_tools.run.steps import list_steps

    # an option without a value ends the parser before it names the arguments
    root = context.params.get("root") or next(iter(context.args), "")
    if not root or "://" in root:
        return []
    root = os.path.expanduser(os.path.expandvars(root))  # the shell has not done so yet
    try:
        return _starting(metrics_of(list_steps(open_root(root))), incomplete)
    except CheckpointError:
        return []


def maps(incomplete: str) -> list[str]:
    """Returns the names of the built-in maps of keys."""
    from importlib import resources

    files = resources.files("ckpt_tools.maps").iterdir()
    names = sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))
    return _starting(names, incomplete)
