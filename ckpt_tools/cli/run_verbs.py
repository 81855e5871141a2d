"""The commands for a run: list its steps, find the newest, remove old ones, pin one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tools.cli.options import (
    Json,
    Quiet,
    Root,
    StorageOption,
    parse_period,
    parse_storage_options,
)
from ckpt_tools.cli.process import fail
from ckpt_tools.errors import NotACheckpointError, StorageError, printable, redacted

if TYPE_CHECKING:
    from ckpt_tools.publish.steps import Step

Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        help="A metric that the steps were saved with.",
        show_default=False,
    ),
]
HigherIsBetter = Annotated[
    bool, typer.Option("--higher-is-better", help="A larger value of the metric is better.")
]


def fail_if_unreadable(steps: Iterable[Step]) -> None:
    """Ends the command, after its output, with the cause and status 15 if a step is unreadable."""
    unread = [step for step in steps if step.error is not None]
    if unread:
        more = f", and {len(unread) - 1} more" * (len(unread) > 1)
        fail(
            f"{printable(unread[0].name)} cannot be read{more}: {unread[0].error}",
            unread[0].error.hint if unread[0].error else None,
            StorageError.exit_code,
        )


def list_(
    root: Root,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Show the metrics that the steps were saved with.")
    ] = False,
    timing: Annotated[
        bool,
        typer.Option("--timing", help="Show the seconds that each phase of the save has taken."),
    ] = False,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """List the steps of a run with size, time, world size and state.

    A step whose save found NaN or infinity is marked. Entries that are not steps come last.
    """
    from ckpt_tools.cli import render
    from ckpt_tools.publish.destinations import open_root
    from ckpt_tools.publish.steps import list_all

    where = open_root(root, parse_storage_options(storage_option))
    steps, others = list_all(where)
    if not steps and not where.exists():
        raise NotACheckpointError(f"not a directory: {printable(root)}")
    if as_json:
        print(json.dumps([render.step_as_json(s) for s in steps]))
    else:
        render.show_steps(steps, metrics, timing)
    if others:
        print(f"not steps: {render.some_names(others)}", file=sys.stderr if as_json else sys.stdout)
    fail_if_unreadable(steps)


def latest(
    root: Root,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read every byte, and skip steps with wrong checksums."),
    ] = False,
    allow_not_finite: Annotated[
        bool,
        typer.Option(
            "--allow-not-finite", help="Do not skip a step whose save found NaN or infinity."
        ),
    ] = False,
    storage_option: StorageOption = None,
) -> None:
    """Print the path of the newest complete step, from which a job would resume.

    Skipped newer steps are listed on stderr with the reason. Exit status 10 if there is no such
    step.
    """
    from ckpt_tools.publish.destinations import open_root
    from ckpt_tools.publish.steps import find_latest as find

    found = find(
        open_root(root, parse_storage_options(storage_option)),
        verify,
        allow_not_finite=allow_not_finite,
    )
    for path, reason in found.passed_over:
        print(f"passed over {printable(str(path))}: {reason}", file=sys.stderr)
    if found.step is None:
        kind = (
            "complete step that a job could resume from" if found.passed_over else "complete step"
        )
        raise NotACheckpointError(f"no {kind} in {printable(root)}")
    print(redacted(str(found.step.path)))


def prune(
    root: Root,
    keep_last: Annotated[
        int,
        typer.Option(
            "--keep-last",
            min=1,
            metavar="N",
            help="How many of the newest complete steps stay.",
            show_default=False,
        ),
    ],
    keep_every: Annotated[
        int | None,
        typer.Option(
            "--keep-every",
            min=1,
            metavar="M",
            help="Steps whose number is a multiple of M stay as well.",
            show_default=False,
        ),
    ] = None,
    keep_spaced: Annotated[
        str | None,
        typer.Option(
            "--keep-spaced",
            metavar="TIME",
            help="One step of each period stays as well, such as 6h or 1d.",
            show_default=False,
        ),
    ] = None,
    keep_younger: Annotated[
        str | None,
        typer.Option(
            "--keep-younger",
            metavar="TIME",
            help="Steps saved less than this ago stay as well, such as 12h.",
            show_default=False,
        ),
    ] = None,
    keep_best: Annotated[
        int | None,
        typer.Option(
            "--keep-best",
            min=1,
            metavar="K",
            help="The K best steps by --metric stay as well.",
            show_default=False,
        ),
    ] = None,
    metric: Metric = None,
    higher_is_better: HigherIsBetter = False,
    grace_hours: Annotated[
        float,
        typer.Option(
            "--grace-hours",
            min=0.0,
            help=(
                "In an object store: remove unfinished work without activity for this number of"
                " hours."
            ),
        ),
    ] = 24.0,
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help=(
                "Read the counted steps, and do not count a damaged one. By default, only the"
                " newest step is read."
            ),
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
    storage_option: StorageOption = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Remove old steps of a run, and unfinished work of dead jobs.

    Unfinished work is directories, objects without an index, and uploads. The newest complete step,
    the newest step without known NaN, incomplete steps, steps of other tools, and all other files
    in ROOT stay. A step also stays if it is pinned, if a link in ROOT leads to it, or if it holds
    files that no save wrote. The output lists these last ones. With --dry-run, each other step that
    stays is listed with its rule. Exit status 15 if a step cannot be removed, or not be read; the
    others are removed.
    """
    from ckpt_tools.cli import render
    from ckpt_tools.loop.steps.retention import prune_steps as operation
    from ckpt_tools.publish.destinations import open_root
    from ckpt_tools.publish.retention_rules import Retention, refuse_unknown_metric

    if (keep_best is None) != (metric is None) or (higher_is_better and metric is None):
        raise typer.BadParameter("--keep-best and --metric need each other")
    rules = Retention(
        last=keep_last,
        every=keep_every,
        every_s=parse_period(keep_spaced),
        younger_s=parse_period(keep_younger),
        best=keep_best,
        metric=metric,
        higher_is_better=higher_is_better,
    )
    where = open_root(root, parse_storage_options(storage_option))
    if metric is not None:
        refuse_unknown_metric(where, metric)
    try:
        result = operation(where, rules, dry_run=dry_run, reads=verify)
        leftovers = where.remove_leftovers(grace_hours * 3600, dry_run)
    except KeyboardInterrupt as stop:
        stop.args = ("some steps may be removed already: ckpt ls shows the others",)
        raise
    if as_json:
        print(json.dumps(render.pruned_as_json(result, leftovers, dry_run)))
    elif not quiet:
        render.show_pruned(result, leftovers, dry_run)
    if result.failed or result.unreadable or any(left.problem for left in leftovers):
        raise typer.Exit(StorageError.exit_code)


def best(
    root: Root,
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="The metric that the steps were saved with.",
            show_default=False,
        ),
    ],
    higher_is_better: HigherIsBetter = False,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Print the path of the best complete step by a metric of `save(…, metrics=…)`.

    Steps without a finite value of it, and steps that are not finite themselves, do not count. They
    are listed on stderr. Exit status 10 if no step is left.
    """
    from ckpt_tools.cli import render
    from ckpt_tools.publish.destinations import open_root
    from ckpt_tools.publish.retention_rules import metric_of, ranked, refuse_unknown_metric
    from ckpt_tools.publish.steps import refuse_unreadable

    where = open_root(root, parse_storage_options(storage_option))
    known = refuse_unknown_metric(where, metric)
    refuse_unreadable(known, "which step is the best")
    steps = [step for step in known if not step.problem]
    found = ranked(steps, metric, higher_is_better)
    without = [printable(step.name) for step in steps if step not in found]
    if without:
        print(
            f"not finite, or without a finite {printable(metric)}: {', '.join(without)}",
            file=sys.stderr,
        )
    if not found:
        raise NotACheckpointError(
            f"no complete step has a value of {printable(metric)} ({printable(root)})"
        )
    if as_json:
        print(json.dumps(render.step_as_json(found[0])))
    else:
        print(f"{found[0].path}")
        print(f"{printable(metric)} = {metric_of(found[0], metric):g}", file=sys.stderr)


def _on_unmeasured(steps: Iterable[Step]) -> str:
    """Returns a remark on steps whose values nobody has measured."""
    from ckpt_tools.cli.render import count

    number = sum(step.manifest is not None and not step.manifest.has_statistics for step in steps)
    if not number:
        return ""
    return f"; {count(number, 'step')} without statistics: NaN in them would not be seen"


def check(
    root: Root,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte, and compare the checksums.")
    ] = False,
    every: Annotated[
        int | None,
        typer.Option(
            "--every",
            min=1,
            metavar="N",
            help="The distance of steps: a missing one is a problem.",
            show_default=False,
        ),
    ] = None,
    unchanged: Annotated[
        int,
        typer.Option(
            "--unchanged",
            min=2,
            metavar="N",
            help="A trained tensor that is the same in the newest N steps is a problem.",
        ),
    ] = 3,
    jump: Annotated[
        float,
        typer.Option(
            "--jump",
            min=1.0,
            metavar="X",
            help="An update of a weight X times larger than those before is a problem.",
        ),
    ] = 10.0,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Check the steps of a run, for CI and cron: exit status 1, and one line for each problem.

    Problems are steps that are incomplete, without a manifest, damaged, missing or not finite,
    trained tensors that do not change, and unusual updates. Values are known of steps that were
    saved with statistics. Only --verify reads the data. Exit status 15 if a step cannot be read.
    """
    from ckpt_tools.operations.check_run import check_steps as operation

    problems, steps = operation(
        root,
        verify=verify,
        every=every,
        unchanged_steps=unchanged,
        jump=jump,
        storage_options=parse_storage_options(storage_option),
    )
    if as_json:
        print(json.dumps([problem._asdict() for problem in problems]))
    for problem in problems if not as_json else ():
        print(problem)
    if any(problem.kind == "unreadable" for problem in problems):
        raise typer.Exit(StorageError.exit_code)
    if problems:
        raise typer.Exit(1)
    if not as_json:
        print(f"{printable(root)}: no problems{_on_unmeasured(steps)}")


def pin(
    step: Annotated[
        str,
        typer.Argument(
            help="A step of a run, such as RUN/step-00000100: a path or a URL.", show_default=False
        ),
    ],
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin.")] = False,
    storage_option: StorageOption = None,
    quiet: Quiet = False,
) -> None:
    """Keep a step for good, with a file ckpt.pin in it.

    Neither prune nor a training's retention removes it.
    """
    from ckpt_tools.loop.steps.retention import pin_step as operation

    is_new = operation(step, parse_storage_options(storage_option), remove)
    if not quiet:
        state = "no longer pinned" if remove else "pinned"
        print(
            f"{printable(step)} is {state}"
            if is_new
            else f"{printable(step)} was {'not pinned' if remove else 'pinned already'}"
        )
