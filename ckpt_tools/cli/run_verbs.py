"""The commands for a run: list its steps, find the newest, remove old ones, pin one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tools.cli.completion import metrics
from ckpt_tools.cli.options import Base, Root, Shared, parse_period, shares
from ckpt_tools.cli.process import fail
from ckpt_tools.errors import (
    IntegrityError,
    NotACheckpointError,
    StorageError,
    printable,
    redacted,
)

if TYPE_CHECKING:
    from ckpt_tools.run.base import RunRoot
    from ckpt_tools.run.step import Step

DryRunOfPrune = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print what would be removed, and remove nothing.",
        rich_help_panel="Output",
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        help="A metric that the steps were saved with.",
        show_default=False,
        autocompletion=metrics,
    ),
]
HigherIsBetter = Annotated[
    bool, typer.Option("--higher-is-better", help="A larger value of the metric is better.")
]


Price = Annotated[
    float | None,
    typer.Option(
        "--price",
        min=0.0,
        metavar="X",
        help="Price of a GB for a month, such as 0.023: show what the freed bytes cost.",
        show_default=False,
    ),
]


def _check_jobs(shared: Shared, verify: bool) -> None:
    if shared.jobs is not None and not verify:
        raise typer.BadParameter("--jobs needs --verify: nothing else is read")


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


@shares("storage_option", "as_json")
def list_(
    root: Root,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Show the metrics that the steps were saved with.")
    ] = False,
    timing: Annotated[
        bool,
        typer.Option("--timing", help="Show the seconds that each phase of the save has taken."),
    ] = False,
    nbytes: Annotated[
        bool,
        typer.Option(
            "--bytes",
            help="Show where the bytes are: models, optimizers, the rest, and what could go.",
        ),
    ] = False,
    price: Price = None,
    *,
    shared: Shared,
) -> None:
    """List the steps of a run with size, time, world size and state, or with their bytes.

    A step whose save found NaN or infinity is marked. Entries that are not steps come last. For a
    folder without steps, everything in it is listed; with --json, such entries have no `step`. With
    --bytes, no values are read either; what could go is what `ckpt thin --keep-full 1` would free.
    """
    from ckpt_tools.cli import render

    if nbytes:
        if metrics or timing:
            raise typer.BadParameter("--bytes has a table of its own: leave the other out")
        _show_bytes(root, price, shared)
        return
    if price is not None:
        raise typer.BadParameter("--price needs --bytes")
    from ckpt_tools.run.roots import open_root
    from ckpt_tools.run.steps import RunListing

    where = open_root(root, shared.storage_options)
    found = RunListing(where)
    steps, others = found.all_steps, found.others
    if not steps:
        _show_folder(root, where, shared)
    elif shared.as_json:
        print(json.dumps([render.step_as_json(s) for s in steps]))
        if others:
            print(f"not steps: {render.some_names(others)}", file=sys.stderr)
    else:
        render.show_steps(steps, metrics, timing)
        if others:
            _show_others(root, others, shared)
    _show_unfinished(where, shared)
    fail_if_unreadable(steps)


def _show_folder(root: str, where: RunRoot, shared: Shared) -> None:
    """Lists what lies in a folder without steps."""
    from ckpt_tools.cli import render
    from ckpt_tools.formats.dcp import format as dcp
    from ckpt_tools.operations.folder import entries_of

    where.check_exists()
    entries = entries_of(root, shared.storage_options)
    is_one = where.has_file(dcp.LOOKS_FOR) or any(
        entry.name.endswith((".distcp", ".index.json")) for entry in entries
    )
    said = "no steps" + "; a checkpoint itself: see ckpt inspect" * is_one
    print(said, file=sys.stderr if shared.as_json else sys.stdout)
    if shared.as_json:
        print(json.dumps([render.entry_as_json(root, entry) for entry in entries]))
    elif entries or not is_one:
        render.show_entries(entries)


def _show_unfinished(where: RunRoot, shared: Shared) -> None:
    """Tells on stderr of unfinished work in a run on a disk; in a bucket, a look costs requests."""
    from ckpt_tools.cli import render
    from ckpt_tools.publish.disk.staging import unfinished_in

    if isinstance(where.path, Path) and not shared.as_json:
        render.show_unfinished([*unfinished_in(where.path).values()])


def _show_others(root: str, others: Sequence[str], shared: Shared) -> None:
    """Lists what lies beside the steps of a run."""
    from ckpt_tools.cli import render
    from ckpt_tools.operations.folder import entries_of

    names = {name.removesuffix("/") for name in others}
    entries = entries_of(root, shared.storage_options, names.__contains__)
    if any(entry.about for entry in entries):
        print("not steps:")
        render.show_entries(entries)
    else:
        print(f"not steps: {render.some_names(others)}")


def _show_bytes(root: str, price: float | None, shared: Shared) -> None:
    from ckpt_tools.cli import render
    from ckpt_tools.operations.run_bytes import du

    found = du(root, storage_options=shared.storage_options)
    if shared.as_json:
        names = ("model", "optimizer", "other", "reclaimable", "why", "kinds")
        print(
            json.dumps(
                [
                    {"step": one.step.number, "path": str(one.step.path), "nbytes": one.step.nbytes}
                    | {name: getattr(one, name) for name in names}
                    for one in found
                ]
            )
        )
    else:
        render.show_bytes(root, found, price)
    fail_if_unreadable(one.step for one in found)


@shares("storage_option", "jobs", "as_json")
def latest(
    root: Root,
    best: Annotated[
        str | None,
        typer.Option(
            "--best",
            metavar="METRIC",
            help="The best step by a metric of save(metrics=…) instead of the newest.",
            show_default=False,
            autocompletion=metrics,
        ),
    ] = None,
    higher_is_better: HigherIsBetter = False,
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
    *,
    shared: Shared,
) -> None:
    """Print the path of the newest complete step, from which a job would resume, or of the best.

    Only --verify reads the bytes: without it, the step may be damaged. Skipped newer steps are
    listed on stderr with the reason. With --best, steps without a finite value of the metric, and
    steps that are not finite themselves, do not count; they are listed, too. Exit status 10 if
    there is no such step.
    """
    from ckpt_tools.cli import render

    if best is None and higher_is_better:
        raise typer.BadParameter("--higher-is-better needs --best")
    _check_jobs(shared, verify)
    if best is not None and (verify or allow_not_finite):
        raise typer.BadParameter("--verify and --allow-not-finite are for the newest step")
    step = (
        _newest(root, verify, allow_not_finite, shared)
        if best is None
        else _best(root, best, higher_is_better, shared)
    )
    print(json.dumps(render.step_as_json(step)) if shared.as_json else redacted(str(step.path)))


def _newest(root: str, verify: bool, allow_not_finite: bool, shared: Shared) -> Step:
    from ckpt_tools.run.roots import open_root
    from ckpt_tools.run.steps import find_latest as find
    from ckpt_tools.run.steps import no_steps

    more: dict[str, Any] = {}
    if verify:
        from ckpt_tools.operations.verify import step_damage

        more = {"read": step_damage(shared.storage_options), "jobs": shared.jobs}
    where = open_root(root, shared.storage_options)
    found = find(
        where,
        verify=verify,
        allow_not_finite=allow_not_finite,
        **more,
    )
    for path, reason in found.passed_over:
        print(f"passed over {printable(str(path))}: {reason}", file=sys.stderr)
    if found.step is None:
        kind = (
            "complete step that a job could resume from" if found.passed_over else "complete step"
        )
        hint = None if found.passed_over else no_steps(where).hint
        raise NotACheckpointError(f"no {kind} in {printable(root)}", hint=hint)
    return found.step


def _best(root: str, metric: str, higher_is_better: bool, shared: Shared) -> Step:
    from ckpt_tools.run.retention import metric_of, ranked, refuse_unknown_metric
    from ckpt_tools.run.roots import open_root
    from ckpt_tools.run.step import refuse_unreadable

    where = open_root(root, shared.storage_options)
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
    if not shared.as_json:
        other = (
            "the highest"
            if higher_is_better
            else "the lowest; --higher-is-better takes the highest"
        )
        print(f"{printable(metric)} = {metric_of(found[0], metric):g} ({other})", file=sys.stderr)
    return found[0]


@shares("dry_run", "storage_option", "jobs", "quiet", "as_json", dry_run=DryRunOfPrune)
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
    grace: Annotated[
        str,
        typer.Option(
            "--grace",
            metavar="TIME",
            help="In an object store: unfinished work without activity for so long is removed.",
        ),
    ] = "24h",
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
    *,
    shared: Shared,
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
    from ckpt_tools.run.retention import Retention, refuse_unknown_metric
    from ckpt_tools.run.roots import open_root

    if higher_is_better and metric is None:
        raise typer.BadParameter("--higher-is-better needs --metric")
    if (keep_best is None) != (metric is None):
        raise typer.BadParameter("--keep-best and --metric need each other")
    rules = Retention(
        last=keep_last,
        every=keep_every,
        every_s=parse_period(keep_spaced, "--keep-spaced"),
        younger_s=parse_period(keep_younger, "--keep-younger"),
        best=keep_best,
        metric=metric,
        higher_is_better=higher_is_better,
    )
    grace_s = parse_period(grace, "--grace", may_be_zero=True) or 0.0
    where = open_root(root, shared.storage_options)
    if metric is not None:
        refuse_unknown_metric(where, metric)
    try:
        result = operation(where, rules, dry_run=shared.dry_run, reads=verify, jobs=shared.jobs)
        leftovers = where.remove_leftovers(grace_s, shared.dry_run)
    except KeyboardInterrupt as stop:
        stop.args = ("some steps may be removed already: ckpt ls shows the others",)
        raise
    if shared.as_json:
        print(json.dumps(render.pruned_as_json(result, leftovers, shared.dry_run)))
    elif not shared.quiet:
        render.show_pruned(result, leftovers, shared.dry_run)
    if result.failed or result.unreadable or any(left.problem for left in leftovers):
        raise typer.Exit(StorageError.exit_code)


def _on_unmeasured(steps: Iterable[Step]) -> str:
    """Returns a remark on steps whose values nobody has measured."""
    from ckpt_tools.cli.render import count

    number = sum(step.manifest is not None and not step.manifest.has_statistics for step in steps)
    if not number:
        return ""
    return f"; {count(number, 'step')} without statistics: NaN in them would not be seen"


@shares("storage_option", "jobs", "quiet", "as_json")
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
    base: Base = None,
    *,
    shared: Shared,
) -> None:
    """Check the steps of a run, for CI and cron: exit status 1, and one line for each problem.

    Problems are steps that are incomplete, without a manifest, damaged, missing or not finite,
    trained tensors that do not change, and unusual updates. Values are known of steps that were
    saved with statistics. Only --verify reads the data. Exit status 14 if a step is damaged, 15
    if one cannot be read.
    """
    from ckpt_tools.operations.check_run import check_steps as operation

    _check_jobs(shared, verify)
    problems, steps = operation(
        root,
        verify=verify,
        every=every,
        base=base,
        jobs=shared.jobs,
        storage_options=shared.storage_options,
    )
    if shared.as_json:
        print(json.dumps([problem._asdict() for problem in problems]))
    for problem in problems if not (shared.as_json or shared.quiet) else ():
        print(problem)
    if any(problem.kind == "unreadable" for problem in problems):
        raise typer.Exit(StorageError.exit_code)
    if any(problem.kind == "damaged" for problem in problems):
        raise typer.Exit(IntegrityError.exit_code)
    if problems:
        raise typer.Exit(1)
    if not (shared.as_json or shared.quiet):
        print(f"{printable(root)}: no problems{_on_unmeasured(steps)}")


@shares("storage_option", "quiet", "as_json")
def pin(
    step: Annotated[
        str,
        typer.Argument(
            help="A step of a run, such as RUN/step-00000100: a path or a URL.", show_default=False
        ),
    ],
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin.")] = False,
    *,
    shared: Shared,
) -> None:
    """Keep a step for good, with a file ckpt.pin in it.

    Neither prune nor a training's retention removes it.
    """
    from ckpt_tools.loop.steps.retention import pin_step as operation

    is_new = operation(step, shared.storage_options, remove)
    if shared.as_json:
        print(json.dumps({"path": redacted(step), "is_pinned": not remove, "is_changed": is_new}))
    elif not shared.quiet:
        state = "no longer pinned" if remove else "pinned"
        print(
            f"{printable(step)} is {state}"
            if is_new
            else f"{printable(step)} was {'not pinned' if remove else 'pinned already'}"
        )
