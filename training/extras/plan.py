"""`--print-plan`: prints the module tree with its FSDP units, and warns of common mistakes.

It shows how much each unit gathers. No process group is needed.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from training import model as models
from training.checks import Degrees
from training.config import Config
from training.extras import tensor
from training.initialize import tied
from training.units import embeddings_of, units_of

_UNEVEN = 0.05  # of a rank's part
_SMALL, _LARGE = 1 << 20, 4 << 30  # bytes that a unit gathers
_MANY = 16  # small units


@dataclass(slots=True)
class Group:
    """The parameters that one FSDP unit gathers: their shapes, and its compute type.

    Only this rank's part of the tensor mesh counts.
    """

    name: str
    dtype: torch.dtype
    shapes: list[torch.Size] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.local_numel(1)

    @property
    def nbytes(self) -> int:
        """The bytes in the compute type."""
        return self.numel * self.dtype.itemsize

    def local_numel(self, over: int) -> int:
        """Returns the elements of rank 0: the first of `over` parts along dim 0 of each shape."""
        return sum(-(-s[0] // over) * s[1:].numel() if s else 1 for s in self.shapes)


def groups_of(model: nn.Module, config: Config) -> dict[str, Group]:
    """Returns the parameters of each unit of a model, by the unit's name.

    A tied weight counts once.
    """
    over = config.fsdp.tensor_parallel
    tensor.check_heads(model, over)
    default = getattr(torch, config.precision.param or config.model.dtype)
    groups = {
        name: Group(name, dtype or default) for name, dtype in units_of(model, config).items()
    }
    split = tensor.split_dims(model) if over > 1 else {}
    for name, parameter in model.named_parameters():
        path, shape = name, parameter.shape
        while path not in groups:
            path = path.rpartition(".")[0]
        if (dim := split.get(name)) is not None:
            shape = torch.Size(-(-n // over) if i == dim else n for i, n in enumerate(shape))
        groups[path].shapes.append(shape)
    return groups


def warnings_of(
    model: nn.Module, config: Config, groups: dict[str, Group], num_shards: int = 1
) -> list[str]:
    """Returns warnings of common mistakes in a plan, each with a remedy.

    Args:
        model: on the meta device.
        config: of the run.
        groups: from `groups_of`.
        num_shards: ranks that share the parameters.
    """
    if config.fsdp.strategy == "NO_SHARD":
        return [
            "nothing is sharded: every rank holds parameters, gradients and optimizer state whole"
        ]
    found = []
    in_root = [n for n in embeddings_of(model) if n not in groups]
    inner = [g for n, g in groups.items() if n]
    total = sum(g.numel for g in groups.values())
    if not inner:
        found.append(
            "only the root is a unit: each rank gathers the whole model at once,"
            f" {size(groups[''].nbytes)}. Set fsdp.wrap"
        )
    elif (largest := max(groups.values(), key=lambda g: g.numel)).numel > total / 2 and (
        largest.name or not in_root
    ):
        share = largest.numel / total
        found.append(
            f"{label(largest.name)} holds {share:.0%} of all parameters: make units of its parts"
            " (fsdp.wrap_classes)"
        )
    root, biggest = groups[""].nbytes, max((g.nbytes for g in inner), default=0)
    if inner and in_root and root > biggest:
        cure = (
            "they share their weight, so that must be so"
            if tied(model)
            else "fsdp.wrap_embeddings = true makes them units"
        )
        found.append(
            f"{' and '.join(in_root)} are in the root unit, which stays gathered from forward to"
            f" backward: {size(root)} on each rank; {cure}"
        )
    return found + _uneven(groups, num_shards) + _sizes(inner)


def _uneven(groups: dict[str, Group], num_shards: int) -> list[str]:
    """Returns a warning if rank 0 holds much more than its part."""
    total = sum(group.numel for group in groups.values())
    mine = sum(group.local_numel(num_shards) for group in groups.values())
    if mine * num_shards <= total * (1 + _UNEVEN):
        return []
    odd = sum(bool(s and s[0] % num_shards) for g in groups.values() for s in g.shapes)
    share = mine * num_shards / total - 1
    text = (
        f"sharding is uneven: the first dimension of {odd} parameters is no multiple of the"
        f" {num_shards} ranks, and rank 0 holds {share:.0%} more than its part. Use sizes that are"
        " multiples, or fewer ranks that share (HYBRID_SHARD)"
    )
    return [text]


def _sizes(inner: list[Group]) -> list[str]:
    """Returns warnings of units that gather too little or too much at a time."""
    small = [group for group in inner if group.nbytes < _SMALL]
    large = [group for group in inner if group.nbytes > _LARGE]
    found = []
    if len(small) > _MANY:
        found.append(
            f"{len(small)} units gather less than {size(_SMALL)} each, such as"
            f" {label(small[0].name)}: the start of a collective then takes longer than its data."
            " Make units of larger modules"
        )
    if large:
        found.append(
            f"{len(large)} units gather more than {size(_LARGE)} each, such as"
            f" {label(large[0].name)}, and two of them exist at a time. Make units of their parts"
            " (fsdp.wrap_classes)"
        )
    return found


def label(name: str) -> str:
    """Returns a unit's name for people."""
    return name or "(root)"


def size(nbytes: float) -> str:
    """Returns bytes in the largest binary unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def wide_console() -> Console:
    """Returns a console as wide as the terminal; without a terminal, it cuts nothing off."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def show(config: Config, sizes: Degrees) -> None:
    """Prints the plan of a configuration for a mesh."""
    model = models.make(config)
    groups = groups_of(model, config)
    console = wide_console()
    fsdp = config.fsdp
    mesh = f"{sizes.replicate} replicate x {sizes.shard} shard x {sizes.tensor} tensor"
    console.print(f"[bold]{fsdp.api.upper()} {fsdp.strategy}[/], ranks: {mesh}", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("module", "class", "parameters", "unit", "gathers"):
        justify = "right" if name in ("parameters", "gathers") else "left"
        table.add_column(name, justify=justify, no_wrap=True)
    for row in _rows(model, groups):
        table.add_row(*row)
    console.print(table)
    total = sum(g.numel for g in groups.values())
    largest = max(groups.values(), key=lambda g: g.nbytes)
    console.print(
        f"\n{total:,} parameters in {len(groups)} units; the largest gathers {size(largest.nbytes)}"
        f" ({label(largest.name)})",
        highlight=False,
    )
    for warning in warnings_of(model, config, groups, sizes.shard):
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)


def _rows(model: nn.Module, groups: dict[str, Group]) -> list[tuple[str, ...]]:
    """Returns a row per module that has parameters.

    Siblings that differ only in the number of their name share one row.
    """
    rows = []

    def visit(name: str, module: nn.Module, depth: int, shown: str) -> None:
        numel = sum(p.numel() for p in module.parameters())
        mark = ("[green]■[/]", size(groups[name].nbytes)) if name in groups else ("", "")
        rows.append((f"{'  ' * depth}{escape(shown)}", type(module).__name__, f"{numel:,}", *mark))
        children = [
            (child, f"{name}.{child}" if name else child, inner)
            for child, inner in module.named_children()
            if any(True for _ in inner.parameters())
        ]
        # a key of its own where the name is no number
        alike = lambda one: _shape(*one[1:], groups) if one[0].isdigit() else one[0]  # noqa: E731
        for _, found in itertools.groupby(children, alike):
            (child, path, inner), *others = found
            if others:
                child += f" … {others[-1][0]}  (each of {len(others) + 1})"
            visit(path, inner, depth + 1, child)

    visit("", model, 0, "(root)")
    return rows


def _shape(name: str, module: nn.Module, groups: dict[str, Group]) -> tuple[object, ...]:
    """Returns what similar modules share: class, shapes, and which of their parts are units."""
    parameters = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
    units = tuple(n[len(name) :] for n in groups if n == name or n.startswith(f"{name}."))
    return type(module), parameters, units
