"""The commands for a run: list its steps, find the newest, remove old ones, pin one."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ckpt_tools.cli.options import Json, Quiet, Root, StorageOption, parse_storage_options
from ckpt_tools.errors import NotACheckpointError, StorageError, printable


def list_(root: Root, storage_option: StorageOption = None, as_json: Json = False) -> None:
    """List the steps of a run with size, time, world size and state.

    Entries that are not steps come last.
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
        render.show_steps(steps)
    if others:
        print(f"not steps: {render.some_names(others)}", file=sys.stderr if as_json else sys.stdout)


def latest(
    root: Root,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read every byte, and skip steps with wrong checksums."),
    ] = False,
    storage_option: StorageOption = None,
) -> None:
    """Print the path of the newest complete step, from which a job would resume.

    Skipped newer steps are listed on stderr with the reason. Exit status 10 if there is no complete
    step.
    """
    from ckpt_tools.publish.destinations import open_root
    from ckpt_tools.publish.steps import find_latest as find

    found = find(open_root(root, parse_storage_options(storage_option)), verify)
    for path, reason in found.passed_over:
        print(f"passed over {printable(str(path))}: {reason}", file=sys.stderr)
    if found.step is None:
        raise NotACheckpointError(f"no complete step in {printable(root)}")
    print(found.step.path)


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
    incomplete steps, steps of other tools, and all other files in ROOT stay. A step also stays if
    it is pinned, if a link in ROOT leads to it, or if it holds files that no save wrote. The output
    lists such steps. Exit status 15 if a step cannot be removed; the others are removed.
    """
    from ckpt_tools.cli import render
    from ckpt_tools.loop.retention import prune_steps as run
    from ckpt_tools.publish.destinations import open_root

    where = open_root(root, parse_storage_options(storage_option))
    try:
        result = run(where, keep_last, keep_every, dry_run=dry_run, reads=verify)
        leftovers = where.remove_leftovers(grace_hours * 3600, dry_run)
    except KeyboardInterrupt as stop:
        stop.args = ("some steps may be removed already: ckpt ls shows the others",)
        raise
    if as_json:
        print(json.dumps(render.pruned_as_json(result, [left.url for left in leftovers], dry_run)))
    elif not quiet:
        render.show_pruned(result, [left.url for left in leftovers], dry_run)
    if result.failed:
        raise typer.Exit(StorageError.exit_code)


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
    from ckpt_tools.loop.retention import pin_step as run

    is_new = run(step, parse_storage_options(storage_option), remove)
    if not quiet:
        state = "no longer pinned" if remove else "pinned"
        print(
            f"{printable(step)} is {state}"
            if is_new
            else f"{printable(step)} was {'not pinned' if remove else 'pinned already'}"
        )
