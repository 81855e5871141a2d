"""The command that draws: report."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ckpt_tools.cli.completion import chart_values
from ckpt_tools.cli.options import OUTPUT, SOURCE, Select, Shared, shares
from ckpt_tools.errors import PlanError, printable

OverwriteFile = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing file.", rich_help_panel="Output")
]


@shares(*SOURCE, "overwrite", *OUTPUT, overwrite=OverwriteFile)
def report(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC|ROOT",
            help="A checkpoint, or a run; a path or a URL.",
            show_default=False,
        ),
    ],
    b: Annotated[
        str | None,
        typer.Argument(
            metavar="[B]",
            help="Another checkpoint: the report shows the differences.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE.html", help="The file to write.", show_default=False
        ),
    ] = None,
    png: Annotated[
        str | None,
        typer.Option(
            "--png",
            metavar="FILE",
            help="Of a run: write only a chart of --select; a .png, .svg or .pdf.",
            show_default=False,
        ),
    ] = None,
    select: Select = None,
    value: Annotated[
        str | None,
        typer.Option(
            "--value",
            autocompletion=chart_values,
            metavar="rms|max|zeros|change",
            help="For --png: what to draw; default: rms.",
            show_default=False,
        ),
    ] = None,
    open_it: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser.", rich_help_panel="More")
    ] = False,
    no_values: Annotated[
        bool,
        typer.Option("--no-values", help="Do not read the values of a step without statistics."),
    ] = False,
    *,
    shared: Shared,
) -> None:
    """Make a page about a checkpoint, a run, or two checkpoints: one HTML file, for any browser.

    It shows a verdict, where the bytes are, the health of the values, ranks, and the run. The file
    fetches nothing. With --json, the numbers are printed, and no file is written. With --png, a
    statistic of tensors is drawn over the steps of a run that were saved with statistics.
    """
    from ckpt_tools.operations.report import report as reports

    if shared.as_json + (output is not None) + (png is not None) != 1:
        raise typer.BadParameter("give one of --output, --png and --json")
    if (png is None) is not (select is None):
        raise typer.BadParameter(
            "--png needs --select, the names to draw, and --select needs --png"
        )
    if png is not None and select is not None:
        if b is not None:
            raise PlanError("--png is for one run")
        _draw(src, png, select, value or "rms", shared)
        return
    if value is not None:
        raise typer.BadParameter("--value is for --png")
    options = shared.reading
    if shared.as_json:
        data = reports.report_data(src, b, read_values=not no_values, **options)
        print(json.dumps(data, allow_nan=False))
        reports.refuse_unread_steps(data)
    elif output is not None:
        nbytes = reports.report(
            src,
            b,
            output=output,
            read_values=not no_values,
            overwrite=shared.overwrite,
            **options,
        )
        if not shared.quiet:
            from ckpt_tools.cli import render

            print(f"wrote {printable(output)}: {render.format_size(nbytes)}")
        if open_it:
            _open(output)


def _open(where: str) -> None:
    import webbrowser
    from pathlib import Path

    webbrowser.open(Path(where).absolute().as_uri())


def _draw(root: str, output: str, select: list[str], value: str, shared: Shared) -> None:
    from ckpt_tools.operations.report.plot import plot

    names = plot(
        root,
        tensor=select,
        output=output,
        value=value,
        overwrite=shared.overwrite,
        storage_options=shared.storage_options,
    )
    if not shared.quiet:
        print(f"wrote {printable(output)}: {len(names):,} tensors")
