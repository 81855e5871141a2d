"""Lets training go on while parameters are still copied, and holds their next update.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt_tools.core.logs import log
from ckpt_tools.loop.staging import StagedCopy


class LateCopies:
    """The copy of the last save, for which the next step of any optimizer waits.

    Only an optimizer changes its parameters and its state. A forward and a backward pass read them.
    So these tensors are copied meanwhile. All others, such as buffers, are copied at once.
    """

    def __init__(self) -> None:
        """Hooks into the steps of all optimizers: some may share parameters with the state."""
        self._copy: StagedCopy | None = None
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._told = set[type]()

    def find(self, optimizers: Iterable[Optimizer], tensors: Sequence[torch.Tensor]) -> set[int]:
        """Returns the numbers of the tensors that belong to these optimizers."""
        owned = set[tuple[torch.device, int]]()
        for optimizer in filter(self._is_hooked, optimizers):
            for group in optimizer.param_groups:
                owned.update(map(_memory, group["params"]))
            for found in optimizer.state.values():
                owned.update(_memory(v) for v in found.values() if isinstance(v, torch.Tensor))
        return {n for n, t in enumerate(tensors) if t.numel() and _memory(t) in owned}

    def _is_hooked(self, optimizer: Optimizer) -> bool:
        """Tells whether torch calls hooks before the steps of an optimizer."""
        kind = type(optimizer)
        is_hooked = bool(getattr(kind.step, "hooked", False))
        if not is_hooked and kind not in self._told:
            self._told.add(kind)
            log.warning(
                "overlap_copy: the tensors of a %s are copied at once, since torch calls no hooks"
                " before its steps",
                kind.__name__,
            )
        return is_hooked

    def began(self, copy: StagedCopy) -> None:
        """Notes a copy that may still be running."""
        self._copy = copy

    def _before_step(self, *_: Any) -> None:
        self.hold()

    def hold(self) -> None:
        """Lets later changes of the state wait for the copy."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.hold_updates()

    def close(self) -> None:
        """Waits for the copy, and removes the hook."""
        self.hold()
        self._hook.remove()


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int]:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.device, local.data_ptr()
