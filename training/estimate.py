"""`--estimate`: calculates a rank's memory under every strategy from shapes, without training.

Nothing is allocated. Activations are counted, not guessed. One micro-batch runs through the model
with fake tensors, and the tensors that autograd would keep are summed. The page docs/training.md
compares the result with measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

from training import config as configuration
from training import factory, parallel
from training import model as models
from training.config import Config, ConfigError, Degrees
from training.plan import Group, groups_of, local_numel, size, wide_console

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, each at its own worst moment.

    Parameters and optimizer state always exist. When the backward pass begins, all activations and
    gathered parameters exist, but no gradients. When it ends, all gradients and the last unit
    exist. AdamW then needs the gradients and some space of its own.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    ending: int  # the last unit of the backward pass
    stepping: int  # AdamW's own space

    @property
    def peak(self) -> int:
        moments = (
            self.gathered + self.activations,
            self.gradients + self.ending,
            self.gradients + self.stepping,
        )
        return self.parameters + self.optimizer + max(moments)


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes that autograd keeps of one micro-batch.

    They are counted within each block, outside of blocks, for a block's input, and for the loss.
    """

    blocks: list[int]
    rest: int
    block_input: int
    loss: int

    def peak(self, every: int) -> int:
        """Returns the peak, with every k-th block recomputed (0: none)."""
        redone = set(range(0, len(self.blocks), every)) if every else set()
        kept = sum(nbytes for i, nbytes in enumerate(self.blocks) if i not in redone)
        inputs = self.block_input * len(redone)
        return self.rest + kept + inputs + max([self.loss, *(self.blocks[i] for i in redone)])


def activations_of(config: Config, sequences: int) -> Activations:
    """Counts the bytes that autograd keeps while a rank runs `sequences` sequences."""
    dtype = getattr(torch, config.precision.param or config.model.dtype)
    model = models.make(config)
    names = parallel.blocks_of(model, config)
    rows = factory.open_rows(config.data.train, "data.train", 1) if config.model.factory else None
    with FakeTensorMode():
        _allocate(model, dtype)
        counter = _Saved(model, [model.get_submodule(n) for n in names])
        with torch.autograd.graph.saved_tensors_hooks(counter.keep, lambda tensor: tensor):
            outputs = _run(model, config, rows, sequences)
    gradient = outputs.numel() * 4  # of the outputs, in float32, when the backward pass begins
    over = config.fsdp.tensor_parallel  # ranks that split blocks, apart from small parts
    return Activations(
        [n // over for n in counter.blocks], counter.rest, counter.block_input, gradient
    )


def _run(model: nn.Module, config: Config, rows: factory.Rows | None, sequences: int) -> Tensor:
    """Computes the loss of a micro-batch, and returns the outputs that it was computed from."""
    if rows is not None:
        dtype = getattr(torch, config.precision.param or config.model.dtype)
        inputs, targets = (
            torch.zeros(sequences, *part.shape[1:], dtype=part.dtype)
            for part in (rows.inputs, rows.targets)
        )
        outputs: Tensor = model(inputs.to(dtype) if inputs.is_floating_point() else inputs)
        factory.loss_of(config)(outputs.float(), targets)
        return outputs
    tokens = torch.zeros(sequences, config.data.seq_len, dtype=torch.int64)
    logits = models.logits_of(model, tokens)
    F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    return logits


def _allocate(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives a meta model (fake) memory in its compute type; tied weights stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, meta in module._parameters.items():
            if meta is not None:
                if id(meta) not in made:
                    made[id(meta)] = nn.Parameter(
                        torch.empty(meta.shape, dtype=dtype), meta.requires_grad
                    )
                module._parameters[name] = made[id(meta)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class _Saved:
    """A counter of the storages that autograd keeps, without parameters, by running block."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        self.seen = {p.untyped_storage()._cdata for p in model.parameters()}
        self.blocks, self.rest, self.block_input, self.current = [0] * len(blocks), 0, 0, -1
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda _, args, i=i: self._enter(i, args))
            block.register_forward_hook(lambda *_: self._leave())

    def _enter(self, i: int, args: tuple[Any, ...]) -> None:
        self.current = i
        self.block_input = args[0].untyped_storage().nbytes()

    def _leave(self) -> None:
        self.current = -1

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            if self.current >= 0:
                self.blocks[self.current] += storage.nbytes()
            else:
                self.rest += storage.nbytes()
        return tensor


def memory_of(
    config: Config, sizes: Degrees, groups: dict[str, Group], activations: Activations
) -> Memory:
    """Returns the memory of rank 0 of a mesh.

    Rank 0 holds the most if a dimension does not divide evenly.
    """
    fsdp = config.fsdp
    elements = sum(local_numel(group, sizes.shard) for group in groups.values())
    trained = sum(local_numel(group, sizes.shard, trained_only=True) for group in groups.values())
    itemsize = getattr(torch, config.model.dtype).itemsize
    gathered = ending = 0
    if fsdp.strategy != "NO_SHARD":
        gathered = _gathered(config, groups) + _accumulated(config, groups)
        ending = min(
            gathered,
            groups[""].nbytes
            + 2 * max(g.nbytes for g in groups.values())
            + _accumulated(config, groups),
        )
    elif config.data.accumulation > 1:
        gathered = trained * itemsize  # gradients exist from the first micro-batch on
    kept = activations.peak(config.compute.checkpoint_every)
    if fsdp.cpu_offload:  # the rest is in host memory
        return Memory(0, 0, 0, gathered, kept, ending, 0)
    # "auto" means "foreach" on a GPU
    is_foreach = config.optim.implementation in ("auto", "foreach")
    own = trained * itemsize
    stepping = own if is_foreach else 0
    return Memory(elements * itemsize, own, 2 * own, gathered, kept, ending, stepping)


def _accumulated(config: Config, groups: dict[str, Group]) -> int:
    """Returns the bytes of whole gradients that wait for the last micro-batch.

    Earlier micro-batches do not reduce gradients, unless `fsdp.reduce_every` is set.
    """
    if config.data.accumulation == 1 or config.fsdp.reduce_every:
        return 0
    return _whole_gradients(config, groups)


def _whole_gradients(config: Config, groups: dict[str, Group]) -> int:
    """Returns the bytes of the gradients of the whole model, in the type that is reduced."""
    precision = config.precision
    reduce = getattr(torch, precision.reduce or precision.param or config.model.dtype)
    return sum(local_numel(g, 1, trained_only=True) for g in groups.values()) * reduce.itemsize


def _gathered(config: Config, groups: dict[str, Group]) -> int:
    """Returns the bytes of gathered parameters and unreduced gradients at the peak of backward."""
    root, inner = groups[""], [g for n, g in groups.items() if n]
    largest = max(inner, key=lambda g: g.nbytes, default=root)
    frees = config.fsdp.strategy in ("FULL_SHARD", "HYBRID_SHARD")
    if config.fsdp.reshard_after_forward is not None:
        frees = config.fsdp.reshard_after_forward is not False
    ahead = 1 + max(1, config.fsdp.backward_prefetch)  # the running unit, and those prefetched
    held = (
        root.nbytes
        + (min(ahead, len(inner)) * largest.nbytes if frees else sum(g.nbytes for g in inner))
        if inner
        else root.nbytes
    )
    reduce = parallel.dtype_of(config.precision.reduce)
    scattering = largest.numel * (reduce or largest.dtype).itemsize  # the input of a reduce-scatter
    return held + largest.nbytes + scattering


def estimates(
    config: Config, num_ranks: int, ranks_a_node: int
) -> Iterator[tuple[str, Degrees | str, Memory | None]]:
    """Yields every strategy with its mesh and memory, or why the configuration excludes it."""
    model = models.make(config)
    counted: dict[int, Activations] = {}
    for name in STRATEGIES:
        changed = replace(
            config,
            fsdp=replace(
                config.fsdp,
                strategy=name,
                shard_size=config.fsdp.shard_size if "HYBRID" in name else 0,
            ),
        )
        try:
            sizes = configuration.check(changed, num_ranks, ranks_a_node)
        except ConfigError as error:
            yield name, str(error), None
            continue
        sequences = config.data.batch_size // sizes.data // config.data.accumulation
        if sequences not in counted:
            counted[sequences] = activations_of(changed, sequences)
        yield name, sizes, memory_of(changed, sizes, groups_of(model, changed), counted[sequences])


def show(config: Config, num_ranks: int, ranks_a_node: int, budget_gib: float | None) -> None:
    """Prints a table of all strategies, and marks those whose peak is within a budget."""
    console, table = wide_console(), Table(box=None, pad_edge=False, header_style="bold")
    columns = (
        "strategy",
        "shard x replicate",
        "parameters",
        "gradients",
        "optimizer",
        "gathered",
        "activations",
        "peak per rank",
        "",
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in (0, 8) else "right", no_wrap=True)
    fits = False
    refused: list[str] = []
    for name, sizes, memory in estimates(config, num_ranks, ranks_a_node):
        if memory is None or isinstance(sizes, str):
            refused.append(f"{name}: {sizes}")
            continue
        parts = (
            memory.parameters,
            memory.gradients,
            memory.optimizer,
            memory.gathered,
            memory.activations,
            memory.peak,
        )
        mark = ""
        if budget_gib:
            good = memory.peak <= budget_gib * 2**30
            fits |= good
            mark = "[green]fits[/]" if good else "[red]too much[/]"
        table.add_row(name, f"{sizes.shard} x {sizes.replicate}", *map(size, parts), mark)
    console.print(table)
    if config.data.accumulation > 1:
        console.print(_on_accumulation(config), highlight=False, soft_wrap=True)
    for line in refused:
        console.print(f"[dim]{line}[/]", highlight=False, soft_wrap=True)
    if budget_gib and not fits:
        console.print(
            f"[yellow]nothing fits into {budget_gib:g} GiB:[/] to need less memory, use more ranks,"
            " compute.checkpoint_every = 1, data.accumulation, or fsdp.cpu_offload",
            highlight=False,
            soft_wrap=True,
        )


def _on_accumulation(config: Config) -> str:
    """Returns what it costs to reduce gradients at the last micro-batch, or at each."""
    number = config.data.accumulation
    whole = _whole_gradients(config, groups_of(models.make(config), config))
    now = "each one" if config.fsdp.reduce_every else "the last one"
    return (
        f"{number} micro-batches, of which {now} reduces gradients. At the last only: a rank keeps"
        f" {size(whole)} of whole gradients and sends {size(whole)} a step. At each"
        f" (fsdp.reduce_every): it keeps its shards only, and sends {size(number * whole)}"
    )
