"""Tells where the bytes of a run are: models, optimizers, and what could be removed."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.naming import is_optimizer_state, is_other_state
from ckpt_tools.operations.arguments import checked
from ckpt_tools.publish.destinations import open_root
from ckpt_tools.publish.manifest import Manifest, SealedTensor
from ckpt_tools.publish.retention_rules import Retention
from ckpt_tools.publish.steps import Step, list_all, no_steps
from ckpt_tools.transfer.options import Path_

WEIGHTS, OTHER = "weights", "other"


def optimizers_in(manifest: Manifest | None) -> frozenset[str]:
    """Returns the names of the optimizers of a checkpoint, whatever they are called.

    An optimizer has objects below `param_groups`. Older manifests do not list objects.
    """
    names = manifest.objects if manifest is not None else ()
    return frozenset(
        name.partition(".param_groups.")[0] for name in names if ".param_groups." in name
    )


def state_kind(fqn: str, optimizers: Collection[str] = ()) -> str:
    """Returns `weights`, the name of an optimizer's state such as `exp_avg`, or `other`.

    Args:
        fqn: of a tensor.
        optimizers: names of the optimizers, as far as they are known.
    """
    is_below = any(fqn.startswith(f"{optimizer}.state.") for optimizer in optimizers)
    if is_below or is_optimizer_state(fqn):
        return fqn.rpartition(".")[2]
    return OTHER if is_other_state(fqn.partition(".")[0]) else WEIGHTS


def bytes_by_kind(manifest: Manifest) -> dict[str, int]:
    """Returns the bytes of a checkpoint's tensors by kind."""
    found: dict[str, int] = {}
    optimizers = optimizers_in(manifest)
    for fqn, tensor in manifest.tensors.items():
        kind = state_kind(fqn, optimizers)
        found[kind] = found.get(kind, 0) + nbytes_of(tensor)
    return found


def nbytes_of(tensor: SealedTensor) -> int:
    """Returns the bytes of a tensor; 0 for an unknown type, and for another name of a tensor."""
    if tensor.tied_to:
        return 0
    dtype = BY_NAME.get(tensor.dtype)
    return math.prod(tensor.shape) * (dtype.itemsize if dtype else 0)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The bytes of one step.

    Attributes:
        step: the step.
        kinds: bytes of tensors by kind; empty without a manifest.
        model, optimizer, other: bytes; `other` includes what is no tensor.
        reclaimable: bytes that a resume from the newest step does not need.
        why: which command removes them; "" for none.
    """

    step: Step
    kinds: Mapping[str, int] = field(repr=False)
    model: int
    optimizer: int
    other: int
    reclaimable: int
    why: str


@checked()
def du(root: Path_, *, storage_options: Mapping[str, Any] | None = None) -> list[StepBytes]:
    """Returns the bytes of each step of a run, by number. It reads manifests only.

    The optimizer of every full step is reclaimable, except for those that `thin` keeps full by the
    rules of `Retention(last=1)`. So is a step that is incomplete or that a rollback set aside.

    Args:
        root: directory of the run, a path or a URL.
        storage_options: of the object store, as fsspec takes them.

    Raises:
        NotACheckpointError: there are no steps.
        StorageError: the directory cannot be read.
    """
    steps, _ = list_all(open_root(root, storage_options))
    if not steps:
        raise no_steps(str(root))
    return bytes_of(steps)


def bytes_of(steps: Sequence[Step]) -> list[StepBytes]:
    """Returns the bytes of each step of a run, as `du` does."""
    full = [step for step in steps if step.counts and not step.thinned]
    stays = Retention(last=1).reasons(full, dt.datetime.now(dt.UTC)) if full else {}
    return [_of_step(step, str(step.path) in stays) for step in steps]


def _of_step(step: Step, stays_full: bool) -> StepBytes:
    if step.error is not None:
        return StepBytes(step, {}, 0, 0, step.nbytes, 0, "it cannot be read")
    if step.problem or step.superseded_by:
        why = "incomplete" if step.problem else "superseded by a rollback"
        return StepBytes(step, {}, 0, 0, step.nbytes, step.nbytes, f"{why}: remove it")
    kinds = bytes_by_kind(step.manifest) if step.manifest is not None else {}
    model = kinds.get(WEIGHTS, 0)
    optimizer = sum(n for kind, n in kinds.items() if kind not in (WEIGHTS, OTHER))
    other = max(0, step.nbytes - model - optimizer)
    is_thinnable = step.counts and step.is_removable and not step.is_pinned and not stays_full
    spare = optimizer + kinds.get(OTHER, 0) if is_thinnable else 0
    return StepBytes(step, kinds, model, optimizer, other, spare, "ckpt thin" if spare else "")
