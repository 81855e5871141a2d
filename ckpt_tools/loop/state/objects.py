"""Encodes plain values of a state as types that load without running code, and decodes them.

`torch.load(weights_only=True)` reads numbers, strings, lists, tuples, dicts and tensors. Any other
supported type is stored as a dict with the key `__ckpt_tools__`, which names the type;
`docs/formats/objects.md` lists them. A save refuses unsupported types; a load never has to.

Imports torch.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import io
import pathlib
import random
import types
import uuid
import zoneinfo
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from ckpt_tools.errors import FormatError, PlanError, printable

TAG = "__ckpt_tools__"
Key = tuple[str | int, ...]
MAX_DEPTH = 64
_INT64 = range(-(1 << 63), 1 << 63)
_SCALARS = frozenset({type(None), bool, float, str})
_NUMBERS = _SCALARS | {int}
# torch's own reader supports these
_NATIVE = (complex, bytes, bytearray, torch.Size, torch.dtype, torch.device, torch.layout)
_NUMPY_KINDS = "biufcSUmM?"
_FACTORIES = {
    factory.__name__: factory for factory in (int, float, str, bool, list, dict, set, tuple)
}
Replace = Callable[[torch.Tensor, Key], Any]
Take = Callable[[Any, Key], dict[str, Any]]


def shown(path: Key) -> str:
    """Returns the Python expression for a path of keys: `state['data']['sampler'][0]`."""
    return "state" + "".join(
        f"[{printable(key)!r}]" if isinstance(key, str) else f"[{key}]" for key in path
    )


def has_only_scalars(value: Any) -> bool:
    """Tells whether a list or tuple holds only numbers and strings.

    Such values, for example a long history, need no walk through their items.
    """
    return isinstance(value, (list, tuple)) and set(map(type, value)) <= _NUMBERS


# ---- generators ----------------------------------------------------------------------------------


def is_generator(value: object) -> bool:
    """Tells whether a value is a random generator, whose state is saved and set in place."""
    return isinstance(
        value,
        (
            torch.Generator,
            np.random.Generator,
            np.random.RandomState,
            np.random.BitGenerator,
            random.Random,
        ),
    )


def generator_state(generator: Any) -> Any:
    """Returns the state of a random generator as plain values."""
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state().clone()}
    if isinstance(generator, np.random.Generator):
        return {"numpy": generator.bit_generator.state}
    if isinstance(generator, np.random.RandomState):
        return {"numpy": generator.get_state(legacy=False)}
    return (
        {"numpy": generator.state}
        if isinstance(generator, np.random.BitGenerator)
        else {"python": generator.getstate()}
    )


def set_generator_state(generator: Any, state: Mapping[str, Any], path: Key) -> None:
    """Sets the state of a random generator.

    Raises:
        PlanError: the state is that of another kind of generator.
    """
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(state["torch"])
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state["numpy"]
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state["numpy"])
        elif isinstance(generator, np.random.BitGenerator):
            generator.state = state["numpy"]
        else:
            generator.setstate(state["python"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"{shown(path)} holds a {type(generator).__name__}, and the checkpoint has the state of"
            f" another generator: {error}",
            hint="make the same kind of generator as the job that saved",
        ) from error


# ---- to plain values -----------------------------------------------------------------------------


def encode_object(value: Any, path: Key, replace: Replace | None = None) -> Any:
    """Returns a value in the types that `torch.load(weights_only=True)` reads.

    Args:
        value: of the supported types, nested.
        path: its keys from the state's root, for messages.
        replace: returns a replacement for each tensor. If None, tensors stay, on the CPU.

    Raises:
        PlanError: a type is not supported, or containers are nested more than 64 deep.
    """
    kind = type(value)
    if kind in _SCALARS or (kind is int and value in _INT64):
        return value
    if len(path) > MAX_DEPTH:
        raise PlanError(
            f"cannot save {shown(path[:4])}…: it is nested more than {MAX_DEPTH} deep, or contains"
            " itself"
        )
    if kind in (list, tuple):
        if (kinds := set(map(type, value))) <= _SCALARS or (
            kinds == {int} and min(value) in _INT64 and max(value) in _INT64
        ):
            return value
        return kind(
            encode_object(item, (*path, number), replace) for number, item in enumerate(value)
        )
    if kind is dict and TAG not in value and all(type(key) is str for key in value):
        return {key: encode_object(item, (*path, key), replace) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return replace(value, path) if replace else _tensor(value, path)
    if kind in _NATIVE and value != b"":  # pickle writes b"" as a call that torch refuses
        return value
    found = next(
        (
            _ENCODERS[k]
            for k in (kind, np.generic, pathlib.PurePath)
            if k in _ENCODERS and (k is kind or isinstance(value, k))
        ),
        None,
    )
    if found is None:
        raise PlanError(f"cannot save {shown(path)}: {_describe(value)}", hint=_advice(value))
    return _tagged(value, path, replace, *found)


def _tagged(
    value: Any, path: Key, replace: Replace | None, name: str, take: Take
) -> dict[str, Any]:
    """Returns the tagged dict that represents a value."""
    fields = {
        k: v if k == "data" else encode_object(v, path, replace)
        for k, v in take(value, path).items()
    }
    if isinstance(value, Mapping):
        fields["items"] = [
            [encode_object(k, path, replace), encode_object(v, (*path, str(k)), replace)]
            for k, v in value.items()
        ]
    return {TAG: name} | fields


def _tensor(value: torch.Tensor, path: Key) -> torch.Tensor:
    if isinstance(value, (DTensor, ShardedTensor)):
        raise PlanError(
            f"cannot save {shown(path)}: a sharded tensor in a value of one rank",
            hint="put it into a dict or a list",
        )
    if (
        type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        or value.layout is not torch.strided
        or value.is_meta
    ):
        raise PlanError(
            f"cannot save {shown(path)}: a tensor of this kind: {type(value).__name__},"
            f" {value.layout}, {value.device}"
        )
    plain = value.detach().cpu()
    return (
        plain.clone()
        if plain.untyped_storage().nbytes() > plain.nbytes or plain.data_ptr() == value.data_ptr()
        else plain
    )


def _describe(value: Any) -> str:
    kind = type(value)
    return (
        f"values of the type {kind.__module__}.{kind.__qualname__} cannot be stored without a"
        " pickle that runs code"
    )


def _advice(value: Any) -> str:
    if is_dataclass(value):
        return "save dataclasses.asdict(value), and make the object again from the dict"
    if isinstance(value, Enum):
        return "save value.name, and look the member up again by Class[name]"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "save value._asdict(), and make the named tuple again from the dict"
    if hasattr(value, "state_dict"):
        return (
            "an object with state_dict and load_state_dict stands in dicts, lists and tuples of the"
            " state, nowhere else"
        )
    if isinstance(value, (str, int, float, dict, list, tuple, set)):
        base = next(b for b in (str, int, float, dict, list, tuple, set) if isinstance(value, b))
        return f"save {base.__name__}(value)"
    return (
        "give its class state_dict and load_state_dict, or save numbers, texts, lists, dicts,"
        " tensors and arrays"
    )


def _dict(_: Any, __: Key) -> dict[str, Any]:
    return {}  # `encode_object` adds the items of every dict


def _namespace(value: Any, _: Key) -> dict[str, Any]:
    return {"items": [[key, item] for key, item in vars(value).items()]}


def _array(value: Any, path: Key) -> dict[str, Any]:
    array = np.asarray(value)
    if (
        array.dtype.kind not in _NUMPY_KINDS
        or array.dtype.hasobject
        or type(value) is np.ma.MaskedArray
    ):
        raise PlanError(f"cannot save {shown(path)}: a NumPy array of this type: {array.dtype}")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": _raw(array.tobytes())}


def _raw(data: bytes) -> torch.Tensor | None:
    """Returns bytes as a tensor, which an archive stores unchanged; None for no bytes."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None


def _bytes(data: torch.Tensor | None) -> bytes:
    return b"" if data is None else data.numpy().tobytes()


def _datetime(value: Any, path: Key) -> dict[str, Any]:
    zone = value.tzinfo
    if zone is not None and not isinstance(zone, (dt.timezone, zoneinfo.ZoneInfo)):
        raise PlanError(
            f"cannot save {shown(path)}: a time with a zone of the type {type(zone).__name__}",
            hint="use datetime.UTC",
        )
    return {"text": value.replace(tzinfo=None).isoformat(), "fold": value.fold, "zone": zone}


def _defaultdict(value: Any, path: Key) -> dict[str, Any]:
    factory = value.default_factory
    if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise PlanError(
            f"cannot save {shown(path)}: a defaultdict that calls {factory!r}",
            hint="save dict(value)",
        )
    return {"factory": factory and factory.__name__}


def _text(value: Any, _: Key) -> dict[str, Any]:
    return {"text": str(value)}


def _items(value: Any, _: Key) -> dict[str, Any]:
    return {"items": list(value)}


def _zone(value: Any, path: Key) -> dict[str, Any]:
    if isinstance(value, zoneinfo.ZoneInfo):
        if value.key is None:
            raise PlanError(f"cannot save {shown(path)}: a time zone without a name")
        return {"text": value.key}
    return {"seconds": value.utcoffset(None).total_seconds(), "text": value.tzname(None)}


_ENCODERS: dict[type, tuple[str, Take]] = {
    int: ("int", lambda v, _: {"hex": f"{v:x}"}),
    bytes: ("bytes", lambda v, _: {"data": _raw(v)}),
    bytearray: ("bytearray", lambda v, _: {"data": _raw(v)}),
    dict: ("dict", _dict),
    collections.OrderedDict: ("OrderedDict", _dict),
    collections.Counter: ("Counter", _dict),
    collections.defaultdict: ("defaultdict", _defaultdict),
    collections.deque: ("deque", lambda v, _: {"items": list(v), "maxlen": v.maxlen}),
    set: ("set", _items),
    frozenset: ("frozenset", _items),
    range: ("range", lambda v, _: {"items": [v.start, v.stop, v.step]}),
    slice: ("slice", lambda v, _: {"items": [v.start, v.stop, v.step]}),
    np.ndarray: ("numpy.ndarray", _array),
    np.generic: ("numpy.generic", _array),
    pathlib.PurePath: ("path", lambda v, _: {"class": type(v).__name__, "text": str(v)}),
    dt.datetime: ("datetime", _datetime),
    dt.time: ("time", _datetime),
    dt.date: ("date", lambda v, _: {"text": v.isoformat()}),
    dt.timedelta: ("timedelta", lambda v, _: {"items": [v.days, v.seconds, v.microseconds]}),
    dt.timezone: ("timezone", _zone),
    zoneinfo.ZoneInfo: ("zoneinfo", _zone),
    decimal.Decimal: ("Decimal", _text),
    fractions.Fraction: ("Fraction", _text),
    uuid.UUID: ("UUID", _text),
    types.SimpleNamespace: ("SimpleNamespace", _namespace),
    Namespace: ("Namespace", _namespace),
    io.BytesIO: ("BytesIO", lambda v, _: {"data": _raw(v.getvalue()), "at": v.tell()}),
    type(np.dtype("f4")): ("numpy.dtype", lambda v, _: {"text": v.str}),
}
_ENCODERS |= {
    type(np.dtype(code)): _ENCODERS[type(np.dtype("f4"))] for code in "?bhilqBHILQefdgFDGSUmM"
}


# ---- from plain values ---------------------------------------------------------------------------


def decode_object(value: Any, tensor: Callable[[str], Any] | None = None) -> Any:
    """Returns the value that `encode_object` was given.

    Args:
        value: a result of `encode_object`. Types without a tag stay unchanged.
        tensor: returns the tensor of a name, for values whose tensors are separate entries.

    Raises:
        FormatError: a tag is unknown, or its fields are not as `encode_object` writes them.
    """
    kind = type(value)
    if kind in (list, tuple):
        if has_only_scalars(value):
            return value
        return kind(decode_object(item, tensor) for item in value)
    if kind is not dict:
        return value
    if TAG not in value:
        return {key: decode_object(item, tensor) for key, item in value.items()}
    name = value[TAG]
    try:
        if name == "tensor" and tensor is not None:
            return tensor(value["name"])
        return _DECODERS[name]({k: decode_object(v, tensor) for k, v in value.items() if k != TAG})
    except FormatError:
        raise
    except Exception as error:  # a malformed field may make a constructor raise any type
        raise FormatError(
            "an object of the checkpoint is malformed, or written by a newer version:"
            f" {printable(str(name))}: {printable(repr(error))}"
        ) from error


def _pairs(fields: Mapping[str, Any]) -> dict[Any, Any]:
    return {key: item for key, item in fields["items"]}  # noqa: C416  # each is a list of two


def _make_array(fields: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    dtype, shape = np.dtype(fields["dtype"]), tuple(fields["shape"])
    if (
        dtype.kind not in _NUMPY_KINDS
        or dtype.hasobject
        or any(type(n) is not int or n < 0 for n in shape)
    ):
        raise ValueError(f"not an array: {dtype} {shape}")
    data = _bytes(fields["data"])
    return np.frombuffer(data, dtype).reshape(shape).copy() if data else np.empty(shape, dtype)


def _make_path(fields: Mapping[str, Any]) -> pathlib.PurePath:
    name = fields["class"]
    if name not in (
        "PurePath",
        "PurePosixPath",
        "PureWindowsPath",
        "Path",
        "PosixPath",
        "WindowsPath",
    ):
        raise ValueError(f"not a path: {name}")
    return (
        pathlib.Path(fields["text"])
        if not name.startswith("Pure")
        else getattr(pathlib, name)(fields["text"])
    )


def _make_time(kind: type[dt.datetime] | type[dt.time]) -> Callable[[Mapping[str, Any]], Any]:
    return lambda f: kind.fromisoformat(f["text"]).replace(tzinfo=f["zone"], fold=f["fold"])


def _make_defaultdict(fields: Mapping[str, Any]) -> Any:
    factory = fields["factory"]
    return collections.defaultdict(factory and _FACTORIES[factory], _pairs(fields))


def _make_buffer(fields: Mapping[str, Any]) -> io.BytesIO:
    buffer = io.BytesIO(_bytes(fields["data"]))
    buffer.seek(fields["at"])
    return buffer


def _make_zone(fields: Mapping[str, Any]) -> dt.timezone:
    offset = dt.timedelta(seconds=fields["seconds"])
    plain = dt.timezone(offset)
    return plain if plain.tzname(None) == fields["text"] else dt.timezone(offset, fields["text"])


_DECODERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "int": lambda f: int(f["hex"], 16),
    "bytes": lambda f: _bytes(f["data"]),
    "bytearray": lambda f: bytearray(_bytes(f["data"])),
    "dict": _pairs,
    "OrderedDict": lambda f: collections.OrderedDict(_pairs(f)),
    "Counter": lambda f: collections.Counter(_pairs(f)),
    "defaultdict": _make_defaultdict,
    "deque": lambda f: collections.deque(f["items"], f["maxlen"]),
    "set": lambda f: set(f["items"]),
    "frozenset": lambda f: frozenset(f["items"]),
    "range": lambda f: range(*f["items"]),
    "slice": lambda f: slice(*f["items"]),
    "numpy.ndarray": _make_array,
    "numpy.generic": lambda f: _make_array(f)[()],
    "numpy.dtype": lambda f: np.dtype(f["text"]),
    "path": _make_path,
    "datetime": _make_time(dt.datetime),
    "time": _make_time(dt.time),
    "date": lambda f: dt.date.fromisoformat(f["text"]),
    "timedelta": lambda f: dt.timedelta(*f["items"]),
    "timezone": _make_zone,
    "zoneinfo": lambda f: zoneinfo.ZoneInfo(f["text"]),
    "Decimal": lambda f: decimal.Decimal(f["text"]),
    "Fraction": lambda f: fractions.Fraction(f["text"]),
    "UUID": lambda f: uuid.UUID(f["text"]),
    "SimpleNamespace": lambda f: types.SimpleNamespace(**_pairs(f)),
    "Namespace": lambda f: Namespace(**_pairs(f)),
    "BytesIO": _make_buffer,
}


@dataclass(slots=True)
class Structure:
    """An encoded value whose tensors are separate entries; it has their names instead."""

    encoded: Any
