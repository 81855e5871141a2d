"""The exponential moving average of a model's parameters, sharded like the model.

Imports torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ckpt_tools.core.counts import check_count
from ckpt_tools.core.naming import strip_wrappers
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.state.late_staging import hold_all
from ckpt_tools.loop.state.shards import has_own_memory

_LOW = (torch.bfloat16, torch.float16)
_APPLIED: weakref.WeakSet[Ema] = weakref.WeakSet()  # whose average lies in the model now


def refuse_applied(tensors: Iterable[torch.Tensor]) -> None:
    """Refuses tensors that are the memory of a model while an average lies in it.

    A save would store the average as the model, and a resume would be overwritten.

    Raises:
        PlanError: an `Ema` is applied.
    """
    averaged = {_local(p).data_ptr() for ema in _APPLIED for p in ema._params.values()} - {0}
    local = map(_local, tensors) if averaged else ()
    if any(has_own_memory(t) and t.data_ptr() in averaged for t in local):
        raise PlanError(
            "the model has the values of its average: this is within `with ema.applied()`",
            hint="save and resume outside of that block, where the model has its own values",
        )


class Ema:
    """The moving average of the parameters that train.

        ema = Ema(model, decay=0.999)
        state = {"model": model, "optimizer": optimizer, "ema": ema}
        …
        optimizer.step()
        ema.update()
        with ema.applied():
            evaluate(model)

    Each rank keeps the average of its own shards. A step stores them like the model's, as
    `ema.model.NAME`, so a resume works on any number of ranks. `ckpt merge STEP out.safetensors
    --model-key ema.model` exports them.

    Works with plain modules, DDP and FSDP2.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        *,
        device: str | torch.device | None = None,
        every: int = 1,
    ) -> None:
        """Starts with the present values.

        Args:
            model: after it is sharded, and before the first step.
            decay: weight of the old average, between 0 and 1.
            device: where the average lies, such as `"cpu"`; that of the parameters if None.
            every: `update` does its work at each call whose number is a multiple of this.

        Raises:
            PlanError: the model has flattened parameters of FSDP1.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a module, got a {type(model).__name__}")
        if not 0 <= decay < 1:
            raise ValueError(f"decay: expected a number from 0 to below 1, got {decay!r}")
        check_count("every", every, ValueError)
        self.decay, self.every, self.num_updates = decay, every, 0
        self._params: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if "_fsdp_wrapped_module" in name or "_flat_param" in name:
                raise PlanError(
                    f"Ema does not know the parameters of FSDP1: {printable(name)}",
                    hint="use FSDP2, fully_shard",
                )
            if parameter.requires_grad:
                self._params[strip_wrappers(name)] = parameter
        with torch.no_grad():
            self.shadow = {name: _copied(p, device) for name, p in self._params.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average to the present values. Call it after each step of the optimizer.

        Raises:
            PlanError: the average is applied to the model.
        """
        if self in _APPLIED:
            raise PlanError("the average is applied: update() would average the average")
        self.num_updates += 1
        if self.num_updates % self.every:
            return
        if not self.shadow:
            return  # nothing trains
        averages = [_local(t) for t in self.shadow.values()]
        present = [
            _local(p.detach()).to(a.device, a.dtype)
            for p, a in zip(self._params.values(), averages, strict=True)
        ]
        torch._foreach_lerp_(averages, present, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the average into the model for the length of a block.

        A save or a resume of that model within the block is refused.

        Raises:
            PlanError: it is applied already.
        """
        if self in _APPLIED:
            raise PlanError("this average is applied already: its blocks cannot be nested")
        kept = {name: _local(p.detach()).clone() for name, p in self._params.items()}
        self._put(self.shadow)
        _APPLIED.add(self)
        try:
            yield
        finally:
            self._put(kept)
            _APPLIED.discard(self)

    def __repr__(self) -> str:
        return (
            f"Ema({len(self._params)} parameters, decay={self.decay}, updates={self.num_updates})"
        )

    @torch.no_grad()
    def _put(self, values: Mapping[str, torch.Tensor]) -> None:
        hold_all()
        for name, parameter in self._params.items():
            _local(parameter.detach()).copy_(_local(values[name]))

    def state_dict(self) -> dict[str, Any]:
        """Returns the live averages and the number of updates."""
        return {"model": dict(self.shadow), "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes stored averages. A parameter that was not stored keeps its present average."""
        with torch.no_grad():
            for name, average in self.shadow.items():
                if name in state["model"] and state["model"][name] is not average:
                    average.copy_(state["model"][name])
        self.num_updates = state["num_updates"]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this rank holds."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _copied(parameter: nn.Parameter, device: str | torch.device | None) -> torch.Tensor:
    """Returns a copy; of 16-bit values in float32, in which a small step is not lost."""
    dtype = torch.float32 if parameter.dtype in _LOW else parameter.dtype
    return parameter.detach().clone().to(device=device, dtype=dtype)
