"""The loss of a micro-batch, and of the validation data."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # torch's own name for it
from torch.utils.checkpoint import checkpoint as recompute

from training import model as models
from training import parallel, sharding
from training.batch import IGNORED, Batch, DataSet
from training.config import ConfigError
from training.extras import factory
from training.job import Job, data_ranks, part_of
from training.metrics import gather
from training.units import dtype_of

PROMPT = b"def main():\n    parser = argparse"
_LEAST = 1e-9  # a batch may have no target at all; its loss is 0


def loss_of(job: Job, batch: Batch) -> Tensor:
    """Returns the cross-entropy of predicting the targets of a micro-batch, in float32.

    The mean over ranks and micro-batches is the mean over all targets of the step. Where rows have
    different numbers of targets, each target has the same weight nevertheless.
    """
    data = job.config.data
    if job.loss is not None:
        return _loss_of_rows(job, batch, job.loss)
    with sharding.computing(job.config, job.device):
        logits = models.logits_of(job.model, batch.inputs, batch.documents, data.packing)
    if output := dtype_of(job.config.precision.output):
        logits = logits.to(output)
    total = sum_of_losses(logits, batch.targets, job.config.compute.loss_chunk)
    return total / max(_share(job, batch), _LEAST)


def _share(job: Job, batch: Batch) -> float:
    """Returns the targets of a step over its micro-batches: the weight of each target is equal."""
    is_training = torch.is_grad_enabled()  # a factory's module may be in eval mode
    accumulation = job.config.data.accumulation if is_training else 1
    return batch.num_targets / (data_ranks(job.mesh) * accumulation)


def _loss_of_rows(job: Job, batch: Batch, loss: factory.Loss) -> Tensor:
    """Returns the loss of a factory's module on rows."""
    dtype = job.config.model.dtype
    with sharding.computing(job.config, job.device):
        outputs = factory.call_on_rows(job.model, job.config, batch.inputs, dtype)
    name = job.config.model.loss or factory.CROSS_ENTROPY
    if not job.config.model.loss and factory.are_labels(batch.targets):
        if not isinstance(outputs, Tensor):
            raise ConfigError(f"model.loss: the module returned {type(outputs).__name__}: give one")
        total = F.cross_entropy(outputs, batch.targets, reduction="sum", ignore_index=IGNORED)
        return total / max(_share(job, batch), _LEAST)
    if job.loss_note is None:
        job.loss_note = factory.note_on_mean(loss, outputs, batch.targets)
    return factory.checked_loss(loss(outputs, batch.targets), name)


def sum_of_losses(logits: Tensor, targets: Tensor, chunk: int = 0) -> Tensor:
    """Returns the summed cross-entropy of `[B, T, V]` logits and `[B, T]` targets, in float32.

    With a `chunk`, the logits of so many tokens at a time are in float32. They are computed again
    in the backward pass, and not kept.
    """
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if not chunk or chunk >= len(targets):
        return F.cross_entropy(logits.float(), targets, reduction="sum")
    parts = zip(logits.split(chunk), targets.split(chunk), strict=True)
    one = lambda part: sum_of_losses(part[0][None], part[1][None])  # noqa: E731
    return torch.stack([recompute(one, part, use_reentrant=False) for part in parts]).sum()


@torch.no_grad()
def logits_for(model: nn.Module, device: torch.device) -> Tensor:
    """Returns `[1, T, V]` logits for a fixed prompt."""
    model.eval()
    return parallel.local(
        models.logits_of(model, torch.tensor([list(PROMPT)], device=device))
    ).cpu()


@torch.no_grad()
def evaluate(job: Job, rows: DataSet) -> float:
    """Returns the mean loss over the first batches of the validation data.

    It does not depend on the number of ranks.
    """
    size = job.config.data.batch_size
    batches = min(job.config.metrics.validate_batches, len(rows) // size)
    modes = {module: module.training for module in job.model.modules()}
    job.model.eval()
    losses, weights = [], []
    with sharding.splitting_loss(job.config):
        for i in range(batches):
            numbers, mine = list(range(i * size, (i + 1) * size)), part_of(size, job.mesh)
            batch = rows.batch(numbers, mine).to(job.device)
            losses.append(parallel.local(loss_of(job, batch)))
            weights.append(batch.num_targets)
    for module, is_training in modes.items():  # a frozen part may have been in eval mode
        module.training = is_training
    of_batch = np.mean(gather(torch.stack(losses).double()), axis=0)
    # the first batches may have no target, although others have
    return float(np.average(of_batch, weights=weights)) if sum(weights) else math.nan
