"""Common options of the commands, and their conversion to arguments of operations."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
import typer.core

from ckpt_tools.core.threads import num_threads, ranks_on_host
from ckpt_tools.errors import printable
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage.base import is_url

if TYPE_CHECKING:
    from ckpt_tools.transfer.options import Options, Reading
    from ckpt_tools.transfer.result import TransferResult


class Command(typer.core.TyperCommand):
    """A verb. Each verb has the option `--stats`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        words = (
            "Print on stderr the number of requests and bytes between this process and object"
            " stores."
        )
        stats = typer.core.TyperOption(
            param_decls=["--stats"],
            is_flag=True,
            default=False,
            expose_value=False,
            help=words,
            show_default=False,
            callback=_show_stats,
        )
        self.params.append(stats)

    def invoke(self, ctx: click.Context) -> Any:
        """Refuses options of an object store if no path is in one."""
        names = ("src", "dst", "a", "b", "root", "step", "lora", "base")
        paths = [ctx.params.get(name) for name in names] + list(ctx.params.get("paths") or ())
        if ctx.params.get("storage_option") and not any(map(is_url, paths)):
            raise typer.BadParameter("no object store is named", param_hint="--storage-option")
        if ctx.params.get("to_storage_option") and not is_url(ctx.params.get("dst")):
            raise typer.BadParameter("DST is in no object store", param_hint="--to-storage-option")
        return super().invoke(ctx)


def _show_stats(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    """Prints the requests when the verb has ended, also after a failure."""
    if is_wanted and not context.resilient_parsing:
        context.call_on_close(_print_stats)


def _print_stats() -> None:
    from ckpt_tools.cli import render
    from ckpt_tools.storage.base import ALL_TRAFFIC as TRAFFIC

    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(TRAFFIC.kinds.items()))
    received, sent = map(render.format_size, (TRAFFIC.nbytes, TRAFFIC.sent_nbytes))
    print(
        f"{render.count(TRAFFIC.requests, 'request')}{f' ({kinds})' if kinds else ''},"
        f" {received} received, {sent} sent",
        file=sys.stderr,
    )


_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parses 5GB (decimal) or 512MiB (binary) into bytes."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise typer.BadParameter(f"expected a size such as 5GB or 512MiB, got {text!r}")
    nbytes = int(
        float(match[1])
        * (1024 if match[3] else 1000) ** ("KMGT".find((match[2] or "0").upper()) + 1)
    )
    if nbytes < 1:
        raise typer.BadParameter(f"expected a size above zero, got {text!r}")
    return nbytes


def parse_numbers(text: str | None) -> list[float] | None:
    """Parses numbers with commas between them."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 1,2,4, got {text!r}") from None


_PERIOD = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(s|m|min|h|d|w)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_period(text: str | None) -> float | None:
    """Parses 90s, 30min, 6h, 2d or 1w into seconds."""
    if text is None:
        return None
    match = _PERIOD.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise typer.BadParameter(f"expected a time such as 30min, 6h or 2d, got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A checkpoint, or a directory that contains one; a path or a URL such as s3://….",
        show_default=False,
    ),
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help=(
            "Option of the object store, in fsspec's form, such as `endpoint_url=…`; repeatable."
            " Keep secrets in config files or the environment."
        ),
        show_default=False,
    ),
]
Shapes = Annotated[
    str | None,
    typer.Option(
        "--shapes",
        metavar="FILE",
        help=(
            "For FSDP1's flat parameters: shapes.json, or a model's config.json, from which"
            " transformers gets the shapes."
        ),
        show_default=False,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        max=256,
        help="Number of threads.  [default: processors, at most 8]",
        show_default=False,
    ),
]
Memory = Annotated[
    int | None,
    typer.Option(
        "--memory",
        parser=parse_size,
        metavar="SIZE",
        help="Memory for all buffers together, such as 64MiB.",
        show_default="64MiB",
    ),
]
Select = Annotated[
    list[str] | None,
    typer.Option(
        "--select", metavar="GLOB", help="Only names that match; repeatable.", show_default=False
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="GLOB",
        help="Leave out names that match; repeatable.",
        show_default=False,
    ),
]
KeepDtype = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-dtype",
        metavar="GLOB",
        help="Tensors that --dtype leaves as they are; repeatable.",
        show_default=False,
    ),
]
HfShardSize = Annotated[
    int | None,
    typer.Option(
        "--max-shard-size",
        parser=parse_size,
        metavar="SIZE",
        help="For hf: largest size of a shard; default: 5GB.",
        show_default=False,
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace a checkpoint at DST; the old one stays until the new one is complete.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help=(
            "Continue an interrupted attempt of this command, and keep finished work if this one"
            " is interrupted."
        ),
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no report.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Root = Annotated[
    str,
    typer.Argument(
        metavar="ROOT",
        help="A run: the directory of step-… directories, a path or a URL such as s3://….",
        show_default=False,
    ),
]


def check_dtype(dtype: str | None) -> None:
    if dtype not in (
        None,
        "bf16",
        "fp16",
        "fp32",
        "fp64",
        "bfloat16",
        "float16",
        "float32",
        "float64",
    ):
        raise typer.BadParameter(
            f"expected bf16, fp16, fp32 or fp64, got {printable(dtype or '')!r}",
            param_hint="--dtype",
        )


def is_first(group: Group | None) -> bool:
    """Tells whether this process prints the report: rank 0, or the only process."""
    return group is None or group.rank == 0


def reading_options(
    group: Group | None,
    jobs: int | None,
    memory: int | None,
    quiet: bool,
    storage_option: list[str] | None,
    shapes: str | None = None,
) -> Reading:
    """Returns the options of a command that writes no checkpoint."""
    if group is not None and jobs is None:
        jobs = num_threads(None, ranks_on_host())
    return {
        "jobs": jobs,
        "memory_bytes": memory,
        "group": group,
        "shapes": shapes,
        "storage_options": parse_storage_options(storage_option),
        "progress": bar if is_first(group) and not quiet else None,
    }


def make_options(
    group: Group | None,
    jobs: int | None,
    memory: int | None,
    overwrite: bool,
    dry_run: bool,
    quiet: bool,
    storage_option: list[str] | None,
    resume: bool = False,
    shapes: str | None = None,
) -> Options:
    """Returns the options of a command that writes a checkpoint."""
    return {
        **reading_options(group, jobs, memory, quiet, storage_option, shapes),
        "overwrite": overwrite,
        "dry_run": dry_run,
        "resume": resume,
    }


def parse_storage_options(given: list[str] | None) -> dict[str, Any]:
    """Parses `key=value` and `table.key=value`. A value is JSON if possible, else a string."""
    options: dict[str, Any] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter("expected key=value", param_hint="--storage-option")
        *tables, last = key.split(".")
        table = options
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise typer.BadParameter(
                    f"{name} is a value and a table", param_hint="--storage-option"
                )
        try:
            table[last] = json.loads(value)
        except (ValueError, RecursionError):
            table[last] = value
    return options


def parse_counts(given: list[str] | None) -> dict[str, int]:
    """Returns numbers by name, from `name=number`."""
    counts = {}
    for text in given or ():
        name, _, number = text.partition("=")
        if not name or not number.isdecimal():
            raise typer.BadParameter(f"expected NAME=N, got {text!r}", param_hint="--set")
        counts[name] = int(number)
    return counts


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    from tqdm import tqdm

    with tqdm(
        total=total,
        desc=label,
        unit="B",
        unit_scale=True,
        unit_divisor=1000,
        file=sys.stderr,
        leave=False,
        disable=None,
    ) as bar:

        def advance(nbytes: int) -> None:
            bar.update(nbytes)

        yield advance


def json_value(value: Any) -> Any:
    """Returns a result as JSON values: dicts by field name, and None for NaN and infinity."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: json_value(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return json_value(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report_transfer(
    group: Group | None, result: TransferResult, quiet: bool, as_json: bool
) -> None:
    """Prints the result of a transfer, on one process of a group."""
    from ckpt_tools.cli import render

    if not is_first(group):
        return
    if as_json:
        print(
            json.dumps(
                json_value(result) | {"read_amplification": round(result.read_amplification, 4)}
            )
        )
    elif not quiet:
        render.show_transfer(result)
