"""The commands that read a checkpoint: inspect, verify, diff, and seal, which adds its manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tools.cli.options import READS, Base, Exclude, Select, Shared, Source, shares
from ckpt_tools.errors import (
    CheckpointError,
    IntegrityError,
    NotACheckpointError,
    StorageError,
    redacted,
)
from ckpt_tools.publish.step_names import number_in

if TYPE_CHECKING:
    from ckpt_tools.operations.folder import Entry


@contextmanager
def listed_if_several(src: str, shared: Shared) -> Iterator[None]:
    """Lists a folder on stdout, before the error, if it is not one checkpoint."""
    try:
        yield
    except NotACheckpointError as error:
        entries = _list(src, shared)
        if not entries:
            raise
        # the rest of the message is the list
        summary = str(error) if _is_silent(shared) else str(error).partition("\n")[0].rstrip(":")
        raise NotACheckpointError(summary, hint=_of_a_run(src, entries) or error.hint) from None
    except StorageError:
        if os.path.isdir(src):  # a store that does not answer is not asked again
            _list(src, shared)
        raise


def _is_silent(shared: Shared) -> bool:
    return shared.as_json or shared.quiet


def _of_a_run(src: str, entries: Sequence[Entry]) -> str | None:
    """Returns the hint for a folder that is a run of steps; None for another folder."""
    readable = [e.name for e in entries if e.is_readable or not e.is_opened]
    names = [name.rstrip("/") for name in readable if name.endswith("/")]
    numbers = {name: number for name in names if (number := number_in(name)) is not None}
    if not numbers:
        return None
    newest = max(numbers, key=numbers.__getitem__)
    run = redacted(src).rstrip("/")
    return (
        f"this is a run: give a step, such as {run}/{newest}; `ckpt ls` shows all steps, and"
        " `ckpt latest` prints the path of the newest complete one; `ckpt check --verify` reads all"
    )


def _list(src: str, shared: Shared) -> Sequence[Entry]:
    """Lists a folder on stdout, if it is one; returns what is in it."""
    from ckpt_tools.cli import render
    from ckpt_tools.operations.folder import entries_of

    with suppress(CheckpointError):
        entries = entries_of(src, shared.storage_options)
        if entries and not _is_silent(shared):
            render.show_entries(entries)
        return entries
    return ()


@shares("storage_option", "shapes", "as_json")
def inspect(
    src: Source,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show the tree of modules with shapes, dtypes and bytes.")
    ] = False,
    files: Annotated[
        bool, typer.Option("--files", help="Show which file, and so which rank, holds which chunk.")
    ] = False,
    base: Base = None,
    *,
    shared: Shared,
) -> None:
    """Show format, world size, tensors, bytes and objects of a checkpoint. Reads only metadata.

    With --base, exit status 1 if names or shapes differ from those of the model.
    """
    from ckpt_tools.cli import render
    from ckpt_tools.operations.inspect import inspect as operation

    with listed_if_several(src, shared):
        report = operation(src, shared.storage_options, shared.shapes, base)
    if shared.as_json:
        print(json.dumps(render.report_as_json(report)))
    else:
        render.show_report(report, tree=tree, files=files)
    if report.presence is not None and not report.presence.is_complete:
        raise typer.Exit(1)


@shares(*READS)
def verify(
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
    *,
    shared: Shared,
) -> None:
    """Find out whether a checkpoint is whole, and what is damaged.

    Exit status 14 if it is not whole.

    With a manifest, it checks size and checksum of every file. Without one, it checks the
    structure, and the CRC-32 of every record in `.distcp` files, which torch writes but never
    compares. It lists files with bytes that have no checksum. It reports damage by entry, file,
    byte and rank.
    """
    from ckpt_tools.cli import findings as verdicts
    from ckpt_tools.operations.verify import verify as operation

    with listed_if_several(src, shared):
        result = operation(
            src,
            quick=quick,
            deep=deep,
            require_manifest=require_manifest,
            **shared.reading,
        )
    shared.show(lambda: verdicts.show_verdict(result, quick), result)
    if result.problems:
        raise SystemExit(IntegrityError.exit_code)


@shares(*READS)
def diff(
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
    *,
    shared: Shared,
) -> None:
    """Compare names, shapes, types and values of two checkpoints. Exit status 0 if equal, 1 if not.

    For each tensor that differs, it shows how many elements differ, the norm of the difference by
    the norm of A, the largest difference, the cosine, and the first element. A tensor with the same
    fingerprint in both manifests is not read. Checkpoints without a common name are compared by the
    names of merge. Other exit statuses are errors.
    """
    from ckpt_tools.cli import findings as verdicts
    from ckpt_tools.operations.diff import diff as operation

    result = operation(
        a,
        b,
        select=select or (),
        exclude=exclude or (),
        atol=atol,
        rtol=rtol,
        read_all=read_all,
        **shared.reading,
    )
    shared.show(lambda: verdicts.show_diff(result), result, is_same=result.is_same)
    if not result.is_same:
        raise SystemExit(1)


@shares("storage_option", "jobs", "memory", "quiet", "as_json")
def seal(src: Source, *, shared: Shared) -> None:
    """Add a manifest to a checkpoint that has none, if its own checksums are right.

    It writes nothing else.
    """
    from ckpt_tools.cli import findings as verdicts
    from ckpt_tools.operations.seal import seal as operation

    result = operation(src, **shared.reading)
    shared.show(lambda: verdicts.show_seal(result), result)
