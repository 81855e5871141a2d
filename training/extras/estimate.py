"""`--estimate`: the memory of a rank under every strategy, measured without its hardware.

The real sharding and one real step run on fake tensors, which have shapes but no memory, in a
process group that sends nothing. torch's tracker notes what is held at the peak. The page
docs/training.md compares the result with measured peaks.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import get_args

import torch
import torch.distributed as dist
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from training import model as models
from training import parallel, sharding
from training.checks import Degrees, check
from training.config import Config, ConfigError, Strategy
from training.extras import factory
from training.extras.plan import size, wide_console
from training.extras.profiling import memory_tracker
from training.initialize import tied
from training.loss import sum_of_losses
from training.units import units_of

# the columns of the table, and the tracker's names for what they hold
COLUMNS = {
    "parameters": ("Sharded Param", "Parameter", "Buffer"),
    "gradients": ("Sharded Grad", "Unsharded Grad", "Gradient", "Reduce Scatter"),
    "optimizer": ("OptState", "Optstate"),
    "gathered": ("Unsharded Param", "All Gather"),
    "activations": ("Activation", "Temp", "Inputs", "Other"),  # and their gradients
}
_COLUMN_OF = {kind: name for name, kinds in COLUMNS.items() for kind in kinds}
_ON_HOST = ("Sharded Param", "Sharded Grad", "OptState")  # with fsdp.cpu_offload


def memory_of(config: Config, sizes: Degrees) -> dict[str, int]:
    """Returns the bytes that rank 0 holds at the peak of a step, by the names of `COLUMNS`.

    Rank 0 holds the most if a dimension does not divide evenly. FSDP1 counts as FSDP2.

    Args:
        config: of the run.
        sizes: of the mesh.
    """
    device, is_whole = torch.device("cpu"), config.fsdp.strategy == "NO_SHARD"
    shapes = _shapes(config, sizes)
    with _fake_group(sizes.data * sizes.tensor), warnings.catch_warnings(action="ignore"):
        mesh = parallel.make_mesh(device, sizes.shard, sizes.replicate, sizes.tensor)
        model = models.make(config)
        units = units_of(model, config)
        sharding.split_and_checkpoint(model, config, mesh)
        if not is_whole:
            parallel.apply_fsdp(model, mesh, sharding.policy_of(config), units)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _allocate(model, device)
            trained = [p for p in model.parameters() if p.requires_grad]
            is_foreach = config.optim.implementation in ("auto", "foreach")
            optimizer = torch.optim.AdamW(trained, foreach=is_foreach)
            inputs, targets = (torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)
            _step(model, optimizer, config, inputs, targets)  # makes the optimizer's state
            tracker = memory_tracker(model, optimizer)
            with tracker:
                _step(model, optimizer, config, inputs, targets, tracker)
    held = dict.fromkeys(COLUMNS, 0)
    for kind, nbytes in tracker.get_tracker_snapshot("peak")[device].items():
        name = str(getattr(kind, "value", kind))
        if name != "Total" and not (config.fsdp.cpu_offload and name in _ON_HOST):
            held[_COLUMN_OF[name]] += nbytes
    return held


def _measured(config: Config, sizes: Degrees) -> dict[str, int]:
    """Returns the result of `memory_of`.

    Raises:
        ConfigError: the model does not run on fake tensors.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # it prints what it raises, too
    logger.addFilter(_drop)
    try:
        return memory_of(config, sizes)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"torch does not run this model on fake tensors: {said}") from error
    finally:
        logger.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    del record
    return False


@contextlib.contextmanager
def _fake_group(num_ranks: int) -> Iterator[None]:
    """Makes this process rank 0 of a group that sends nothing."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Gives a meta model (fake) memory; tied weights stay tied."""
    shared = tied(model)
    model.to_empty(device=device)
    for first, *others in shared:
        for other in others:
            other.module._parameters[other.name] = first.module._parameters[first.name]


def _shapes(config: Config, sizes: Degrees) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Returns shape and type of the inputs, and of the targets, of one micro-batch."""
    number = config.data.batch_size // sizes.data // config.data.accumulation
    if not config.model.factory:
        return [((number, config.data.seq_len), torch.int64)] * 2
    rows = factory.open_rows(config.data.train, "data.train", 1)
    return [((number, *part.shape[1:]), part.dtype) for part in (rows.inputs, rows.targets)]


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Config,
    inputs: Tensor,
    targets: Tensor,
    tracker: MemTracker | None = None,
) -> None:
    for number in range(config.data.accumulation):
        is_last = number == config.data.accumulation - 1
        reducing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(model, FSDPModule):
            reducing = parallel.reducing(model, is_last, config.fsdp.reduce_every)
        with reducing, sharding.splitting_loss(config):
            with sharding.computing(config, inputs.device):
                if config.model.factory:
                    dtype = config.model.dtype
                    outputs = factory.call_on_rows(model, config, inputs, dtype)
                    loss = factory.loss_of(config)(outputs, targets)
                else:
                    logits = models.logits_of(model, inputs)
                    loss = sum_of_losses(logits, targets, config.compute.loss_chunk)
            loss.backward()
        if tracker:
            tracker.reset_mod_stats()  # it takes one pass over the modules at a time
    optimizer.step()
    optimizer.zero_grad()


def show(config: Config, num_ranks: int, ranks_a_node: int, budget_gib: float | None) -> None:
    """Prints a table of all strategies, and marks those whose peak is within a budget."""
    console, table = wide_console(), Table(box=None, pad_edge=False, header_style="bold")
    names = ("strategy", "shard x replicate", *COLUMNS, "peak per rank", "")
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i in (0, 8) else "right", no_wrap=True)
    fits, refused = False, []
    for strategy in get_args(Strategy):
        shard_size = config.fsdp.shard_size if "HYBRID" in strategy else 0
        changed = config.having("fsdp", strategy=strategy, shard_size=shard_size)
        try:
            sizes = check(changed, num_ranks, ranks_a_node)
            held, mark = _measured(changed, sizes), ""
        except ConfigError as error:
            refused.append(f"{strategy}: {error}")
            continue
        peak = sum(held.values())
        if budget_gib:
            is_good = peak <= budget_gib * 2**30
            fits |= is_good
            mark = "[green]fits[/]" if is_good else "[red]too much[/]"
        sizes_of = map(size, (*held.values(), peak))
        table.add_row(strategy, f"{sizes.shard} x {sizes.replicate}", *sizes_of, mark)
    if not table.row_count:
        raise ConfigError(f"--estimate: no strategy can be estimated: {refused[0]}")
    console.print(table)
    for line in (*_on_accumulation(config), *refused):
        console.print(
            escape(line), highlight=False, soft_wrap=True, style="dim" if line in refused else ""
        )
    if budget_gib and not fits:
        console.print(
            f"[yellow]nothing fits into {budget_gib:g} GiB:[/] to need less memory, use more ranks,"
            " compute.checkpoint_every = 1, data.accumulation, or fsdp.cpu_offload",
            highlight=False,
            soft_wrap=True,
        )


def _on_accumulation(config: Config) -> Iterator[str]:
    """Yields what it costs to reduce gradients at the last micro-batch, or at each."""
    number, precision = config.data.accumulation, config.precision
    if number == 1:
        return
    reduce = getattr(torch, precision.reduce or precision.param or config.model.dtype)
    model = models.make(config)
    whole = sum(p.numel() for p in model.parameters() if p.requires_grad) * reduce.itemsize
    now = "each one" if config.fsdp.reduce_every else "the last one"
    yield (
        f"{number} micro-batches, of which {now} reduces gradients. At the last only: a rank keeps"
        f" {size(whole)} of whole gradients and sends {size(whole)} a step. At each"
        f" (fsdp.reduce_every): it keeps its shards only, and sends {size(number * whole)}"
    )
