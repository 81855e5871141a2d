"""What a training loop keeps, as names and values, and back: modules, optimizers, anything with `state_dict`, plain values.

`export` turns a user's dict into flat names, the same as `dcp.save(get_state_dict(…))` would store; `restore` hands loaded
values back. FSDP, DDP, `torch.compile` and activation checkpointing never show in a name: torch's own state-dict functions
take care of that. Imports torch. May import errors.
"""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from ckpt_tools.errors import IntegrityError, PlanError, UnsafePickleError, printable

Key = tuple[str | int, ...]
_RANK = "rank_"
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class PerRank:
    """A value of which every rank has its own: a dataloader's position, a random generator.

    Its states are stored side by side, and each goes back to its own rank. When the number of ranks has changed, `on_resize`
    says what happens: `"refuse"` (an error), `"reset"` (every rank keeps what it has, and the report says so), or a function
    `(states, rank, world_size) -> state` that deals the old ranks' states out again.
    """

    def __init__(self, value: Any, on_resize: str | Callable[[Sequence[Any], int, int], Any] = "refuse") -> None:
        if on_resize not in ("refuse", "reset") and not callable(on_resize):
            raise ValueError(f"on_resize: expected 'refuse', 'reset' or a function, got {on_resize!r}")
        self.value, self.on_resize = value, on_resize


class RngState:
    """The random generators of this rank: Python's, NumPy's, torch's on the CPU and on the current CUDA device.

    `{"rng": RngState()}` is stored per rank; on another number of ranks every rank keeps the generators it has.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the states as ints and tensors, which load without running any code."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {"python": (version, list(words), gauss), "torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        import numpy as np

        name, keys, *rest = np.random.get_state(legacy=True)
        state["numpy"] = (name, torch.from_numpy(np.asarray(keys).astype("int64")), *rest)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the generators that this machine has."""
        import numpy as np

        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), *rest))


@dataclass(slots=True)
class Exported:
    """A state under flat names: tensors as they live (DTensors and all), other values, and the keys on the way to each.

    `per_rank` has the names under which each rank has a value of its own, with the wrapper. `free` has the paths of values
    whose structure may have changed since (a history, a scheduler): what was stored below them is what they become.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Key] = field(default_factory=dict)
    per_rank: dict[str, PerRank] = field(default_factory=dict)
    free: list[Key] = field(default_factory=list)


def name_of_rank(name: str, rank: int) -> str:
    """Returns the name under which one rank's own value is stored."""
    return f"{name}.{_RANK}{rank}"


def export(state: Mapping[str, Any], for_loading: bool = False) -> Exported:
    """Returns a user's state under flat names. The tensors are the live ones: nothing is copied or gathered.

    Args:
        state: dicts (nested at will) of modules, optimizers, objects with `state_dict`, tensors and plain values.
        for_loading: give an optimizer that has taken no step yet the state that it is to be loaded into.

    Raises:
        PlanError: two entries have one name, or an optimizer's parameters belong to no module of the state.
    """
    try:
        flat, paths = flatten_state_dict(_export_dict(state, (), _modules(state), for_loading))
    except ValueError as error:
        raise PlanError(f"two entries of the state have one name: {printable(str(error))}") from error
    result = Exported(paths=dict(paths), per_rank=dict(_find_per_rank(state, ())), free=list(_find_free(state, ())))
    for name, value in flat.items():
        if isinstance(value, torch.Tensor):
            result.tensors[name] = value
        else:
            result.objects[name] = value
    return result


def _export_dict(state: Mapping[str, Any], path: tuple[str, ...], modules: Sequence[nn.Module], for_loading: bool) -> dict[str, Any]:
    exported: dict[str, Any] = {}
    for key, value in state.items():
        here = (*path, str(key))
        if isinstance(value, nn.Module):
            exported[key] = _tied(value, get_model_state_dict(value))
        elif isinstance(value, Optimizer):
            exported[key] = _export_optimizer(_owner(value, modules, here), value, for_loading)
        elif isinstance(value, Mapping):
            exported[key] = _export_dict(value, here, modules, for_loading)
        elif not isinstance(value, (PerRank, RngState)):
            exported[key] = value.state_dict() if hasattr(value, "state_dict") else value
    return exported


def _tied(model: nn.Module, exported: dict[str, Any]) -> dict[str, Any]:
    """Makes the entries of a tied weight one tensor again, of which FSDP1 hands out a copy each."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        original = first.setdefault(id(parameter), plain)
        if plain in exported and original in exported:
            exported[plain] = exported[original]
    return exported


def _find_free(state: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Key]:
    for key, value in state.items():
        here = (*path, str(key))
        if isinstance(value, Mapping) and not _is_plain(value):
            yield from _find_free(value, here)
        elif not isinstance(value, (nn.Module, Optimizer, PerRank, RngState)):
            yield here


def _is_plain(value: Any) -> bool:
    """Tells whether a value is loaded by replacing it, not by asking something in it to load."""
    if isinstance(value, Mapping):
        return all(_is_plain(v) for v in value.values())
    return not isinstance(value, (nn.Module, Optimizer, PerRank, RngState)) and not hasattr(value, "load_state_dict")


def _find_per_rank(state: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, PerRank]]:
    for key, value in state.items():
        if isinstance(value, (PerRank, RngState)):
            yield ".".join((*path, str(key))), value if isinstance(value, PerRank) else PerRank(value, "reset")
        elif isinstance(value, Mapping):
            yield from _find_per_rank(value, (*path, str(key)))


def _modules(state: Mapping[str, Any]) -> list[nn.Module]:
    found = [v for v in state.values() if isinstance(v, nn.Module)]
    return found + [m for v in state.values() if isinstance(v, Mapping) for m in _modules(v)]


def _owner(optimizer: Optimizer, modules: Sequence[nn.Module], path: tuple[str, ...]) -> nn.Module:
    """Returns the module that an optimizer's parameters belong to."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in modules:
        if wanted <= {id(p) for p in module.parameters()}:
            return module
    raise PlanError(
        f"the optimizer at {'.'.join(path)!r} has parameters that no single module of the state has",
        hint="put the module in beside it, or one module that holds them all",
    )


def _export_optimizer(model: nn.Module, optimizer: Optimizer, for_loading: bool) -> dict[str, Any]:
    """Returns an optimizer's state by parameter name.

    torch gives one that has taken no step a state by taking a step of length 0, which would count from then on; so unless
    that is what the state is loaded into, it is taken back.
    """
    is_fresh = not optimizer.state
    exported: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    if is_fresh and not for_loading:
        optimizer.state.clear()
    if not exported["state"] or (is_fresh and not for_loading):
        del exported["state"]
    return exported


def pack(value: Any) -> bytes:
    """Returns an object as DCP stores it: a `torch.save` archive."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes, name: str, trust_pickle: bool) -> Any:
    """Returns an object from its archive, after proving its checksums; by torch's allow-list, unless told to trust it.

    Raises:
        IntegrityError: its bytes were damaged.
        UnsafePickleError: it asks for code, and `trust_pickle` is False.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip() if any(i.CRC for i in archive.infolist()) else None
    except zipfile.BadZipFile as error:
        raise IntegrityError(f"an object's archive is damaged: {printable(str(error))} ({printable(name)!r})") from error
    if damaged:
        raise IntegrityError(f"an object was damaged since it was written: {printable(damaged)} ({printable(name)!r})")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trust_pickle)
    except Exception as error:  # whatever torch's unpickler trips over
        if trust_pickle:
            raise
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line), str(error).splitlines()[0])
        raise UnsafePickleError(
            f"refused an object of the checkpoint: {printable(reason.strip())} ({printable(name)!r})",
            hint="nothing of it was run; if you wrote the file, pass trust_pickle=True",
        ) from error


def state_of(wrapper: PerRank) -> Any:
    """Returns this rank's state of a per-rank value."""
    value = wrapper.value
    return value.state_dict() if hasattr(value, "state_dict") else value


def restore(state: MutableMapping[str, Any], values: Mapping[str, Any], paths: Mapping[str, Key]) -> None:
    """Hands values back: modules, optimizers and the like take theirs in place, plain values are put into `state`.

    Args:
        state: as it was given to `export`.
        values: by flat name. An optimizer's parameter whose state is left out is left without any; for the rest, what is
            given at all must be given whole.
        paths: from `export`.
    """
    modules = _modules(state)

    def visit(owner: MutableMapping[str, Any], given: Mapping[str, Any], path: tuple[str, ...]) -> None:
        for key, value in list(owner.items()):
            if str(key) not in given or isinstance(value, (PerRank, RngState)):
                continue
            new, here = given[str(key)], (*path, str(key))
            if isinstance(value, nn.Module):
                set_model_state_dict(value, new, options=StateDictOptions(strict=False))
            elif isinstance(value, Optimizer):
                set_optimizer_state_dict(_owner(value, modules, here), value, {"state": {}, **new}, options=StateDictOptions(strict=False))
            elif isinstance(value, MutableMapping) and _is_plain(value):
                value.clear()
                value.update(new)
            elif isinstance(value, MutableMapping):
                visit(value, new, here)
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(new)
            else:
                owner[key] = new

    visit(state, unflatten_state_dict(dict(values), {name: paths[name] for name in values}), ())
