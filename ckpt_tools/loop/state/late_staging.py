"""Lets training go on while parameters are still copied, and holds their next update.

Imports torch.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from ckpt_tools.core.logs import log
from ckpt_tools.loop.state.optimizers import StateOwners
from ckpt_tools.loop.state.shards import local_part
from ckpt_tools.loop.state.staging import StagedTensors
from ckpt_tools.loop.state.unchanged import memory_of, plainly

_ACTIVE: weakref.WeakSet[LateStaging] = weakref.WeakSet()


def hold_all() -> None:
    """Lets changes of any state wait for the copies that still read it.

    For functions of this tool that write into tensors, such as a load.
    """
    for staging in list(_ACTIVE):
        staging.hold()


class LateStaging:
    """The staging of the last save, for which the next step of any optimizer waits.

    Only an optimizer changes the parameters that it trains, and its state. So these tensors are
    copied while training goes on. All others are copied at once: buffers, frozen parameters, and
    embeddings with `max_norm`, whose forward pass writes them.
    """

    def __init__(self) -> None:
        """Hooks into the steps of all optimizers: some may share parameters with the state."""
        self._staged: StagedTensors | None = None
        self._hook, self._pid = register_optimizer_step_pre_hook(self._before_step), os.getpid()
        # a hook of the user's own may change parameters: it must come later
        _global_optimizer_pre_hooks.move_to_end(self._hook.id, last=False)  # type: ignore[attr-defined]
        self._told, self._lock = set[type](), threading.Lock()
        _ACTIVE.add(self)

    def find(self, owners: StateOwners, tensors: Sequence[torch.Tensor]) -> set[int]:
        """Returns the numbers of the tensors that only the optimizers of a state change."""
        with plainly():
            return self._find(owners, tensors)

    def _find(self, owners: StateOwners, tensors: Sequence[torch.Tensor]) -> set[int]:
        owned, written = set[object](), set[object]()
        for _, optimizer in owners.optimizers:
            if self._is_hooked(optimizer):
                for group in optimizer.param_groups:
                    owned.update(_memory(p) for p in group["params"] if p.requires_grad)
                for found in optimizer.state.values():
                    owned.update(_memory(v) for v in found.values() if isinstance(v, torch.Tensor))
        for _, root in owners.modules:
            for module in root.modules():
                if _max_norm(module) is not None:
                    written.update(map(_memory, module.parameters(recurse=False)))
        owned -= written
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

    def began(self, staged: StagedTensors) -> None:
        """Notes a copy that may still be running."""
        with self._lock:
            self._staged = staged

    def _before_step(self, *_: Any) -> None:
        self.hold()

    def hold(self) -> None:
        """Lets later changes of the state wait for the copy.

        Every thread and every stream waits for itself, so the copy stays known until it is
        complete.
        """
        staged = self._staged
        if staged is None or os.getpid() != self._pid:
            return  # in a forked child, no thread would complete the copy
        staged.hold_updates()
        with self._lock:
            if self._staged is staged and staged.is_complete:
                self._staged = None

    def close(self) -> None:
        """Lets later changes wait for the copy, and removes the hook."""
        self.hold()
        self._hook.remove()
        _ACTIVE.discard(self)


def _max_norm(module: torch.nn.Module) -> object:
    """Returns what `module.max_norm` is, without the search of `nn.Module`, which is slow."""
    for table in (module.__dict__, module._parameters, module._buffers):
        if "max_norm" in table:
            return table["max_norm"]
    return getattr(type(module), "max_norm", None)


def _memory(tensor: torch.Tensor) -> object:
    return memory_of(local_part(tensor))
