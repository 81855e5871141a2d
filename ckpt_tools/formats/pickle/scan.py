"""Checks a pickle before it is loaded: only safe opcodes that writers of checkpoints emit.

The C unpickler trusts its input. It would allocate lengths beyond the input. It also hashes a tuple
as a key of a dict with all its contents at any depth. A million nested tuples end the process.
Sixty tuples that each hold the previous one twice never end. So this module walks the opcodes with
a stack of weights instead of values, and limits the expanded contents of a tuple. Runs of opcodes
that DCP writes by the million (the start of an object, a `torch.Size`) are one step of the walk.
"""

from __future__ import annotations

import functools
import re
import sys

from ckpt_tools.errors import FormatError, UnsafePickleError

MAX_PICKLE_BYTES = 1 << 30
_MAX_LONG_BYTES = 64  # the state of a random generator has 128 bits and more
# An attacker can choose tuples with equal hashes, and integers of at least so many bytes. A dict
# with many such keys takes hours. So a weight also has the number of tuples and the number of such
# integers in a value, and such keys of dicts are counted. Checkpoints have few.
_TUPLE, _LONG_INT, _WEIGHT = 1, 1 << 20, 1 << 40
_LONG_BYTES, _MAX_LONGS, _MAX_TUPLE_KEYS = 6, 10_000, 2_000
# limit for a tuple: its elements with all their contents; torch's tuples have dozens
_MAX_WEIGHT = 4096 * _WEIGHT
_LIGHT = 6 * _WEIGHT  # at least the weight of a Size of three dims with its arguments
_STOP = ord(".")
_GET = ord("h")
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
# number of values that an opcode takes; for the first two, those after a mark
_TAKES = {b"u": 0, b"e": 0, b"s": 2, b"a": 1, b"R": 1, b"\x81": 1, b"b": 1}
_WITH_ARGUMENT = b"hjKMJG"
_NO_MARKS = bytes(range(2, 256))
# Runs that DCP writes by the million: a Size, and an object whose state has only Sizes, strings,
# numbers, remembered values, small objects, and lists of objects.
_TEXT = rb"\x8c(?:" + b"|".join(re.escape(bytes([n])) + b".{%d}" % n for n in range(256)) + rb")"
_LONG = rb"\x8a(?:\x04.{4}|\x05.{5})"
_SEEN = rb"(?:h.|j....)"
# After a quantifier: it takes all that it can, and never gives anything back. Before Python 3.11.5,
# such quantifiers lose matches (gh-106052). Without it, only pickles that do not match take longer.
ALL = b"+" if sys.version_info >= (3, 11, 5) else b""
_SIZE = _SEEN + rb"(?:(?:K.|M..|J....){1,3}" + ALL + rb"[\x85-\x87])\x94?\x85\x94?R\x94?"
# an object whose state is a short tuple, such as torch's `TensorProperties`
_SMALL = _SEEN + rb"\)\x81\x94?\((?:" + _SEEN + rb"|K.|[N\x88\x89]){0,8}" + ALL + rb"t\x94?b"
_SHORT = _SMALL + rb"|" + _SIZE + rb"|h.|K.|M..|[Jj]....|[N\x88\x89]"
# a list of persistent ids: what stands for chunks that are read as columns
_IDS = rb"\]\x94?(?:J....Qa|\((?:J....Q)+" + ALL + rb"e)"


def _object(value: bytes) -> bytes:
    """Returns the pattern of an object whose state is a dict of such values.

    The dict is short, because its keys are not counted. They may be tuples with equal hashes.
    """
    return _SEEN + rb"\)\x81\x94?\}\x94?\((?:" + value + rb"){0,32}" + ALL + rb"ub"


_CHUNK = _object(_SHORT)
_LIST = rb"\]\x94?(?:" + _CHUNK + rb"a|\((?:" + _CHUNK + rb")+" + ALL + rb"e)"


@functools.cache  # one takes 5 ms to compile
def _token(with_persistent_ids: bool) -> re.Pattern[bytes]:
    """Returns the pattern of a token."""
    ids = _IDS + rb"|" if with_persistent_ids else b""
    value = ids + _SHORT + rb"|" + _TEXT + rb"\x94?|" + _LONG
    return re.compile(
        rb"(?s)(?P<objects>(?:" + _object(value) + rb")+" + ALL + rb")"
        rb"|(?P<nested>" + _object(_LIST + rb"|" + _SHORT) + rb")"
        rb"|(?P<text>" + _TEXT + rb"\x94)"
        rb"|(?P<size>" + _SIZE + rb")"
        rb"|(?P<got>" + _SEEN + rb")"
        rb"|(?P<plain>[\]})N\x88\x89]|K.|M..|J....|G.{8})"
        rb"|(?P<other>[a-zA-Z(.\x81\x85-\x87\x8a\x8c\x93-\x95])"
    )


_ARGUMENTS = re.compile(rb"(?s)h.|K.|M..|[Jj]....|" + _TEXT + rb"|" + _LONG)


def scan(data: bytes, where: str, with_persistent_ids: bool = False) -> None:
    """Walks the opcodes of a pickle.

    Args:
        data: the whole pickle, without any bytes after it.
        where: names the file in messages.
        with_persistent_ids: whether it may refer to objects by persistent ids.

    Raises:
        UnsafePickleError: it could harm its reader, or has opcodes that no checkpoint needs.
        FormatError: it is truncated or malformed.
    """
    size = len(data)
    if size > MAX_PICKLE_BYTES:
        raise UnsafePickleError(
            f"refused a pickle: expected at most {MAX_PICKLE_BYTES} bytes, got {size} ({where})"
        )
    if size < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise FormatError(f"not a pickle of protocol 2 to 5: it begins with {data[:2]!r} ({where})")
    try:
        _Walk(data, where, with_persistent_ids).run()
    except IndexError:
        raise FormatError(f"a pickle is malformed: it takes more than it has ({where})") from None


class _Walk:
    """The walk: weights of the values on the stack and in the memo, and positions of marks.

    Small values share a few low weights.
    """

    def __init__(self, data: bytes, where: str, with_persistent_ids: bool) -> None:
        self.data, self.where, self.with_persistent_ids = data, where, with_persistent_ids
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.num_longs = self.num_long_keys = self.num_tuple_keys = 0
        self.heavy: dict[int, int] = {}  # weights of remembered values that are not light
        self.memo = bytearray()  # for each value that MEMOIZE remembers, whether a run made a tuple
        self.light = set[bytes]()  # opcodes that take a light value from the memo
        self.frame_end = 0  # of the present frame

    def run(self) -> None:
        """Walks to the end of the pickle."""
        data, push = self.data, self.stack.append
        match = _token(self.with_persistent_ids).match
        at, end = 2, len(data)
        while True:
            token = match(data, at, end)
            if token is None:
                raise self._foreign(at, end)
            kind, start, at = token.lastgroup, at, token.end()
            if kind == "plain":
                push(_WEIGHT)
            elif kind == "other" and data[start] == _STOP:
                return self._stop(at)
            elif kind == "other":
                at = self._step(data[start : start + 1], start)
            elif kind == "got" or not self._phrase(kind, token[0]):
                at = start + (2 if data[start] == _GET else 5)
                push(self._seen(int.from_bytes(data[start + 1 : at], "little")))
            if at >= end or kind == "other":  # it may be the start of a frame
                end = self._next_end(at, end)

    def _next_end(self, at: int, end: int) -> int:
        """Returns the end of what can be read without a look at frames.

        No opcode may cross the end of a frame: C's unpickler would drop the rest of the frame.
        """
        if at > end or self.frame_end > len(self.data):
            raise FormatError(
                f"a pickle is truncated: an opcode runs past its {len(self.data)} bytes, or past"
                f" its frame ({self.where})"
            )
        return self.frame_end if at < self.frame_end else len(self.data)

    def _phrase(self, kind: str | None, phrase: bytes) -> bool:
        """Processes a whole run of opcodes that DCP writes by the million.

        Returns:
            False for a run that must be walked step by step. It would remember a tuple of values
            that are not light.
        """
        opcodes = _ARGUMENTS.sub(b"", phrase)
        if b"\x94" in opcodes and self.data[1] < 4:
            raise UnsafePickleError(
                f"refused a pickle of protocol {self.data[1]} with an opcode of protocol 4"
                f" ({self.where})"
            )
        if b"t\x94" in opcodes and not self._has_light_values(phrase):
            return False
        count = opcodes.count(b"ub") if kind == "objects" else 1
        self.stack += [_LIGHT if kind == "size" else _WEIGHT] * count
        for one in (b"\x85\x94", b"\x86\x94", b"\x87\x94", b"t\x94"):
            opcodes = opcodes.replace(one, b"\x01")
        self.memo += opcodes.replace(b"\x94", b"\x00").translate(None, _NO_MARKS)
        return True

    def _has_light_values(self, phrase: bytes) -> bool:
        """Tells whether a run takes no value of many parts from the memo.

        The weight of a tuple that a run has made is not known, so it counts as such a value.
        """
        for argument in {*_ARGUMENTS.findall(phrase)} - self.light:
            if argument[:1] in b"hj":
                index = int.from_bytes(argument[1:], "little")
                if index >= len(self.memo) or self._seen(index) > _LIGHT:
                    return False
                self.light.add(argument)
        return True

    def _seen(self, index: int) -> int:
        """Returns the weight of a remembered value."""
        if index in self.heavy:
            return self.heavy[index]
        return _LIGHT + _TUPLE * (index < len(self.memo) and self.memo[index])

    def _stop(self, at: int) -> None:
        if at != len(self.data):
            raise UnsafePickleError(
                f"refused a pickle: {len(self.data) - at} bytes follow its STOP ({self.where})"
            )
        self.stack.pop()

    def _foreign(self, at: int, end: int) -> FormatError:
        if at >= end or self.data[at : at + 1] in _WITH_ARGUMENT:
            return FormatError(
                f"a pickle is truncated: no STOP within its {len(self.data)} bytes ({self.where})"
            )
        return self._refused(self.data[at : at + 1], at)

    def _step(self, opcode: bytes, at: int) -> int:
        """Processes one of the rarer opcodes; returns the position after it."""
        if opcode in _TUPLES:
            self._tuple(len(self.stack) - _TUPLES[opcode])
        elif opcode == b"t":
            self._tuple(self.marks.pop())
        elif opcode == b"(":
            self.marks.append(len(self.stack))
        elif opcode == b"\x94" and self.data[1] >= 4:
            self._remember(len(self.memo))
            self.memo.append(0)
        elif opcode in _TAKES:
            start = self.marks.pop() if opcode in b"ue" else len(self.stack) - _TAKES[opcode]
            if opcode == b"b":
                self._build()
            else:
                self._take(start, is_kept=opcode in b"uesa", has_keys=opcode in b"us")
        elif opcode == b"Q" and self.with_persistent_ids:
            pass
        else:
            return self._with_argument(opcode, at)
        return at + 1

    def _tuple(self, start: int) -> None:
        """Makes a tuple of the values from position `start` of the stack."""
        if start < 0:
            raise IndexError
        weight = _WEIGHT + _TUPLE + sum(self.stack[start:])
        if weight > _MAX_WEIGHT:
            raise UnsafePickleError(
                f"refused a pickle: a tuple holds more than {_MAX_WEIGHT // _WEIGHT} elements,"
                f" nested ones counted ({self.where})"
            )
        self.stack[start:] = [weight]

    def _remember(self, index: int) -> None:
        """Notes the weight of the last value under a memo index.

        A protocol numbers the memo in only one way, so indices cannot be confused.
        """
        if self.stack[-1] > _LIGHT or self.stack[-1] % _WEIGHT:
            self.heavy[index] = self.stack[-1]
        else:
            self.heavy.pop(index, None)

    def _count_keys(self, keys: list[int]) -> None:
        """Counts the keys of a dict that are tuples or long integers."""
        for key in keys:
            if key % _LONG_INT:
                self.num_tuple_keys += 1
            elif key % _WEIGHT:
                self.num_long_keys += 1
        for count, most, kind in (
            (self.num_tuple_keys, _MAX_TUPLE_KEYS, "tuples"),
            (self.num_long_keys, _MAX_LONGS, f"integers of {_LONG_BYTES} bytes or more"),
        ):
            if count > most:
                raise UnsafePickleError(
                    f"refused a pickle: more than {most} keys of its dicts are {kind}"
                    f" ({self.where})"
                )

    def _build(self) -> None:
        """Gives the last value, a state, to the object before it.

        The object keeps its weight: a tuple stays one, whatever its state.
        """
        state = self.stack.pop()
        self.stack[-1] += state - state % _WEIGHT

    def _take(self, start: int, is_kept: bool, has_keys: bool) -> None:
        """Adds the weights from position `start` to the value below them.

        A container keeps its own weight as well. The result of a call has only the weight of its
        arguments.
        """
        weight = sum(self.stack[start:])
        if start < 1:
            raise IndexError
        if has_keys:
            self._count_keys(self.stack[start::2])
        del self.stack[start:]
        self.stack[-1] = self.stack[-1] + weight if is_kept else weight

    def _push_number(self, is_long: bool) -> None:
        """Adds the weight of a string or a number, and counts long integers.

        They are counted here too, because a call can make a set of them.
        """
        self.stack.append(_WEIGHT + _LONG_INT * is_long)
        self.num_longs += is_long
        if self.num_longs > _MAX_LONGS:
            raise UnsafePickleError(
                f"refused a pickle: it has more than {_MAX_LONGS} integers of {_LONG_BYTES} bytes"
                f" or more ({self.where})"
            )

    def _with_argument(self, opcode: bytes, at: int) -> int:
        """Processes an opcode with a length, an index or a name; returns the position after it."""
        data, number = self.data, self.data[at + 1 : at + 5]
        if opcode == b"q" and data[1] < 4:
            self._remember(int.from_bytes(number[:1], "little"))
            return at + 2
        if opcode == b"r" and data[1] < 4 and int.from_bytes(number, "little") <= len(data):
            self._remember(int.from_bytes(number, "little"))
            return at + 5
        if opcode == b"\x95":
            if at < self.frame_end:
                raise self._refused(opcode, at)
            self.frame_end = at + 9 + int.from_bytes(data[at + 1 : at + 9], "little")
            return at + 9
        if opcode == b"\x93":
            self.stack.pop()
            return at + 1
        if opcode == b"\x8a" and number[:1] > bytes([_MAX_LONG_BYTES]):
            raise self._refused(opcode, at)
        self._push_number(opcode == b"\x8a" and number[:1] >= bytes([_LONG_BYTES]))
        if opcode in (b"\x8c", b"\x8a"):
            return at + 2 + int.from_bytes(number[:1], "little")
        if opcode == b"X":
            return at + 5 + int.from_bytes(number, "little")
        if opcode == b"c":
            middle = data.find(b"\n", at, at + 512)
            end = data.find(b"\n", middle + 1, middle + 512) if middle > 0 else -1
            return end + 1 if end > 0 else len(data) + 1
        raise self._refused(opcode, at)

    def _refused(self, opcode: bytes, at: int) -> UnsafePickleError:
        return UnsafePickleError(
            f"refused a pickle: opcode {opcode!r} at byte {at} has no place in a checkpoint"
            f" ({self.where})"
        )
