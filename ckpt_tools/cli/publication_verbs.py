"""The commands that bring a model to inference engines: publish, pull."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tools.cli.options import (
    OUTPUT,
    SOURCE,
    KeepDtype,
    KeyMap,
    Rename,
    Settings,
    Shared,
    Source,
    dtype_option,
    parse_counts,
    shares,
)
from ckpt_tools.cli.render import count, format_size
from ckpt_tools.errors import CheckpointError, PlanError, printable

if TYPE_CHECKING:
    from ckpt_tools.operations.pull import PullResult

_POLL_S = 2.0

Versions = Annotated[
    str,
    typer.Argument(
        metavar="ROOT",
        help="The directory of the versions, such as `weight_v000001`; a path or a URL.",
        show_default=False,
    ),
]


@shares(*SOURCE, "dry_run", *OUTPUT)
def publish(
    src: Source,
    root: Versions,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="DIR",
            help=(
                "Directory of the model's config and tokenizer. It is version 0, if nothing is"
                " published yet: the engines have it, and the first version is a delta."
            ),
            show_default=False,
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Publish a complete version, not a delta.")
    ] = False,
    full_every: Annotated[
        int | None,
        typer.Option(
            "--full-every",
            min=1,
            metavar="N",
            help="Publish a complete version after N deltas.",
            show_default=False,
        ),
    ] = None,
    keep_last: Annotated[
        int | None,
        typer.Option(
            "--keep-last",
            min=1,
            metavar="N",
            help="Then remove versions that the newest N do not need.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        dtype_option("Cast the model's floating-point tensors. Nothing is cast unless asked."),
    ] = None,
    keep_dtype: KeepDtype = None,
    rename: Rename = None,
    key_map: KeyMap = None,
    settings: Settings = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="slime|skyrl",
            help="For whose receivers; default: that of the versions in ROOT, or slime.",
            show_default=False,
        ),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(
            "--encoding",
            metavar="xor|overwrite",
            help="How a delta stores changes; default: xor. overwrite may be applied twice.",
            show_default=False,
        ),
    ] = None,
    checksum: Annotated[
        str | None,
        typer.Option(
            "--checksum",
            metavar="xxh3-128|blake3|adler32",
            help="Checksum of a delta's tensors; default: xxh3-128.",
            show_default=False,
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            help="Names that the config's model lacks are kept, and told.",
            rich_help_panel="More",
        ),
    ] = False,
    *,
    shared: Shared,
) -> None:
    """Publish a model as the next version, for inference engines to pull.

    The first version is a complete Hugging Face directory, or with `--base` a delta against that
    model. Later versions are deltas: only changed tensors, as compressed differences from the
    version before. The receivers of slime (for SGLang) or of SkyRL (for vLLM) read them, and so do
    `ckpt pull`, `inspect`, `diff` and `verify`. A version appears as a whole, or not at all.
    """
    from ckpt_tools.operations.publish import publish_version as operation

    result = operation(
        src,
        root,
        base=base,
        full=full,
        full_every=full_every,
        keep_last=keep_last,
        dtype=dtype,
        keep_dtype=keep_dtype or (),
        rename=rename or (),
        key_map=key_map,
        settings=parse_counts(settings),
        layout=layout,
        encoding=encoding,
        checksum=checksum,
        partial=partial,
        dry_run=shared.dry_run,
        **shared.reading,
    )

    def show() -> None:
        what = "complete" if result.base_version is None else f"delta of {result.base_version}"
        would = "would be " if result.is_dry_run else ""
        print(f"version {result.version} {would}at {printable(result.destination)}: {what}")
        print(f"model: {count(result.num_tensors, 'tensor')}, {format_size(result.nbytes)}")
        if result.num_changed is not None and result.changed_nbytes is not None:
            share = result.changed_nbytes / max(1, result.nbytes)
            changed = count(result.num_changed, "tensor")
            print(f"changed: {changed}, {format_size(result.changed_nbytes)} ({share:.1%})")
        if result.written_nbytes is not None:
            print(f"wrote {format_size(result.written_nbytes)} in {result.seconds:.2f} s")
        if result.removed:
            gone = ", ".join(map(str, reversed(result.removed)))
            print(f"removed version{'s' * (len(result.removed) > 1)} {gone}")
        for note in result.notes:
            print(f"note: {printable(note)}")

    shared.show(show, result)


@shares("storage_option", "jobs", "memory", "dry_run", *OUTPUT)
def pull(
    root: Versions,
    local: Annotated[
        str,
        typer.Argument(
            metavar="LOCAL",
            help="The directory of the model on this machine; it is replaced as a whole.",
            show_default=False,
        ),
    ],
    version: Annotated[
        int | None,
        typer.Option(
            "--version",
            min=1,
            metavar="N",
            help="The version; default: newest.",
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="DIR",
            help="Directory of version 0, if it is not where the publisher had it.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Look every 2 seconds, and pull each new version until interrupted."
        ),
    ] = False,
    hook: Annotated[
        str | None,
        typer.Option(
            "--hook",
            metavar="COMMAND|URL",
            help=(
                "After each version, run a shell command with CKPT_VERSION and CKPT_PATH; or post"
                " JSON to a URL, as SGLang's /update_weights_from_disk takes it. One that failed"
                " runs again at the next pull."
            ),
            show_default=False,
        ),
    ] = None,
    receiver: Annotated[
        str | None,
        typer.Option(
            "--receiver",
            metavar="NAME",
            help="Tell ROOT what LOCAL has, under this name: `--keep-last` keeps what it needs.",
            show_default=False,
        ),
    ] = None,
    *,
    shared: Shared,
) -> None:
    """Bring a local directory to a published version.

    Several deltas are applied in one pass, from the local version or from the nearest complete
    one. What is written is compared with the published checksums before the new directory takes the
    place of the old one, at one instant. Readers that have opened the old files keep them. LOCAL
    is a new directory, or an earlier pull.
    """
    from ckpt_tools.operations.pull import pull as operation

    def once() -> PullResult:
        return operation(
            root,
            local,
            version=version,
            base=base,
            hook=hook,
            receiver=receiver,
            dry_run=shared.dry_run,
            **shared.reading,
        )

    if not follow:
        _show_pull(once(), shared)
        return
    if version is not None or shared.dry_run:
        raise PlanError("--follow pulls the newest versions: leave out --version and --dry-run")
    last, told = 0, ""
    while True:
        try:
            result = once()
            if result.version != last:
                _show_pull(result, shared)
            last, told = result.version, ""
        except CheckpointError as error:  # a later version may come through
            if str(error) != told:
                print(f"ckpt: {error}; trying again every {_POLL_S:g} s", file=sys.stderr)
            told = str(error)
        time.sleep(_POLL_S)


def _show_pull(result: PullResult, shared: Shared) -> None:
    def show() -> None:
        where = printable(result.destination)
        if result.is_there:
            print(f"version {result.version} is in {where} already")
            return
        would = "would be " if result.is_dry_run else ""
        how = f"from version {result.from_version}, {count(result.num_deltas, 'delta')}"
        how = how if result.num_deltas else "complete"
        took = "" if result.is_dry_run else f", {result.seconds:.2f} s"
        nbytes = format_size(result.nbytes)
        print(f"version {result.version} {would}in {where}: {how} ({nbytes}{took})")
        for note in result.notes:
            print(f"note: {printable(note)}")

    shared.show(show, result)
