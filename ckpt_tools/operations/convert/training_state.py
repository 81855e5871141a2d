"""Splits a training state into model, optimizers and the rest, and joins them again.

Optimizer state comes in three namings: by parameter name with groups (torch's
`get_optimizer_state_dict`, FSDP1, Accelerate, our own), by parameter name throughout (torchtitan),
and by number (`OptimizerState.state_dict`).

Source: torch 2.13 `torch/distributed/checkpoint/state_dict.py`, `torch/optim/optimizer.py`;
torchtitan 0.2 `components/optimizer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import (
    BytesEntry,
    Catalog,
    Chunk,
    Extent,
    TensorEntry,
    check_new_name,
    find_model,
    find_optimizers,
    is_other_state,
    key_path,
    strip_wrappers,
)
from ckpt_tools.errors import FormatError, IntegrityError, PlanError, UnsafePickleError, printable
from ckpt_tools.formats.in_memory import FILE, InMemoryFile
from ckpt_tools.formats.pickle.state import Path, TensorView, is_number, is_value
from ckpt_tools.formats.torch_save import UnreadValues, name_of, read_leaves
from ckpt_tools.operations.convert.param_order import (
    ModelOrder,
    NumberedOptimizer,
    Order,
    is_by_shape,
    name_parameters,
)
from ckpt_tools.publish.manifest import read_object
from ckpt_tools.storage import MemoryStore, Store, read

FORMS = ("groups", "flat", "ids")
_OPTIMIZER = re.compile(r"((?:.*?\.)?optim\w*(?:\.[0-9]{1,9})?)\.(state|param_groups)\.(.+)")
_OF_ONE_RANK = re.compile(r"\.rank_[0-9]+$")  # files of ranks had different values
_SHOWN = 4
_BARE = re.compile(r"()(state|param_groups)\.(.+)")
_MAX_OBJECT_BYTES, _OPTION_BYTES = 64 << 20, 4096


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
    LBFGS's: they stay in the rest.
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
            model[new] = replace(entry, fqn=new)
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


# ---- taking apart --------------------------------------------------------------------------------


def take_apart(
    catalog: Catalog,
    store: Store,
    order: Order | None = None,
    keeps_order: bool = False,
    only_model: bool = False,
) -> TrainingState:
    """Returns the parts of a checkpoint. It reads the options of optimizers: small objects.

    Args:
        catalog: of the checkpoint.
        store: where its objects lie.
        order: the parameters that an optimizer's numbers mean; see `read_order`.
        keeps_order: the format keeps entries in the order of the job.
        only_model: return the model alone, and read no object.

    Raises:
        FormatError: an optimizer's options cannot be read.
        PlanError: `order` does not fit, or no optimizer needs it.
    """
    found = _find(catalog, None if only_model else store)
    mine = {fqn for names in found.values() for fqn in names}
    prefix = find_model(catalog)
    model: dict[str, TensorEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    places: dict[str, Path] = {}
    for fqn, entry in catalog.tensors.items():
        path = key_path(catalog, fqn)
        if fqn in mine:
            continue
        if path[: len(prefix)] == prefix if prefix else not is_other_state(path[0]):
            name = fqn[len(".".join(prefix)) + 1 :] if prefix else fqn
            model[name] = replace(entry, fqn=name)
            place = catalog.paths.get(fqn, ())[len(prefix) :]
            if len(place) > 1:
                places[name] = place
        else:
            tensors[fqn] = entry
    if only_model:
        return TrainingState(prefix, model, [], {}, {}, {}, [], places)
    objects = {fqn: item for fqn, item in catalog.objects.items() if fqn not in mine}
    paths = {fqn: path for fqn, path in catalog.paths.items() if fqn in tensors or fqn in objects}
    parts = TrainingState(prefix, model, [], tensors, objects, paths, [], places)
    for name, names in found.items():
        optimizer = _optimizer(name, names, parts, order, store)
        if optimizer is not None:
            optimizer.has_order |= keeps_order
            parts.optimizers.append(optimizer)
            continue
        parts.untouched.append(name)
        parts.tensors |= {fqn: catalog.tensors[fqn] for fqn in names if fqn in catalog.tensors}
        parts.objects |= {fqn: catalog.objects[fqn] for fqn in names if fqn in catalog.objects}
        parts.paths |= {fqn: catalog.paths[fqn] for fqn in names if fqn in catalog.paths}
    return parts


def check_used(order: Order | None, numbered: Sequence[str]) -> None:
    """Refuses an order of parameters that none of these optimizers needs."""
    if order is not None and not numbered:
        raise PlanError("--param-order: no optimizer here numbers its parameters")
    if isinstance(order, Mapping) and (unknown := [name for name in order if name not in numbered]):
        raise PlanError(
            f"--param-order names {printable(unknown[0])!r}, which is no optimizer that numbers its"
            " parameters",
            hint=(
                "there are:"
                f" {', '.join(printable(name) or '(without a name)' for name in numbered)}"
            ),
        )


Entry = tuple[str, str, Any]  # kind ("state" or "param_groups"), rest of the name, value


def _find(catalog: Catalog, store: Store | None) -> dict[str, dict[str, Entry]]:
    """Returns the entries of each optimizer by name, with the objects read.

    Without a store, these are the tensors only.
    """
    is_bare = any(fqn.startswith("param_groups.") for fqn in catalog.objects)
    others = sorted((".".join(path) for path in find_optimizers(catalog)), key=len, reverse=True)
    by_key = (
        re.compile(rf"({'|'.join(map(re.escape, others))})\.(state|param_groups)\.(.+)", re.DOTALL)
        if others
        else None
    )
    found: dict[str, dict[str, Entry]] = {}
    wanted: list[tuple[str, re.Match[str]]] = []

    def match_of(fqn: str) -> re.Match[str] | None:
        match = _OPTIMIZER.fullmatch(fqn) or (by_key.fullmatch(fqn) if by_key else None)
        return match or (_BARE.fullmatch(fqn) if is_bare else None)

    for fqn in catalog.tensors:
        if match := match_of(fqn):
            found.setdefault(match[1], {})[fqn] = (match[2], match[3], catalog.tensors[fqn])
    if store is None:
        return found
    for fqn in catalog.objects:
        if match := match_of(fqn):
            wanted.append((fqn, match))
    values = ObjectReader(store)
    values.will_read(catalog.objects[fqn] for fqn, _ in wanted)
    for fqn, match in wanted:
        found.setdefault(match[1], {})[fqn] = (
            match[2],
            match[3],
            values.plain(catalog.objects[fqn]),
        )
    return found


def _optimizer(
    prefix: str,
    entries: Mapping[str, Entry],
    parts: TrainingState,
    order: Order | None,
    store: Store,
) -> OptimizerState | None:
    """Returns an optimizer from its entries; None if they do not form one.

    If the parameters of its numbers are unknown, it adds a note.
    """
    _refuse_differing(entries)
    state: dict[str, dict[str, Any]] = {}
    numbered: dict[int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for kind, rest, value in entries.values():
        name, _, key = rest.rpartition(".")
        first, _, last = rest.partition(".")
        # Megatron-Core: the key comes first
        if kind == "state" and last in parts.model and rest.rpartition(".")[0] not in parts.model:
            state.setdefault(last, {})[first] = value
        elif kind == "state":
            state.setdefault(name, {})[key] = value
        elif is_number(name):
            numbered.setdefault(int(name), {})[key] = value
        elif is_number(first) and last.partition(".")[0] == "params":  # a flattened list
            numbered.setdefault(int(first), {}).setdefault("params", []).append(value)
        else:
            by_name.setdefault(name, {})[key] = value
    if not any("params" in group for group in numbered.values()):
        # no groups, but the options of each parameter: its name may be a number
        by_name |= {str(number): options for number, options in numbered.items()}
        numbered = {}
    groups = [numbered[n] for n in sorted(numbered)] or _grouped(by_name, store)
    params = _params_of(groups)
    if params is None or _has_parts(params, state):
        return None
    optimizer = OptimizerState(prefix, state, groups, has_order=bool(numbered))
    if _has_names(params, state):
        return optimizer
    if not all(map(is_number, state)):
        return None
    return _with_names(optimizer, parts, order)


def _refuse_differing(entries: Mapping[str, Entry]) -> None:
    """Refuses an optimizer with a value of each rank."""
    if differing := [fqn for fqn, (_, rest, _) in entries.items() if _OF_ONE_RANK.search(rest)]:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise PlanError(
            "values of an optimizer differ between ranks:"
            f" {printable(', '.join(differing[:_SHOWN]))}{more}",
            hint="--model-only leaves the optimizer out; ckpt reshard keeps the value of each rank",
        )


def _has_parts(params: Sequence[str | int], state: Mapping[str, Any]) -> bool:
    """Tells whether a state is below a key of a parameter: a list or a dict, such as LBFGS's."""
    known = {str(p) for p in params}
    return any(
        name not in known and any(name[:end] in known for end in _dots(name)) for name in state
    )


def _dots(name: str) -> list[int]:
    return [position for position, char in enumerate(name) if char == "."]


def _has_names(params: Sequence[str | int], state: Mapping[str, Any]) -> bool:
    """Tells whether an optimizer has names of parameters, not numbers.

    The names of a `ParameterList` are numbers, too, but strings.
    """
    if params and all(isinstance(p, str) for p in params) and set(params) >= state.keys():
        return True
    has_numbers = any(isinstance(p, int) for p in params)
    return not has_numbers and not (state and all(map(is_number, state)))


def _with_names(
    optimizer: OptimizerState, parts: TrainingState, order: Order | None
) -> OptimizerState:
    """Returns an optimizer with names for its numbers, if anything proves them; adds a note."""
    prefix, state, groups = optimizer.prefix, optimizer.state, optimizer.groups
    what = printable(prefix) or "the optimizer"
    numbers = NumberedOptimizer(prefix, groups, state)
    names = name_parameters(numbers, parts.model, order)
    if names is None:
        parts.notes.append(
            f"{what} numbers its parameters, and their shapes alone do not tell which is which: the"
            " numbers are kept; --param-order FILE or --param-order model says what they mean"
        )
        return replace(optimizer, is_numbered=True, is_unnamed=True)
    if is_by_shape(numbers, order):
        parts.notes.append(
            f"{what} numbers its parameters: each number became the only parameter of its shape;"
            " --param-order FILE says it if the optimizer has others"
        )
    return OptimizerState(
        prefix,
        {names[int(number)]: values for number, values in state.items()},
        [{**group, "params": [names[number] for number in group["params"]]} for group in groups],
        is_numbered=True,
        has_order=True,
    )


def _params_of(groups: Sequence[Mapping[str, Any]]) -> list[str | int] | None:
    """Returns the parameters of all groups; None if a group does not list names or numbers."""
    lists = [group.get("params") for group in groups]
    if not all(
        isinstance(found, (list, tuple)) and all(type(item) in (str, int) for item in found)
        for found in lists
    ):
        return None
    return [item for found in lists for item in found or ()]


def _grouped(by_name: Mapping[str, Mapping[str, Any]], store: Store) -> list[dict[str, Any]]:
    """Returns groups of the parameters that have the same options."""
    groups: dict[str, dict[str, Any]] = {}
    for name, options in by_name.items():
        shown = repr(sorted((key, _comparable(value, store)) for key, value in options.items()))
        groups.setdefault(shown, {**options, "params": []})["params"].append(name)
    return list(groups.values())


def _comparable(option: Any, store: Store) -> Any:
    """Returns an option that can be compared: of a small tensor, its bytes."""
    if not isinstance(option, TensorEntry) or option.nbytes > _OPTION_BYTES:
        return option
    chunks = [(c.box, read(store, *c.extent[:3])) for c in option.chunks]
    return option.dtype.name, option.shape, chunks


Leaves = list[tuple[Path, object, tuple[Extent, ...]]]


class ObjectReader:
    """Reads objects. Equal small objects are unpacked only once.

    For example, an option of a flattened optimizer occurs for every parameter.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[bytes, tuple[Leaves, UnreadValues]] = {}

    def will_read(self, items: Iterable[BytesEntry]) -> None:
        """Announces the objects to the store."""
        self._store.will_read(item.extent[:3] for item in items)

    def leaves(self, item: BytesEntry, others: UnreadValues) -> tuple[bytes, Leaves]:
        """Returns an object's archive and its leaves.

        Raises:
            FormatError: it is too long to be an object, or malformed.
        """
        if item.extent.nbytes > _MAX_OBJECT_BYTES:
            raise FormatError(
                f"an object is too long: {item.extent.nbytes} bytes ({printable(item.fqn)!r})"
            )
        data = read_object(self._store, item)
        known = self._known.get(data)
        if known is None:
            found = UnreadValues()
            try:
                known = list(read_leaves(MemoryStore({FILE: data}), FILE, len(data), found)), found
            except IntegrityError as error:
                raise IntegrityError(
                    f"an object is damaged: {printable(item.fqn)!r}: {error}", hint=error.hint
                ) from error
            if not known[0] and not found and not found.tensors:
                known[0].append(((), {}, ()))  # an empty dict
            if len(data) <= _OPTION_BYTES:
                self._known[data] = known
        others.update(known[1])
        others.tensors |= known[1].tensors
        return data, known[0]

    def plain(self, item: BytesEntry) -> Any:
        """Returns an object that is a plain value.

        Raises:
            FormatError: it is something else.
        """
        _, leaves = self.leaves(item, UnreadValues())
        if len(leaves) != 1 or leaves[0][0] or not is_value(leaves[0][1]):
            raise FormatError(f"an optimizer's option is no plain value: {printable(item.fqn)!r}")
        return leaves[0][1]

    def is_same(self, item: BytesEntry, others: ObjectReader, other: BytesEntry) -> bool:
        """Tells whether two objects have equal bytes, or equal plain values and tensors.

        Raises:
            FormatError: one is malformed, or too long to be an object.
        """
        unknown = UnreadValues()
        (one, ones), (two, twos) = self.leaves(item, unknown), others.leaves(other, unknown)
        return one == two or (
            not unknown and not unknown.tensors and _flattened(one, ones) == _flattened(two, twos)
        )


def _flattened(data: bytes, leaves: Leaves) -> list[tuple[Path, str]]:
    """Returns the values and tensors of an archive as strings that can be compared."""
    found = []
    for path, value, extents in leaves:
        if isinstance(value, TensorView):
            (extent,) = extents
            content = data[extent.start : extent.start + extent.nbytes].hex()
            found.append((path, f"{value.dtype.name} {value.sizes} {extent.strides} {content}"))
        else:
            found.append((path, f"{type(value).__name__} {value!r}"))
    return found


def unpack_objects(
    catalog: Catalog, store: Store, made: InMemoryFile
) -> tuple[Catalog, dict[str, Any], list[str]]:
    """Returns a catalog with the tensors of its objects, the plain values, and other names.

    The other names are those of leaves that are neither tensors nor plain values.

    Args:
        catalog: the catalog; all its objects are read.
        store: where they lie.
        made: receives the tensors that were found in objects.

    Raises:
        FormatError: an object is malformed.
    """
    tensors, paths, values = dict(catalog.tensors), dict(catalog.paths), dict[str, Any]()
    unknown: list[str] = []
    reader = ObjectReader(store)
    reader.will_read(catalog.objects.values())
    for fqn, item in catalog.objects.items():
        path = paths.pop(fqn, (fqn,))
        others = UnreadValues()
        try:
            data, leaves = reader.leaves(item, others)
        except UnsafePickleError:
            others["unsafe"] += 1
            leaves = []
        unknown += [fqn] if others or others.tensors else []
        for inner, value, extents in leaves:
            name = name_of((*path, *inner))
            paths[name] = (*path, *inner)
            if isinstance(value, TensorView):
                extent = extents[0]._replace(start=extents[0].start + made.add(data).start)
                tensors[name] = TensorEntry(
                    name, value.dtype, value.sizes, (Chunk(whole(value.sizes), extent),)
                )
            else:
                values[name] = value
    return replace(catalog, tensors=tensors, objects={}, paths=paths), values, unknown


# ---- putting together ----------------------------------------------------------------------------


def put_together(
    parts: TrainingState, form: str, made: InMemoryFile, prefix: tuple[str, ...] | None = None
) -> Catalog:
    """Returns a catalog of all parts, with optimizer state named by one of `FORMS`.

    Args:
        parts: the training state.
        form: how optimizer state is named.
        made: receives the options.
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
        tensors[name], paths[name] = replace(entry, fqn=name), path
    for optimizer in parts.optimizers:
        for path, value in _named(optimizer, "ids" if optimizer.is_unnamed else form):
            name = name_of(path)
            paths[name] = path
            if isinstance(value, TensorEntry):
                tensors[name] = replace(value, fqn=name)
            # today torch keeps the step as a tensor
            elif path[-1] == "step" and type(value) in (int, float) and 0 <= value < 1 << 53:
                tensors[name] = made.scalar(name, float(value))
            else:
                objects[name] = made.value(name, value)
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


def _named(optimizer: OptimizerState, form: str) -> Iterable[tuple[Path, Any]]:
    root: Path = (
        tuple(int(k) if is_number(k) else k for k in optimizer.prefix.split("."))
        if optimizer.prefix
        else ()
    )
    names = dict.fromkeys([*(f for g in optimizer.groups for f in g["params"]), *optimizer.state])
    numbers: Mapping[Any, Any] = {
        name: name if optimizer.is_unnamed else i for i, name in enumerate(names)
    }
    if form == "ids" and not optimizer.state:  # `load_state_dict` needs it
        yield (*root, "state"), {}
    for fqn, state in optimizer.state.items():
        for key, value in state.items():
            if form == "flat":
                yield (*root, f"state.{fqn}.{key}"), value
            else:
                yield (*root, "state", str(numbers[fqn]) if form == "ids" else fqn, key), value
    for number, group in enumerate(optimizer.groups):
        options = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        # torch's own names of the parameters, which a rename may have changed
        if "param_names" in group and form != "flat":
            options["param_names"] = (
                group["param_names"] if optimizer.is_unnamed else list(group["params"])
            )
        if form == "flat":
            yield from (
                ((*root, f"param_groups.{fqn}.{key}"), value)
                for fqn in group["params"]
                for key, value in options.items()
            )
            continue
        yield from (((*root, "param_groups", number, key), value) for key, value in options.items())
        yield (
            (*root, "param_groups", number, "params"),
            [numbers[f] if form == "ids" else f for f in group["params"]],
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
