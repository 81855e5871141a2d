"""A training state: model, optimizers and the rest; `put_together` makes a checkpoint of them.

Optimizer state comes in three namings: by parameter name with groups (torch's
`get_optimizer_state_dict`, FSDP1, Accelerate, our own), by parameter name throughout (torchtitan),
and by number (`OptimizerState.state_dict`).

Source: torch 2.13 `torch/distributed/checkpoint/state_dict.py`, `torch/optim/optimizer.py`;
torchtitan 0.2 `components/optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tools.core.catalog import BytesEntry, Catalog, TensorEntry
from ckpt_tools.core.naming import strip_wrappers
from ckpt_tools.core.selection import check_new_name
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.builder import name_of
from ckpt_tools.formats.in_memory import InMemoryFile
from ckpt_tools.formats.pickle.state import Path, is_number
from ckpt_tools.operations.convert.param_order import (
    ModelOrder,
    Order,
)

NAMINGS = ("groups", "flat", "ids")


@dataclass(slots=True)
class OptimizerState:
    """One optimizer.

    Attributes:
        state: tensors and plain values by the parameter's name.
        groups: the options of each group, and `params`, the names of its parameters.
        is_numbered: the order of `params` is the optimizer's own, as its numbers gave it.
        is_unnamed: the parameters of its numbers are unknown. Then `state` has the numbers as
            strings, and `params` has numbers.
        has_order: `params` has the job's order. If each parameter has its own options, there is no
            such order.
    """

    prefix: str
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    is_numbered: bool = False
    is_unnamed: bool = False
    has_order: bool = False


@dataclass(slots=True)
class TrainingState:
    """The parts of a checkpoint: model, optimizers, and the rest.

    `model` has names relative to `prefix`, the keys above the model. The rest has its own names.
    `places` has the keys below the prefix of model entries that stood in separate dicts or lists.
    `untouched` names optimizers whose state is not one value per parameter and key, such as
    LBFGS's: they stay in the rest. `used` has the stored names of tensors that were cut or joined.
    `is_dequantized` tells that quantized weights of the model have become numbers.
    `saved_by_transformers` has the names and shapes that transformers would save; None if unknown.
    `renamed_by` tells what has changed the names and the layout, in order.
    """

    prefix: tuple[str, ...]
    model: dict[str, TensorEntry]
    optimizers: list[OptimizerState]
    tensors: dict[str, TensorEntry]
    objects: dict[str, BytesEntry]
    paths: dict[str, Path]
    notes: list[str]
    places: dict[str, Path] = field(default_factory=dict)
    untouched: list[str] = field(default_factory=list)
    used: frozenset[str] = frozenset()
    is_dequantized: bool = False
    saved_by_transformers: Mapping[str, tuple[int, ...]] | None = None
    renamed_by: list[str] = field(default_factory=list)

    def renamed(self, new_name: Callable[[str], str]) -> TrainingState:
        """Returns the state with renamed parameters, in the model and in the optimizers.

        Raises:
            PlanError: two parameters would get the same name.
        """
        model: dict[str, TensorEntry] = {}
        for old, entry in self.model.items():
            new = new_name(old)
            if new in model:
                raise PlanError(
                    f"two tensors would get one name: {printable(new)!r}, one of them is"
                    f" {printable(old)!r}",
                    hint=(
                        "renames apply one after the other; to swap two names, go by a third:"
                        " a=TMP, b=a, TMP=b"
                    ),
                )
            check_new_name(old, new)
            model[new] = entry.named(new)
        places = {name: place for name, place in self.places.items() if new_name(name) == name}
        for optimizer in self.optimizers:
            if not optimizer.is_unnamed and len({new_name(fqn) for fqn in optimizer.state}) != len(
                optimizer.state
            ):
                raise PlanError(
                    f"two parameters of {printable(optimizer.prefix) or 'the optimizer'} would get"
                    " one name"
                )
        optimizers = [
            (
                o
                if o.is_unnamed
                else replace(
                    o,
                    state={new_name(fqn): state for fqn, state in o.state.items()},
                    groups=[
                        {**group, "params": [new_name(fqn) for fqn in group["params"]]}
                        for group in o.groups
                    ],
                )
            )
            for o in self.optimizers
        ]
        return replace(self, model=model, optimizers=optimizers, places=places)


def put_together(
    parts: TrainingState,
    naming: str,
    memory_file: InMemoryFile,
    prefix: tuple[str, ...] | None = None,
) -> Catalog:
    """Returns a catalog of all parts, with optimizer state named by one of `NAMINGS`.

    Args:
        parts: the training state.
        naming: how optimizer state is named.
        memory_file: receives the options.
        prefix: the keys above the model; those of `parts` if None.

    Raises:
        PlanError: two entries get the same name.
    """
    above = parts.prefix if prefix is None else prefix
    tensors, objects, paths = dict(parts.tensors), dict(parts.objects), dict(parts.paths)
    for fqn, entry in parts.model.items():
        path: Path = (*above, *parts.places.get(fqn, (fqn,)))
        name = name_of(path)
        if name in tensors or name in objects:
            raise PlanError(f"two entries would get one name: {printable(name)!r}")
        tensors[name], paths[name] = entry.named(name), path
    for optimizer in parts.optimizers:
        for path, value in _named(optimizer, "ids" if optimizer.is_unnamed else naming):
            name = name_of(path)
            paths[name] = path
            if isinstance(value, TensorEntry):
                tensors[name] = value.named(name)
            # today torch keeps the step as a tensor
            elif path[-1] == "step" and type(value) in (int, float) and 0 <= value < 1 << 53:
                tensors[name] = memory_file.scalar(name, float(value))
            else:
                objects[name] = memory_file.value(name, value)
    return Catalog("parts", tensors, objects, paths)


def in_order(optimizer: OptimizerState, order: Order | None) -> OptimizerState:
    """Returns an optimizer whose groups list their parameters in the order of the numbers.

    Args:
        optimizer: by name.
        order: the user's order. It is needed if each parameter has its own options, because then
            nothing else shows the order.

    Raises:
        PlanError: the order is unknown, or the user's order does not fit.
    """
    if optimizer.has_order or optimizer.is_unnamed:
        return optimizer
    if isinstance(order, Mapping):
        order = order.get(optimizer.prefix)
    names = order.names if isinstance(order, ModelOrder) else order
    mine = {strip_wrappers(fqn): fqn for group in optimizer.groups for fqn in group["params"]}
    listed = [mine[bare] for name in names or () if (bare := strip_wrappers(name)) in mine]
    if sorted(listed) != sorted(mine.values()):
        missing = next((fqn for fqn in mine.values() if fqn not in listed), "")
        what = (
            f"--param-order lacks {printable(missing)!r}"
            if names
            else "nothing tells the order of its parameters"
        )
        raise PlanError(
            f"{printable(optimizer.prefix) or 'the optimizer'} cannot be numbered: {what}",
            hint="name all parameters in the order of the job's optimizer: --param-order FILE",
        )
    places = {fqn: number for number, fqn in enumerate(listed)}
    return replace(
        optimizer,
        groups=[
            {**g, "params": sorted(g["params"], key=places.__getitem__)} for g in optimizer.groups
        ],
        has_order=True,
    )


def _named(optimizer: OptimizerState, naming: str) -> Iterable[tuple[Path, Any]]:
    root: Path = (
        tuple(int(k) if is_number(k) else k for k in optimizer.prefix.split("."))
        if optimizer.prefix
        else ()
    )
    names = dict.fromkeys([*(f for g in optimizer.groups for f in g["params"]), *optimizer.state])
    numbers: Mapping[Any, Any] = {
        name: name if optimizer.is_unnamed else i for i, name in enumerate(names)
    }
    if naming == "ids" and not optimizer.state:  # `load_state_dict` needs it
        yield (*root, "state"), {}
    for fqn, state in optimizer.state.items():
        for key, value in state.items():
            if naming == "flat":
                yield (*root, f"state.{fqn}.{key}"), value
            else:
                yield (*root, "state", str(numbers[fqn]) if naming == "ids" else fqn, key), value
    for number, group in enumerate(optimizer.groups):
        options = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        # torch's own names of the parameters, which a rename may have changed
        if "param_names" in group and naming != "flat":
            options["param_names"] = (
                group["param_names"] if optimizer.is_unnamed else list(group["params"])
            )
        if naming == "flat":
            yield from (
                ((*root, f"param_groups.{fqn}.{key}"), value)
                for fqn in group["params"]
                for key, value in options.items()
            )
            continue
        yield from (((*root, "param_groups", number, key), value) for key, value in options.items())
        yield (
            (*root, "param_groups", number, "params"),
            [numbers[f] if naming == "ids" else f for f in group["params"]],
        )


def refuse_unnamed(parts: TrainingState, why: str) -> None:
    """Refuses optimizers whose parameter numbers have no known names, if names are needed."""
    for optimizer in parts.optimizers:
        if optimizer.is_unnamed:
            raise PlanError(
                f"{why}, and {printable(optimizer.prefix) or 'the optimizer'} has numbers for its"
                " parameters",
                hint=(
                    "say what they mean with --param-order FILE or --param-order model, or leave it"
                    " out with --model-only"
                ),
            )
