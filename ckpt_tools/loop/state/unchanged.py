"""Proves that a state would be exported as at its last save, apart from values.

torch's state-dict functions search the name of every parameter. For thousands of tensors this takes
longer than a copy of their bytes. Between two saves of a loop, nothing has changed but values.

A guard knows where each exported tensor stands: in which slot of a module or an optimizer. It walks
the live objects again, and compares the identities of all slots and where their memory lies. It
does not trust code of others: hooks, overridden methods, extra state. Such a state is exported anew
at every save. A guard keeps no tensor and no module alive. Imports torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt_tools.loop.state.objects import Key
from ckpt_tools.loop.state.shards import has_own_memory

# a hook of FSDP2: it only puts the sharded parameters back into the module
_RESHARDS = "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook"
_OVERRIDES = ("state_dict", "_save_to_state_dict", "get_extra_state")
_SCALARS = (int, float, bool, type(None), torch.Tensor)
_Hook = Callable[..., object]
_Slots = tuple[int, ...] | None  # of the exported tensors, among those of a guard


def plainly() -> AbstractContextManager[None]:
    """Lets attributes of tensors be read without the functions that modes of torch put around them.

    `torch.set_default_device` is such a mode: with it, each attribute takes four times as long.
    """
    return torch._C.DisableTorchFunction()


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns where a tensor's elements lie. Two equal results mean the same bytes."""
    if isinstance(tensor, DTensor):
        return (tensor._spec, *memory_of(tensor._local_tensor))
    if not has_own_memory(tensor):
        return (object(),)  # equal to no other result
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


class _Tensors:
    """The tensors of some slots, as they were: their identities, and where their memory lies."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._ids, self._memory = list(map(id, tensors)), _memories(tensors)

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tells whether these are the same tensors, with the memory that they had."""
        return list(map(id, tensors)) == self._ids and _memories(tensors) == self._memory


def _memories(tensors: Iterable[torch.Tensor]) -> list[tuple[Any, ...]]:
    with plainly():
        return list(map(memory_of, tensors))


def _slots_of(exported: Iterable[torch.Tensor], tensors: Sequence[torch.Tensor]) -> _Slots:
    """Returns the slot of each exported tensor; None if one of them has memory of its own."""
    slots = {memory: slot for slot, memory in enumerate(_memories(tensors))}
    found = [slots.get(memory, -1) for memory in _memories(exported)]
    return None if -1 in found else tuple(found)


class _Module(NamedTuple):
    """One module of a tree, as it was.

    Attributes:
        names: of its children, parameters and buffers.
        empty: the names of those that hold None, which have no entry in a state dict.
    """

    module: weakref.ref[nn.Module]
    kind: type[nn.Module]
    names: tuple[tuple[str, ...], ...]
    empty: tuple[tuple[str, ...], ...]
    children: tuple[int, ...]
    non_persistent: frozenset[str]
    hooks: tuple[_Hook, ...]

    @classmethod
    def of(cls, module: nn.Module) -> _Module:
        tables = _tables_of(module)
        return cls(
            weakref.ref(module),
            type(module),
            tuple(map(tuple, tables)),
            tuple(tuple(name for name, value in t.items() if value is None) for t in tables),
            tuple(map(id, module._modules.values())),
            frozenset(module._non_persistent_buffers_set),
            tuple(module._state_dict_pre_hooks.values()),
        )

    def unchanged(self) -> nn.Module | None:
        """Returns the module if its class, names, children and hooks are the same; else None.

        Empty slots are the same, too. A full slot may have become empty: then a tensor is missing.
        """
        module = self.module()
        if module is None or type(module) is not self.kind:
            return None
        hooks = module._state_dict_pre_hooks
        if (hooks or self.hooks) and not (
            len(hooks) == len(self.hooks) and all(map(is_, hooks.values(), self.hooks))
        ):
            return None
        for hook in self.hooks:
            hook(module, "", False)
        tables = _tables_of(module)
        is_same = (
            not module._state_dict_hooks
            and not _has_overrides(module)
            and tuple(map(tuple, tables)) == self.names
            and tuple(map(id, module._modules.values())) == self.children
            and module._non_persistent_buffers_set == self.non_persistent
            and (not any(self.empty) or self._are_empty(tables))
        )
        return module if is_same else None

    def _are_empty(self, tables: tuple[Mapping[str, object], ...]) -> bool:
        pairs = zip(tables, self.empty, strict=True)
        return all(table[name] is None for table, names in pairs for name in names)


def _tables_of(module: nn.Module) -> tuple[Mapping[str, object], ...]:
    return module._modules, module._parameters, module._buffers


def _has_overrides(module: nn.Module) -> bool:
    own = module.__dict__
    return "state_dict" in own or "_save_to_state_dict" in own or "get_extra_state" in own


def _tensors_in(module: nn.Module) -> list[torch.Tensor]:
    found: list[torch.Tensor] = [v for v in module._parameters.values() if v is not None]
    if module._buffers:
        hidden = module._non_persistent_buffers_set
        found += [v for n, v in module._buffers.items() if v is not None and n not in hidden]
    return found


class ModuleGuard:
    """Proves that a module's state dict would have the same names and the same memory."""

    def __init__(self, module: nn.Module, exported: Iterable[torch.Tensor]) -> None:
        """Notes where each exported tensor stands."""
        self._modules = list(map(_Module.of, module.modules()))
        self._kinds = {found.kind for found in self._modules}
        tensors = list(chain.from_iterable(map(_tensors_in, module.modules())))
        self._tensors, self.slots = _Tensors(tensors), _slots_of(exported, tensors)

    @classmethod
    def of(cls, module: nn.Module, exported: Iterable[torch.Tensor]) -> ModuleGuard | None:
        """Returns a guard; None if code of others takes part in the export."""
        if not all(map(is_ordinary, module.modules())):
            return None
        guard = cls(module, exported)
        return None if guard.slots is None else guard

    def exported(self) -> list[torch.Tensor] | None:
        """Returns the live tensors in the order of the export; None if anything has changed."""
        if not all(map(_is_ordinary_kind, self._kinds)):
            return None
        tensors: list[torch.Tensor] = []
        for found in self._modules:
            module = found.unchanged()
            if module is None:
                return None
            tensors += _tensors_in(module)
        return [tensors[n] for n in self.slots or ()] if self._tensors.are(tensors) else None


def _is_ordinary_kind(kind: type[nn.Module]) -> bool:
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in _OVERRIDES)


def is_ordinary(module: nn.Module) -> bool:
    """Tells whether a module's own entries in a state dict are its parameters and buffers."""
    return (
        not isinstance(module, torch.jit.ScriptModule)  # its tables are not dicts
        and _is_ordinary_kind(type(module))
        and not _has_overrides(module)
        and not module._state_dict_hooks
        and all(map(_only_reshards, module._state_dict_pre_hooks.values()))
    )


def _only_reshards(hook: _Hook) -> bool:
    is_torch = getattr(hook, "__module__", "").startswith("torch.distributed.fsdp.")
    return is_torch and getattr(hook, "__qualname__", "") == _RESHARDS


class OptimizerGuard:
    """Proves that an optimizer's state has the same tensors, in the same memory.

    Attributes:
        names: of its parameters, by group.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        path: Key,
        exported: Iterable[torch.Tensor],
    ) -> None:
        """Notes where each exported tensor stands, and the place of every other value."""
        self._optimizer, self.names = weakref.ref(optimizer), names
        self._kind = type(optimizer)
        self._parameters = _parameters_of(optimizer)
        self._keys = _keys_of(optimizer)
        tensors = _tensors_of(optimizer)
        self._tensors, self.slots = _Tensors(tensors), _slots_of(exported, tensors)
        name_of = dict(
            zip(chain.from_iterable(self._parameters), chain.from_iterable(names), strict=True)
        )
        self._values = [
            (number, key, (*path, "state", name_of[id(parameter)], key))
            for number, (parameter, found) in enumerate(optimizer.state.items())
            for key, value in found.items()
            if not isinstance(value, torch.Tensor)
        ]

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        path: Key,
        exported: Iterable[torch.Tensor],
    ) -> OptimizerGuard | None:
        """Returns a guard; None if code of others takes part in the export.

        Args:
            optimizer: it has just been exported.
            names: of its parameters, by group.
            path: of the optimizer in the state.
            exported: the tensors of its state.
        """
        groups = _parameters_of(optimizer)
        is_ordinary = (
            _has_own_state_dict(optimizer)
            # FSDP1's flat parameters have several names each
            and list(map(len, groups)) == list(map(len, names))
            and set(map(id, optimizer.state)) <= set(chain.from_iterable(groups))
            and all(
                type(key) is str and isinstance(value, _SCALARS)
                for found in optimizer.state.values()
                for key, value in found.items()
            )
        )
        guard = cls(optimizer, names, path, exported) if is_ordinary else None
        return None if guard is None or guard.slots is None else guard

    def exported(self) -> list[torch.Tensor] | None:
        """Returns the live tensors in the order of the export; None if anything has changed."""
        optimizer = self._optimizer()
        if optimizer is None or type(optimizer) is not self._kind:
            return None
        tensors = _tensors_of(optimizer)
        is_same = (
            _has_own_state_dict(optimizer)
            and _parameters_of(optimizer) == self._parameters
            and _keys_of(optimizer) == self._keys
            and self._tensors.are(tensors)
        )
        return [tensors[n] for n in self.slots or ()] if is_same else None

    def values(self, optimizer: Optimizer) -> Iterable[tuple[Any, Key]]:
        """Returns the entries of the state that are not tensors, each with its path."""
        found = list(optimizer.state.values())
        return ((found[number][key], path) for number, key, path in self._values)


def _parameters_of(optimizer: Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _keys_of(optimizer: Optimizer) -> list[tuple[int, tuple[tuple[Any, bool], ...]]]:
    """Returns the parameters with a state, with their keys, and whether each is a tensor's."""
    return [
        (id(parameter), tuple((key, isinstance(v, torch.Tensor)) for key, v in found.items()))
        for parameter, found in optimizer.state.items()
    ]


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


Guard = ModuleGuard | OptimizerGuard
