"""The command `ckpt`: it parses arguments, calls one operation and renders the result.

Only this module turns errors into exit codes. Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

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
from ckpt_tools.cli.process import (
    EXIT_STATUS,
    drop_output,
    fail,
    prepare_streams,
    print_json,
    terminated,
)
from ckpt_tools.errors import CheckpointError, PlanError, printable
from ckpt_tools.ranks.base import Group, is_launched
from ckpt_tools.version import __version__

if TYPE_CHECKING:
    from ckpt_tools.transfer.result import TransferResult


class _Commands(typer.core.TyperGroup):
    """Prints a message on Ctrl-C, because typer prints none."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # flush here: an error can still set the exit status
            return result
        except click.UsageError as error:
            print_json(error.format_message(), None, error.exit_code, "UsageError")
            raise
        except BrokenPipeError:  # the reader of the pipe has ended; click would exit with 1
            drop_output()
            raise SystemExit(128 + signal.SIGPIPE) from None
        except KeyboardInterrupt as stop:
            fail(
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
    suggest_commands=False,  # click suggests commands itself
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Inspect, verify, compare, merge and reshard PyTorch FSDP checkpoints at the speed of a"
        " file copy, without running code from them."
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
        bool, typer.Option("--ranks", help="Show which file, and so which rank, holds which chunk.")
    ] = False,
    storage_option: StorageOption = None,
    shapes: Shapes = None,
    as_json: Json = False,
) -> None:
    """Show format, world size, tensors, bytes and objects of a checkpoint. Reads only metadata."""
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
            help="The .safetensors file to write; with --max-shard-size, a directory.",
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
    are left out. The key above the model and the prefixes of wrappers (`_orig_mod.`,
    `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.`, `module.`) are removed from the names.
    The report lists what was removed.
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
            help="Check that SRC was written by this number of ranks.",
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
    """Rewrite a checkpoint as DCP, with the chunks that a job of N ranks would save.

    DCP reshards by itself when it loads, so a job can continue without this command. Use it when
    many jobs will load the result, when each rank should read one contiguous range, or to drop
    files that a job left. It is necessary if a save without collectives (`__{rank}.metadata`)
    cannot be loaded on another number of ranks. It also turns `torch.save` files, one in all or one
    per rank, into DCP.

    A tensor split along one dimension is split again along it, as DTensor's `Shard` does. A tensor
    split along several dimensions (a 2-D mesh) is split along dim 0. A whole tensor stays whole. If
    one rank saved the source, its tensors are split along dim 0. Objects are copied bit for bit.
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
            help="The directory to write; for safetensors and torch, the file.",
            show_default=False,
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="LAYOUT",
            help=(
                "Layout of DST: dcp, safetensors, hf, torch, accelerate, peft,"
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
            help="For dcp, accelerate and per-rank: ranks to split for; default: as SRC, or 1.",
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
            help="Only entries whose name in DST matches; repeatable.",
            show_default=False,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="GLOB",
            help="Leave out entries whose name in DST matches; repeatable.",
            show_default=False,
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="REGEX=NEW",
            help="Rename parameters in the model and in optimizers; repeatable, applied in order.",
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
            help="A number that the key map needs, such as heads=32; repeatable.",
            show_default=False,
        ),
    ] = None,
    param_order: Annotated[
        str | None,
        typer.Option(
            "--param-order",
            metavar="FILE|model",
            help=(
                "Parameters of a numbered optimizer, in order: a file with one name per line or a"
                " JSON list. Or `model`: each group has the model's order."
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
                "Directory of the model's config, tokenizer and code. They are copied for hf; the"
                " key map reads the number of heads there."
            ),
            show_default=False,
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="DEVICE:AXIS",
            help="For per-rank: mesh of the loading job; default: that of SRC, or cuda:fsdp.",
            show_default=False,
        ),
    ] = None,
    max_shard_size: Annotated[
        int | None,
        typer.Option(
            "--max-shard-size",
            parser=size,
            metavar="SIZE",
            help="For hf: largest size of a shard; default: 5GB.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="For hf: load the result with transformers in a separate process, and compare.",
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
    """Write a checkpoint of any readable format in another layout.

    Optimizer state is included, if both formats have it.

    `dcp` is for dcp.load, torchtitan and CheckpointManager. `hf` is a directory that transformers
    opens. `torch` is one .pt file that torch.load opens with weights_only and mmap. `accelerate`
    has the model and optimizer folders of Accelerate. `peft` is only the LoRA adapter. DeepSpeed
    loads `deepspeed-universal` with load_universal. `per-rank` has one file of DTensors per rank,
    from which verl resumes.
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
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select",
            metavar="GLOB",
            help="Only names that match; repeatable.",
            show_default=False,
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="GLOB",
            help="Leave out names that match; repeatable.",
            show_default=False,
        ),
    ] = None,
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
    """Add a manifest to a checkpoint that has none, if its own checksums are right.

    It writes nothing else.
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
    """Write the undamaged tensors and objects of a damaged checkpoint, and list the lost ones."""
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
            metavar="DST",
            help="The directory or file to write: a path or a URL.",
            show_default=False,
        ),
    ],
    storage_option: StorageOption = None,
    to_storage_option: Annotated[
        list[str] | None,
        typer.Option(
            "--to-storage-option",
            metavar="KEY=VALUE",
            help="Options of DST's object store, if it is not SRC's; repeatable.",
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
    """Copy a checkpoint unchanged: upload, download, or from store to store.

    A second run transfers only files that are missing or have another checksum. The checkpoint is
    visible at DST only when it is complete. Within one S3, the store copies on the server. An
    existing checkpoint is never replaced.
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
    """Adds the resume hint to a Ctrl-C message, if finished work is kept."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if is_kept:
            stop.args = ("finished work is kept, and the same command continues from there",)
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


def main(may_share: bool = False) -> None:
    """Runs the command, and turns errors into exit codes.

    Args:
        may_share: share the work with the other processes of torchrun or srun, if it was started by
            one.
    """
    signal.signal(signal.SIGTERM, terminated)
    prepare_streams()
    gc.disable()  # the process is short-lived, and has no cycles worth collecting
    try:
        with _group(may_share) as group:
            app(prog_name="ckpt", obj=group)
    except CheckpointError as error:
        fail(str(error), error.hint, error.exit_code, type(error).__name__)
    except OSError as error:
        fail(
            f"{error.strerror or error} ({printable(str(error.filename or ''))})",
            None,
            15,
            type(error).__name__,
        )
    except KeyboardInterrupt:
        fail("interrupted", None, 130)
    finally:
        # the work is done: a late Ctrl-C must not print a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _group(may_share: bool) -> AbstractContextManager[Group | None]:
    """Returns the group of processes that share the work; None if this process is alone."""
    if not may_share or not is_launched(os.environ):
        return nullcontext()
    from ckpt_tools.ranks.launch import joined  # imports torch

    return joined()


if __name__ == "__main__":
    main()
