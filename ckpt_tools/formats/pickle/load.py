"""Reads a pickle without running anything that it asks for.

A pickle is a program. This reader lets it build numbers, strings, tuples, lists and dicts. It may
also call the few functions of our own that the caller allows. Any other global is refused by name,
before it is looked up. First, `scan` refuses pickles that would exhaust memory or time. The work
itself is left to C's unpickler, for speed. No torch is needed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from ckpt_tools.core.memory import no_gc
from ckpt_tools.errors import FormatError, UnsafePickleError, printable
from ckpt_tools.formats.pickle.scan import scan

_SIZED = (str, bytes, bytearray, list, tuple, dict, set)
_FREE_ITEMS = 1 << 16  # small pickles pass the same short texts many times
_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    IndexError,
    KeyError,
    AttributeError,
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
)


class _Budget:
    """Bounds what all calls of one pickle may copy.

    A pickle can remember a long value once and pass it to a call a thousand times.
    """

    def __init__(self, nbytes: int, where: str) -> None:
        self._left, self._where = 2 * nbytes + _FREE_ITEMS, where

    def spend(self, args: tuple[Any, ...]) -> None:
        """Counts the elements of the arguments.

        Raises:
            UnsafePickleError: the calls were given more than twice what the pickle holds.
        """
        self._left -= sum(len(arg) for arg in args if isinstance(arg, _SIZED))
        if self._left < 0:
            raise UnsafePickleError(
                f"refused a pickle: its calls copy more than it holds ({self._where})"
            )


def _same_tuple(items: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """Stands in for `tuple` and `torch.Size`. Writers pass a tuple, which is not copied."""
    if type(items) is not tuple:
        raise TypeError(f"expected a tuple, got a {type(items).__name__}")
    return items


class SafeCallable:
    """A function for a pickle: it can be called, but none of its attributes can be set.

    The opcode BUILD sets attributes of any object. A changed attribute of a function, such as its
    defaults, would affect all later pickles.
    """

    __slots__ = ("budget", "function")
    function: Callable[..., Any]
    budget: _Budget

    def __init__(self, function: Callable[..., Any], budget: _Budget) -> None:
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "budget", budget)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"it cannot be changed: {name}")

    def __call__(self, *args: Any) -> Any:
        self.budget.spend(args)
        return self.function(*args)


def load_pickle(
    data: bytes,
    allowed: Mapping[tuple[str, str], Any],
    where: str,
    persistent_load: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns the value that a pickle builds from plain values and the allowed globals.

    Args:
        data: the whole pickle, with nothing after it.
        allowed: the replacement for each global `(module, name)` that may occur. Make it anew for
            every call: a hostile pickle can set attributes on its values.
        where: names the file in messages.
        persistent_load: called for persistent ids. If it is None, they are refused.

    Raises:
        UnsafePickleError: another global, or an opcode or length that no checkpoint needs.
        FormatError: the pickle is truncated or malformed.
    """
    scan(data, where, persistent_load is not None)
    budget = _Budget(len(data), where)

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            try:
                found = allowed[module, name]
                if found is tuple:
                    return SafeCallable(_same_tuple, budget)
                is_function = isinstance(found, FunctionType | partial)
                return SafeCallable(found, budget) if is_function else found
            except KeyError:
                raise UnsafePickleError(
                    f"refused a pickle: it asks for {printable(f'{module}.{name}')}, which no"
                    f" checkpoint needs ({where})",
                    hint=(
                        "nothing of it was run; if the file is your own, report the name so that it"
                        " can be looked at"
                    ),
                ) from None

    if persistent_load is not None:
        Restricted.persistent_load = staticmethod(persistent_load)  # type: ignore[assignment]
    try:
        with no_gc():
            return Restricted(io.BytesIO(data)).load()
    except _BROKEN as error:
        raise FormatError(
            f"a pickle is malformed: {printable(str(error)) or type(error).__name__} ({where})"
        ) from error


def short_repr(value: object) -> str:
    """Returns an unpickled value for a message.

    Strings and numbers are shown as they are. Any other value is shown by its type, because it may
    be very large.
    """
    return (
        printable(str(value))
        if value is None or type(value) in (str, int, float, bool)
        else f"a {type(value).__name__}"
    )
