"""Plain values that a pickle builds by calling something: bytes, sets, numbers of NumPy; and the
stand-in for all other objects.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ckpt_tools.formats.pickle.write import CounterValue

SCALAR_KEYS = (str, int, float, bool, type(None))


class NumpyNumber:
    """A NumPy number, as Python has it. Each is a dict's key of its own: numbers that hash alike
    could be made at will.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class NumpyComplex:
    """A complex number; see `NumpyNumber`."""

    __slots__ = ("value",)

    def __init__(self, real: float, imaginary: float) -> None:
        self.value = complex(real, imaginary)


class OpaqueObject:
    """Stands in for an object: takes anything, keeps its arguments and its state, and does nothing.

    A pickle may also fill it as a list or a dict; that is not kept.
    """

    label = ""  # the name of the type it stands in for, where that is not known here
    arguments: tuple[Any, ...]
    state: Mapping[str, Any]

    def __new__(cls, *args: object) -> OpaqueObject:
        made = object.__new__(cls)
        made.arguments, made.state = args, {}
        return made

    def __init__(self, *args: object) -> None:
        del args

    def __setitem__(self, key: object, value: object) -> None:
        del key, value

    def append(self, value: object) -> None:
        """Takes an item, and does not keep it."""
        del value

    def extend(self, values: object) -> None:
        """Takes items, and does not keep them."""
        del values

    def __setstate__(self, state: object) -> None:
        # attributes, slots
        tables = [
            part
            for part in (state if isinstance(state, tuple) else (state,))
            if isinstance(part, dict)
        ]
        self.state = {str(key): value for table in tables for key, value in table.items()}


def plain_types() -> dict[tuple[str, str], Any]:
    """Returns what makes values that torch loads with weights_only, and NumPy's numbers."""
    made: dict[tuple[str, str], Any] = {
        ("_codecs", "encode"): _bytes_of,
        ("collections", "Counter"): _counter,
    }
    for module in ("builtins", "__builtin__"):  # the latter in protocol 2
        made |= {
            (module, "bytearray"): _bytearray,
            (module, "complex"): _complex,
            (module, "set"): _set,
        }
    for module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray"):
        made[module, "_reconstruct"] = type("ndarray", (OpaqueObject,), {"label": "numpy.ndarray"})
        made |= {
            (module, "dtype"): type(
                "dtype", (OpaqueObject,), {"label": "numpy.dtype", "__setstate__": _keep_order}
            ),
            (module, "scalar"): _numpy_number,
        }
    return made


def _bytes_of(text: object = "", encoding: object = "") -> object:
    """Returns the bytes that protocol 2 writes as a text of Latin 1."""
    if not isinstance(text, str) or encoding != "latin1":
        raise TypeError("not bytes as a text")
    return text.encode("latin1")


def _bytearray(data: object = b"", *more: object) -> object:
    if not isinstance(data, bytes) or more:  # a number would be a length
        raise TypeError("not the contents of a bytearray")
    return bytearray(data)


def _complex(real: object = 0.0, imaginary: object = 0.0) -> object:
    if not isinstance(real, float) or not isinstance(imaginary, float):
        raise TypeError("not the parts of a complex number")
    return NumpyComplex(real, imaginary)


def _set(items: object = ()) -> object:
    """Returns a set of scalars; a stand-in for any other, whose items could be slow to compare."""
    if not isinstance(items, (list, tuple)) or not all(type(item) in SCALAR_KEYS for item in items):
        return type("Foreign", (OpaqueObject,), {"label": "set"})(items)
    return set(items)


def _counter(table: object = None) -> object:
    """Returns a counter of scalars; a stand-in for any other."""
    table = {} if table is None else table
    if not isinstance(table, dict) or not all(
        type(key) in SCALAR_KEYS and type(count) is int for key, count in table.items()
    ):
        return type("Foreign", (OpaqueObject,), {"label": "collections.Counter"})(table)
    return CounterValue(tuple(table.items()))


def _keep_order(dtype: OpaqueObject, state: object) -> None:
    """Keeps the order of bytes that a NumPy dtype has in its state."""
    dtype.state = {"order": state[1] if isinstance(state, tuple) and len(state) > 1 else None}


_NUMPY_NUMBERS = {
    "f2": "<e",
    "f4": "<f",
    "f8": "<d",
    "i1": "<b",
    "i2": "<h",
    "i4": "<i",
    "i8": "<q",
    "u1": "<B",
    "u2": "<H",
    "u4": "<I",
    "u8": "<Q",
    "b1": "<?",
}


def _numpy_number(dtype: object = None, data: object = None) -> object:
    """Returns a NumPy number; a stand-in for one of another type."""
    code = dtype.arguments[0] if isinstance(dtype, OpaqueObject) and dtype.arguments else None
    order = dtype.state.get("order") if isinstance(dtype, OpaqueObject) else None
    is_known = (
        isinstance(code, str)
        and code in _NUMPY_NUMBERS
        and isinstance(order, str)
        and order in ("<", "|")
    )
    if (
        not is_known
        or not isinstance(data, bytes)
        or len(data) != struct.calcsize(_NUMPY_NUMBERS[str(code)])
    ):
        return type("Foreign", (OpaqueObject,), {"label": "numpy.generic"})(dtype, data)
    return NumpyNumber(struct.unpack(_NUMPY_NUMBERS[str(code)], data)[0])
