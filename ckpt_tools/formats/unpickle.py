"""Reading a pickle without running anything it asks for.

A pickle is a program. This one may build numbers, strings, tuples, lists and dicts, and call the few callables that the
caller hands in, all of them our own; any other global is refused by name before it is looked up. A scan in front refuses
opcodes that no writer of checkpoints emits, and lengths that run past the input, before anything is allocated. The work
itself is left to C's unpickler, for speed. Needs no torch. May import errors.
"""

from __future__ import annotations

import gc
import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckpt_tools.errors import FormatError, UnsafePickleError, printable

MAX_PICKLE_BYTES = 1 << 30
_BROKEN = (
    pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError, TypeError, OverflowError, MemoryError,
    RecursionError,
)  # fmt: skip

# Opcodes of fixed length, skipped in runs at C speed. The scan stops at those that carry a length, an index or a name.
_FIXED = re.compile(rb"(?s:[()}\]N\x88\x89t\x85-\x87aesubR\x81\x93\x94]|[Khq].|M..|[Jj]....|G.{8}|\x95.{8})*+")
_MAX_LONG_BYTES = 16


def load(data: bytes, allowed: Mapping[tuple[str, str], Any], where: str, persistent_load: Callable[[Any], Any] | None = None) -> Any:
    """Returns what a pickle builds out of plain values and the allowed globals.

    Args:
        data: the whole pickle and nothing behind it.
        allowed: what stands for each global `(module, name)` that may occur. Make it anew for every call: a hostile pickle
            can set attributes on what it is given.
        where: names the file in messages.
        persistent_load: called for persistent ids; they are refused where None.

    Raises:
        UnsafePickleError: another global, or an opcode or length that no checkpoint needs.
        FormatError: the pickle is truncated or malformed.
    """
    _scan(data, where, persistent_load is not None)

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            try:
                return allowed[module, name]
            except KeyError:
                raise UnsafePickleError(
                    f"refused a pickle: it asks for {printable(f'{module}.{name}')}, which no checkpoint needs ({where})",
                    hint="nothing of it was run; if the file is your own, report the name so that it can be looked at",
                ) from None

    if persistent_load is not None:
        Restricted.persistent_load = staticmethod(persistent_load)  # type: ignore[assignment]
    try:
        with no_gc():
            return Restricted(io.BytesIO(data)).load()
    except _BROKEN as error:
        raise FormatError(f"a pickle is malformed: {printable(str(error)) or type(error).__name__} ({where})") from error


def _scan(data: bytes, where: str, with_persistent_ids: bool) -> None:
    """Walks the opcodes; refuses what is unknown or longer than the input."""
    size = len(data)
    if size > MAX_PICKLE_BYTES:
        raise UnsafePickleError(f"refused a pickle: expected at most {MAX_PICKLE_BYTES} bytes, got {size} ({where})")
    if size < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise FormatError(f"not a pickle of protocol 2 to 5: it begins with {data[:2]!r} ({where})")
    at = 2
    while True:
        at = _FIXED.match(data, at).end()  # type: ignore[union-attr]  # it matches the empty run too
        if at >= size:
            raise FormatError(f"a pickle is truncated: no STOP within its {size} bytes ({where})")
        opcode = data[at : at + 1]
        if opcode == b".":
            if at + 1 != size:
                raise UnsafePickleError(f"refused a pickle: {size - at - 1} bytes follow its STOP ({where})")
            return
        at = _skip(data, at, opcode, where, with_persistent_ids)
        if at > size:
            raise FormatError(f"a pickle is truncated: opcode {opcode!r} runs past its {size} bytes ({where})")


def _skip(data: bytes, at: int, opcode: bytes, where: str, with_persistent_ids: bool) -> int:
    """Returns the position behind the opcode at `at`, which carries a length, an index or a name."""
    if opcode == b"\x8c":
        return at + 2 + int.from_bytes(data[at + 1 : at + 2], "little")
    if opcode == b"X":
        return at + 5 + int.from_bytes(data[at + 1 : at + 5], "little")
    if opcode == b"r" and int.from_bytes(data[at + 1 : at + 5], "little") <= len(data):
        return at + 5
    if opcode == b"\x8a" and data[at + 1 : at + 2] <= bytes([_MAX_LONG_BYTES]):
        return at + 2 + int.from_bytes(data[at + 1 : at + 2], "little")
    if opcode == b"c":
        end = data.find(b"\n", data.find(b"\n", at, at + 512) + 1, at + 1024)
        return end + 1 if end > 0 else len(data) + 1
    if opcode == b"Q" and with_persistent_ids:
        return at + 1
    raise UnsafePickleError(f"refused a pickle: opcode {opcode!r} at byte {at} has no place in a checkpoint ({where})")


@contextmanager
def no_gc() -> Iterator[None]:
    """Keeps the cyclic collector from walking millions of new objects again and again while they are being built."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
