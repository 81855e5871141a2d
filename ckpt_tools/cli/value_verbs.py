"""The commands that compute with values: stats and average."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tools.cli.completion import layouts, schedules
from ckpt_tools.cli.options import (
    OUTPUT,
    READS,
    SOURCE,
    Exclude,
    HfShardSize,
    KeepDtype,
    Select,
    Shared,
    Source,
    dtype_option,
    parse_numbers,
    report_transfer,
    shares,
)

MeanDtype = Annotated[
    str | None, dtype_option("Round the sums to this type; default: that of the last checkpoint.")
]


@shares(*READS)
def stats(
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
    read_all: Annotated[
        bool,
        typer.Option(
            "--read-all", help="Read the values even if the manifest has their statistics."
        ),
    ] = False,
    *,
    shared: Shared,
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
        **shared.reading,
    )
    shared.show(lambda: statistics.show_stats(result), result)
    if result.not_finite:
        raise SystemExit(1)


@shares("group", *SOURCE, "overwrite", "dry_run", *OUTPUT)
def average(
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
            metavar="LAYOUT",
            autocompletion=layouts,
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
            autocompletion=schedules,
            metavar="linear|cosine|sqrt|exponential",
            help=(
                "The decay of the learning rate that the mean stands for; default: linear, which is"
                " the plain mean."
            ),
            show_default=False,
        ),
    ] = None,
    pretrained: Annotated[
        str | None,
        typer.Option(
            "--pretrained",
            metavar="B",
            help="A checkpoint B: the result is B + scale * sum of w * (M - B).",
            show_default=False,
        ),
    ] = None,
    scale: Annotated[float, typer.Option("--scale", help="See --pretrained.")] = 1.0,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            metavar="N",
            min=1,
            help="For dcp, accelerate and per-rank: ranks to split for; default: those of SRC.",
            show_default=False,
            rich_help_panel="More",
        ),
    ] = None,
    dtype: MeanDtype = None,
    keep_dtype: KeepDtype = None,
    select: Select = None,
    exclude: Exclude = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="DIR",
            help="For hf: directory of the model's config, tokenizer and code, which are copied.",
            show_default=False,
        ),
    ] = None,
    max_shard_size: HfShardSize = None,
    *,
    shared: Shared,
) -> None:
    """Write a weighted mean of the models of several checkpoints.

    The checkpoints may differ in format and sharding. Sums are in float64, and rounded once. The
    result holds the model only. Names and shapes must be the same; tensors that are no
    floating-point numbers must be equal, or come from the last checkpoint, with a note. Complex
    numbers and NaN are refused; --exclude leaves tensors out. Quantized weights need --dtype.
    """
    from ckpt_tools.operations.average import average as operation

    if len(paths) < 2:
        raise typer.BadParameter("expected checkpoints and what to write", param_hint="SRC... DST")
    if scale != 1.0 and pretrained is None:
        raise typer.BadParameter(
            "--scale needs --pretrained, which was --base until 0.1", param_hint="--scale"
        )
    *sources, dst = paths
    result = operation(
        sources,
        dst,
        to=to,
        last=last,
        steps=steps,
        weights=parse_numbers(weights),
        schedule=schedule,
        base_model=pretrained,
        scale=scale,
        ranks=ranks,
        dtype=dtype,
        keep_dtype=keep_dtype or (),
        select=select or (),
        exclude=exclude or (),
        base=base,
        max_shard_bytes=max_shard_size,
        **shared.writing,
    )
    report_transfer(shared, "", result)
