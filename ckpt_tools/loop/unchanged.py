"""Proves that a state would be exported as at its last save, apart from values.

torch's state-dict functions search the name of every parameter. For thousands of tensors this takes
longer than a copy of their bytes. Between two saves of a loop, nothing has changed but values.

A guard knows every object that led to the export: modules, parameters and buffers, the optimizer's
state. It compares their identities, and where their memory lies. It does not trust code of others:
hooks, an overridden `state_dict`, extra state. Such a state is exported anew at every save.

Guards keep tensors alive, but no module and no optimizer. Imports torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt_tools.loop.objects import Key

# a hook of FSDP2: it only puts the sharded parameters back into the module
_RESHARDS = "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook"
_OVERRIDES = ("state_dict", "_save_to_state_dict", "get_extra_state")
_SCALARS = (int, float, bool, type(None), torch.Tensor)
_Hook = Callable[..., object]


def _are_same(now: Iterable[Any], before: Sequence[Any], number: int) -> bool:
    """Tells whether both have the same objects; `number` is the length of `now`."""
    return number == len(before) and all(map(is_, now, before))


class TensorGuard:
    """Proves that tensors are the same objects, and that their memory lies where it was."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._memory = list(map(_memory, self._tensors))

    def holds(self) -> bool:
        """Tells whether the tensors have the memory that they had."""
        return list(map(_memory, self._tensors)) == self._memory

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tells whether these are the same tensors, with the memory that they had."""
        return _are_same(tensors, self._tensors, len(tensors)) and self.holds()


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns where a tensor's elements lie. Two equal results mean the same bytes."""
    if isinstance(tensor, ShardedTensor):
        return (object(),)  # it does not say: equal to no other result
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        return (tensor._spec, local.data_ptr(), local.dtype, local.shape, local.stride())
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


class _Module(NamedTuple):
    """One module of a tree, as it was."""

    module: weakref.ref[nn.Module]
    names: tuple[tuple[str, ...], ...]
    children: tuple[int, ...]
    values: tuple[torch.Tensor | None, ...]
    non_persistent: frozenset[str]
    hooks: tuple[_Hook, ...]

    @classmethod
    def of(cls, module: nn.Module) -> _Module:
        return cls(
            weakref.ref(module),
            (tuple(module._modules), tuple(module._parameters), tuple(module._buffers)),
            tuple(map(id, module._modules.values())),
            (*module._parameters.values(), *module._buffers.values()),
            frozenset(module._non_persistent_buffers_set),
            tuple(module._state_dict_pre_hooks.values()),
        )

    def holds(self) -> bool:
        """Tells whether the module has the same children, parameters, buffers and hooks."""
        module = self.module()
        if module is None:
            return False
        for hook in self.hooks:
            hook(module, "", False)
        own, buffers = module._parameters, module._buffers
        return (
            not module._state_dict_hooks
            and not any(name in module.__dict__ for name in _OVERRIDES)
            and _are_same(module._state_dict_pre_hooks.values(), self.hooks, len(self.hooks))
            and (tuple(module._modules), tuple(own), tuple(buffers)) == self.names
            # of children that are dead, another record says so
            and tuple(map(id, module._modules.values())) == self.children
            and _are_same(chain(own.values(), buffers.values()), self.values, len(self.values))
            and module._non_persistent_buffers_set == self.non_persistent
        )


class ModuleGuard:
    """Proves that a module's state dict would have the same names and the same memory."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(map(_Module.of, module.modules()))
        self._tensors = TensorGuard(
            value for found in self._modules for value in found.values if value is not None
        )

    @classmethod
    def of(cls, module: nn.Module) -> ModuleGuard | None:
        """Returns a guard; None if code of others takes part in the export."""
        return cls(module) if all(map(_is_ordinary, module.modules())) else None

    def holds(self) -> bool:
        """Tells whether the module's names and memory are as they were."""
        return all(found.holds() for found in self._modules) and self._tensors.holds()


def _is_ordinary(module: nn.Module) -> bool:
    """Tells whether a module's own entries in a state dict are its parameters and buffers."""
    kind = type(module)
    return (
        all(getattr(kind, name) is getattr(nn.Module, name) for name in _OVERRIDES)
        and not any(name in module.__dict__ for name in _OVERRIDES)
        and not module._state_dict_hooks
        and all(map(_only_reshards, module._state_dict_pre_hooks.values()))
        and not any(isinstance(value, ShardedTensor) for value in module._parameters.values())
    )


def _only_reshards(hook: _Hook) -> bool:
    is_torch = getattr(hook, "__module__", "").startswith("torch.distributed.fsdp.")
    return is_torch and getattr(hook, "__qualname__", "") == _RESHARDS


class OptimizerGuard:
    """Proves that an optimizer's state has the same tensors, in the same memory.

    Attributes:
        names: of its parameters, by group.
        values: the entries of its state that are not tensors: parameter, key, and path in the
            state.
    """

    def __init__(self, optimizer: Optimizer, names: Sequence[Sequence[str]], path: Key) -> None:
        self._optimizer, self.names = weakref.ref(optimizer), names
        self._parameters = [tuple(group["params"]) for group in optimizer.param_groups]
        self._keys = [(parameter, tuple(found)) for parameter, found in optimizer.state.items()]
        name_of = {
            parameter: name
            for group, mine in zip(self._parameters, names, strict=True)
            for parameter, name in zip(group, mine, strict=True)
        }
        self._tensors = TensorGuard(_tensors_of(optimizer))
        self.values = [
            (parameter, key, (*path, "state", name_of[parameter], key))
            for parameter, found in optimizer.state.items()
            for key, value in found.items()
            if not isinstance(value, torch.Tensor)
        ]

    @classmethod
    def of(
        cls, optimizer: Optimizer, names: Sequence[Sequence[str]], path: Key
    ) -> OptimizerGuard | None:
        """Returns a guard; None if code of others takes part in the export.

        Args:
            optimizer: it has just been exported.
            names: of its parameters, by group.
            path: of the optimizer in the state.
        """
        groups = [group["params"] for group in optimizer.param_groups]
        is_ordinary = (
            _has_own_state_dict(optimizer)
            # FSDP1's flat parameters have several names each
            and list(map(len, groups)) == list(map(len, names))
            and optimizer.state.keys() <= set(chain.from_iterable(groups))
            and all(
                type(key) is str and isinstance(value, _SCALARS)
                for found in optimizer.state.values()
                for key, value in found.items()
            )
        )
        return cls(optimizer, names, path) if is_ordinary else None

    def holds(self) -> bool:
        """Tells whether the optimizer has the same parameters, keys and tensors."""
        optimizer = self._optimizer()
        if optimizer is None or not _has_own_state_dict(optimizer):
            return False
        groups, state = optimizer.param_groups, optimizer.state
        return (
            len(groups) == len(self._parameters)
            and all(
                _are_same(group["params"], before, len(group["params"]))
                for group, before in zip(groups, self._parameters, strict=True)
            )
            and len(state) == len(self._keys)
            and all(
                parameter is known and tuple(found) == keys
                for (parameter, found), (known, keys) in zip(state.items(), self._keys, strict=True)
            )
            and self._tensors.is_of(_tensors_of(optimizer))
        )


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [
        value
        for found in optimizer.state.values()
        for value in found.values()
        if isinstance(value, torch.Tensor)
    ]


def _has_own_state_dict(optimizer: Optimizer) -> bool:
    return (
        type(optimizer).state_dict is Optimizer.state_dict
        and "state_dict" not in optimizer.__dict__
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
    )
