"""The contents of a pickled state dict: tensors, plain values, and inert stand-ins.

Tensors become views of storages. Objects of unknown types become stand-ins that accept anything
from the pickle and do nothing. None of their code runs.

Source: torch 2.13 `torch/_utils.py`, `torch/_tensor.py`,
`torch/distributed/checkpoint/_traverse.py`; confirmed on files that it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from ckpt_tools.core.box import Box
from ckpt_tools.core.dtypes import BY_NAME, BY_STORAGE_CLASS, DType
from ckpt_tools.errors import FormatError, UnsafePickleError
from ckpt_tools.formats.pickle.load import SafeCallable, load_pickle
from ckpt_tools.formats.pickle.plain_values import (
    SCALAR_KEYS,
    Inert,
    NumpyComplex,
    NumpyNumber,
    OpaqueObject,
    may_hash_alike,
    plain_types,
)
from ckpt_tools.formats.pickle.write import CounterValue, Device

_MAX_NODES, _MAX_DEPTH = 10_000_000, 64
_MAX_FOREIGN = 1000  # types of one pickle that this tool does not know
# limits for a pickle: a value that occurs twice in the state is walked twice
_NODES_PER_BYTE, _FEW_NODES = 4, 10_000
Path = tuple[str | int, ...]


class TypedKey(str):
    """A dict's key as a string, as DCP writes it, with the original key.

    The original is a number, a bool, None or a tuple.
    """

    __slots__ = ("original",)
    original: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_key, (str(self), self.original)


class TupleItem(int):
    """A position in a tuple."""


def _made_key(text: str, original: Any) -> TypedKey:
    key = TypedKey(text)
    key.original = original
    return key


class Storage(NamedTuple):
    """The record `data/{key}` of an archive.

    `numel` counts elements of `dtype`, or bytes if `dtype` is None.
    """

    key: str
    dtype: DType | None
    numel: int


class TensorView(NamedTuple):
    """A tensor from the pickle: elements of a storage."""

    storage: Storage
    dtype: DType
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class UnreadTensor(NamedTuple):
    """A tensor of a kind that ckpt does not read, such as a quantized one.

    Attributes:
        kind: describes it for people.
        view: the stored elements, if only operations on them are pending.
        pending: these operations: `conj`, `neg`.
    """

    kind: str
    view: TensorView | None = None
    pending: tuple[str, ...] = ()


class DTensorShard(NamedTuple):
    """A rank's part of a DTensor: its elements, the global shape, and its spec."""

    local: TensorView
    shape: tuple[int, ...]
    spec: OpaqueObject


class ShardedTensorShard(NamedTuple):
    """A rank's part of a ShardedTensor: its shards with their boxes, and the global shape.

    A rank without elements has no shards.
    """

    parts: tuple[tuple[TensorView, Box], ...]
    dtype: DType
    shape: tuple[int, ...]


class _Globals(dict[tuple[str, str], Any]):
    """The allow-list of globals. Any other global becomes an inert stand-in."""

    def __init__(self, is_foreign: Callable[[str], object]) -> None:
        super().__init__(
            {("torch", name): d for name, d in BY_STORAGE_CLASS.items()}
            | {("torch", name): d for name, d in BY_NAME.items()}
        )
        self._is_foreign, self._num_foreign = is_foreign, 0
        for module in ("torch", "torch.storage"):
            self[module, "UntypedStorage"] = self[module, "TypedStorage"] = None
        self["collections", "OrderedDict"] = partial(
            _ordered_dict, Inert("OrderedDict", (dict,), {})
        )
        self["torch", "Size"] = tuple
        self["torch._utils", "_rebuild_tensor_v2"] = _rebuild
        self["torch._utils", "_rebuild_tensor_v3"] = _rebuild_v3
        self["torch.serialization", "_get_layout"] = type(
            "layout", (OpaqueObject,), {"label": "torch.layout"}
        )
        self["torch._utils", "_rebuild_wrapper_subclass"] = None
        # the second module before torch 2.5
        for module in ("torch.distributed.tensor", "torch.distributed._tensor.api"):
            self[module, "DTensor"] = None
        self[_SHARDED_TENSOR, "ShardedTensor"] = _SHARDED_TENSOR
        self["torch._tensor", "_rebuild_from_type_v2"] = _rebuild_subclass
        # pickle names an inner class by `getattr`; this function looks nothing up
        for module in ("__builtin__", "builtins"):
            self[module, "getattr"] = lambda *_: type("Nested", (OpaqueObject,), {})
        self["torch", "Tensor"] = self["torch.nn.parameter", "Parameter"] = _TENSOR
        self |= plain_types()
        self |= {
            (module, name): type(name, (OpaqueObject,), {})
            for module, names in _KEPT.items()
            for name in names.split()
        }
        self |= {
            ("torch._utils", name): partial(_other_kind, kind)
            for name, kind in _OTHER_KINDS.items()
        }
        self["torch._utils", "_rebuild_parameter"] = self[
            "torch._utils", "_rebuild_parameter_with_state"
        ] = _rebuild_parameter

    def __missing__(self, key: tuple[str, str]) -> Any:
        self._is_foreign(".".join(key))
        self._num_foreign += 1
        if self._num_foreign > _MAX_FOREIGN:
            raise UnsafePickleError(
                f"refused a pickle: it asks for more than {_MAX_FOREIGN} unknown types"
            )
        found = self[key] = type("Foreign", (OpaqueObject,), {"label": ".".join(key)})
        return found


def _ordered_dict(kind: Callable[..., dict[Any, Any]], items: object = ()) -> dict[Any, Any]:
    """Returns an empty dict, or one of pairs with plain keys, as Python 2 wrote it."""
    if not isinstance(items, (list, tuple)) or not all(
        isinstance(item, (list, tuple)) and len(item) == 2 and type(item[0]) in SCALAR_KEYS
        for item in items
    ):
        raise TypeError("not the pairs of an OrderedDict")
    if may_hash_alike(key for key, _ in items):
        raise TypeError("too many long integers as the keys of an OrderedDict")
    return kind(items)


_OTHER_KINDS = {
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_meta_tensor_no_storage": "a meta tensor, which has no data",
    "_rebuild_device_tensor_from_numpy": "a tensor of another device, as a NumPy array",
    "_rebuild_device_tensor_from_cpu_tensor": "a tensor of another device",
}


def _other_kind(kind: str, *_: object) -> UnreadTensor:
    return UnreadTensor(kind)


_TENSOR = "torch.Tensor"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api"
_KEPT = {
    "torch": "device",
    "torch.distributed.remote_device": "_remote_device",
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharded_tensor.shard": "Shard",
    "torch.distributed._shard.sharded_tensor.metadata": "ShardedTensorMetadata TensorProperties",
    "torch.distributed._shard.sharding_spec.api": "EnumerableShardingSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    "torch.distributed._mesh_layout": "_MeshLayout _FlatLayout",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed._tensor.device_mesh": "DeviceMesh",
    "torch.distributed._tensor.placement_types": "DTensorSpec TensorMeta Shard Replicate _Partial",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec ShardOrderEntry TensorMeta",
    "torch.distributed.tensor.placement_types": "Shard _StridedShard Replicate Partial",
}


def _rebuild_subclass(
    function: object, kind: object, args: object, state: object
) -> TensorView | UnreadTensor | DTensorShard | ShardedTensorShard:
    """Returns a tensor with attributes, of another class, a DTensor or a ShardedTensor."""
    function = function.function if isinstance(function, SafeCallable) else function
    label = kind.label if isinstance(kind, type) and issubclass(kind, OpaqueObject) else ""
    if (kind == _TENSOR or label) and isinstance(args, tuple):
        made = function(*args) if function in (_rebuild, _rebuild_v3, _rebuild_parameter) else None
        if label and not isinstance(made, TensorView):
            return UnreadTensor(f"a tensor of the class {label}")
        if not isinstance(made, (TensorView, UnreadTensor)):
            raise TypeError("not a tensor")
        return made
    shape, dtype = (args[2], args[1]) if isinstance(args, tuple) and len(args) > 2 else (None, None)
    if (
        not isinstance(shape, tuple)
        or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
        or len(shape) > 64
    ):
        raise ValueError("not the shape of a sharded tensor")
    if kind == _SHARDED_TENSOR:
        shards = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(shards, list) or not isinstance(dtype, DType):
            raise TypeError("not a ShardedTensor")
        return ShardedTensorShard(
            tuple(_piece(shard, dtype, len(shape)) for shard in shards), dtype, tuple(shape)
        )
    # the state may be a pair: attributes and slots
    tables = [
        table
        for table in (state if isinstance(state, tuple) else (state,))
        if isinstance(table, dict)
    ]
    spec, local = (
        next((t[name] for t in tables if name in t), None) for name in ("_spec", "_local_tensor")
    )
    if not isinstance(spec, OpaqueObject) or not isinstance(local, TensorView):
        raise TypeError("not a DTensor")
    return DTensorShard(local, tuple(shape), spec)


def _piece(shard: object, dtype: DType, ndim: int) -> tuple[TensorView, Box]:
    metadata = shard.state.get("metadata") if isinstance(shard, OpaqueObject) else None
    if not isinstance(shard, OpaqueObject) or not isinstance(metadata, OpaqueObject):
        raise TypeError("not a shard")
    view, offsets, sizes = (
        shard.state.get("tensor"),
        metadata.state.get("shard_offsets"),
        metadata.state.get("shard_sizes"),
    )
    for numbers in (offsets, sizes):
        if (
            not isinstance(numbers, list)
            or len(numbers) != ndim
            or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
        ):
            raise ValueError("not a shard's box")
    if (
        not isinstance(view, TensorView)
        or view.dtype != dtype
        or list(view.sizes) != sizes
        or not isinstance(offsets, list)
    ):
        raise ValueError("a shard has another shape or type than it says")
    return view, Box(tuple(offsets), view.sizes)


def _rebuild(
    storage: object = None,
    offset: object = 0,
    sizes: object = (),
    strides: object = (),
    *more: object,
    dtype: object = None,
) -> TensorView | UnreadTensor:
    pending = tuple(
        name
        for about in more
        if isinstance(about, dict)
        for name in ("conj", "neg")
        if about.get(name)
    )
    found = dtype if dtype is not None else storage.dtype if isinstance(storage, Storage) else None
    if not isinstance(storage, Storage) or not isinstance(found, DType):
        raise TypeError("not a tensor's storage")
    if (
        type(offset) is not int
        or not isinstance(sizes, tuple)
        or not isinstance(strides, tuple)
        or not len(sizes) == len(strides) <= 64
    ):
        raise ValueError("not a tensor's shape")
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (offset, *sizes, *strides)):
        raise ValueError("not a tensor's numbers")
    view = TensorView(storage, found, offset, tuple(sizes), tuple(strides))
    if not pending:
        return view
    kind = "a conjugated or negated view: save its resolve_conj() and resolve_neg()"
    return UnreadTensor(kind, view, pending)


def _rebuild_v3(*args: object) -> TensorView | UnreadTensor:
    return _rebuild(*args[:6], *args[7:], dtype=args[6])


def _rebuild_parameter(tensor: object, *_: object) -> object:
    return tensor


def _persistent(pid: object) -> Storage:
    if (
        not isinstance(pid, tuple)
        or len(pid) != 5
        or pid[0] != "storage"
        or type(pid[2]) is not str
        or type(pid[4]) is not int
    ):
        raise ValueError("not a storage")
    return Storage(pid[2], pid[1] if isinstance(pid[1], DType) else None, pid[4])


def plain_path(path: Path) -> Path:
    """Returns a path with exact strings and ints, as in torch's DCP."""
    return tuple(str(key) if isinstance(key, str) else int(key) for key in path)


def unpickled(data: bytes, where: str, is_foreign: Callable[[str], object]) -> Any:
    """Returns the value that `data.pkl` builds; `is_foreign` gets the name of each unknown global.

    Raises:
        FormatError: the pickle is malformed, or built to exhaust its reader.
    """
    return load_pickle(
        data, _Globals(is_foreign), f"data.pkl in {where}", persistent_load=_persistent
    )


def most_nodes(nbytes: int) -> int:
    """Returns how many entries the state of a pickle of `nbytes` bytes may have."""
    return min(_MAX_NODES, _FEW_NODES + _NODES_PER_BYTE * nbytes)


def leaves(root: object, where: str, most: int = _MAX_NODES) -> Iterator[tuple[Path, object]]:
    """Yields tensors, values and stand-ins with their paths of keys, flattened as in DCP.

    It descends into dicts, and into lists and tuples that contain a tensor or a non-empty dict. Any
    other list is one value, as stock torch expects it. An empty dict below the root is also one
    value, although DCP itself would drop it.

    Raises:
        FormatError: there are too many entries, or they are nested too deep.
    """
    waiting: list[tuple[Path, object]] = [((), root)]
    weights: dict[int, int] = {}
    seen = 0
    while waiting:
        path, value = waiting.pop()
        seen += max(1, weight := _weigh(value, weights, 0, where))
        if seen > most or len(path) > _MAX_DEPTH:
            raise FormatError(
                f"a state dict is too large or too deep: {seen:,} entries, {len(path)} levels"
                f" ({where})"
            )
        if isinstance(value, dict) and (value or not path):
            waiting += [((*path, _key(key)), item) for key, item in reversed(value.items())]
        elif isinstance(value, (list, tuple)) and type(value) in (list, tuple) and not weight:
            position = TupleItem if type(value) is tuple else int
            waiting += [
                ((*path, position(number)), item)
                for number, item in reversed(list(enumerate(value)))
            ]
        else:
            yield path, shown_value(value)


def shown_value(value: object) -> object:
    """Returns a value as people write it: a device instead of its stand-in."""
    if (
        isinstance(value, OpaqueObject)
        and type(value).__name__ == "device"
        and 1 <= len(value.arguments) <= 2
    ):
        kind, index = (*value.arguments, None)[:2]
        if isinstance(kind, str) and (index is None or type(index) is int):
            return Device(kind, index)
    return value


def python_numbers(value: Any) -> Any:
    """Returns a value with Python's numbers in place of NumPy's."""
    if isinstance(value, NumpyNumber | NumpyComplex):
        return value.value
    return type(value)(map(python_numbers, value)) if type(value) in (list, tuple) else value


def has_numpy(value: object) -> bool:
    """Tells whether a plain value contains NumPy's numbers."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return any(map(has_numpy, value))
    return isinstance(value, NumpyNumber)


def kind_of(value: object) -> str:
    """Returns the type name of a value, or of the object that it stands in for."""
    return (value.label if isinstance(value, OpaqueObject) else "") or type(value).__name__


def _key(key: object) -> str:
    """Returns a dict's key as a string, as DCP makes it.

    A key of an unknown type becomes the name of its type.
    """
    if type(key) is str:
        return key
    is_plain = type(key) in SCALAR_KEYS or (
        isinstance(key, tuple) and all(type(part) in SCALAR_KEYS for part in key)
    )
    return _made_key(str(key), key) if is_plain else f"<{type(key).__name__}>"


def _weigh(value: object, known: dict[int, int], depth: int, where: str) -> int:
    """Returns the number of scalars in a plain value, plus one per list; 0 if it is not plain.

    A list may contain another list twice, and that list a third one twice. The weight of each list
    is therefore remembered, and each list is examined once.
    """
    if not isinstance(value, (list, tuple)) or type(value) not in (list, tuple):
        return int(is_scalar(value) or (isinstance(value, dict) and not value))
    if depth > _MAX_DEPTH:
        raise FormatError(f"a state dict is too large or too deep: {depth} levels ({where})")
    found = known.get(id(value))
    if found is None:
        weights = [_weigh(item, known, depth + 1, where) for item in value]
        found = known[id(value)] = 1 + sum(weights) if all(weights) else 0
    return found


def is_number(key: object) -> bool:
    """Tells whether a key is a string of a few digits, such as an optimizer's numbers."""
    return isinstance(key, str) and len(key) < 10 and key.isascii() and key.isdigit()


def is_scalar(value: object) -> bool:
    """Tells whether a value is a string, a number, bytes or None."""
    return value is None or type(value) in (
        str,
        int,
        float,
        bool,
        bytes,
        complex,
        NumpyComplex,
        NumpyNumber,
    )


def is_value(value: object) -> bool:
    """Tells whether an item of `leaves` is a plain value.

    Plain values are scalars, lists, tuples, sets, bytearrays, counters, dtypes, devices and empty
    dicts.
    """
    is_plain = is_scalar(value) or type(value) in (
        list,
        tuple,
        bytearray,
        set,
        CounterValue,
        DType,
        Device,
    )
    return is_plain or (isinstance(value, dict) and not value)


# ---- fields of a state whose writer is known -----------------------------------------------------


class Malformed(Exception):
    """A field of a file has another type or shape than its writer writes."""


def want(table: object, key: str, *kinds: type) -> Any:
    """Returns a field of a dict.

    Raises:
        Malformed: `table` is not a dict, or the field is missing or of another type.
    """
    value = table.get(key) if isinstance(table, dict) else None
    if not isinstance(value, kinds):
        raise Malformed(f"{key} is {type(value).__name__}")
    return value


def shapes_of(table: object) -> dict[str, tuple[int, ...]]:
    """Returns shapes by name.

    Raises:
        Malformed: `table` is not a dict of shapes.
    """
    if not isinstance(table, dict):
        raise Malformed("shapes are no dict")
    for name, shape in table.items():
        if (
            type(name) is not str
            or not isinstance(shape, tuple)
            or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape)
        ):
            raise Malformed("a shape is none")
    return table
