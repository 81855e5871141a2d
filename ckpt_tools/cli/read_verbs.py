"""The commands that read a checkpoint: inspect, verify, diff, and seal, which adds its manifest."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ckpt_tools.cli.options import (
    Exclude,
    Jobs,
    Json,
    Memory,
    Quiet,
    Select,
    Shapes,
    Source,
    StorageOption,
    is_first,
    json_value,
    parse_storage_options,
    reading_options,
)


def inspect(
    src: Source,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show the tree of modules with shapes, dtypes and bytes.")
    ] = False,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Show which file, and so which rank, holds which chunk.")
    ] = False,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    as_json: Json = False,
) -> None:
    """Show format, world size, tensors, bytes and objects of a checkpoint. Reads only metadata."""
    from ckpt_tools.cli import render
    from ckpt_tools.operations.inspect import inspect as operation

    report = operation(src, parse_storage_options(storage_option), shapes)
    if as_json:
        print(json.dumps(render.report_as_json(report)))
    else:
        render.show_report(report, tree=tree, ranks=ranks)


def verify(
    context: typer.Context,
    src: Source,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=(
                "Read no data: check only names, sizes, the index, and an object store's own"
                " checksums."
            ),
        ),
    ] = False,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help=("Also scan the values: NaN, infinity, tensors of only zeros or only one value."),
        ),
    ] = False,
    require_manifest: Annotated[
        bool,
        typer.Option(
            "--require-manifest", help="Fail with exit status 14 if there is no manifest."
        ),
    ] = False,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    jobs: Jobs = None,
    memory: Memory = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find out whether a checkpoint is whole, and what is damaged.

    Exit status 1 if it is not whole.

    With a manifest, it checks size and checksum of every file. Without one, it checks the
    structure, and the CRC-32 of every record in `.distcp` files, which torch writes but never
    compares. It lists files with bytes that have no checksum. It reports damage by entry, file,
    byte and rank.
    """
    from ckpt_tools.cli import findings as verdicts
    from ckpt_tools.operations.verify import verify as operation

    result = operation(
        src,
        quick=quick,
        deep=deep,
        require_manifest=require_manifest,
        **reading_options(context.obj, jobs, memory, quiet or as_json, storage_option, shapes),
    )
    if as_json and is_first(context.obj):
        print(json.dumps(json_value(result)))
    elif not quiet and is_first(context.obj):
        verdicts.show_verdict(result, quick)
    if result.problems:
        raise SystemExit(1)


def diff(
    context: typer.Context,
    a: Annotated[
        str, typer.Argument(metavar="A", help="A checkpoint: a path or a URL.", show_default=False)
    ],
    b: Annotated[
        str,
        typer.Argument(
            metavar="B",
            help="Another checkpoint, of any format, layout, store and world size.",
            show_default=False,
        ),
    ],
    select: Select = None,
    exclude: Exclude = None,
    atol: Annotated[
        float,
        typer.Option(
            "--atol",
            min=0.0,
            help=(
                "Values are equal if |a - b| <= atol + rtol * |b|. With neither option, only equal"
                " bits are equal."
            ),
        ),
    ] = 0.0,
    rtol: Annotated[float, typer.Option("--rtol", min=0.0, help="See --atol.")] = 0.0,
    read_all: Annotated[
        bool,
        typer.Option(
            "--read-all", help="Compare bytes even if both manifests have the same fingerprint."
        ),
    ] = False,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    jobs: Jobs = None,
    memory: Memory = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare names, shapes, types and values of two checkpoints. Exit status 0 if equal, 1 if not.

    For each tensor that differs, it shows the number of different elements, the first of them, the
    largest absolute and relative difference, and the cosine. A tensor with the same fingerprint in
    both manifests is not read. Checkpoints without a common name are compared by the names of
    merge. Other exit statuses are errors.
    """
    from ckpt_tools.cli import findings as verdicts
    from ckpt_tools.operations.diff import diff as operation

    options = reading_options(context.obj, jobs, memory, quiet or as_json, storage_option, shapes)
    result = operation(
        a,
        b,
        select=select or (),
        exclude=exclude or (),
        atol=atol,
        rtol=rtol,
        read_all=read_all,
        **options,
    )
    if as_json and is_first(context.obj):
        print(json.dumps(json_value(result) | {"is_same": result.is_same}))
    elif not quiet and is_first(context.obj):
        verdicts.show_diff(result)
    if not result.is_same:
        raise SystemExit(1)


def seal(
    src: Source,
    storage_option: StorageOption = None,
    jobs: Jobs = None,
    memory: Memory = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Add a manifest to a checkpoint that has none, if its own checksums are right.

    It writes nothing else.
    """
    from ckpt_tools.cli import findings as verdicts
    from ckpt_tools.operations.seal import seal as operation

    result = operation(src, **reading_options(None, jobs, memory, quiet or as_json, storage_option))
    if as_json:
        print(json.dumps(json_value(result)))
    elif not quiet:
        verdicts.show_seal(result)
