"""Applies relations between tensors to a training state: to the model and its optimizers.

The moments of a parameter have its shape, so they are cut and joined as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tools.core.catalog import ChunkList, TensorEntry
from ckpt_tools.core.grid import Relation
from ckpt_tools.core.relations import SourceIndexes, assemble, is_whole
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.convert.training_state import OptimizerState, TrainingState
from ckpt_tools.storage import read

_MAX_SCALAR_BYTES = 64  # of a value that a parameter has beside its moments, such as its step
Raw = Callable[[TensorEntry], TensorEntry]


def relate(
    parts: TrainingState,
    relations: Mapping[str, Sequence[Relation]],
    left: Mapping[str, tuple[int, ...]],
    right: Mapping[str, tuple[int, ...]],
    source: Source,
    raw: Raw,
    with_model: bool = True,
) -> TrainingState:
    """Returns a training state with other tensors in the place of some.

    Tensors that no relation names stay. A result of which no part is there is left out.

    Args:
        parts: the training state.
        relations: for each result, the elements that it takes. Its parts are on the left.
        left, right: the shapes of the parts and of the results, by name.
        source: where the tensors lie.
        raw: of the parts; see `located`.
        with_model: False for the optimizers alone.

    Raises:
        PlanError: a part of a result is missing, has another shape, is quantized, or has other
            options than its other parts. Or two tensors would get one name.
    """
    change = _Change(relations, left, right, raw, source)
    model, used = parts.model, set[str]()
    if with_model:
        model = change.of_model(parts.model)
        used = {e.stored_name for name, e in parts.model.items() if name in change.results_of}
    return replace(
        parts,
        model=model,
        optimizers=[change.of_optimizer(o) for o in parts.optimizers],
        used=parts.used | used,
    )


def located(parts: TrainingState, names: Iterable[str], source: Source) -> Raw:
    """Returns a function that returns a tensor with located payloads, so that it can be cut.

    All payloads of the named parameters and of their optimizer state are located in one call.
    """
    chosen = dict.fromkeys(names)
    states = [o.state[fqn] for o in parts.optimizers for fqn in chosen if fqn in o.state]
    kept = [value for state in states for value in state.values() if isinstance(value, TensorEntry)]
    entries = [parts.model[fqn] for fqn in chosen if fqn in parts.model]
    found = source.format.locate(source.store, [*entries, *kept])
    return lambda entry: replace(
        entry,
        chunks=ChunkList(c._replace(extent=found.get(c.extent, c.extent)) for c in entry.chunks),
    )


class _Change:
    """The relations of one step, for the model and each optimizer."""

    def __init__(
        self,
        relations: Mapping[str, Sequence[Relation]],
        left: Mapping[str, tuple[int, ...]],
        right: Mapping[str, tuple[int, ...]],
        raw: Raw,
        source: Source,
    ) -> None:
        self.relations, self.left, self.right = relations, left, right
        self.source, self._raw = source, raw
        self._cut: dict[int, tuple[TensorEntry, TensorEntry]] = {}  # by identity
        self.indexes = SourceIndexes()
        self.parts_of = {
            made: [*dict.fromkeys(relation.left.name for relation in found)]
            for made, found in relations.items()
        }
        self.results_of: dict[str, list[str]] = {}
        for made, parts in self.parts_of.items():
            for part in parts:
                self.results_of.setdefault(part, []).append(made)

    def raw(self, entry: TensorEntry) -> TensorEntry:
        """Returns a tensor with located payloads. Many results may take parts of it."""
        if id(entry) not in self._cut:
            self._cut[id(entry)] = entry, self._raw(entry)
        return self._cut[id(entry)][1]

    def of_model(self, model: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Returns the model with the results in the place of their first parts."""
        found: dict[str, TensorEntry] = {}
        for name, made in self._order(model):
            if made is None:
                found[name] = model[name]
                continue
            entries = {part: model[part] for part in self.parts_of[made]}
            self._check(made, entries)
            if not self._is_renaming(made):
                entries = {part: self.raw(entry) for part, entry in entries.items()}
            found[made] = assemble(
                made, self.right[made], self.relations[made], entries, self.indexes
            )
        return found

    def of_optimizer(self, optimizer: OptimizerState) -> OptimizerState:
        """Returns an optimizer whose parameters are the results."""
        state: dict[str, dict[str, Any]] = {}
        for name, made in self._order(optimizer.state, "the state of a tensor"):
            state[name if made is None else made] = (
                optimizer.state[name]
                if made is None
                else self._state(made, [optimizer.state[part] for part in self.parts_of[made]])
            )
        groups = []
        holders: dict[str, int] = {}
        for number, group in enumerate(optimizer.groups):
            params: dict[str, None] = {}
            for param in group["params"]:
                for made in self.results_of.get(param, ()):
                    if holders.setdefault(made, number) != number:
                        raise PlanError(
                            f"parameters with different options would become one in"
                            f" {printable(optimizer.prefix) or 'the optimizer'}:"
                            f" {printable(', '.join(self.parts_of[made][:4]))}",
                            hint="--model-only leaves the optimizer out",
                        )
                params |= dict.fromkeys(self.results_of.get(param, [param]))
            groups.append({**group, "params": list(params)})
        return replace(optimizer, state=state, groups=groups)

    def _order(
        self, there: Mapping[str, Any], what: str = "one"
    ) -> Iterable[tuple[str, str | None]]:
        """Returns each name that stays, and each part with its results where they come first.

        Raises:
            PlanError: a part is missing, or a name would occur twice.
        """
        seen = set[str]()
        for name in there:
            if name not in self.results_of:
                if name in self.relations and any(p in there for p in self.parts_of[name]):
                    raise PlanError(
                        f"two tensors would get one name: {printable(name)!r} is there already, and"
                        " another becomes it"
                    )
                yield name, None
                continue
            for made in self.results_of[name]:
                if made in seen:
                    continue
                seen.add(made)
                missing = next((part for part in self.parts_of[made] if part not in there), None)
                if missing is not None:
                    raise PlanError(
                        f"{printable(made)!r} consists of several tensors, but {what} is missing:"
                        f" {printable(missing)!r} beside {printable(name)!r}"
                    )
                yield name, made

    def _check(self, made: str, entries: Mapping[str, TensorEntry]) -> None:
        """Refuses parts of other shapes, and to cut what is quantized."""
        for part, entry in entries.items():
            if entry.shape != self.left[part]:
                raise PlanError(
                    f"{printable(part)!r} has the shape {list(entry.shape)}, expected"
                    f" {list(self.left[part])} to make {printable(made)!r}",
                    hint="give the directory of the model with these weights",
                )
            if entry.quantized is not None and not self._is_renaming(made):
                raise PlanError(
                    f"a part of a quantized weight ({entry.quantized.scheme}) cannot be cut, joined"
                    f" or reordered: {printable(part)!r}",
                    hint="--dtype bf16 in the same command writes numbers; or convert the model"
                    " before you quantize it",
                )

    def _is_renaming(self, made: str) -> bool:
        found = self.relations[made]
        return len(found) == 1 and is_whole(
            found[0], self.right[made], self.left[found[0].left.name]
        )

    def _state(self, made: str, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the optimizer state of a result.

        Raises:
            PlanError: a value that is no moment, such as the step, differs between the parts.
        """
        parts, result = self.parts_of[made], dict[str, Any]()
        is_renaming = self._is_renaming(made)
        # else only the names of the parameters are known, and no shape
        has_elements = sum(r.numel for r in self.relations[made]) == math.prod(self.right[made])
        for key in dict.fromkeys(key for state in states for key in state):
            values = [state.get(key) for state in states]
            moments = {
                part: value if is_renaming else self.raw(value)
                for part, value in zip(parts, values, strict=True)
                if isinstance(value, TensorEntry) and value.shape == self.left[part]
            }
            if has_elements and len(moments) == len(parts):
                result[key] = assemble(
                    f"{made}.{key}",
                    self.right[made],
                    self.relations[made],
                    moments,
                    self.indexes,
                )
                continue
            first = values[0]
            is_missing = any(key not in state for state in states)
            for part, value in zip(parts, values, strict=True):
                if part in moments or not isinstance(value, TensorEntry):
                    continue
                if math.prod(value.shape) != 1:
                    raise PlanError(
                        f"{printable(part)!r} becomes {printable(made)!r}, and its state"
                        f" {printable(key)!r} has the shape {list(value.shape)}, not"
                        f" {list(self.left[part])}",
                        hint="--model-only leaves the optimizer out",
                    )
            if is_missing or any(self._value(v) != self._value(first) for v in values[1:]):
                raise PlanError(
                    f"parameters whose {printable(key)!r} differs cannot become one:"
                    f" {printable(', '.join(parts[:4]))}",
                    hint="--model-only leaves the optimizer out",
                )
            result[key] = first
        return result

    def _value(self, value: Any) -> Any:
        """Returns a value that can be compared: of a small tensor, its bytes."""
        if not isinstance(value, TensorEntry) or value.nbytes > _MAX_SCALAR_BYTES:
            return value
        chunks = self.raw(value).chunks
        return value.dtype, value.shape, [read(self.source.store, *c.extent[:3]) for c in chunks]


def names_of(parts: TrainingState) -> list[str]:
    """Returns the names of all parameters: those of the model, then those of optimizers alone."""
    names = dict.fromkeys(parts.model)
    for optimizer in parts.optimizers:
        names |= dict.fromkeys(optimizer.state)
        names |= dict.fromkeys(name for group in optimizer.groups for name in group["params"])
    return list(names)


def shape_of(parts: TrainingState, name: str) -> tuple[int, ...]:
    """Returns the shape of a parameter: of its weight, or of its moments if there is no weight.

    The moments are the largest of its state.
    """
    if (entry := parts.model.get(name)) is not None:
        return entry.shape
    shapes = [
        value.shape
        for optimizer in parts.optimizers
        for value in optimizer.state.get(name, {}).values()
        if isinstance(value, TensorEntry)
    ]
    return max(shapes, key=lambda shape: (math.prod(shape), len(shape)), default=())
