"""Lets training go on while parameters are still copied, and holds their next update.

Imports torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ckpt_tools.loop.staging import StagedCopy


class LateCopies:
    """The copy of the last save, and the optimizers that wait for it before their next step.

    Only an optimizer changes its parameters and its state. A forward and a backward pass read them.
    So these tensors are copied meanwhile. All others, such as buffers, are copied at once.
    """

    def __init__(self) -> None:
        self._copy: StagedCopy | None = None
        self._hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = (
            weakref.WeakKeyDictionary()
        )

    def find(self, optimizers: Iterable[Optimizer], tensors: Sequence[torch.Tensor]) -> set[int]:
        """Returns the numbers of the tensors that only these optimizers change.

        The optimizers wait for the copy from now on.
        """
        owned = set[tuple[torch.device, int]]()
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(self._before)
            for group in optimizer.param_groups:
                owned.update(map(_memory, group["params"]))
            for found in optimizer.state.values():
                owned.update(_memory(v) for v in found.values() if isinstance(v, torch.Tensor))
        return {n for n, t in enumerate(tensors) if t.numel() and _memory(t) in owned}

    def began(self, copy: StagedCopy) -> None:
        """Notes a copy that may still be running."""
        self._copy = copy

    def _before(self, *_: Any) -> None:
        self.hold()

    def hold(self) -> None:
        """Lets later changes of the state wait for the copy."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.hold_updates()

    def close(self) -> None:
        """Waits for the copy, and removes the hooks."""
        self.hold()
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int]:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.device, local.data_ptr()
