"""The commands that write a checkpoint: merge, reshard, convert, salvage, copy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
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
    Resume,
    Select,
    Shapes,
    Source,
    StorageOption,
    check_dtype,
    is_first,
    json_value,
    make_options,
    parse_counts,
    parse_size,
    parse_storage_options,
    report_transfer,
)


def merge(
    context: typer.Context,
    src: Source,
    dst: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="The .safetensors file to write; with --max-shard-size, a directory.",
            show_default=False,
        ),
    ],
    select: Select = None,
    exclude: Exclude = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="bf16|fp16|fp32|fp64",
            help="Cast floating-point tensors. Nothing is cast unless asked.",
            show_default=False,
        ),
    ] = None,
    keep_dtype: KeepDtype = None,
    max_shard_size: Annotated[
        int | None,
        typer.Option(
            "--max-shard-size",
            parser=parse_size,
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
    model_key: Annotated[
        str | None,
        typer.Option(
            "--model-key",
            metavar="KEY",
            help="The key below which the model lies, such as `ema.model`; found if absent.",
            show_default=False,
        ),
    ] = None,
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
    from ckpt_tools.operations.merge_reshard import merge as operation

    check_dtype(dtype)
    options = make_options(
        context.obj,
        jobs,
        memory,
        overwrite,
        dry_run,
        quiet or as_json,
        storage_option,
        resume,
        shapes,
    )
    with _kept(resume):
        result = operation(
            src,
            dst,
            select=select or (),
            exclude=exclude or (),
            dtype=dtype,
            keep_dtype=keep_dtype or (),
            max_shard_bytes=max_shard_size,
            keep_prefix=keep_prefix,
            lora=lora,
            model_key=model_key,
            **options,
        )
    report_transfer(context.obj, result, quiet, as_json)


def reshard(
    context: typer.Context,
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
    from ckpt_tools.operations.merge_reshard import reshard as operation

    options = make_options(
        context.obj,
        jobs,
        memory,
        overwrite,
        dry_run,
        quiet or as_json,
        storage_option,
        resume,
        shapes,
    )
    with _kept(resume):
        result = operation(src, dst, to_ranks=to_ranks, from_ranks=from_ranks, **options)
    report_transfer(context.obj, result, quiet, as_json)


def convert(
    context: typer.Context,
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
    keep_dtype: KeepDtype = None,
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
    max_shard_size: HfShardSize = None,
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
    from ckpt_tools.operations.convert.convert import convert as operation

    check_dtype(dtype)
    options = make_options(
        context.obj,
        jobs,
        memory,
        overwrite,
        dry_run,
        quiet or as_json,
        storage_option,
        resume,
        shapes,
    )
    with _kept(resume):
        result = operation(
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
    report_transfer(context.obj, result, quiet, as_json)


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
    from ckpt_tools.operations.salvage import salvage as operation

    result = operation(
        src,
        dst,
        **make_options(
            None, jobs, memory, overwrite, dry_run, quiet or as_json, storage_option, shapes=shapes
        ),
    )
    if as_json:
        print(json.dumps(json_value(result)))
    elif not quiet:
        verdicts.show_salvage(result)


def copy_(
    context: typer.Context,
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

    A second copy transfers only files that are missing or have another checksum. The checkpoint is
    visible at DST only when it is complete. Within one S3, the store copies on the server. An
    existing checkpoint is never replaced.
    """
    from ckpt_tools.cli import render
    from ckpt_tools.operations.copy import copy as operation

    options = make_options(
        context.obj, jobs, memory, False, dry_run, quiet or as_json, storage_option, shapes=shapes
    )
    with _kept(True):
        result = operation(
            src,
            dst,
            to_storage_options=(
                parse_storage_options(to_storage_option) if to_storage_option else None
            ),
            **options,
        )
    if as_json and is_first(context.obj):
        print(json.dumps(json_value(result)))
    elif not quiet and is_first(context.obj):
        render.show_copy(result)


@contextmanager
def _kept(is_kept: bool) -> Iterator[None]:
    """Adds the resume hint to a Ctrl-C message, if finished work is kept."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if is_kept:
            stop.args = ("finished work is kept, and the same command continues from there",)
        raise
