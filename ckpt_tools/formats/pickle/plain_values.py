"""Plain values that a pickle builds by calls: bytes, sets, NumPy's numbers.

The stand-in for all other objects is here too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_tools.formats.pickle.write import CounterValue

SCALAR_KEYS = (str, int, float, bool, type(None))
_LONG_INT, _MANY_LONGS = 1 << 40, 1000


class NumpyNumber:
    """A NumPy number as a Python number.

    Each instance is a separate key of a dict, because a file could contain many numbers with the
    same hash.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class NumpyComplex:
    """A complex number; see `NumpyNumber`."""

    __slots__ = ("value",)

    def __init__(self, real: float, imaginary: float) -> None:
        self.value = complex(real, imaginary)


class Inert(type):
    """The type of classes that a pickle may use, but not change.

    The opcode BUILD sets attributes of any value.
    """

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"it cannot be changed: {name}")

    def __delattr__(cls, name: str) -> None:
        raise AttributeError(f"it cannot be changed: {name}")


class OpaqueObject(metaclass=Inert):
    """A stand-in for an object: it keeps its arguments and its state, and does nothing.

    It accepts anything. A pickle may also fill it as a list or a dict; these items are not kept.
    """

    label = ""  # the name of the unknown type that it stands in for
    arguments: tuple[Any, ...]
    _given: object

    def __new__(cls, *args: object) -> OpaqueObject:
        made = object.__new__(cls)
        made.arguments, made._given = args, {}
        return made

    @property
    def state(self) -> Mapping[str, Any]:
        """Its attributes by name."""
        if isinstance(self._given, dict):
            return self._given
        # the state may be a pair: attributes and slots
        parts = self._given if isinstance(self._given, tuple) else ()
        return {
            key: value for part in parts if isinstance(part, dict) for key, value in part.items()
        }

    def __init__(self, *args: object) -> None:
        del args

    def __setitem__(self, key: object, value: object) -> None:
        del key, value

    def append(self, value: object) -> None:
        """Accepts an item and does not keep it."""
        del value

    def extend(self, values: object) -> None:
        """Accepts items and does not keep them."""
        del values

    def __setstate__(self, state: object) -> None:
        self._given = state  # not copied: a pickle can give one dict to a million objects


def plain_types() -> dict[tuple[str, str], Any]:
    """Returns the functions that make NumPy's numbers and values of torch's `weights_only`."""
    made: dict[tuple[str, str], Any] = {
        ("_codecs", "encode"): _bytes_of,
        ("collections", "Counter"): _counter,
    }
    for module in ("builtins", "__builtin__"):  # `__builtin__` in protocol 2
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
    """Returns bytes, which protocol 2 writes as a Latin-1 string."""
    if not isinstance(text, str) or encoding != "latin1":
        raise TypeError("not bytes as a string")
    return text.encode("latin1")


def _bytearray(data: object = b"", *more: object) -> object:
    if not isinstance(data, bytes) or more:  # an int would be a length to allocate
        raise TypeError("not the contents of a bytearray")
    return bytearray(data)


def _complex(real: object = 0.0, imaginary: object = 0.0) -> object:
    if not isinstance(real, float) or not isinstance(imaginary, float):
        raise TypeError("not the parts of a complex number")
    return NumpyComplex(real, imaginary)


def may_hash_alike(keys: Iterable[object]) -> bool:
    """Tells whether there are so many long integers that equal hashes could take minutes.

    A pickle can remember such keys once, and make a thousand sets or dicts of them.
    """
    return sum(1 for key in keys if type(key) is int and abs(key) >= _LONG_INT) > _MANY_LONGS


def _set(items: object = ()) -> object:
    """Returns a set of scalars, or a stand-in for any other set, whose items may compare slowly."""
    if (
        not isinstance(items, (list, tuple))
        or not all(type(item) in SCALAR_KEYS for item in items)
        or may_hash_alike(items)
    ):
        return type("Foreign", (OpaqueObject,), {"label": "set"})(items)
    return set(items)


def _counter(table: object = None) -> object:
    """Returns a counter of scalars, or a stand-in for any other counter."""
    table = {} if table is None else table
    if not isinstance(table, dict) or not all(
        type(key) in SCALAR_KEYS and type(count) is int for key, count in table.items()
    ):
        return type("Foreign", (OpaqueObject,), {"label": "collections.Counter"})(table)
    return CounterValue(tuple(table.items()))


def _keep_order(dtype: OpaqueObject, state: object) -> None:
    """Keeps the byte order from the state of a NumPy dtype."""
    dtype._given = {"order": state[1] if isinstance(state, tuple) and len(state) > 1 else None}


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
    """Returns a NumPy number, or a stand-in for a number of another type."""
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
