"""The commands for the bytes of a run: thin and du."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ckpt_tools.cli.options import (
    Jobs,
    Json,
    Memory,
    Quiet,
    Root,
    StorageOption,
    check_dtype,
    json_value,
    parse_storage_options,
    reading_options,
)
from ckpt_tools.cli.run_verbs import fail_if_unreadable
from ckpt_tools.errors import StorageError, printable

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
            help="Remove only entries that match; repeatable. Default: all but the models.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="bf16|fp16|fp32|fp64",
            help="Also cast the tensors that stay.",
            show_default=False,
        ),
    ] = None,
    price: Price = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")
    ] = False,
    storage_option: StorageOption = None,
    jobs: Jobs = None,
    memory: Memory = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Remove optimizer and loader state from old steps of a run.

    The models stay, unless --drop names them.

    A thinned step is complete and sealed. It takes the place of the full one in one instant. Pinned
    steps, and steps with files that no save wrote, stay full. No job may be saving to ROOT. Exit
    status 15 if a step cannot be thinned; it is as it was, and the others are thinned.
    """
    from ckpt_tools.operations.thin import thin as operation

    check_dtype(dtype)
    try:
        result = operation(
            root,
            keep_full,
            keep_every=keep_every,
            drop=drop or (),
            dtype=dtype,
            dry_run=dry_run,
            **reading_options(None, jobs, memory, quiet or as_json, storage_option),
        )
    except KeyboardInterrupt as stop:
        stop.args = ("some steps may be thinned already: ckpt ls shows which",)
        raise
    if as_json:
        print(json.dumps(json_value(result) | {"freed_nbytes": result.freed_nbytes}))
    elif not quiet:
        from ckpt_tools.cli import render

        render.show_thinned(result, price)
    for path, error in result.failed.items():
        typer.echo(f"could not thin {printable(path)}: {error}", err=True)
    if result.failed:
        raise typer.Exit(StorageError.exit_code)


def du(
    root: Root,
    price: Price = None,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Show where the bytes of a run are: models, optimizers, the rest, and what can be removed.

    It reads manifests only.
    """
    from ckpt_tools.cli import render
    from ckpt_tools.operations.run_bytes import du as operation

    found = operation(root, storage_options=parse_storage_options(storage_option))
    if as_json:
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
        render.show_bytes(found, price)
    fail_if_unreadable(one.step for one in found)
