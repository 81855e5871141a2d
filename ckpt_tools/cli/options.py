"""Common options of the commands, and their conversion to arguments of operations."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
import typer.core

from ckpt_tools.cli.completion import DTYPES, dtypes, maps
from ckpt_tools.cli.help import write_verb
from ckpt_tools.core.threads import MAX_THREADS, num_threads, ranks_on_host
from ckpt_tools.errors import printable
from ckpt_tools.ranks.base import Group
from ckpt_tools.storage.base import is_url

if TYPE_CHECKING:
    from ckpt_tools.transfer.options import Options, Reading
    from ckpt_tools.transfer.result import TransferResult


class Command(typer.core.TyperCommand):
    """A verb. Each verb has the options `--traffic` and `--help-all`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        words = (
            "Print on stderr the number of requests and bytes between this process and object"
            " stores."
        )
        traffic = typer.core.TyperOption(
            param_decls=["--traffic"],
            is_flag=True,
            default=False,
            expose_value=False,
            help=words,
            show_default=False,
            callback=_show_traffic,
            rich_help_panel="Store",
        )
        every = typer.core.TyperOption(
            param_decls=["--help-all"],
            is_flag=True,
            default=False,
            expose_value=False,
            is_eager=True,
            help="Explain every option.",
            show_default=False,
            callback=_show_all_help,
            rich_help_panel="Run",
        )
        self.params += [traffic, every]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the help of one screen, or the whole one after `--help-all`."""
        if ctx.meta.get(_ALL):
            super().format_help(ctx, formatter)
        else:
            write_verb(self, ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Refuses options of an object store if no path is in one."""
        names = ("src", "dst", "a", "b", "root", "step", "lora", "base")
        paths = [ctx.params.get(name) for name in names] + list(ctx.params.get("paths") or ())
        if ctx.params.get("storage_option") and not any(map(is_url, paths)):
            raise typer.BadParameter("no object store is named", param_hint="--storage-option")
        if ctx.params.get("to_storage_option") and not is_url(ctx.params.get("dst")):
            raise typer.BadParameter("DST is in no object store", param_hint="--to-storage-option")
        return super().invoke(ctx)


_ALL = "ckpt_tools.help_all"  # in the `meta` of a context


def _show_all_help(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def _show_traffic(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    """Prints the requests when the verb has ended, also after a failure."""
    if is_wanted and not context.resilient_parsing:
        context.call_on_close(_print_traffic)


def _print_traffic() -> None:
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


def parse_period(text: str | None, option: str, may_be_zero: bool = False) -> float | None:
    """Parses 90s, 30min, 6h, 2d or 1w into seconds."""
    if text is None:
        return None
    match = _PERIOD.fullmatch(text.strip())
    if not match or not (may_be_zero or float(match[1])):
        raise typer.BadParameter(
            f"expected a time such as 30min, 6h or 2d, got {text!r}", param_hint=option
        )
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
        rich_help_panel="Store",
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
        rich_help_panel="More",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        max=MAX_THREADS,
        help="Number of threads.  [default: processors, at most 8]",
        show_default=False,
        rich_help_panel="Run",
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
        rich_help_panel="Run",
    ),
]
Select = Annotated[
    list[str] | None,
    typer.Option(
        "--select",
        metavar="GLOB",
        help="Only names that match; repeatable.",
        show_default=False,
        rich_help_panel="Select",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="GLOB",
        help="Leave out names that match; repeatable.",
        show_default=False,
        rich_help_panel="Select",
    ),
]
KeepDtype = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-dtype",
        metavar="GLOB",
        help="Tensors that --dtype leaves as they are; repeatable.",
        show_default=False,
        rich_help_panel="More",
    ),
]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="REGEX=NEW",
        help="Rename parameters in the model and in optimizers; repeatable, applied in order.",
        show_default=False,
        rich_help_panel="More",
    ),
]
KeyMap = Annotated[
    str | None,
    typer.Option(
        "--map",
        autocompletion=maps,
        metavar="FILE|NAME",
        help=(
            "A key map: llama_titan_to_hf, llama_hf_to_titan, the same of qwen3, deepseek_v3"
            " and gpt_oss, llama_hf_to_meta, qkv_split, qkv_fuse, megatron_unstack, or your file."
        ),
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=N",
        help="A number that the key map needs, such as heads=32; repeatable.",
        show_default=False,
        rich_help_panel="More",
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
        rich_help_panel="More",
    ),
]
ToStorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--to-storage-option",
        metavar="KEY=VALUE",
        help="Options of DST's object store, if it is not SRC's; repeatable.",
        show_default=False,
        rich_help_panel="Store",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace a checkpoint at DST; the old one stays until the new one is complete.",
        rich_help_panel="Output",
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
        rich_help_panel="Run",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the plan and write nothing.", rich_help_panel="Output"),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress bar and no report.", rich_help_panel="Output"),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON.", rich_help_panel="Output")
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="DIR",
        help="Compare names and shapes with the model in this Hugging Face directory.",
        show_default=False,
    ),
]
Root = Annotated[
    str,
    typer.Argument(
        metavar="ROOT",
        help="A run: the directory of step-… directories, a path or a URL such as s3://….",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Shared:
    """The values of the options that several verbs share, as far as a verb has them.

    Attributes:
        group: the processes that share the work; None if this process is alone.
        storage_option, to_storage_option: as given, `KEY=VALUE`.
        shapes, jobs, memory, overwrite, resume, dry_run, quiet, as_json: see their help.
    """

    group: Group | None = None
    storage_option: list[str] | None = None
    to_storage_option: list[str] | None = None
    shapes: str | None = None
    jobs: int | None = None
    memory: int | None = None
    overwrite: bool = False
    resume: bool = False
    dry_run: bool = False
    quiet: bool = False
    as_json: bool = False

    @property
    def is_first(self) -> bool:
        """Tells whether this process prints: rank 0, or the only process."""
        return self.group is None or self.group.rank == 0

    @property
    def storage_options(self) -> dict[str, Any]:
        """Returns the options of the object store."""
        return parse_storage_options(self.storage_option)

    @property
    def reading(self) -> Reading:
        """Returns the options of an operation that writes no checkpoint."""
        is_shared = self.group is not None and self.jobs is None
        shows_bar = self.is_first and not (self.quiet or self.as_json)
        return {
            "jobs": num_threads(None, ranks_on_host()) if is_shared else self.jobs,
            "memory_bytes": self.memory,
            "group": self.group,
            "shapes": self.shapes,
            "storage_options": self.storage_options,
            "progress": bar if shows_bar else None,
        }

    @property
    def writing(self) -> Options:
        """Returns the options of an operation that writes a checkpoint."""
        return {
            **self.reading,
            "overwrite": self.overwrite,
            "dry_run": self.dry_run,
            "resume": self.resume,
        }

    def show(self, as_text: Callable[[], None], value: Any, **more: Any) -> None:
        """Prints the result of a verb, on one process of a group, as text or as JSON.

        Args:
            as_text: prints it for people.
            value: the result, a dataclass.
            more: further JSON values.
        """
        if self.as_json and self.is_first:
            print(json.dumps(json_value(value) | more))
        elif self.is_first and not self.quiet:
            as_text()


_SHARED: dict[str, Any] = {
    "storage_option": StorageOption,
    "to_storage_option": ToStorageOption,
    "shapes": Shapes,
    "jobs": Jobs,
    "memory": Memory,
    "overwrite": Overwrite,
    "resume": Resume,
    "dry_run": DryRun,
    "quiet": Quiet,
    "as_json": Json,
}


SOURCE, OUTPUT = ("storage_option", "shapes", "jobs", "memory"), ("quiet", "as_json")
READS = ("group", *SOURCE, *OUTPUT)
WRITES = ("group", *SOURCE, "overwrite", "resume", "dry_run", *OUTPUT)


def shares(*names: str, **own: Any) -> Callable[[Callable[..., None]], Verb]:
    """Gives a verb some of the options that verbs share; their values are its argument `shared`.

    Args:
        names: fields of `Shared`, in the order of the help. `group` makes it a verb that several
            processes can share.
        own: a declaration of its own for one of them.
    """
    return lambda function: Verb(function, names, own)


class Verb:
    """A function with the options that it shares with others, as typer reads them.

    The signature is made when it is asked for: only one verb is called.
    """

    def __init__(
        self, function: Callable[..., None], names: Sequence[str], own: Mapping[str, Any]
    ) -> None:
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self._function, self._own = function, own
        self._names = [name for name in names if name != "group"]
        self._is_shared = "group" in names

    def __call__(self, **values: Any) -> None:
        taken = {name: values.pop(name) for name in self._names}
        group = values.pop("context").obj if self._is_shared else None
        self._function(**values, shared=Shared(group, **taken))

    @property
    def __signature__(self) -> inspect.Signature:
        given = inspect.signature(self._function, eval_str=True).parameters
        kind, defaults = inspect.Parameter.KEYWORD_ONLY, {f.name: f.default for f in fields(Shared)}
        own = [p.replace(kind=kind) for name, p in given.items() if name != "shared"]
        shared = [
            inspect.Parameter(
                name, kind, default=defaults[name], annotation=self._own.get(name, _SHARED[name])
            )
            for name in self._names
        ]
        context = [inspect.Parameter("context", kind, annotation=typer.Context)]
        return inspect.Signature([*(context if self._is_shared else ()), *own, *shared])

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: p.annotation for name, p in self.__signature__.parameters.items()}


def dtype_option(words: str) -> Any:
    """Returns the declaration of `--dtype`, with help of its own."""
    return typer.Option(
        "--dtype",
        autocompletion=dtypes,
        metavar="bf16|fp16|fp32|fp64",
        help=words,
        show_default=False,
        callback=_check_dtype,
    )


_DTYPES = (*DTYPES, "bfloat16", "float16", "float32", "float64")


def _check_dtype(dtype: str | None) -> str | None:
    if dtype is not None and dtype not in _DTYPES:
        raise typer.BadParameter(
            f"expected bf16, fp16, fp32 or fp64, got {printable(dtype)!r}", param_hint="--dtype"
        )
    return dtype


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


def report_transfer(shared: Shared, src: str, result: TransferResult) -> None:
    """Prints the result of a transfer."""
    from ckpt_tools.cli import render

    amplification = round(result.read_amplification, 4)
    shared.show(lambda: render.show_transfer(result, src), result, read_amplification=amplification)
