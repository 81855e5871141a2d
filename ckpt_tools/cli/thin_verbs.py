"""The command that makes the steps of a run smaller: thin."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tools.cli.options import Root, Shared, dtype_option, shares
from ckpt_tools.cli.run_verbs import Price
from ckpt_tools.errors import IntegrityError, PlanError, StorageError, printable

KeptDtype = Annotated[str | None, dtype_option("Also cast the tensors that stay.")]
DryRunOfThin = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print what would be done, and change nothing.", rich_help_panel="Output"
    ),
]


@shares("dry_run", "storage_option", "jobs", "memory", "quiet", "as_json", dry_run=DryRunOfThin)
def thin(
    root: Root,
    keep_full: Annotated[
        int,
        typer.Option(
            "--keep-full",
            min=1,
            metavar="N",
            help="How many of the newest full steps stay as they are.",
            show_default=False,
        ),
    ],
    keep_every: Annotated[
        int | None,
        typer.Option(
            "--keep-every",
            min=1,
            metavar="M",
            help="Steps whose number is a multiple of M stay full as well.",
            show_default=False,
        ),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            "--drop",
            metavar="GLOB",
            help="Remove what matches, weights too; repeatable. Default: all but the models.",
            show_default=False,
        ),
    ] = None,
    dtype: KeptDtype = None,
    price: Price = None,
    *,
    shared: Shared,
) -> None:
    """Remove optimizer and loader state from old steps of a run.

    The models stay, unless --drop names them.

    A thinned step is complete and sealed. It takes the place of the full one in one instant. Pinned
    steps, and steps with files that no save wrote, stay full. No job may be saving to ROOT. Exit
    status 14 if a step is damaged, 13 if the request does not fit one, 15 if one cannot be
    thinned for another reason: it is as it was, and the others are thinned.
    """
    from ckpt_tools.cli import render
    from ckpt_tools.operations.thin import thin as operation

    try:
        result = operation(
            root,
            keep_full,
            keep_every=keep_every,
            drop=drop or (),
            dtype=dtype,
            dry_run=shared.dry_run,
            **shared.reading,
        )
    except KeyboardInterrupt as stop:
        stop.args = ("some steps may be thinned already: ckpt ls shows which",)
        raise
    freed = result.freed_nbytes
    shared.show(lambda: render.show_thinned(result, price), result, freed_nbytes=freed)
    for path, error in result.failed.items():
        typer.echo(f"could not thin {printable(path)}: {error}", err=True)
    for step in result.thinned:
        if step.stays:
            typer.echo(
                f"thinned {printable(step.path)}, but {step.stays}; the next thin or prune, or the"
                " next job, removes them",
                err=True,
            )
    if result.damaged:
        raise typer.Exit(IntegrityError.exit_code)
    if len(result.failed) > len(result.unfit) or any(step.stays for step in result.thinned):
        raise typer.Exit(StorageError.exit_code)
    if result.unfit:
        raise typer.Exit(PlanError.exit_code)
