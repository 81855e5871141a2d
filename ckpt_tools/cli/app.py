"""The command `ckpt`: parse, call one operation, render. Errors become exit codes here and nowhere
else.

Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import click
import typer
import typer.core

from ckpt_tools.cli import runs as cli_runs
from ckpt_tools.cli.options import (
    Command,
    DryRun,
    Jobs,
    Json,
    Memory,
    Overwrite,
    Quiet,
    Resume,
    Shapes,
    Source,
    StorageOption,
    check_dtype,
    is_first,
    make_options,
    parse_counts,
    parse_storage_options,
    plain,
    reading_options,
    size,
)
from ckpt_tools.errors import CheckpointError, PlanError, printable, printable_lines
from ckpt_tools.ranks.base import Group, is_launched
from ckpt_tools.version import __version__

if TYPE_CHECKING:
    from ckpt_tools.transfer.result import TransferResult

EXIT_STATUS = """EXIT STATUS

0 fine · 1 error · 2 wrong usage · 10 not a checkpoint · 11 malformed or unsafe file ·
12 holes or overlaps · 13 the request does not fit · 14 damaged bytes ·
15 reading or writing failed · 16 another rank failed · 130 interrupted · 143 terminated"""


class _Commands(typer.core.TyperGroup):
    """Tells of Ctrl-C itself; typer ends without a word."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here, where an error still has an exit status
            return result
        except BrokenPipeError:  # the reader of a pipe has ended: click would end with 1
            _drop_output()
            raise SystemExit(128 + signal.SIGPIPE) from None
        except KeyboardInterrupt as stop:
            _fail(
                "interrupted;"
                f" {stop.args[0] if stop.args else 'nothing was left at the destination'}",
                None,
                130,
            )


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click does
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Look into, prove, compare, merge and reshard PyTorch FSDP checkpoints, at the speed of a"
        " file copy, without running what they contain."
    ),
    epilog=EXIT_STATUS.replace("\n\n", ": ").replace("\n", " "),
)


def _show_version(value: bool) -> None:
    if value:
        print(f"ckpt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    del version
    if context.obj is not None and context.invoked_subcommand not in _SHARED:
        raise PlanError(
            f"{context.invoked_subcommand} is work for one process; several share "
            + ", ".join(_SHARED),
            hint="start it without the launcher",
        )


_SHARED = ("merge", "reshard", "convert", "verify", "diff", "copy")


@app.command(cls=Command, epilog=app.info.epilog)
def inspect(
    src: Source,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show the tree of modules with shapes, dtypes and bytes.")
    ] = False,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Show which file, and so which rank, holds which part.")
    ] = False,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds: format, world size, tensors, bytes, objects. Reads metadata
    only.
    """
    from ckpt_tools.cli import render
    from ckpt_tools.operations.inspect import inspect as run

    report = run(src, parse_storage_options(storage_option), shapes)
    if as_json:
        print(json.dumps(render.report_as_json(report)))
    else:
        render.show_report(report, tree=tree, ranks=ranks)


@app.command(cls=Command, epilog=app.info.epilog)
def merge(
    src: Source,
    dst: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="The .safetensors file to write; with --max-shard-size a directory.",
            show_default=False,
        ),
    ],
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select",
            metavar="GLOB",
            help="Only tensors whose name matches; repeatable.",
            show_default=False,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="GLOB",
            help="Leave out tensors whose name matches; repeatable.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="bf16|fp16|fp32|fp64",
            help="Cast floating-point tensors. Nothing is cast unless asked.",
            show_default=False,
        ),
    ] = None,
    keep_dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-dtype",
            metavar="GLOB",
            help="Tensors that --dtype leaves as they are; repeatable.",
            show_default=False,
        ),
    ] = None,
    max_shard_size: Annotated[
        int | None,
        typer.Option(
            "--max-shard-size",
            parser=size,
            metavar="SIZE",
            help="Write shards of at most this size, such as 5GB, and an index.",
            show_default=False,
        ),
    ] = None,
    keep_prefix: Annotated[
        bool,
        typer.Option(
            "--keep-prefix", help="Keep names as stored: `model.`, `_orig_mod.`, `module.`, …."
        ),
    ] = False,
    lora: Annotated[
        str | None,
        typer.Option(
            "--lora",
            metavar="DIR",
            help="Add the LoRA adapter of a PEFT directory to the weights, in fp32 arithmetic.",
            show_default=False,
        ),
    ] = None,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    jobs: Jobs = None,
    memory: Memory = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Join the shards of a model into one safetensors file, ready for inference.

    It joins shards; it does not average models. Optimizer, scheduler, dataloader and train state
    are left out. The key under which the model stands and the prefixes of wrappers (`_orig_mod.`,
    `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.`, `module.`) are stripped from the names,
    and what was stripped is reported.
    """
    from ckpt_tools.operations.merge_reshard import merge as run

    check_dtype(dtype)
    options = make_options(
        jobs, memory, overwrite, dry_run, quiet or as_json, storage_option, resume, shapes
    )
    with _kept(resume):
        result = run(
            src,
            dst,
            select=select or (),
            exclude=exclude or (),
            dtype=dtype,
            keep_dtype=keep_dtype or (),
            max_shard_bytes=max_shard_size,
            keep_prefix=keep_prefix,
            lora=lora,
            **options,
        )
    _report(result, quiet, as_json)


@app.command(cls=Command, epilog=app.info.epilog)
def reshard(
    src: Source,
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="The directory to write.", show_default=False)
    ],
    to_ranks: Annotated[
        int,
        typer.Option(
            "--to",
            min=1,
            max=1_000_000,
            metavar="N",
            help="Number of ranks to split for.",
            show_default=False,
        ),
    ],
    from_ranks: Annotated[
        int | None,
        typer.Option(
            "--from",
            min=1,
            metavar="N",
            help="Number of ranks that wrote SRC, to be checked.",
            show_default=False,
        ),
    ] = None,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    jobs: Jobs = None,
    memory: Memory = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Rewrite a checkpoint as DCP, with the very chunks that a job of another number of ranks would
    have saved.

    DCP reshards by itself when it loads, so a job can go on without this. Do it when many jobs will
    load the result, when each rank's load should be one contiguous read, to clean up what a job
    left, or where a save without collectives (`__{rank}.metadata`) cannot be loaded on another
    number of ranks at all. Files of `torch.save`, one or one a rank, become DCP by it.

    A tensor split along one dimension is split again along it, as DTensor's `Shard` does; one split
    along several (a 2-D mesh) is split along dim 0; a whole one stays whole. What one rank saved is
    split along dim 0. Objects come along bit for bit.
    """
    from ckpt_tools.operations.merge_reshard import reshard as run

    options = make_options(
        jobs, memory, overwrite, dry_run, quiet or as_json, storage_option, resume, shapes
    )
    with _kept(resume):
        result = run(src, dst, to_ranks=to_ranks, from_ranks=from_ranks, **options)
    _report(result, quiet, as_json)


@app.command(cls=Command, epilog=app.info.epilog)
def convert(
    src: Source,
    dst: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="The directory to write; for safetensors and torch the file.",
            show_default=False,
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="LAYOUT",
            help=(
                "What DST is to be: dcp, safetensors, hf, torch, accelerate, peft,"
                " deepspeed-universal or per-rank."
            ),
            show_default=False,
        ),
    ],
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            max=1_000_000,
            metavar="N",
            help="For dcp, accelerate and per-rank: ranks to split for; as many as SRC, or 1.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="bf16|fp16|fp32|fp64",
            help="Cast the model's floating-point tensors. Nothing is cast unless asked.",
            show_default=False,
        ),
    ] = None,
    keep_dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-dtype",
            metavar="GLOB",
            help="Tensors that --dtype leaves as they are; repeatable.",
            show_default=False,
        ),
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select",
            metavar="GLOB",
            help="Only what matches by its name in DST; repeatable.",
            show_default=False,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="GLOB",
            help="Leave out what matches by its name in DST; repeatable.",
            show_default=False,
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="REGEX=NEW",
            help="Rename parameters, in the model and in optimizers; repeatable, in order.",
            show_default=False,
        ),
    ] = None,
    key_map: Annotated[
        str | None,
        typer.Option(
            "--map",
            metavar="FILE|NAME",
            help=(
                "A key map: llama_titan_to_hf, llama_hf_to_titan, qkv_split, qkv_fuse,"
                " megatron_unstack, or a file of your own."
            ),
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=N",
            help="A number that the key map asks for, such as heads=32; repeatable.",
            show_default=False,
        ),
    ] = None,
    param_order: Annotated[
        str | None,
        typer.Option(
            "--param-order",
            metavar="FILE|model",
            help=(
                "What the numbers of an optimizer mean: a file with one name per line or a JSON"
                " list, or `model`: each group has its parameters in the model's order."
            ),
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            metavar="groups|flat|ids",
            help=(
                "Name optimizer state by parameter with groups, by parameter throughout"
                " (torchtitan), or by number."
            ),
            show_default=False,
        ),
    ] = None,
    model_only: Annotated[
        bool, typer.Option("--model-only", help="Leave out everything but the model.")
    ] = False,
    keep_prefix: Annotated[
        bool, typer.Option("--keep-prefix", help="Keep wrappers' prefixes in names.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="DIR",
            help=(
                "Directory of config, tokenizer and code, which go along for hf; the key map takes"
                " heads from it."
            ),
            show_default=False,
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="DEVICE:AXIS",
            help="For per-rank: the mesh of the job that will load it; that of SRC, or cuda:fsdp.",
            show_default=False,
        ),
    ] = None,
    max_shard_size: Annotated[
        int | None,
        typer.Option(
            "--max-shard-size",
            parser=size,
            metavar="SIZE",
            help="For hf: at most this size a shard; 5GB.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="For hf: load the result with transformers in a process of its own, and compare.",
        ),
    ] = False,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    jobs: Jobs = None,
    memory: Memory = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint of any readable format as another one, optimizer state included where both
    have it.

    `dcp` is for dcp.load, torchtitan and CheckpointManager; `hf` is a directory that transformers
    opens; `torch` one .pt that torch.load opens with weights_only and mmap; `accelerate` the model
    and optimizer folders of Accelerate; `peft` the LoRA adapter alone; `deepspeed-universal` what
    DeepSpeed loads with load_universal; `per-rank` a file of DTensors a rank, as verl resumes from.
    """
    from ckpt_tools.operations.convert.convert import convert as run

    check_dtype(dtype)
    options = make_options(
        jobs, memory, overwrite, dry_run, quiet or as_json, storage_option, resume, shapes
    )
    with _kept(resume):
        result = run(
            src,
            dst,
            to=to,
            ranks=ranks,
            dtype=dtype,
            keep_dtype=keep_dtype or (),
            select=select or (),
            exclude=exclude or (),
            rename=rename or (),
            key_map=key_map,
            settings=parse_counts(settings),
            param_order=param_order,
            optimizer=optimizer,
            model_only=model_only,
            keep_prefix=keep_prefix,
            base=base,
            mesh=mesh,
            max_shard_bytes=max_shard_size,
            check=check,
            **options,
        )
    _report(result, quiet, as_json)


@app.command(cls=Command, epilog=app.info.epilog)
def verify(
    src: Source,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=(
                "Read no data: names, sizes, the index, and the checksums that an object store"
                " keeps."
            ),
        ),
    ] = False,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help=(
                "Also look at the values: NaN, infinity, nothing but zeros, nothing but one value."
            ),
        ),
    ] = False,
    require_manifest: Annotated[
        bool,
        typer.Option(
            "--require-manifest", help="Exit status 14 where there is no manifest to compare with."
        ),
    ] = False,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    jobs: Jobs = None,
    memory: Memory = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find out whether a checkpoint is whole, and what of it is not. Exit status 1 where something
    is wrong.

    With a manifest: every file, its size and its checksum. Without one: structure, and the CRC-32
    of every record in `.distcp` files, which torch writes and never compares; bytes of which nobody
    kept a checksum are said not to be compared. Damage is told by entry, file, byte and rank.
    """
    from ckpt_tools.cli import findings as verdicts
    from ckpt_tools.operations.verify import verify as run

    result = run(
        src,
        quick=quick,
        deep=deep,
        require_manifest=require_manifest,
        **reading_options(jobs, memory, quiet or as_json, storage_option, shapes),
    )
    if as_json and is_first():
        print(json.dumps(plain(result)))
    elif not quiet and is_first():
        verdicts.show_verdict(result, quick)
    if result.problems:
        raise SystemExit(1)


@app.command(cls=Command, epilog=app.info.epilog)
def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A checkpoint, as SRC elsewhere.", show_default=False)
    ],
    b: Annotated[
        str,
        typer.Argument(
            metavar="B",
            help="Another one; of any format, layout, store and world size.",
            show_default=False,
        ),
    ],
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select", metavar="GLOB", help="Only what matches; repeatable.", show_default=False
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="GLOB",
            help="Leave out what matches; repeatable.",
            show_default=False,
        ),
    ] = None,
    atol: Annotated[
        float,
        typer.Option(
            "--atol",
            min=0.0,
            help=(
                "Values count as the same where |a - b| <= atol + rtol * |b|; with neither, only"
                " the same bits do."
            ),
        ),
    ] = 0.0,
    rtol: Annotated[float, typer.Option("--rtol", min=0.0, help="See --atol.")] = 0.0,
    read_all: Annotated[
        bool,
        typer.Option(
            "--read-all", help="Compare bytes even where both manifests have the same fingerprint."
        ),
    ] = False,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    jobs: Jobs = None,
    memory: Memory = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: names, shapes, types, then values. Exit status 0 where they are the
    same, 1 where not, more on trouble.

    Of each tensor that differs: how many elements, the first of them, the largest absolute and
    relative difference, the cosine. Where both manifests have one fingerprint nothing is read.
    Checkpoints without a common name are compared by the names that merge gives.
    """
    from ckpt_tools.cli import findings as verdicts
    from ckpt_tools.operations.diff import diff as run

    options = reading_options(jobs, memory, quiet or as_json, storage_option, shapes)
    result = run(
        a,
        b,
        select=select or (),
        exclude=exclude or (),
        atol=atol,
        rtol=rtol,
        read_all=read_all,
        **options,
    )
    if as_json and is_first():
        print(json.dumps(plain(result) | {"is_same": result.is_same}))
    elif not quiet and is_first():
        verdicts.show_diff(result)
    if not result.is_same:
        raise SystemExit(1)


@app.command(cls=Command, epilog=app.info.epilog)
def seal(
    src: Source,
    storage_option: StorageOption = None,
    jobs: Jobs = None,
    memory: Memory = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Add a manifest to a checkpoint that has none, once all that can be compared is right. Nothing
    else is written.
    """
    from ckpt_tools.cli import findings as verdicts
    from ckpt_tools.operations.seal import seal as run

    result = run(src, **reading_options(jobs, memory, quiet or as_json, storage_option))
    if as_json:
        print(json.dumps(plain(result)))
    elif not quiet:
        verdicts.show_seal(result)


@app.command(cls=Command, epilog=app.info.epilog)
def salvage(
    src: Source,
    dst: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="The directory to write; a .safetensors file for one such file.",
            show_default=False,
        ),
    ],
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    jobs: Jobs = None,
    memory: Memory = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write the tensors and objects of a damaged checkpoint that are whole, and list what is
    lost.
    """
    from ckpt_tools.cli import findings as verdicts
    from ckpt_tools.operations.salvage import salvage as run

    result = run(
        src,
        dst,
        **make_options(
            jobs, memory, overwrite, dry_run, quiet or as_json, storage_option, shapes=shapes
        ),
    )
    if as_json:
        print(json.dumps(plain(result)))
    elif not quiet:
        verdicts.show_salvage(result)


@app.command("copy", cls=Command, epilog=app.info.epilog)
def copy_(
    src: Source,
    dst: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="The directory or file to be: a path, or a URL.", show_default=False
        ),
    ],
    storage_option: StorageOption = None,
    to_storage_option: Annotated[
        list[str] | None,
        typer.Option(
            "--to-storage-option",
            metavar="KEY=VALUE",
            help="Of DST's object store, where it is another than SRC's; repeatable.",
            show_default=False,
        ),
    ] = None,
    shapes: Shapes = None,
    jobs: Jobs = None,
    memory: Memory = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint as it is: upload, download, or from store to store.

    A second run transfers what is missing or has another checksum; nothing is visible at DST before
    everything is there. Within one S3 the store copies by itself. A checkpoint that is there is
    never replaced.
    """
    from ckpt_tools.cli import render
    from ckpt_tools.operations.copy import copy as run

    options = make_options(
        jobs, memory, False, dry_run, quiet or as_json, storage_option, shapes=shapes
    )
    with _kept(True):
        result = run(
            src,
            dst,
            to_storage_options=(
                parse_storage_options(to_storage_option) if to_storage_option else None
            ),
            **options,
        )
    if as_json and is_first():
        print(json.dumps(plain(result)))
    elif not quiet and is_first():
        render.show_copy(result)


app.command("ls", cls=Command, epilog=app.info.epilog)(cli_runs.list_)
app.command(cls=Command, epilog=app.info.epilog)(cli_runs.latest)
app.command(cls=Command, epilog=app.info.epilog)(cli_runs.prune)
app.command(cls=Command, epilog=app.info.epilog)(cli_runs.pin)


@contextmanager
def _kept(is_kept: bool) -> Iterator[None]:
    """Says of an interrupted command that another run goes on from there, where it does."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if is_kept:
            stop.args = ("what was finished is kept, and the same command goes on from there",)
        raise


def _report(result: TransferResult, quiet: bool, as_json: bool) -> None:
    from ckpt_tools.cli import render

    if not is_first():
        return
    if as_json:
        print(
            json.dumps(plain(result) | {"read_amplification": round(result.read_amplification, 4)})
        )
    elif not quiet:
        render.show_transfer(result)


def _terminated(number: int, frame: Any) -> NoReturn:
    del frame
    raise SystemExit(128 + number)


def _prepare_streams() -> None:
    """Makes sure that the standard streams are there, and take any text.

    A closed one (`>&-`) leaves its number to the next file that is opened, which messages would
    then be written into.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # LC_ALL=C knows ASCII only
    if not os.environ.get("COLUMNS", "1").isdecimal() or int(os.environ.get("COLUMNS", "1")) < 1:
        del os.environ["COLUMNS"]


def _fail(message: str, hint: str | None, code: int, kind: str = "") -> NoReturn:
    if kind and "--json" in sys.argv[1:]:
        with suppress(OSError):  # stdout may be what failed
            print(json.dumps({"error": kind, "message": message, "hint": hint, "exit_code": code}))
            sys.stdout.flush()
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}error:{plain} {printable_lines(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {printable_lines(hint)}", file=sys.stderr)
    raise SystemExit(code)


def _drop_output() -> None:
    """Points stdout to nowhere: what is still buffered would fail once more at the exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(may_share: bool = False) -> None:
    """Runs the command; the one place where errors become exit codes.

    Args:
        may_share: do it together with the other processes that torchrun or srun has started, if one
            has.
    """
    signal.signal(signal.SIGTERM, _terminated)
    _prepare_streams()
    gc.disable()  # a short-lived process that makes no cycles worth collecting
    try:
        with _team(may_share) as team:
            app(prog_name="ckpt", obj=team)
    except CheckpointError as error:
        _fail(str(error), error.hint, error.exit_code, type(error).__name__)
    except OSError as error:
        _fail(
            f"{error.strerror or error} ({printable(str(error.filename or ''))})",
            None,
            15,
            type(error).__name__,
        )
    except KeyboardInterrupt:
        _fail("interrupted", None, 130)
    finally:
        # what was done is done: the interpreter ends without a word about it
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _team(may_share: bool) -> AbstractContextManager[Group | None]:
    """Returns the processes that share the work; none where this one is alone."""
    if not may_share or not is_launched(os.environ):
        return nullcontext()
    from ckpt_tools.ranks.launch import joined  # takes torch

    return joined()


if __name__ == "__main__":
    main()
