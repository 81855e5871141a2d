"""Reading a pickle without running anything it asks for.

A pickle is a program. This one may build numbers, strings, tuples, lists and dicts, and call the
few callables that the caller hands in, all of them our own; any other global is refused by name
before it is looked up. A scan in front (see `pickle_scan`) refuses what would hurt the reader. The
work itself is left to C's unpickler, for speed. Needs no torch.
"""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

from ckpt_tools.errors import FormatError, UnsafePickleError, printable
from ckpt_tools.formats.pickle.scan import scan

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


class SafeCallable:
    """A function as a pickle gets it: it can be called, and nothing of it can be set.

    The opcode BUILD sets attributes of any object. Those of a function, as its defaults, would stay
    for all pickles after this one.
    """

    __slots__ = ("function",)
    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "function", function)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"it cannot be changed: {name}")

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def load(
    data: bytes,
    allowed: Mapping[tuple[str, str], Any],
    where: str,
    persistent_load: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns what a pickle builds out of plain values and the allowed globals.

    Args:
        data: the whole pickle and nothing behind it.
        allowed: what stands for each global `(module, name)` that may occur. Make it anew for every
            call: a hostile pickle can set attributes on what it is given.
        where: names the file in messages.
        persistent_load: called for persistent ids; they are refused where None.

    Raises:
        UnsafePickleError: another global, or an opcode or length that no checkpoint needs.
        FormatError: the pickle is truncated or malformed.
    """
    scan(data, where, persistent_load is not None)

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            try:
                found = allowed[module, name]
                return SafeCallable(found) if isinstance(found, FunctionType | partial) else found
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


@contextmanager
def no_gc() -> Iterator[None]:
    """Keeps the cyclic collector from walking millions of new objects again and again while they
    are being built.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def brief(value: object) -> str:
    """Returns an unpickled value for a message: texts and numbers as they are, anything else by its
    type, since it may be a giant.
    """
    return (
        printable(str(value))
        if value is None or type(value) in (str, int, float, bool)
        else f"a {type(value).__name__}"
    )
