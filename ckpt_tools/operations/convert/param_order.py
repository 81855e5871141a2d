"""Finds which parameter each number of an optimizer means.

`Optimizer.state_dict()` numbers its parameters. A wrong pairing would move one parameter's moments
to another. So numbers become names only where the file, the user or the shapes prove the order.

Source: torch 2.13 `torch/optim/optimizer.py`, `param_names`.
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tools.core.catalog import TensorEntry
from ckpt_tools.core.naming import is_norm_buffer, strip_wrappers
from ckpt_tools.errors import FormatError, PlanError, StorageError, printable
from ckpt_tools.storage.small_files import parse_json, read_named

IN_ORDER = "model"
LIKE_PARAMETER = (  # state with its parameter's shape, in torch's optimizers and other common ones
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "exp_inf",
    "sum",
    "ax",
    "acc_delta",
    "prev",
    "step_size",
    "exp_avg_diff",
    "hessian",
    "state1",
    "state2",
)


@dataclass(frozen=True, slots=True)
class ModelOrder:
    """The order "model": each group has its parameters in the model's order.

    `names` has this order; it is empty if the order is unknown.
    """

    names: tuple[str, ...]


Names = Sequence[str] | Mapping[str, Sequence[str]]  # a list, or lists by optimizer
Order = ModelOrder | Names


def read_order(order: str | os.PathLike[str] | Names | None) -> str | Names | None:
    """Returns the order of parameters that the user gives: names, or the word `model`.

    Args:
        order: the word `model`, names in order, names by optimizer, or a file. A file holds one
            name per line, or JSON: a list, or an object of lists by optimizer.

    Raises:
        PlanError: the file cannot be read, or holds something else.
    """
    if order is None or order == IN_ORDER:
        return order
    if not isinstance(order, (str, os.PathLike)):
        return _checked(order, "param_order")
    path, what = Path(order), f"--param-order {printable(os.fspath(order))}"
    try:
        text = read_named(path).decode()
        value = (
            parse_json(text.encode())
            if text.lstrip()[:1] in ("[", "{")
            else [line for line in text.splitlines() if line.strip()]
        )
    except (StorageError, ValueError) as error:
        raise PlanError(
            f"{what}: {printable(str(error))}",
            hint="give a file with one name per line or a JSON list, or the word model",
        ) from error
    return _checked(value, what)


def _checked(value: Any, what: str) -> Sequence[str] | Mapping[str, Sequence[str]]:
    lists = list(value.values()) if isinstance(value, Mapping) else [value]
    if not lists or not all(
        isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        for names in lists
    ):
        raise PlanError(f"{what}: expected names of parameters, or lists of names by optimizer")
    return value  # type: ignore[no-any-return]


class NumberedOptimizer:
    """An optimizer that numbers its parameters: its groups, and the known parameter shapes.

    Attributes:
        prefix: the keys above the optimizer, for messages.
        queues: the numbers of each group, in order.
        given: the file's own names for each group's parameters, None without them.
        shapes: the shape for each number; None if no state has the parameter's shape.
    """

    def __init__(
        self,
        prefix: str,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.prefix = prefix
        self.queues: list[list[int]] = [list(group["params"]) for group in groups]
        self.given = [group.get("param_names") for group in groups]
        self.shapes: dict[int, tuple[int, ...] | None] = {
            number: None for queue in self.queues for number in queue
        }
        self.shapes |= {int(number): _shape(values) for number, values in state.items()}

    @property
    def numbers(self) -> list[int]:
        """Returns the numbers of all groups."""
        return [number for queue in self.queues for number in queue]


def _shape(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    found = (values.get(key) for key in LIKE_PARAMETER)
    return next((value.shape for value in found if isinstance(value, TensorEntry)), None)


def name_parameters(
    optimizer: NumberedOptimizer, model: Mapping[str, TensorEntry], order: Order | None
) -> dict[int, str] | None:
    """Returns the parameter of each number; None if nothing proves the order.

    Args:
        optimizer: the numbers.
        model: the tensors that the names may mean.
        order: the user's order, which has priority.

    Raises:
        PlanError: the user's order does not fit.
        FormatError: the file's own names do not fit.
    """
    numbers = optimizer.numbers
    if len(set(numbers)) != len(numbers) or optimizer.shapes.keys() != set(numbers):
        return None
    if isinstance(order, Mapping):
        order = order.get(optimizer.prefix)
    parameters = _parameters(model)
    if isinstance(order, ModelOrder):
        if not order.names:
            raise PlanError(
                "--param-order model: files of this format do not keep the order of the"
                f" parameters, and {_where(optimizer)} numbers them",
                hint=(
                    "say it with --shapes and the model's config.json, or name them in their order:"
                    " --param-order FILE"
                ),
            )
        return _in_model_order(
            optimizer,
            {fqn: parameters[fqn] for fqn in _in(model, order.names) if fqn in parameters},
        )
    if order is not None:
        return _by_list(optimizer, [str(name) for name in order], model)
    if any(isinstance(names, (list, tuple)) for names in optimizer.given):
        return _by_own_names(optimizer, model)
    return _by_shape(optimizer, parameters)


def is_by_shape(optimizer: NumberedOptimizer, order: Order | None) -> bool:
    """Tells whether neither the file nor the user names the parameters of an optimizer."""
    if isinstance(order, Mapping):
        order = order.get(optimizer.prefix)
    return order is None and not any(isinstance(n, (list, tuple)) for n in optimizer.given)


def _parameters(model: Mapping[str, TensorEntry]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of possible parameters, in the model's order.

    A tied weight is one parameter.
    """
    first: dict[Any, str] = {}
    for fqn, entry in model.items():
        if not is_norm_buffer(fqn):
            first.setdefault(entry.chunks or fqn, fqn)
    return {fqn: model[fqn].shape for fqn in first.values()}


def _in(model: Mapping[str, TensorEntry], names: Iterable[str]) -> list[str]:
    """Returns names as the model has them, with or without the prefixes of wrappers.

    Names that the model lacks are left out.
    """
    bare = {strip_wrappers(fqn): fqn for fqn in model}
    return [
        fqn
        for name in names
        if (fqn := name if name in model else bare.get(strip_wrappers(name), ""))
    ]


def _by_own_names(optimizer: NumberedOptimizer, model: Mapping[str, TensorEntry]) -> dict[int, str]:
    """Returns the names in the file, which an optimizer made from `named_parameters()` saves."""
    names: dict[int, str] = {}
    for queue, given in zip(optimizer.queues, optimizer.given, strict=True):
        if (
            not isinstance(given, (list, tuple))
            or len(given) != len(queue)
            or not all(isinstance(name, str) for name in given)
        ):
            raise FormatError(
                f"{_where(optimizer)}: param_names does not name each of its {len(queue)}"
                " parameters"
            )
        names |= dict(zip(queue, given, strict=True))
    try:
        return _known(optimizer, names, model, "param_names")
    except PlanError as error:
        raise FormatError(
            str(error), hint="say what its numbers mean with --param-order FILE"
        ) from error


def _by_list(
    optimizer: NumberedOptimizer, order: Sequence[str], model: Mapping[str, TensorEntry]
) -> dict[int, str]:
    if len(order) != len(optimizer.numbers):
        raise PlanError(
            f"--param-order names {len(order)} parameters, and {_where(optimizer)} has"
            f" {len(optimizer.numbers)}"
        )
    return _known(
        optimizer, dict(zip(sorted(optimizer.numbers), order, strict=True)), model, "--param-order"
    )


def _known(
    optimizer: NumberedOptimizer,
    names: Mapping[int, str],
    model: Mapping[str, TensorEntry],
    what: str,
) -> dict[int, str]:
    """Returns names as the model has them.

    It refuses names that are not in the model, occur twice, or have another shape.
    """
    bare = {strip_wrappers(fqn): fqn for fqn in model}
    found: dict[int, str] = {}
    for number, name in names.items():
        fqn = name if name in model else bare.get(strip_wrappers(name))
        if fqn is None:
            close = difflib.get_close_matches(name, list(model)[:2000], 3, 0.5)
            raise PlanError(
                f"{what} names {printable(name)!r}, which is no tensor of the model",
                hint=f"the nearest names: {', '.join(map(printable, close))}" if close else None,
            )
        shape = optimizer.shapes[number]
        if shape is not None and shape != model[fqn].shape:
            raise PlanError(
                f"{what} and the shapes differ: parameter {number} of {_where(optimizer)} has"
                f" {list(shape)}, and {printable(fqn)!r} has {list(model[fqn].shape)}"
            )
        found[number] = fqn
    if twice := [fqn for fqn, count in Counter(found.values()).items() if count > 1]:
        raise PlanError(f"{what} names {printable(twice[0])!r} twice")
    return found


def _in_model_order(
    optimizer: NumberedOptimizer, parameters: Mapping[str, tuple[int, ...]]
) -> dict[int, str]:
    """Pairs each group with the model's parameters in order, if the shapes allow only one way.

    Raises:
        PlanError: the shapes allow no way, or several.
    """
    names: dict[int, str] = {}
    for queue in optimizer.queues:
        wanted = [optimizer.shapes[number] for number in queue]
        first = _paired(wanted, list(parameters.items()))
        last = _paired(wanted[::-1], list(parameters.items())[::-1])
        if first is None or last is None or first != last[::-1]:
            why = (
                "do not have the shapes of the model's in its order"
                if first is None
                else "fit the model's in several ways"
            )
            raise PlanError(
                f"--param-order model: the parameters of {_where(optimizer)} {why}",
                hint="name them in their order: --param-order FILE",
            )
        names |= dict(zip(queue, first, strict=True))
    if len(set(names.values())) != len(names):
        raise PlanError(
            f"--param-order model: groups of {_where(optimizer)} may share a parameter",
            hint="name all in order: --param-order FILE",
        )
    return names


def _paired(
    wanted: Sequence[tuple[int, ...] | None], candidates: Sequence[tuple[str, tuple[int, ...]]]
) -> list[str] | None:
    """Returns the first candidates, in order, with the wanted shapes; None if some are missing.

    A wanted shape of None fits any shape, but only if every candidate is needed.
    """
    if None in wanted and len(wanted) != len(candidates):
        return None
    names: list[str] = []
    for fqn, shape in candidates:
        if len(names) < len(wanted) and wanted[len(names)] in (shape, None):
            names.append(fqn)
    return names if len(names) == len(wanted) else None


def _by_shape(
    optimizer: NumberedOptimizer, parameters: Mapping[str, tuple[int, ...]]
) -> dict[int, str] | None:
    """Returns the only parameter with each number's shape.

    Returns None if two have the same shape, or a shape is unknown.
    """
    ours, theirs = Counter(optimizer.shapes.values()), Counter(parameters.values())
    if any(shape is None or count > 1 or theirs[shape] != 1 for shape, count in ours.items()):
        return None
    by_shape = {shape: fqn for fqn, shape in parameters.items()}
    return {
        number: by_shape[shape] for number, shape in optimizer.shapes.items() if shape is not None
    }


def _where(optimizer: NumberedOptimizer) -> str:
    return printable(optimizer.prefix) or "the optimizer"
