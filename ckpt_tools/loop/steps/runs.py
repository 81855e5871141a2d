"""Functions for the directory of a run: its steps, the newest one, and removing old ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt_tools.core.counts import check_count
from ckpt_tools.errors import PlanError
from ckpt_tools.loop.steps.retention import Pruned, prune_steps
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.verify import step_damage
from ckpt_tools.run import steps as run_steps
from ckpt_tools.run.retention import Retention, check_rules, refuse_unknown_metric
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import Step

Root = str | os.PathLike[str]


@checked()
def steps(root: Root, *, storage_options: Mapping[str, Any] | None = None) -> list[Step]:
    """Returns the steps of a run by number, complete or not. No data is read.

    A directory that does not exist has no steps: the first save makes it.

    Args:
        root: directory of the run, a path or a URL.
        storage_options: of the object store, as fsspec takes them.

    Raises:
        StorageError: the directory cannot be read.
    """
    return run_steps.list_steps(open_root(root, storage_options))


@checked()
def latest(
    root: Root,
    *,
    verify: bool = False,
    jobs: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Step | None:
    """Returns the newest complete step of a run; None if there is none, or no directory yet.

    Args:
        root: directory of the run, a path or a URL.
        verify: also read every byte, and pass over a step that is damaged.
        jobs: threads that read with `verify`.
        storage_options: of the object store, as fsspec takes them.

    Raises:
        StorageError: the directory cannot be read.
    """
    where = open_root(root, storage_options)
    read = step_damage(storage_options)
    return run_steps.find_latest(where, verify=verify, jobs=jobs, read=read).step


@checked()
def prune(
    root: Root,
    keep_last: int | None = None,
    *,
    keep_every: int | None = None,
    retention: Retention | None = None,
    verify: bool | None = None,
    dry_run: bool = False,
    jobs: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Pruned:
    """Removes old steps of a run, oldest first.

    A pinned step stays. So does one that a link leads to, and one with files that no save wrote.

    Args:
        root: directory of the run, a path or a URL. A job may be saving to it.
        keep_last: how many of the newest complete steps stay, at least 1.
        keep_every: steps whose number is a multiple of this stay too.
        retention: rules in place of these two.
        verify: read the counted steps, and do not count damaged ones. If None, only the newest step
            is read.
        dry_run: remove nothing, and return what would be removed.
        jobs: threads that read.
        storage_options: of the object store, as fsspec takes them.

    Raises:
        NotACheckpointError: there is no such directory.
        PlanError: a number is less than 1, or no step has the metric of the rules.
        StorageError: the directory cannot be read.
    """
    if (keep_last is None) == (retention is None) or (retention and keep_every is not None):
        raise PlanError("expected keep_last, or retention in its place")
    check_count("keep_last", keep_last, PlanError, or_none=True)
    check_count("keep_every", keep_every, PlanError, or_none=True)
    rules = Retention(keep_last, keep_every) if retention is None else retention
    check_rules(rules)
    if rules.full is not None:
        raise PlanError(
            "full is for steps that are thinned, and prune only removes steps",
            hint="call ckpt_tools.thin(root, keep_full=…)",
        )
    where = open_root(root, storage_options)
    if rules.metric is not None:
        refuse_unknown_metric(where, rules.metric)
    return prune_steps(where, rules, dry_run=dry_run, reads=verify, jobs=jobs)
