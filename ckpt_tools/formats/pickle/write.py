"""Writes pickles of plain values and of tensors' descriptions, as torch's own pickler would.

Source: CPython's `pickletools`; torch 2.13 `torch/_utils.py`, `torch/serialization.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ckpt_tools.core.box import row_major_strides
from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import PlanError, printable

_MAX_DEPTH = 64


class TensorRecord(NamedTuple):
    """A contiguous tensor whose bytes are the record `data/{key}` of its archive."""

    dtype: DType
    sizes: tuple[int, ...]
    key: str


class Device(NamedTuple):
    """A `torch.device`: its type, and its number if it has one."""

    kind: str
    number: int | None = None


class CounterValue:
    """A `collections.Counter`, such as the milestones of a scheduler.

    As a dict's key it hashes by identity; its items are not hashed.
    """

    __slots__ = ("items",)

    def __init__(self, items: tuple[tuple[Any, int], ...]) -> None:
        self.items = items

    def __repr__(self) -> str:
        return f"Counted({self.items!r})"


class GlobalCall(NamedTuple):
    """An object that a pickle makes by a call: `module.name(*arguments)`, and then sets a state.

    With `is_new`, it calls only `__new__` of the class.
    """

    module: str
    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    is_new: bool = False


class GlobalName(NamedTuple):
    """A global itself: a class, a function, a dtype."""

    module: str
    name: str


class SharedObject(NamedTuple):
    """An object that a pickle makes once and refers to by number afterwards.

    The number is `key`, below 256.
    """

    key: int
    value: Any


class Opcodes(NamedTuple):
    """The opcodes that push one object: bytes as they are, with values in between."""

    parts: tuple[Any, ...]


def integer(value: int) -> bytes:
    """Returns the opcodes that push an int."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def pickled(value: Any) -> bytes:
    """Returns a pickle of protocol 2.

    The value may contain dicts, lists, tuples, sets, strings, bytes, numbers, None, dtypes, and the
    classes above.

    Raises:
        PlanError: the value contains anything else.
    """
    return b"\x80\x02" + opcodes(value) + b"."


def opcodes(value: Any) -> bytes:
    """Returns the opcodes that push a value, without the start and end of a pickle.

    Raises:
        PlanError: as for `pickled`.
    """
    return _push(value, 0, set())


def _push(value: Any, depth: int, known: set[int]) -> bytes:
    if depth > _MAX_DEPTH:
        raise PlanError(f"a state is nested too deep to be written: {depth} levels")
    if isinstance(value, TensorRecord):
        return _push_tensor(value)
    if isinstance(value, (GlobalCall, GlobalName, SharedObject, Opcodes)):
        return _push_special(value, depth, known)
    if isinstance(value, dict):
        return (
            b"}("
            + b"".join(_push(part, depth + 1, known) for item in value.items() for part in item)
            + b"u"
        )
    if type(value) in (list, tuple):
        parts = b"".join(_push(item, depth + 1, known) for item in value)
        return b"](" + parts + b"e" if type(value) is list else b"(" + parts + b"t"
    return _push_scalar(value)


def _push_special(
    value: GlobalCall | GlobalName | SharedObject | Opcodes, depth: int, known: set[int]
) -> bytes:
    if isinstance(value, GlobalName):
        return f"c{value.module}\n{value.name}\n".encode()
    if isinstance(value, Opcodes):
        return b"".join(
            part if type(part) is bytes else _push(part, depth, known) for part in value.parts
        )
    if isinstance(value, SharedObject):
        if value.key in known:
            return b"h" + bytes([value.key])
        known.add(value.key)
        return _push(value.value, depth, known) + b"q" + bytes([value.key])
    made = (
        opcodes(GlobalName(value.module, value.name))
        + _push(value.arguments, depth + 1, known)
        + (b"\x81" if value.is_new else b"R")
    )
    return made if value.state is None else made + _push(value.state, depth + 1, known) + b"b"


_CALLS: dict[
    type, Callable[[Any], GlobalCall | GlobalName]
] = {  # calls that torch loads with weights_only
    bytes: lambda value: GlobalCall("_codecs", "encode", (value.decode("latin1"), "latin1")),
    bytearray: lambda value: GlobalCall("builtins", "bytearray", (bytes(value),)),
    complex: lambda value: GlobalCall("builtins", "complex", (value.real, value.imag)),
    set: lambda value: GlobalCall("builtins", "set", (list(value),)),
    CounterValue: lambda value: GlobalCall("collections", "Counter", (dict(value.items),)),
    Device: lambda value: GlobalCall(
        "torch", "device", (value.kind,) if value.number is None else tuple(value)
    ),
    DType: lambda value: GlobalName("torch", value.name),
}


def _push_scalar(value: Any) -> bytes:
    if value is None or value is True or value is False:
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if type(value) is int:
        return integer(value)
    if type(value) is float:
        return b"G" + struct.pack(">d", value)
    if (call := _CALLS.get(type(value))) is not None:
        return opcodes(call(value))
    if type(value) is str:
        raw = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(raw)) + raw
    raise PlanError(f"cannot write a value of this type: {printable(type(value).__name__)}")


def _push_tensor(tensor: TensorRecord) -> bytes:
    """Returns the call that rebuilds a contiguous tensor over its storage."""
    dtype, sizes = tensor.dtype, tensor.sizes
    is_untyped, numel = dtype.storage_class == "UntypedStorage", math.prod(sizes)
    storage = (
        GlobalName("torch.storage", "UntypedStorage")
        if is_untyped
        else GlobalName("torch", dtype.storage_class)
    )
    count = numel * dtype.itemsize if is_untyped else numel
    body = (
        b"("
        + opcodes(("storage", storage, tensor.key, "cpu", count))
        + b"QK\x00"
        + _sizes(sizes)
        + _sizes(row_major_strides(sizes))
    )
    body += b"\x89ccollections\nOrderedDict\n)R" + (
        opcodes(GlobalName("torch", dtype.name)) if is_untyped else b""
    )
    return (
        b"ctorch._utils\n_rebuild_tensor_v" + (b"3" if is_untyped else b"2") + b"\n" + body + b"tR"
    )


def _sizes(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"
