"""The commands that draw: report and plot."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from ckpt_tools.cli.options import (
    Jobs,
    Json,
    Memory,
    Quiet,
    Root,
    Shapes,
    StorageOption,
    parse_storage_options,
    reading_options,
)
from ckpt_tools.errors import NotACheckpointError, PlanError, printable

OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]


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
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="Serve the page on this machine, and make it anew while a job runs.",
        ),
    ] = False,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="For --serve: the port.")
    ] = 8265,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    no_values: Annotated[
        bool,
        typer.Option("--no-values", help="Do not read the values of a step without statistics."),
    ] = False,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    jobs: Jobs = None,
    memory: Memory = None,
    overwrite: OverwriteFile = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Make a page about a checkpoint, a run, or two checkpoints: one HTML file, for any browser.

    It shows a verdict, where the bytes are, the health of the values, ranks, and the run. The file
    fetches nothing. With --json, the numbers are printed, and no file is written.
    """
    from ckpt_tools.operations.report import report as reports

    if as_json + serve + (output is not None) != 1:
        raise typer.BadParameter("give one of --output, --serve and --json")
    options = reading_options(None, jobs, memory, quiet or as_json, storage_option, shapes)
    if as_json:
        data = reports.report_data(src, b, read_values=not no_values, **options)
        print(json.dumps(data, allow_nan=False))
        reports.refuse_unread_steps(data)
    elif output is not None:
        nbytes = reports.report(
            src, b, output=output, read_values=not no_values, overwrite=overwrite, **options
        )
        if not quiet:
            from ckpt_tools.cli import render

            print(f"wrote {printable(output)}: {render.format_size(nbytes)}")
        if open_it:
            _open(output)
    else:
        if b is not None:
            raise PlanError("--serve is for one checkpoint or run")
        if "://" not in src and not os.path.exists(src):
            raise NotACheckpointError(f"no such path: {printable(src)}")
        options["progress"] = None
        server = reports.serve(
            lambda: reports.report_data(src, read_values=not no_values, **options), port
        )
        url = f"http://127.0.0.1:{server.server_port}/"
        print(f"serving {printable(src)} at {url}, until Ctrl-C", file=sys.stderr, flush=True)
        if open_it:
            _open(url)
        with server:
            try:
                server.serve_forever()
            except KeyboardInterrupt as stop:
                stop.args = ("the page is no longer served",)
                raise


def _open(where: str) -> None:
    import webbrowser
    from pathlib import Path

    webbrowser.open(where if where.startswith("http://") else Path(where).absolute().as_uri())


def plot(
    root: Root,
    tensor: Annotated[
        list[str],
        typer.Option(
            "--tensor", metavar="GLOB", help="Names to draw; repeatable.", show_default=False
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A .png, .svg or .pdf.", show_default=False
        ),
    ],
    value: Annotated[
        str, typer.Option("--value", metavar="rms|max|zeros|change", help="What to draw.")
    ] = "rms",
    overwrite: OverwriteFile = False,
    storage_option: StorageOption = None,
    quiet: Quiet = False,
) -> None:
    """Draw a statistic of tensors over the steps of a run that were saved with statistics."""
    from ckpt_tools.operations.report.plot import plot as operation

    names = operation(
        root,
        tensor=tensor,
        output=output,
        value=value,
        overwrite=overwrite,
        storage_options=parse_storage_options(storage_option),
    )
    if not quiet:
        print(f"wrote {printable(output)}: {len(names):,} tensors")
