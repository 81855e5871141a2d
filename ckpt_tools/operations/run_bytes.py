"""Tells where the bytes of a run are: models, optimizers, and what could be removed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.naming import is_optimizer_state, is_other_state
from ckpt_tools.operations.arguments import checked
from ckpt_tools.publish.manifest import Manifest, SealedTensor
from ckpt_tools.run.base import RunRoot
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import Step
from ckpt_tools.run.steps import RunListing, no_steps
from ckpt_tools.storage.kept import KEPT
from ckpt_tools.transfer.options import Path_

WEIGHTS, OTHER = "weights", "other"
THIN = "ckpt thin ROOT --keep-full 1"  # the command that frees what is reclaimable


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
        reclaimable: bytes that `thin` with one full step would free, as its dry run tells; or those
            of a step that a rollback has set aside.
        why: which command removes them, or why none does; "" if there is nothing to say.
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
    """Returns the bytes of each step of a run, by number. It reads no values.

    What `thin` would free is reclaimable, and a step that a rollback has set aside.

    Args:
        root: directory of the run, a path or a URL.
        storage_options: of the object store, as fsspec takes them.

    Raises:
        NotACheckpointError: there are no steps.
        StorageError: the directory cannot be read.
    """
    with KEPT.during():
        where = open_root(root, storage_options)
        steps = RunListing(where).all_steps
        if not steps:
            raise no_steps(where)
        return bytes_of(where, steps)


def bytes_of(where: RunRoot, steps: Sequence[Step]) -> list[StepBytes]:
    """Returns the bytes of each step of a run, as `du` does."""
    from ckpt_tools.operations.thin import thin_steps  # and the path of every write

    current = [step for step in steps if not step.superseded_by]
    result = thin_steps(where, current, 1, reads=False, dry_run=True, options={})
    freed = {step.path: step.freed_nbytes for step in result.thinned}
    return [_of_step(step, freed.get(str(step.path), 0)) for step in steps]


def _of_step(step: Step, spare: int) -> StepBytes:
    if step.error is not None:
        return StepBytes(step, {}, 0, 0, step.nbytes, 0, "it cannot be read")
    if step.problem:
        return StepBytes(step, {}, 0, 0, step.nbytes, 0, "incomplete")
    if step.superseded_by:
        why = "superseded by a rollback: remove it yourself"
        return StepBytes(step, {}, 0, 0, step.nbytes, step.nbytes, why)
    kinds = bytes_by_kind(step.manifest) if step.manifest is not None else {}
    model = kinds.get(WEIGHTS, 0)
    optimizer = sum(n for kind, n in kinds.items() if kind not in (WEIGHTS, OTHER))
    other = max(0, step.nbytes - model - optimizer)
    return StepBytes(step, kinds, model, optimizer, other, spare, THIN * bool(spare))
