"""Makes a report, and writes it to a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from ckpt_tools.errors import (
    CatalogError,
    CheckpointError,
    FormatError,
    IntegrityError,
    PlanError,
    StorageError,
    printable,
    redacted,
)
from ckpt_tools.formats.base import new_attempt
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.report import collect
from ckpt_tools.operations.report.page import render_page
from ckpt_tools.publish.disk.commit import add_file
from ckpt_tools.transfer.options import Path_, Reading


@checked(Reading)
def report_data(
    src: Path_, other: Path_ | None = None, *, read_values: bool = True, **options: Unpack[Reading]
) -> dict[str, Any]:
    """Returns the numbers of a report as plain values.

    Args:
        src: a checkpoint, or the directory of a run.
        other: another checkpoint: the report is about the differences.
        read_values: measure the values of a checkpoint whose manifest lacks statistics.
        **options: see `Reading`.

    Raises:
        CheckpointError: something is no checkpoint, or cannot be read. Damage is no error.
    """
    name, storage_options = redacted(os.fspath(src)), options.get("storage_options")
    try:
        if other is not None:
            name = f"{name} and {redacted(os.fspath(other))}"
            return collect.of_difference(src, other, **options)
        if (run := collect.of_run_at(src, storage_options)) is not None:
            return run
        return collect.of_checkpoint(src, read_values, **options)
    except CheckpointError as error:
        # the first step of a run may be there now
        if other is None and (run := collect.of_run_at(src, storage_options)) is not None:
            return run
        if isinstance(error, CatalogError | FormatError | IntegrityError):
            paths = [redacted(os.fspath(path)) for path in (src, other) if path is not None]
            return collect.of_damaged(name, [printable(str(error))], paths, error.hint)
        raise


def refuse_unread_steps(data: Mapping[str, Any]) -> None:
    """Raises if a report lacks steps that cannot be read.

    Raises:
        StorageError: there are such steps.
    """
    if unread := data.get("unreadable"):
        text = next(p for p in data["problems"] if p.startswith(f"step {unread[0]}: "))
        more = f", and {len(unread) - 1} more steps" * (len(unread) > 1)
        raise StorageError(f"the report lacks steps that cannot be read: {text}{more}")


@checked(Reading)
def report(
    src: Path_,
    other: Path_ | None = None,
    *,
    output: Path_,
    read_values: bool = True,
    overwrite: bool = False,
    **options: Unpack[Reading],
) -> int:
    """Writes a report as one HTML file, which fetches nothing. Returns its bytes.

    Args:
        src, other, read_values: as for `report_data`.
        output: the file to write.
        overwrite: replace an existing file.
        **options: see `Reading`.

    Raises:
        StorageError: the file exists, or cannot be written. Or the file is written, and lacks steps
            that cannot be read.
        CheckpointError: plotly is not installed, or something cannot be read.
    """
    if "://" in os.fspath(output):
        raise PlanError(f"a report is a local file, got {printable(os.fspath(output))}")
    path = Path(os.fspath(output))
    if path.suffix.lower() not in (".html", ".htm"):
        raise PlanError(f"a report is an HTML file: expected a name that ends in .html, got {path}")
    if os.path.lexists(path) and not overwrite:
        raise StorageError(f"it exists: {printable(str(path))}", hint="--overwrite replaces it")
    data = report_data(src, other, read_values=read_values, **options)
    page = render_page(data)
    add_file(path.parent, path.name, page, new_attempt(), overwrite)
    refuse_unread_steps(data)
    return len(page)
