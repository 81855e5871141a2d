"""The command `ckpt`: parse, call one operation, render. Errors become exit codes here and nowhere else.

Results go to stdout, progress and errors to stderr. May import everything; imports the operations only when one is called,
so that `--help` and completion are quick.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ckpt_tools.errors import CheckpointError, NotACheckpointError, printable
from ckpt_tools.storage.remote import is_url
from ckpt_tools.version import __version__

if TYPE_CHECKING:
    from ckpt_tools.operations.move import Options, TransferResult

EXIT_STATUS = """EXIT STATUS

0 fine · 1 error · 2 wrong usage · 10 not a checkpoint · 11 malformed or unsafe file · 12 holes or overlaps ·
13 the request does not fit · 14 damaged bytes · 15 reading or writing failed · 16 another rank failed · 130 interrupted · 143 terminated"""

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False,
    help="Look into, merge and reshard PyTorch FSDP checkpoints, at the speed of a file copy, without running what they contain.",
    epilog=EXIT_STATUS.replace("\n\n", ": ").replace("\n", " "),
)  # fmt: skip

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def _size(text: str) -> int:
    """Parses 5GB (decimal) or 512MiB (binary) into bytes."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise typer.BadParameter(f"expected a size such as 5GB or 512MiB, got {text!r}")
    nbytes = int(float(match[1]) * (1024 if match[3] else 1000) ** "KMGT".find(match[2].upper() or "0").__add__(1))
    if nbytes < 1:
        raise typer.BadParameter(f"expected a size above zero, got {text!r}")
    return nbytes


def _show_version(value: bool) -> None:
    if value:
        print(f"ckpt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)] = False,
) -> None:
    del version


Source = Annotated[
    str,
    typer.Argument(metavar="SRC", help="A checkpoint, or a directory with one below; a path, or a URL such as s3://….", show_default=False),
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="Of the object store, as fsspec takes them, such as `endpoint_url=…`; repeatable. Secrets belong into its own files or the environment, not here.",
        show_default=False,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, max=256, help="Number of threads.  [default: processors, at most 8]", show_default=False),
]
Memory = Annotated[
    int | None,
    typer.Option("--memory", parser=_size, metavar="SIZE", help="Budget of all buffers together, such as 64MiB.", show_default="64MiB"),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a checkpoint at DST; the old one stays until the new one is complete.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no report.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command(epilog=app.info.epilog)
def inspect(
    src: Source,
    tree: Annotated[bool, typer.Option("--tree", help="Show the tree of modules with shapes, dtypes and bytes.")] = False,
    ranks: Annotated[bool, typer.Option("--ranks", help="Show which file, and so which rank, holds which part.")] = False,
    storage_option: StorageOption = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Say on stderr how many requests and bytes an object store was asked for.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds: format, world size, tensors, bytes, objects. Reads metadata only."""
    from ckpt_tools import render
    from ckpt_tools.operations.inspect import inspect as run

    report = run(src, _storage_options(storage_option))
    if stats and report.traffic is not None:
        print(f"{report.traffic.requests} requests, {render.size(report.traffic.nbytes)}", file=sys.stderr)
    if as_json:
        print(json.dumps(render.report_as_json(report)))
    else:
        render.show_report(report, tree=tree, ranks=ranks)


@app.command(epilog=app.info.epilog)
def merge(
    src: Source,
    dst: Annotated[str, typer.Argument(metavar="DST", help="The .safetensors file to write; with --max-shard-size a directory.", show_default=False)],
    select: Annotated[list[str] | None, typer.Option("--select", metavar="GLOB", help="Only tensors whose name matches; repeatable.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="bf16|fp16|fp32", help="Cast floating-point tensors. Nothing is cast unless asked.", show_default=False)] = None,
    keep_dtype: Annotated[list[str] | None, typer.Option("--keep-dtype", metavar="GLOB", help="Tensors that --dtype leaves as they are; repeatable.", show_default=False)] = None,
    max_shard_size: Annotated[int | None, typer.Option("--max-shard-size", parser=_size, metavar="SIZE", help="Write shards of at most this size, such as 5GB, and an index.", show_default=False)] = None,
    keep_prefix: Annotated[bool, typer.Option("--keep-prefix", help="Keep names as stored: `model.`, `_orig_mod.`, `module.`, ….")] = False,
    storage_option: StorageOption = None, jobs: Jobs = None, memory: Memory = None, overwrite: Overwrite = False, dry_run: DryRun = False, quiet: Quiet = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Join the shards of a model into one safetensors file, ready for inference.

    It joins shards; it does not average models. Optimizer, scheduler, dataloader and train state are left out. The key under
    which the model stands and the prefixes of wrappers (`_orig_mod.`, `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.`,
    `module.`) are stripped from the names, and what was stripped is reported.
    """
    from ckpt_tools.operations.transfer import merge as run

    _check_dtype(dtype)
    options = _options(jobs, memory, overwrite, dry_run, quiet or as_json, storage_option)
    result = run(
        src, dst, select=select or (), dtype=dtype, keep_dtype=keep_dtype or (),
        max_shard_bytes=max_shard_size, keep_prefix=keep_prefix, **options,
    )  # fmt: skip
    _report(result, quiet, as_json)


@app.command(epilog=app.info.epilog)
def reshard(
    src: Source,
    dst: Annotated[str, typer.Argument(metavar="DST", help="The directory to write.", show_default=False)],
    to_ranks: Annotated[int, typer.Option("--to", min=1, max=1_000_000, metavar="N", help="Number of ranks to split for.", show_default=False)],
    from_ranks: Annotated[int | None, typer.Option("--from", min=1, metavar="N", help="Number of ranks that wrote SRC, to be checked.", show_default=False)] = None,
    storage_option: StorageOption = None, jobs: Jobs = None, memory: Memory = None, overwrite: Overwrite = False, dry_run: DryRun = False, quiet: Quiet = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Rewrite a DCP checkpoint with the very chunks that a job of another number of ranks would have saved.

    DCP reshards by itself when it loads, so a job can go on without this. Do it when many jobs will load the result, when
    each rank's load should be one contiguous read, to clean up what a job left, or where a save without collectives
    (`__{rank}.metadata`) cannot be loaded on another number of ranks at all.

    A tensor split along one dimension is split again along it, as DTensor's `Shard` does; one split along several (a 2-D
    mesh) is split along dim 0; a whole one stays whole. What one rank saved is split along dim 0. Objects come along bit for bit.
    """
    from ckpt_tools.operations.transfer import reshard as run

    options = _options(jobs, memory, overwrite, dry_run, quiet or as_json, storage_option)
    _report(run(src, dst, to_ranks=to_ranks, from_ranks=from_ranks, **options), quiet, as_json)


@app.command(epilog=app.info.epilog)
def verify(
    src: Source,
    quick: Annotated[bool, typer.Option("--quick", help="Read no data: names, sizes, the index, and the checksums that an object store keeps.")] = False,
    storage_option: StorageOption = None, jobs: Jobs = None, memory: Memory = None, quiet: Quiet = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Compare a checkpoint with its manifest: every file, its size and its checksum. Exit status 1 where something is wrong."""
    from ckpt_tools import render
    from ckpt_tools.operations.verify import verify as run

    result = run(src, quick=quick, **_options(jobs, memory, False, False, quiet or as_json, storage_option))
    if as_json:
        print(json.dumps(asdict(result)))
    elif not quiet:
        render.show_verdict(result)
    if result.problems:
        raise SystemExit(1)


@app.command("copy", epilog=app.info.epilog)
def copy_(
    src: Source,
    dst: Annotated[str, typer.Argument(metavar="DST", help="The directory or file to be: a path, or a URL.", show_default=False)],
    storage_option: StorageOption = None,
    to_storage_option: Annotated[list[str] | None, typer.Option("--to-storage-option", metavar="KEY=VALUE", help="Of DST's object store, where it is another than SRC's; repeatable.", show_default=False)] = None,
    jobs: Jobs = None, memory: Memory = None, dry_run: DryRun = False, quiet: Quiet = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Copy a checkpoint as it is: upload, download, or from store to store.

    A second run transfers what is missing or has another checksum; nothing is visible at DST before everything is there. Within one S3
    the store copies by itself. A checkpoint that is there is never replaced.
    """
    from ckpt_tools import render
    from ckpt_tools.operations.copy import copy as run

    options = _options(jobs, memory, False, dry_run, quiet or as_json, storage_option)
    try:
        result = run(src, dst, to_storage_options=_storage_options(to_storage_option) if to_storage_option else None, **options)
    except KeyboardInterrupt:
        _fail("interrupted; what was transferred is kept, and a second run goes on from there", None, 130)
    if as_json:
        print(json.dumps(asdict(result)))
    elif not quiet:
        render.show_copy(result)


Root = Annotated[
    str, typer.Argument(metavar="ROOT", help="A run, with its step-… directories: a path, or a URL such as s3://….", show_default=False)
]


@app.command("ls", epilog=app.info.epilog)
def list_(root: Root, storage_option: StorageOption = None, as_json: Json = False) -> None:
    """List the steps of a run: size, time, world size, complete or not and why."""
    from ckpt_tools import render
    from ckpt_tools.steps import list_steps

    steps = list_steps(root, _storage_options(storage_option))
    if not steps and not is_url(root) and not os.path.isdir(root):
        raise NotACheckpointError(f"not a directory: {printable(root)}")
    if as_json:
        print(json.dumps([render.step_as_json(s) for s in steps]))
    else:
        render.show_steps(steps)


@app.command(epilog=app.info.epilog)
def latest(
    root: Root,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte, and pass over steps with wrong checksums.")] = False,
    storage_option: StorageOption = None,
) -> None:
    """Print the path of the newest complete step: the one that a job would resume from.

    Newer ones that are passed over are named on stderr with the reason. Exit status 10 where there is none.
    """
    from ckpt_tools.steps import latest as find

    found = find(root, verify, options=_storage_options(storage_option))
    for path, reason in found.passed_over:
        print(f"passed over {printable(str(path))}: {reason}", file=sys.stderr)
    if found.step is None:
        raise NotACheckpointError(f"no complete step in {printable(root)}")
    print(found.step.path)


@app.command(epilog=app.info.epilog)
def prune(
    root: Root,
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, metavar="N", help="How many of the newest complete steps stay.", show_default=False)],
    keep_every: Annotated[int | None, typer.Option("--keep-every", min=1, metavar="M", help="Steps whose number is a multiple of M stay as well.", show_default=False)] = None,
    grace_hours: Annotated[float, typer.Option("--grace-hours", min=0.0, help="In an object store: what was never finished goes if it has been silent for so long.")] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would go and remove nothing.")] = False,
    storage_option: StorageOption = None, quiet: Quiet = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Remove old steps of a run, and what dead jobs left half-written: directories, objects without an index, unfinished uploads.

    Never the newest complete step, never one that is incomplete or that another tool wrote, never anything else in ROOT.
    """
    from ckpt_tools import render
    from ckpt_tools.leftovers import remove_leftovers
    from ckpt_tools.steps import prune as run

    options = _storage_options(storage_option)
    removed = run(root, keep_last, keep_every, dry_run=dry_run, options=options)
    leftovers = remove_leftovers(root, grace_hours * 3600, dry_run, options)
    if as_json:
        print(
            json.dumps(
                {"steps": [render.step_as_json(s) for s in removed], "leftovers": [left.url for left in leftovers], "is_dry_run": dry_run}
            )
        )
    elif not quiet:
        render.show_pruned(removed, [left.url for left in leftovers], dry_run)


def _check_dtype(dtype: str | None) -> None:
    if dtype not in (None, "bf16", "fp16", "fp32", "bfloat16", "float16", "float32"):
        raise typer.BadParameter(f"expected bf16, fp16 or fp32, got {printable(dtype or '')!r}", param_hint="--dtype")


def _options(
    jobs: int | None, memory: int | None, overwrite: bool, dry_run: bool, quiet: bool, storage_option: list[str] | None
) -> Options:
    return {
        "jobs": jobs, "memory_bytes": memory, "overwrite": overwrite, "dry_run": dry_run,
        "storage_options": _storage_options(storage_option), "progress": None if quiet else _bar,
    }  # fmt: skip


def _storage_options(given: list[str] | None) -> dict[str, Any]:
    """Parses `key=value` and `table.key=value`; a value is JSON where it can be, else a text."""
    options: dict[str, Any] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter("expected key=value", param_hint="--storage-option")
        *tables, last = key.split(".")
        table = options
        for name in tables:
            table = table.setdefault(name, {})
        try:
            table[last] = json.loads(value)
        except json.JSONDecodeError:
            table[last] = value
    return options


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    from tqdm import tqdm

    with tqdm(total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1000, file=sys.stderr, leave=False, disable=None) as bar:

        def advance(nbytes: int) -> None:
            bar.update(nbytes)

        yield advance


def _report(result: TransferResult, quiet: bool, as_json: bool) -> None:
    from ckpt_tools import render

    if as_json:
        print(json.dumps(asdict(result) | {"read_amplification": round(result.read_amplification, 4)}))
    elif not quiet:
        render.show_transfer(result)


def _terminated(number: int, frame: Any) -> NoReturn:
    del frame
    raise SystemExit(128 + number)


def _fail(message: str, hint: str | None, code: int) -> NoReturn:
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}error:{plain} {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    raise SystemExit(code)


def main() -> None:
    """Runs the command; the one place where errors become exit codes."""
    signal.signal(signal.SIGTERM, _terminated)
    gc.disable()  # a short-lived process that makes no cycles worth collecting
    try:
        app(prog_name="ckpt")
    except CheckpointError as error:
        _fail(str(error), error.hint, error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted; nothing was left at the destination", None, 130)
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
    except OSError as error:
        _fail(f"{error.strerror or error} ({printable(str(error.filename or ''))})", None, 15)


if __name__ == "__main__":
    main()
