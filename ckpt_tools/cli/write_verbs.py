"""The commands that write a checkpoint: merge, reshard, convert, salvage, copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from ckpt_tools.cli.completion import layouts
from ckpt_tools.cli.options import (
    OUTPUT,
    SOURCE,
    WRITES,
    Exclude,
    HfShardSize,
    KeepDtype,
    KeyMap,
    Rename,
    Select,
    Settings,
    Shared,
    Source,
    dtype_option,
    parse_counts,
    parse_size,
    parse_storage_options,
    report_transfer,
    shares,
)
from ckpt_tools.errors import IntegrityError
from ckpt_tools.ranks.base import MAX_RANKS

Dtype = Annotated[
    str | None,
    dtype_option(
        "Cast floating-point tensors, and turn codes of quantized weights into numbers. Nothing is"
        " cast unless asked."
    ),
]
ModelDtype = Annotated[
    str | None,
    dtype_option(
        "Cast the model's floating-point tensors, and turn codes of quantized weights into numbers."
        " Nothing is cast unless asked."
    ),
]


@shares(*WRITES)
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
    select: Select = None,
    exclude: Exclude = None,
    dtype: Dtype = None,
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
            "--keep-prefix",
            help="Keep names as stored: `model.`, `_orig_mod.`, `module.`, ….",
            rich_help_panel="More",
        ),
    ] = False,
    model_key: Annotated[
        str | None,
        typer.Option(
            "--model-key",
            metavar="KEY",
            help="The key below which the model lies, such as `ema.model`; found if absent.",
            show_default=False,
            rich_help_panel="More",
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
    *,
    shared: Shared,
) -> None:
    """Join the shards of a model into one safetensors file, ready for inference.

    It joins shards; it does not average models. Optimizer, scheduler, dataloader and train state
    are left out. The key above the model and the prefixes of wrappers (`_orig_mod.`,
    `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.`, `module.`) are removed from the names.
    The report lists what was removed.
    """
    from ckpt_tools.operations.merge_reshard import merge as operation

    with _kept(shared.resume):
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
            **shared.writing,
        )
    report_transfer(shared, src, result)


@shares(*WRITES)
def reshard(
    src: Source,
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="The directory to write.", show_default=False)
    ],
    to_ranks: Annotated[
        int | None,
        typer.Option(
            "--to",
            "--ranks",
            min=1,
            max=MAX_RANKS,
            metavar="N",
            help="Number of ranks to split for.",
            show_default=False,
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="AXIS=N,…",
            help="Mesh to split for, in place of --to: fsdp=8,tp=2,ep=4; also replicate.",
            show_default=False,
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="NAME|FILE",
            help="Dims that tp and ep split: torchtitan, transformers, FILE; default: found.",
            show_default=False,
        ),
    ] = None,
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
    *,
    shared: Shared,
) -> None:
    """Rewrite a checkpoint as DCP, with the chunks that a job of another size would save.

    DCP reshards by itself when it loads, so a job can continue without this command. Use it when
    many jobs will load the result, when each rank should read one contiguous range, or to drop
    files that a job left. It is necessary if a save without collectives (`__{rank}.metadata`)
    cannot be loaded on another number of ranks. It also turns `torch.save` files, one in all or one
    per rank, into DCP.

    A tensor split along one dimension is split again along it, as DTensor's `Shard` does. A tensor
    split along several dimensions (a 2-D mesh) is split along dim 0. A whole tensor stays whole. If
    one rank saved the source, its tensors are split along dim 0. Objects are copied bit for bit.

    With --mesh, fsdp splits each parameter along dim 0, and a plan tells what tp and ep split. ep
    takes its ranks from those of fsdp and tp.
    """
    from ckpt_tools.operations.merge_reshard import reshard as operation

    if (to_ranks is None) == (mesh is None):
        raise typer.BadParameter("give one of the two", param_hint="--to N or --mesh AXIS=N,…")
    with _kept(shared.resume):
        result = operation(
            src,
            dst,
            to_ranks=to_ranks,
            from_ranks=from_ranks,
            mesh=mesh,
            plan=plan,
            **shared.writing,
        )
    report_transfer(shared, src, result)


@shares(*WRITES)
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
            autocompletion=layouts,
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
            max=MAX_RANKS,
            metavar="N",
            help="For dcp, accelerate and per-rank: ranks to split for; default: as SRC, or 1.",
            show_default=False,
        ),
    ] = None,
    dtype: ModelDtype = None,
    keep_dtype: KeepDtype = None,
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select",
            metavar="GLOB",
            help="Only entries whose name in DST matches; repeatable.",
            show_default=False,
            rich_help_panel="Select",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="GLOB",
            help="Leave out entries whose name in DST matches; repeatable.",
            show_default=False,
            rich_help_panel="Select",
        ),
    ] = None,
    rename: Rename = None,
    key_map: KeyMap = None,
    settings: Settings = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            help=(
                "SRC has only a part of the model, or more: names that the map or the config's"
                " model lacks are kept, and told."
            ),
            rich_help_panel="More",
        ),
    ] = False,
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
            rich_help_panel="More",
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
            rich_help_panel="More",
        ),
    ] = None,
    model_only: Annotated[
        bool, typer.Option("--model-only", help="Leave out everything but the model.")
    ] = False,
    keep_prefix: Annotated[
        bool,
        typer.Option(
            "--keep-prefix", help="Keep wrappers' prefixes in names.", rich_help_panel="More"
        ),
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
    names: Annotated[
        str | None,
        typer.Option(
            "--names",
            metavar="hub|transformers|torchtitan|meta",
            help=(
                "Names and tensors of files on the Hub (the default of hf), of transformers in"
                " memory, of torchtitan or of Meta, with their optimizer state; needs --base."
            ),
            show_default=False,
            rich_help_panel="More",
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            metavar="METHOD",
            help=(
                "For hf: write the weights of linear layers as codes and scales: fp8-block,"
                " fp8-channel, int8-channel or mxfp4; needs --base. Of NVFP4 codes:"
                " compressed-tensors or modelopt, the other's form."
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
            rich_help_panel="More",
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
    no_prove: Annotated[
        bool,
        typer.Option(
            "--no-prove",
            help=(
                "Skip the proof by the inverse, which makes SRC again of the written files, before"
                " DST appears."
            ),
            rich_help_panel="More",
        ),
    ] = False,
    *,
    shared: Shared,
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

    with _kept(shared.resume):
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
            partial=partial,
            settings=parse_counts(settings),
            param_order=param_order,
            optimizer=optimizer,
            model_only=model_only,
            keep_prefix=keep_prefix,
            base=base,
            names=names,
            quantize=quantize,
            mesh=mesh,
            max_shard_bytes=max_shard_size,
            check=check,
            prove=not no_prove,
            **shared.writing,
        )
    report_transfer(shared, src, result)


@shares(*SOURCE, "overwrite", "dry_run", *OUTPUT)
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
    *,
    shared: Shared,
) -> None:
    """Write the undamaged tensors and objects of a damaged checkpoint, and list the lost ones."""
    from ckpt_tools.cli import findings as verdicts
    from ckpt_tools.operations.salvage import salvage as operation

    result = operation(src, dst, **shared.writing)
    shared.show(lambda: verdicts.show_salvage(result), result)
    if result.lost or result.problems:
        raise SystemExit(IntegrityError.exit_code)


@shares(
    "group",
    "storage_option",
    "to_storage_option",
    "shapes",
    "jobs",
    "memory",
    "dry_run",
    "quiet",
    "as_json",
)
def copy_(
    src: Source,
    dst: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="The directory or file to write: a path or a URL; RUN/ keeps the name of SRC.",
            show_default=False,
        ),
    ],
    *,
    shared: Shared,
) -> None:
    """Copy a checkpoint unchanged: upload, download, or from store to store.

    A second copy transfers only files that are missing or have another checksum. The checkpoint is
    visible at DST only when it is complete. Within one S3, the store copies on the server. An
    existing checkpoint is never replaced.
    """
    from ckpt_tools.cli import render
    from ckpt_tools.operations.copy import copy as operation

    given = shared.to_storage_option
    with _kept(True):
        result = operation(
            src,
            dst,
            to_storage_options=parse_storage_options(given) if given else None,
            **shared.writing,
        )
    shared.show(lambda: render.show_copy(result), result)


@contextmanager
def _kept(is_kept: bool) -> Iterator[None]:
    """Adds the resume hint to a Ctrl-C message, if finished work is kept."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if is_kept:
            stop.args = ("finished work is kept, and the same command continues from there",)
        raise
