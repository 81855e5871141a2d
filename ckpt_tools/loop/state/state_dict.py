"""Exports the state of a training loop as flat names and values.

A state has modules, optimizers, other objects with `state_dict`, and plain values. `export` gives
them the names that `dcp.save(get_state_dict(…))` would store. FSDP, DDP, `torch.compile` and
activation checkpointing leave no trace in a name: torch's own state-dict functions remove it.

Imports torch.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from ckpt_tools.core.catalog import is_valid_name
from ckpt_tools.core.naming import WRAPPERS, is_norm_buffer, is_optimizer_state
from ckpt_tools.errors import CheckpointError, PlanError, printable
from ckpt_tools.loop.state.composite import Composite, as_composite, check_parts, refuse_names
from ckpt_tools.loop.state.ema import Ema, refuse_applied
from ckpt_tools.loop.state.few_bits import are_parts
from ckpt_tools.loop.state.modules import module_state, plain_parameter_names
from ckpt_tools.loop.state.objects import (
    MAX_DEPTH,
    TAG,
    Key,
    Structure,
    encode_object,
    generator_state,
    has_only_scalars,
    is_generator,
    shown,
)
from ckpt_tools.loop.state.optimizers import (
    StateOwners,
    Stored,
    StoredStates,
    export_optimizer,
    extra_of,
    is_container,
)
from ckpt_tools.loop.state.shard_info import ReplicaKind
from ckpt_tools.loop.state.shards import has_own_memory, is_meta, is_sharded, local_part
from ckpt_tools.loop.state.state_cache import KnownExport, StateCache
from ckpt_tools.loop.state.unchanged import ModuleGuard, OptimizerGuard


class Only(StrEnum):
    """Which part of its state a save has written, as its manifest names it."""

    TRAINABLE = "trainable"  # without frozen parameters
    CHOSEN = "chosen"  # by a function of the caller


STRUCTURE = "__structure__"  # last key of a value whose tensors are separate entries
_RANK = "rank_"


class PerRank:
    """A value that differs from rank to rank: a dataloader's position, a random generator.

    The states of all ranks are stored, and each goes back to its own rank. `on_resize` decides what
    happens when the number of ranks has changed. `"refuse"` is an error. With `"reset"`, every rank
    keeps its present state, and the report says so. `"round-robin"` is for a `StatefulDataLoader`
    of torchdata whose sampler deals one common order to the ranks in turn, as
    `DistributedSampler` does: the new ranks continue where the old ones stood. A function
    `(states, rank, world_size) -> state` redistributes the old ranks' states.
    """

    def __init__(
        self, value: Any, on_resize: str | Callable[[Sequence[Any], int, int], Any] = "refuse"
    ) -> None:
        if on_resize not in ("refuse", "reset", "round-robin") and not callable(on_resize):
            raise ValueError(
                "on_resize: expected 'refuse', 'reset', 'round-robin' or a function, got"
                f" {on_resize!r}"
            )
        self.value, self.on_resize = value, on_resize

    def __repr__(self) -> str:
        return f"PerRank({type(self.value).__name__}, on_resize={self.on_resize!r})"


class RngState:
    """The random generators of this rank.

    These are Python's, NumPy's, and torch's on the CPU and on the current CUDA device.

    `{"rng": RngState()}` is stored per rank. If the number of ranks changes, every rank keeps its
    present generators.
    """

    def __repr__(self) -> str:
        return "RngState()"

    def state_dict(self) -> dict[str, Any]:
        """Returns the states as ints and tensors, which load without running any code."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": (version, list(words), gauss),
            "torch": torch.get_rng_state(),
        }
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


class PlacedPerRank(NamedTuple):
    """A `PerRank` of a state, and its path of keys."""

    wrapper: PerRank
    path: Key


@dataclass(slots=True)
class ExportedState:
    """A state under flat names: live tensors (DTensors included), other values, and their keys.

    Attributes:
        tensors, objects: live tensors and other values, by flat name.
        paths: the path of keys to each name.
        per_rank: the names under which each rank has its own value.
        free: paths of values whose structure may have changed since the save, such as a history or
            a scheduler. They take whatever was stored below them.
        plain: those of `free` that belong to no module and no optimizer.
        own: those of `plain` that are the user's own values, and not the state of an object. A name
            in them must be stored, or it would be lost.
        kept: non-persistent buffers of modules, which no checkpoint holds.
        roots: the top-level keys of the state.
        fresh: paths of new optimizer state: memory without values until something is loaded.
        frozen: names of parameters that take no gradient; for a load, or a save of a part.
        of_modules: names of the entries of modules; for a save of a part.
        kinds: of tensors for which a difference between ranks is not just an error.
        widened: names of moments of few bits that are float32 here.
        composites: weights of modules that consist of several tensors, by their flat names. The
            tensors are entries of their own, and so is the description, under the weight's name.
        owners: the modules, tensors and optimizers of the state.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Key] = field(default_factory=dict)
    per_rank: dict[str, PlacedPerRank] = field(default_factory=dict)
    free: list[Key] = field(default_factory=list)
    plain: list[Key] = field(default_factory=list)
    own: list[Key] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    roots: set[str] = field(default_factory=set)
    fresh: list[Key] = field(default_factory=list)
    frozen: set[str] = field(default_factory=set)
    of_modules: set[str] = field(default_factory=set)
    kinds: dict[str, ReplicaKind] = field(default_factory=dict)
    widened: list[str] = field(default_factory=list)
    composites: dict[str, Composite] = field(default_factory=dict)
    owners: StateOwners = field(default_factory=lambda: StateOwners((), (), ()))

    def leave_out(self, accepts: Callable[[str], bool]) -> None:
        """Leaves out the entries of modules whose names a function does not accept."""
        for name in [n for n in self.of_modules if not accepts(n)]:
            for entries in (self.tensors, self.objects, self.paths, self.kinds):
                entries.pop(name, None)


def flat_name(path: Key) -> str:
    """Returns the flat name of a path of keys."""
    return ".".join(map(str, path))


def name_of_rank(name: str, rank: int) -> str:
    """Returns the name under which one rank's own value is stored."""
    return f"{name}.{_RANK}{rank}"


def value_of_ranks(stored: str) -> str:
    """Returns the name to which `name_of_rank` has added a rank; "" if there is none."""
    place, _, last = stored.rpartition(f".{_RANK}")
    return place if last.isdecimal() else ""


# ---- what is in a state --------------------------------------------------------------------------


def _items(value: Any) -> Iterable[tuple[str | int, Any]]:
    """Returns the entries of a dict, a list or a tuple."""
    if isinstance(value, Mapping):
        return [(key if isinstance(key, str) else str(key), item) for key, item in value.items()]
    return enumerate(value)


def has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and not isinstance(value, type)


def loads_itself(value: Any) -> bool:
    """Tells whether a value has its own state and loads it in place."""
    return (
        isinstance(value, (nn.Module, Optimizer, PerRank, RngState))
        or is_generator(value)
        or has_state(value)
    )


def is_plain(value: Any, depth: int = 0) -> bool:
    """Tells whether a load replaces the value: nothing in it loads itself."""
    if has_only_scalars(value):
        return True
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    else:
        return not loads_itself(value)
    return depth > MAX_DEPTH or all(is_plain(item, depth + 1) for item in items)


def holders_of(state: Mapping[str, Any]) -> StateOwners:
    modules: list[tuple[Key, nn.Module]] = []
    tensors: list[tuple[Key, torch.Tensor]] = []
    optimizers: list[tuple[Key, Optimizer]] = []

    def visit(value: Any, path: Key) -> None:
        if isinstance(value, nn.Module):
            modules.append((path, value))
        elif isinstance(value, torch.Tensor):
            tensors.append((path, value))
        elif isinstance(value, Optimizer) and not is_container(value):
            optimizers.append((path, value))
        elif (
            isinstance(value, (Mapping, list, tuple))
            and len(path) <= MAX_DEPTH
            and not has_only_scalars(value)
        ):
            for key, item in _items(value):
                visit(item, (*path, key))

    visit(state, ())
    return StateOwners(modules, tensors, optimizers)


def _holds_tensor(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth > MAX_DEPTH or has_only_scalars(value):
        return False
    if isinstance(value, Mapping):
        return any(_holds_tensor(item, depth + 1) for item in value.values())
    if isinstance(value, (list, tuple, AbstractSet)) or type(value).__name__ == "deque":
        return any(_holds_tensor(item, depth + 1) for item in value)
    return False


@contextmanager
def calling(method: str, value: Any, path: Key) -> Iterator[None]:
    """Adds a note with the object's path to exceptions of the user's own code."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        error.add_note(f"raised by {type(value).__name__}.{method}() of {shown(path)}")
        raise


def _frozen(module: nn.Module) -> set[str]:
    """Returns the names of the parameters that take no gradient, as a state dict names them."""
    found = module.named_parameters(remove_duplicate=False)
    frozen = [name for name, parameter in found if not parameter.requires_grad]
    return {plain for name in frozen for plain in _get_fqns(module, name)}


# ---- export --------------------------------------------------------------------------------------


def check_state(state: object) -> None:
    """Refuses a state that is no dict, or an empty one, before anything is read.

    Raises:
        PlanError: it is, for example, a module.
    """
    if not isinstance(state, Mapping):
        raise PlanError(
            f"a state is a dict, got a {type(state).__name__}",
            hint='give each object a name: {"model": model, "optimizer": optimizer}',
        )
    if not state:
        raise PlanError(
            "the state is empty: expected at least one object",
            hint='give each object a name: {"model": model, "optimizer": optimizer}',
        )


def export(
    state: Mapping[str, Any],
    stored: StoredStates | None = None,
    only: str | Callable[[str], bool] | None = None,
    cache: StateCache | None = None,
    wants: Callable[[str], bool] | None = None,
) -> ExportedState:
    """Returns a user's state under flat names.

    The tensors are the live ones: nothing is copied or gathered.

    Args:
        state: dicts, lists and tuples (nested freely) of modules, optimizers, objects with
            `state_dict`, generators, tensors and plain values.
        stored: the state of each optimizer in the checkpoint to load; None for a save.
        only: as for `CheckpointManager.save`.
        cache: of the same loop's last save; for whole states only. The caller ends it.
        wants: tells by name what is loaded; None for all.

    Raises:
        PlanError: two entries have the same name, the state lacks an optimizer's parameters, a
            tensor is on the meta device, or an average is applied to a model.
    """
    check_state(state)
    _check_nesting(state, (), ())
    owners = holders_of(state)
    refuse_applied(p for _, module in owners.modules for p in module.parameters())
    exporter = _Exporter(owners, stored, bool(only), cache, wants)
    if cache is not None:
        cache.begin(exporter.holders)
    exporter.result.roots = {str(key) for key in state}
    exporter.visit_container(state, ())
    refuse_applied(exporter.result.tensors.values())
    exporter.judge_own_tensors()
    exporter.check_meta()
    exporter.check_names()
    result = exporter.result
    if only:
        result.leave_out(only if callable(only) else lambda name: name not in result.frozen)
        check_parts(result.composites, result.tensors, "would be left out")
    return result


def _check_nesting(value: Any, path: Key, above: tuple[int, ...]) -> None:
    """Refuses containers that contain themselves, and very deep ones, so that each walk ends."""
    if not isinstance(value, (Mapping, list, tuple)):
        return
    if len(above) > MAX_DEPTH or id(value) in above:
        raise PlanError(
            f"cannot save or load {shown(path[:4])}: it is nested more than {MAX_DEPTH} deep, or"
            " contains itself"
        )
    if not has_only_scalars(value):
        for key, item in _items(value):
            _check_nesting(item, (*path, key), (*above, id(value)))


class _Exporter:
    """Walks a state and gives every leaf its name."""

    def __init__(
        self,
        holders: StateOwners,
        stored: StoredStates | None,
        is_partial: bool,
        cache: StateCache | None,
        wants: Callable[[str], bool] | None,
    ) -> None:
        self.wants = wants or (lambda _: True)
        self.holders, self.stored, self.result = holders, stored, ExportedState(owners=holders)
        self.cache, self.reused = cache, set[str]()
        self.is_partial = is_partial  # only a part of each module is wanted
        self.trained: set[object] | None = None  # where parameters lie, once that is asked for
        self.own_names: list[str] = []  # of tensors of the state itself

    def visit(self, value: Any, path: Key) -> None:
        """Exports a value of the state itself."""
        if isinstance(value, (PerRank, RngState)):
            wrapper = value if isinstance(value, PerRank) else PerRank(value, "reset")
            self.result.per_rank[self._name(path)] = PlacedPerRank(wrapper, path)
        elif isinstance(value, nn.Module):
            if not self._reuse(path):
                self._visit_module(value, path)
        elif isinstance(value, Optimizer) and not is_container(value):
            known = self._reuse(path)
            if known is not None and isinstance(known.guard, OptimizerGuard):
                self._visit_values(value, known.guard, path)
            else:
                self._visit_optimizer(value, path)
        elif isinstance(value, (Mapping, list, tuple)) and not is_plain(value):
            self.visit_container(value, path)
        else:
            self._visit_value(value, path)

    def _visit_module(self, module: nn.Module, path: Key) -> None:
        before = len(self.result.tensors), len(self.result.objects)
        with calling("state_dict", module, path):
            exported = module_state(module)
        exported, composites = _parts_of(_tied(module, exported))
        self.result.composites |= {
            flat_name((*path, name)): found._replace(
                parts={flat_name((*path, n)): part for n, part in found.parts.items()}
            )
            for name, found in composites.items()
        }
        if self.is_partial or self.stored is not None:
            frozen = _with_parts(_frozen(module), composites)
            self.result.frozen |= {flat_name((*path, name)) for name in frozen}
        if self.stored is not None:
            self._free_extra(exported, path)
            self.result.kept += [f"{flat_name(path)}.{name}" for name in _non_persistent(module)]
        known = {*self.result.tensors, *self.result.objects} if self.is_partial else set()
        self.emit(exported, path, is_root=True)
        trained = _with_parts(plain_parameter_names(module, exported), composites)
        self._let_differ(before[0], {flat_name((*path, name)) for name in trained})
        for found in composites.values():
            for part in found.parts:
                self.result.kinds.setdefault(flat_name((*path, part)), ReplicaKind.PART)
        if self.is_partial:
            self.result.of_modules |= {*self.result.tensors, *self.result.objects} - known
        if self.cache is not None and len(self.result.objects) == before[1]:
            tensors = dict(islice(self.result.tensors.items(), before[0], None))
            guard = ModuleGuard.of(module, tensors.values())
            self.cache.keep(path, guard, list(tensors), self.result.paths, self.result.kinds)

    def _let_differ(self, first: int, trained: Container[str] = ()) -> None:
        """Notes that the tensors exported since may differ between ranks, but parameters.

        A parameter has one of the names in `trained`, or is the memory of one in the state.
        """
        found = [
            (name, tensor)
            for name, tensor in islice(self.result.tensors.items(), first, None)
            if name not in trained and not is_sharded(tensor)
        ]
        if not found:
            return
        if self.trained is None:
            modules = (module for _, module in self.holders.modules)
            self.trained = {_place(p) for module in modules for p in module.parameters()}
        for name, tensor in found:
            if _place(tensor) not in self.trained:
                self.result.kinds[name] = ReplicaKind.FREE

    def _trained_in(self, value: Any, first: int) -> set[str]:
        """Returns the names exported by an object since that every rank must have alike.

        They are parameters of modules that it holds, and the state of optimizers, by its name.
        """
        held = [m for m in getattr(value, "__dict__", {}).values() if isinstance(m, nn.Module)]
        places = {_place(p) for module in held for p in module.parameters()}
        return {
            name
            for name, tensor in islice(self.result.tensors.items(), first, None)
            if is_optimizer_state(name) or (places and _place(tensor) in places)
        }

    def judge_own_tensors(self) -> None:
        """Lets no tensor of the state itself differ, also where a module holds it as a buffer.

        But the `state_dict` of a module has the buffers of its norms, which honest jobs let differ.
        """
        tensors, kinds = self.result.tensors, self.result.kinds
        free = {n for n in self.own_names if is_norm_buffer(n) and not is_sharded(tensors[n])}
        for name in free:
            kinds.setdefault(name, ReplicaKind.FREE)
        own = {_place(tensors[name]) for name in self.own_names if name not in free}
        if own:
            self.result.kinds = {
                name: kind
                for name, kind in kinds.items()
                if kind is not ReplicaKind.FREE or _place(tensors[name]) not in own
            }

    def _visit_optimizer(self, optimizer: Optimizer, path: Key) -> None:
        with calling("state_dict", optimizer, path):
            stored, front = self._stored_for(path), flat_name((*path, "state"))
            found = export_optimizer(
                optimizer, self.holders, path, stored, lambda n, k: self.wants(f"{front}.{n}.{k}")
            )
        self.result.free += [(*path, key) for key in extra_of(optimizer)] + [
            (*path, "state", name) for name in found.free
        ]
        self.result.fresh += [(*path, "state", name) for name in found.fresh]
        self.result.widened += [flat_name((*path, "state", *keys)) for keys in found.widened]
        before = len(self.result.tensors)
        if "state" in found.values:
            self.emit(found.values["state"], (*path, "state"))
        tensors = dict(islice(self.result.tensors.items(), before, None))
        for name, values in found.values.get("state", {}).items():
            moments = values.items() if isinstance(values, Mapping) else ()
            parts = [(key, part) for key, value in moments if are_parts(value) for part in value]
            for keys in parts:
                self.result.kinds[flat_name((*path, "state", name, *keys))] = ReplicaKind.PART
        for keys in found.local:
            self.result.kinds[flat_name((*path, "state", *keys))] = ReplicaKind.LOCAL
        self.emit({k: v for k, v in found.values.items() if k != "state"}, path, is_root=True)
        if self.cache is not None:
            names = [group["params"] for group in found.values["param_groups"]]
            guard = OptimizerGuard.of(optimizer, names, path, tensors.values())
            self.cache.keep(path, guard, list(tensors), self.result.paths, self.result.kinds)

    def _reuse(self, path: Key) -> KnownExport | None:
        """Adds the tensors that are known of a module or an optimizer."""
        known = self.cache.find(path) if self.cache is not None else None
        if known is None or not self.result.paths.keys().isdisjoint(known.paths):
            return None
        self.reused |= known.tensors.keys()
        self.result.tensors.update(known.tensors)
        self.result.paths.update(known.paths)
        self.result.kinds.update(known.kinds)
        return known

    def _visit_values(self, optimizer: Optimizer, guard: OptimizerGuard, path: Key) -> None:
        """Exports what is not a tensor of an optimizer's state: such values change unseen."""
        for value, where in guard.values(optimizer):
            self.emit(value, where)
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": list(names)}
            for group, names in zip(optimizer.param_groups, guard.names, strict=True)
        ]
        self.emit({"param_groups": groups}, path)

    def _stored_for(self, path: Key) -> Stored | None:
        """Returns what a checkpoint has of the optimizer at a path; of all, if it is not named."""
        if self.stored is None:
            return None
        return self.stored.get(flat_name(path), self.stored[""])

    def _free_extra(self, exported: dict[str, Any], path: Key) -> None:
        """Exempts a module's extra state from loading in place: it may take any stored form."""
        for name in [n for n in exported if n.rpartition(".")[2] == "_extra_state"]:
            self.result.free.append((*path, name))
            self._leaf(exported.pop(name), (*path, name))

    def visit_container(self, value: Any, path: Key) -> None:
        """Exports the entries of a dict, a list or a tuple of the state."""
        for key, item in _items(value):
            if isinstance(value, tuple) and is_plain(item):
                raise PlanError(
                    f"cannot save or load {shown((*path, key))}: a plain value within a tuple"
                    " cannot be replaced",
                    hint="use a list, or a dict",
                )
            self.visit(item, (*path, key))

    def _visit_value(self, value: Any, path: Key) -> None:
        self.result.free.append(path)
        self.result.plain.append(path)
        if is_generator(value):
            self._leaf(generator_state(value), path)
        elif has_state(value):
            if not hasattr(value, "load_state_dict"):
                raise PlanError(
                    f"cannot save or load {shown(path)}: {type(value).__name__} has state_dict, and"
                    " no load_state_dict"
                )
            with calling("state_dict", value, path):
                exported = value.state_dict()
            before = len(self.result.tensors)
            self.emit(exported, path)
            if not isinstance(value, Optimizer | Ema):
                self._let_differ(before, self._trained_in(value, before))
        else:
            self.result.own.append(path)
            before = len(self.result.tensors)
            self.emit(value, path)
            self.own_names += islice(self.result.tensors, before, None)

    def emit(self, value: Any, path: Key, is_root: bool = False) -> None:
        """Names the leaves of an exported value, as DCP does.

        A value that DCP would not return unchanged is kept as a `Structure`.
        """
        if isinstance(value, torch.Tensor):
            self.result.tensors[self._name(path)] = value
        elif isinstance(value, Mapping) and (value or is_root) and _is_walked(value):
            for key, item in value.items():
                self.emit(item, (*path, key))
        elif type(value) is list and _is_walked_list(value):
            for number, item in enumerate(value):
                self.emit(item, (*path, number))
        elif _holds_tensor(value):
            self._structure(value, path)
        else:
            self._leaf(value, path)

    def _leaf(self, value: Any, path: Key) -> None:
        self.result.objects[self._name(path)] = value

    def _structure(self, value: Any, path: Key) -> None:
        def put(tensor: torch.Tensor, at: Key) -> dict[str, str]:
            where = (*path, *map(str, at[len(path) :]))
            while flat_name(where) in self.result.paths:
                where = (*where[:-1], f"{where[-1]}~")
            self.result.tensors[self._name(where)] = tensor
            return {TAG: "tensor", "name": flat_name(where)}

        self._leaf(Structure(encode_object(value, path, put)), (*path, STRUCTURE))

    def _name(self, path: Key) -> str:
        name = flat_name(path)
        if (other := self.result.paths.setdefault(name, path)) is not path:
            raise PlanError(
                f"two entries of the state have one name: {printable(name)!r}: {shown(other)} and"
                f" {shown(path)}",
                hint=(
                    "keys are joined by dots, and numbers as keys become strings: choose other keys"
                ),
            )
        return name

    def check_names(self) -> None:
        """Refuses names that no checkpoint can store.

        Raises:
            PlanError: there is such a name.
        """
        for name in (*(self.result.tensors.keys() - self.reused), *self.result.objects):
            if not is_valid_name(name):
                raise PlanError(f"a name is not valid, or too long: {printable(name)[:200]!r}")
        for name in self.result.paths if self.result.per_rank else ():
            if f".{_RANK}" not in name:
                continue
            above, _, last = name.rpartition(f".{_RANK}")
            if above in self.result.per_rank and last.isdecimal():
                raise PlanError(
                    f"two entries of the state have one name: {printable(name)!r} is where the"
                    f" PerRank {printable(above)!r} of a rank is stored",
                    hint="choose other keys",
                )

    def check_meta(self) -> None:
        """Refuses tensors without memory.

        Raises:
            PlanError: there are such tensors; the hint has the call that gives them memory.
        """
        without = [
            name
            for name, tensor in self.result.tensors.items()
            if name not in self.reused and is_meta(tensor)
        ]
        if without:
            kept = (
                ", then initialise the buffers that no checkpoint holds:"
                f" {', '.join(self.result.kept[:4])}"
                if self.result.kept
                else ""
            )
            raise PlanError(
                f"{len(without)} tensors are on the meta device and have no memory:"
                f" {', '.join(map(printable, without[:3]))}",
                hint=f"call model.to_empty(device=…) first{kept}",
            )


def _place(tensor: torch.Tensor) -> object:
    """Returns where the elements of a tensor begin; equal to no other for one without memory."""
    local = local_part(tensor)
    if not has_own_memory(local) or not local.numel():
        return object()
    return local.device, local.data_ptr()


def _is_walked(value: Mapping[Any, Any]) -> bool:
    """Tells whether the keys of a dict become one level of names."""
    return (
        type(value) in (dict, OrderedDict)
        and STRUCTURE not in value
        and all(type(key) is str for key in value)
    )


def _is_walked_list(value: Any) -> bool:
    if has_only_scalars(value):
        return False
    return any(
        (isinstance(v, Mapping) and v)
        or (type(v) is list and _is_walked_list(v))
        or _holds_tensor(v)
        for v in value
    )


def _tied(model: nn.Module, exported: dict[str, Any]) -> dict[str, Any]:
    """Returns the export with one tensor per tied weight; FSDP1 exports a copy for each name.

    Other modules export live tensors, or what their hooks make of them.
    """
    if not any(isinstance(found, FullyShardedDataParallel) for found in model.modules()):
        return exported
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = _plain(name)
        original = first.setdefault(id(parameter), plain)
        if plain in exported and original in exported:
            exported[plain] = exported[original]
    for plain, original in _tied_in_flat(model):
        if plain in exported and original in exported:
            exported[plain] = exported[original]
    return exported


def _parts_of(exported: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Composite]]:
    """Returns an export of a module with plain tensors in the place of composite weights.

    Also returns these weights, by their names.
    """
    plain, composites = dict[str, Any](), dict[str, Composite]()
    for name, value in exported.items():
        found = as_composite(name, value)
        if found is None:
            plain[name] = value
            continue
        refuse_names(found, exported)
        composites[name] = found
        plain |= found.parts
        plain[name] = found.described
    return plain, composites


def _with_parts(names: AbstractSet[str], composites: Mapping[str, Composite]) -> set[str]:
    """Returns names of weights, and those of the parts of composite ones."""
    return {*names, *(n for name in names if name in composites for n in composites[name].parts)}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _tied_in_flat(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields each further name of a tied weight with its first name.

    Only for the flat parameters of FSDP1 without `use_orig_params`.
    """
    for name, module in model.named_modules():
        flat = getattr(module, "_flat_param", None)
        inside = f"{_plain(name)}." if _plain(name) else ""
        for info in getattr(flat, "_shared_param_infos", None) or ():
            plain, original = (
                _plain(f"{inside}{prefix}.{parameter}" if prefix else f"{inside}{parameter}")
                for prefix, parameter in (
                    (info.module_name, info.param_name),
                    (info.prim_module_name, info.prim_param_name),
                )
            )
            yield plain, original


def _non_persistent(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        for buffer in module._non_persistent_buffers_set:
            if module._buffers.get(buffer) is not None:
                yield _plain(f"{name}.{buffer}" if name else buffer)
