"""The commands that compute with values: stats and average."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ckpt_tools.cli.options import (
    DryRun,
    Exclude,
    HfShardSize,
    Jobs,
    Json,
    KeepDtype,
    Memory,
    Overwrite,
    Quiet,
    Select,
    Shapes,
    Source,
    StorageOption,
    check_dtype,
    is_first,
    json_value,
    make_options,
    parse_numbers,
    reading_options,
    report_transfer,
)


def stats(
    context: typer.Context,
    src: Source,
    select: Select = None,
    exclude: Exclude = None,
    histogram: Annotated[
        bool,
        typer.Option(
            "--histogram",
            help=("Count magnitudes by power of two, and show what bf16, fp16 and fp8 would lose."),
        ),
    ] = False,
    each: Annotated[
        bool, typer.Option("--each", help="One line for each tensor, also for equal layers.")
    ] = False,
    read_all: Annotated[
        bool,
        typer.Option(
            "--read-all", help="Read the values even if the manifest has their statistics."
        ),
    ] = False,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    jobs: Jobs = None,
    memory: Memory = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure the values of a checkpoint: magnitudes, zeros, NaN and infinity.

    It reads the checkpoint once, and compares its checksums on the way. A step that was saved with
    statistics is not read. Exit status 1 if a value is NaN or infinite.
    """
    from ckpt_tools.cli import statistics
    from ckpt_tools.operations.stats import stats as operation

    result = operation(
        src,
        select=select or (),
        exclude=exclude or (),
        histogram=histogram,
        read_all=read_all,
        **reading_options(context.obj, jobs, memory, quiet or as_json, storage_option, shapes),
    )
    if as_json and is_first(context.obj):
        print(json.dumps(json_value(result)))
    elif not quiet and is_first(context.obj):
        statistics.show_stats(result, each)
    if result.not_finite:
        raise SystemExit(1)


def average(
    context: typer.Context,
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC... DST",
            help=(
                "Checkpoints, oldest first, and what to write. With --last or --steps: a run, and"
                " what to write."
            ),
            show_default=False,
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="A format of ckpt convert; default: by the suffix of DST.",
            show_default=False,
        ),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(
            "--last",
            metavar="N",
            help="The newest N complete steps of a run.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            metavar="FIRST:LAST:EVERY",
            help="Steps of a run, both ends included, such as 1000:5000:500.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="W,W,…",
            help="A weight for each checkpoint; they are divided by their sum.",
            show_default=False,
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            metavar="linear|cosine|sqrt|exponential",
            help=(
                "The decay of the learning rate that the mean stands for; default: linear, which is"
                " the plain mean."
            ),
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="B",
            help="A checkpoint B: the result is B + scale * sum of w * (M - B).",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[float, typer.Option("--scale", help="See --base.")] = 1.0,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            help="For dcp, accelerate and per-rank: ranks to split for; default: those of SRC.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="bf16|fp16|fp32|fp64",
            help="Round the sums to this type; default: that of the last checkpoint.",
            show_default=False,
        ),
    ] = None,
    keep_dtype: KeepDtype = None,
    select: Select = None,
    exclude: Exclude = None,
    config_from: Annotated[
        str | None,
        typer.Option(
            "--config-from",
            metavar="DIR",
            help="For hf: directory of the model's config, tokenizer and code, which are copied.",
            show_default=False,
        ),
    ] = None,
    max_shard_size: HfShardSize = None,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    jobs: Jobs = None,
    memory: Memory = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a weighted mean of the models of several checkpoints.

    The checkpoints may differ in format and sharding. Sums are in float64, and rounded once. The
    result holds the model only. Names and shapes must be the same; tensors that are no
    floating-point numbers must be equal, or come from the last checkpoint, with a note. Complex
    numbers, fp8 and NaN are refused; --exclude leaves tensors out.
    """
    from ckpt_tools.operations.average import average as operation

    check_dtype(dtype)
    if len(paths) < 2:
        raise typer.BadParameter("expected checkpoints and what to write", param_hint="SRC... DST")
    *sources, dst = paths
    result = operation(
        sources,
        dst,
        to=to,
        last=last,
        steps=steps,
        weights=parse_numbers(weights),
        schedule=schedule,
        base_model=base,
        scale=scale,
        ranks=ranks,
        dtype=dtype,
        keep_dtype=keep_dtype or (),
        select=select or (),
        exclude=exclude or (),
        base=config_from,
        max_shard_bytes=max_shard_size,
        **make_options(
            context.obj,
            jobs,
            memory,
            overwrite,
            dry_run,
            quiet or as_json,
            storage_option,
            shapes=shapes,
        ),
    )
    report_transfer(context.obj, result, quiet, as_json)
