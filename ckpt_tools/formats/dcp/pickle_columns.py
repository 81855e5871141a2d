"""Reads the millions of similar objects in a pickle as arrays, by the opcodes they share.

Two objects with the same opcodes have their arguments at the same positions. The pickle is
therefore cut in two. Stretches of such objects become numpy columns of arguments. The small rest is
a pickle for the ordinary reader, with a persistent id in place of each stretch. Anything irregular
raises `IrregularPickle`, and the caller then reads all of it in the ordinary way.

Source: CPython's `pickletools` and `_pickle.c` (frames, batches, MEMOIZE).
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.formats.pickle.scan import ALL

Ints = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint8]
_WINDOW_BYTES = 4 << 20
_TEXT = rb"\x8c(?:" + b"|".join(re.escape(bytes([n])) + b".{%d}" % n for n in range(256)) + rb")"
_LONG = rb"\x8a(?:" + b"|".join(re.escape(bytes([n])) + b".{%d}" % n for n in range(1, 9)) + rb")"
_SEEN = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....)"
_SIZE = (
    _SEEN
    + rb"(?:\)|"
    + _INT
    + rb"{1,3}"
    + ALL
    + rb"[\x85-\x87]\x94?|\("
    + _INT
    + rb"{4,16}"
    + ALL
    + rb"t\x94?)\x85\x94?R\x94?"
)
_VALUE = (
    rb"(?:"
    + _SIZE
    + rb"|"
    + _SEEN
    + rb"|"
    + _INT
    + rb"|[N\x88\x89\x94]|"
    + _TEXT
    + rb"|"
    + _LONG
    + rb")"
)
_OBJECT = re.compile(rb"(?s)" + _SEEN + rb"\)\x81\x94?\}\x94?\(" + _VALUE + rb"*" + ALL + rb"ub")
_WORD = rb"(?:" + _TEXT + rb"\x94?|" + _SEEN + rb")"
_TOKEN = re.compile(
    rb"(?s)(?P<name>"
    + _WORD
    + _WORD
    + rb"\x93\x94)|(?P<text>"
    + _TEXT
    + rb"\x94)|(?P<seen>"
    + _SEEN
    + rb")|(?P<memo>\x94)"
    rb"|(?P<plain>(?:[\]})N\x88\x89(t\x85-\x87uesaR\x81b]|K.|M..|J....|G.{8}|"
    + _LONG
    + rb")+"
    + ALL
    + rb")|(?P<word>"
    + _TEXT
    + rb")|(?P<stop>\.)"
)
_NAME, _TEXT_KIND, _SEEN_KIND, _MEMO = map(
    _TOKEN.groupindex.__getitem__, ("name", "text", "seen", "memo")
)
_ARGUMENT = re.compile(rb"(?s)h.|j....|K.|M..|J....|" + _TEXT + rb"|" + _LONG + rb"|.")
# the same, but for the opcodes without one
_ARGUMENTS = re.compile(rb"(?s)h.|j....|K.|M..|J....|G.{8}|" + _TEXT + rb"|" + _LONG)
_MARK = object()
_MAX_SHAPES = 4096  # with more shapes than that, the objects are not similar enough


class IrregularPickle(Exception):
    """The pickle has a form that only the ordinary reader can read."""


class Argument(NamedTuple):
    """The position of an argument in the opcodes of an object.

    `memo` is the number of values remembered before it; -1 if this argument is not remembered.
    """

    opcode: str
    column: int
    width: int
    memo: int = -1


class BuiltValue(NamedTuple):
    """A call within an object, such as `torch.Size((1, 2))`."""

    function: Argument
    arguments: Any


class OpcodeShape:
    """The opcodes that some objects share.

    Attributes:
        template, mask: their bytes, and which of these bytes are the same in all objects.
        kind: the class.
        fields: the state. Keys and the class are memo indices; see `OpcodeShape.resolved`.
        num_memos: number of values that each object adds to the memo.
    """

    def __init__(self, phrase: bytes) -> None:
        self.mask: Rows = np.full(len(phrase), 255, np.uint8)
        self.phrase = phrase
        self.num_memos = 0
        self._fixed: set[Argument] = set()
        try:
            self.kind, self.fields = self._interpret()
        # an opcode takes too many values, or values of another type
        except (IndexError, ValueError, AttributeError):
            raise IrregularPickle from None
        self.template: Rows = np.frombuffer(phrase, np.uint8) & self.mask
        self.names: tuple[object, dict[object, Any]] | None = None

    def _interpret(self) -> tuple[Argument, list[tuple[Argument, Any]]]:
        """Runs the opcodes with arguments in place of their values."""
        stack: list[Any] = []
        arguments: list[Argument] = []
        for token in _ARGUMENT.finditer(self.phrase):
            opcode, at, end = token[0][:1].decode("latin1"), token.start(), token.end()
            if opcode in "hjKMJ":
                stack.append(Argument(opcode, at + 1, end - at - 1))
                arguments.append(stack[-1])
            elif opcode in "\x8a\x8c":
                stack.append(Argument(opcode, at + 2, end - at - 2))
                arguments.append(stack[-1])
            elif opcode == "\x94":
                if isinstance(stack[-1], Argument) and stack[-1].opcode == "\x8c":
                    stack[-1] = stack[-1]._replace(memo=self.num_memos)
                self.num_memos += 1
            else:
                self._do(opcode, stack)
        if len(stack) != 1 or not isinstance(stack[0], BuiltValue):
            raise IrregularPickle
        for argument in arguments:
            if argument not in self._fixed:
                self.mask[argument.column : argument.column + argument.width] = 0
        return stack[0].function, stack[0].arguments

    def _do(self, opcode: str, stack: list[Any]) -> None:
        if opcode in ")}N\x88\x89(":
            stack.append(
                {")": (), "}": [], "N": None, "\x88": True, "\x89": False, "(": _MARK}[opcode]
            )
        elif opcode in "\x85\x86\x87t":
            count = {"\x85": 1, "\x86": 2, "\x87": 3}.get(opcode) or stack[::-1].index(_MARK)
            items: Sequence[Any] = tuple(stack[len(stack) - count :])
            del stack[len(stack) - count - (opcode == "t") :]
            stack.append(items)
        elif opcode in "R\x81":
            arguments = stack.pop()
            stack.append(BuiltValue(self._seen(stack.pop()), arguments))
        elif opcode == "u":
            count = stack[::-1].index(_MARK)
            items = stack[len(stack) - count :]
            del stack[len(stack) - count - 1 :]
            stack[-1] = [
                (self._seen(key), value) for key, value in zip(items[::2], items[1::2], strict=True)
            ]
        elif opcode == "b":
            state = stack.pop()
            stack[-1] = BuiltValue(stack[-1].function, state)
        else:
            raise IrregularPickle

    def _seen(self, argument: Any) -> Argument:
        """Marks an argument that must be the same in all objects: a class, a function, a key."""
        if not isinstance(argument, Argument) or argument.opcode not in "hj":
            raise IrregularPickle
        self._fixed.add(argument)
        return argument

    def index(self, argument: Argument) -> int:
        """Returns the memo index of a fixed argument."""
        return int.from_bytes(
            self.phrase[argument.column : argument.column + argument.width], "little"
        )

    def resolved(self, names: Mapping[int, object]) -> tuple[object, dict[object, Any]]:
        """Returns the class and the state with names in place of memo indices.

        Called functions remain `BuiltValue`.
        """
        if self.names is None:
            try:
                self.names = (
                    names[self.index(self.kind)],
                    {names[self.index(k)]: v for k, v in self.fields},
                )
            except KeyError:
                raise IrregularPickle from None
            if len(self.names[1]) < len(self.fields):
                raise IrregularPickle
        return self.names


class ShapeGroup(NamedTuple):
    """All objects of one shape in a window: their numbers, and their bytes row by row."""

    shape: OpcodeShape
    numbers: Ints
    rows: Rows

    def ints(self, argument: object) -> Ints:
        """Returns the column of an argument that is a number."""
        if not isinstance(argument, Argument) or argument.opcode not in "KMJ\x8a":
            raise IrregularPickle
        column = self._column(argument)
        if argument.opcode != "\x8a":
            return column.view({"K": "u1", "M": "<u2", "J": "<i4"}[argument.opcode])[:, 0].astype(
                np.int64
            )
        wide = np.repeat(np.where(column[:, -1:] > 127, 255, 0).astype(np.uint8), 8, axis=1)
        wide[:, : argument.width] = column
        return wide.view("<i8")[:, 0].astype(np.int64)

    def indices(self, argument: Argument) -> Ints:
        """Returns the column of an argument that is a memo index."""
        return (
            self._column(argument)
            .view({"h": "u1", "j": "<u4"}[argument.opcode])[:, 0]
            .astype(np.int64)
        )

    def texts(self, argument: Argument) -> tuple[list[str], Ints]:
        """Returns the distinct strings of a column, and for each row the number of its string."""
        column = self._column(argument)
        if not argument.width:
            return [""], np.zeros(len(column), np.int64)
        found, which = np.unique(column.view(f"V{argument.width}")[:, 0], return_inverse=True)
        try:
            return [
                value.tobytes().decode("utf-8", "surrogatepass") for value in found
            ], which.astype(np.int64)
        except UnicodeDecodeError:
            raise IrregularPickle from None

    def _column(self, argument: Argument) -> Rows:
        return np.ascontiguousarray(
            self.rows[:, argument.column : argument.column + argument.width]
        )


class ObjectWindow:
    """The objects in a part of a pickle.

    Each has a start, an end, a shape, and the number of values it adds to the memo.
    """

    def __init__(self, data: bytes, at: int, shapes: dict[int, list[OpcodeShape]]) -> None:
        found = _OBJECT.finditer(data, at, at + _WINDOW_BYTES)
        spans: Ints = np.array([m.span() for m in found], np.int64).reshape(-1, 2)
        self.starts, self.ends = spans[:, 0], spans[:, 1]
        self.num_memos: Ints = np.zeros(len(spans), np.int64)
        self.kinds: list[ShapeGroup] = []
        self.shapes: npt.NDArray[np.int32] = np.zeros(len(spans), np.int32)
        buffer: Rows = np.frombuffer(data, np.uint8)
        lengths = self.ends - self.starts
        order = np.argsort(lengths, kind="stable")
        cuts = np.flatnonzero(np.diff(lengths[order])) + 1
        for numbers in np.split(order, cuts) if len(order) else ():
            length = int(lengths[numbers[0]])
            # one row per start, without an array of indices
            rows = np.lib.stride_tricks.sliding_window_view(buffer, length)[self.starts[numbers]]
            self._sort(numbers, rows, shapes.setdefault(length, []))
            if sum(map(len, shapes.values())) > _MAX_SHAPES:
                raise IrregularPickle

    def _sort(self, numbers: Ints, rows: Rows, known: list[OpcodeShape]) -> None:
        """Sorts objects of one length by their shapes."""
        tried = 0
        while len(numbers):
            if tried == len(known):
                if tried > _MAX_SHAPES:
                    raise IrregularPickle
                known.append(OpcodeShape(rows[0].tobytes()))
            shape = known[tried]
            tried += 1
            fits = ((rows & shape.mask) == shape.template).all(axis=1)
            if fits.any():
                self.shapes[numbers[fits]] = len(self.kinds)
                self.num_memos[numbers[fits]] = shape.num_memos
                self.kinds.append(ShapeGroup(shape, numbers[fits], rows[fits]))
                numbers, rows = numbers[~fits], rows[~fits]

    @property
    def mean_stretch(self) -> float:
        """The mean number of objects in a stretch."""
        return len(self.starts) / (1 + int((self.starts[1:] != self.ends[:-1]).sum()))

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Yields stretches of objects with nothing between them, as first and last + 1."""
        cuts = np.flatnonzero(self.starts[1:] != self.ends[:-1]) + 1
        edges = [0, *cuts.tolist(), len(self.starts)] if len(self.starts) else []
        yield from pairwise(edges)


def _run_of(num_early: int) -> re.Pattern[bytes]:
    """Returns the pattern of a run of opcodes that stay as they are.

    They refer to the first values of the memo only, whose numbers do not change. A global is no
    part of a run, because it has two words.

    Args:
        num_early: how many first values there are, at most 256.
    """
    early = (
        rb"h[" + b"".join(b"\\x%02x" % n for n in range(num_early)) + rb"]"
        if num_early
        else rb"h(?!)"
    )
    return re.compile(
        rb"(?s)(?:"
        + early
        + rb"(?!\x8c|"
        + _SEEN
        + rb"\x93)|[\]})N\x88\x89(t\x85-\x87uesaR\x81b\x94]|K.|M..|J....|G.{8}|"
        + _LONG
        + rb")+"
        + ALL
    )


class Remainder:
    """A pickle without its stretches.

    It also has the contents of the memo, by the original's indices.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 2
        self.parts: list[bytes] = [data[:2]]
        self.names: dict[int, object] = {}
        self.num_memos = 0  # size of the original's memo at this position
        self._copied = 2
        self._num_kept = 0
        # ranges of the memo that were kept, and the shift of their indices
        self._firsts, self._lasts, self._shifts = [0], [0], [0]
        self._run: re.Pattern[bytes] | None = None

    def walk(self, stop: int) -> None:
        """Walks to a position, which must be the start of an opcode."""
        match, data = _TOKEN.match, self.data
        match_run = self._run.match if self._run else None
        while self.at < stop:
            if match_run and (run := match_run(data, self.at, stop)):
                self._remember(_ARGUMENTS.sub(b"", run[0]).count(b"\x94"))
                self.at = run.end()
                continue
            token = match(data, self.at, stop)
            if token is None:
                raise IrregularPickle
            kind = token.lastindex
            if kind == _SEEN_KIND:
                self._put_seen(token[0])
            elif kind == _NAME:
                self._name(token[0])
            elif kind == _TEXT_KIND:
                self.names[self.num_memos] = _decoded(token[0][2:-1])
                self._remember()
            elif kind == _MEMO:
                self._remember()
            self.at = token.end()
        if self.at != stop:
            raise IrregularPickle

    def _remember(self, count: int = 1) -> None:
        self.num_memos += count
        self._num_kept += count
        self._lasts[-1] = self.num_memos

    def _name(self, token: bytes) -> None:
        """Reads a global: two words, each spelled out or taken from the memo."""
        words: list[str] = []
        at = 0
        while len(words) < 2:
            if token[at] == 0x8C:
                end = at + 2 + token[at + 1]
                words.append(_decoded(token[at + 2 : end]))
                if token[end] == 0x94:
                    self.names[self.num_memos] = words[-1]
                    self._remember()
                    end += 1
            else:
                end = at + (2 if token[at] == 0x68 else 5)
                words.append(self._known(int.from_bytes(token[at + 1 : end], "little")))
                self._copy(self.at + at)
                self._put_seen(token[at:end], self.at + at)
            at = end
        self.names[self.num_memos] = tuple(words)
        self._remember()

    def _known(self, index: int) -> str:
        name = self.names.get(index)
        if not isinstance(name, str):
            raise IrregularPickle
        return name

    def _put_seen(self, token: bytes, at: int | None = None) -> None:
        """Copies a reference to the memo, with its new index."""
        at = self.at if at is None else at
        index = int.from_bytes(token[1:], "little")
        stretch = bisect_right(self._firsts, index) - 1
        if index >= self._lasts[stretch]:
            raise IrregularPickle  # the reference points into a stretch
        shift = self._shifts[stretch]
        if shift:
            self._copy(at)
            self.parts.append(b"j" + struct.pack("<I", index - shift))
            self._copied = at + len(token)

    def _copy(self, stop: int) -> None:
        self.parts.append(self.data[self._copied : stop])
        self._copied = stop

    def replace(self, stop: int, num_memos: int, by: bytes) -> None:
        """Replaces everything up to `stop` with `by`.

        The replaced part added `num_memos` values to the memo.
        """
        self._copy(self.at)
        self.parts.append(by)
        if self._run is None:
            self._run = _run_of(min(self._lasts[0], 256))
        self.at = self._copied = stop
        self.num_memos += num_memos
        self._firsts.append(self.num_memos)
        self._lasts.append(self.num_memos)
        self._shifts.append(self.num_memos - self._num_kept)

    def finish(self) -> bytes:
        """Walks to the end, and returns the remaining pickle."""
        self.walk(len(self.data))
        self._copy(self.at)
        return b"".join(self.parts)


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise IrregularPickle from None


def unframed(data: bytes) -> bytes:
    """Returns a pickle without its frames, which would cut objects in two.

    Raises:
        IrregularPickle: its protocol is below 4, or it has bytes outside of frames.
    """
    if len(data) < 3 or data[0] != 0x80 or data[1] not in (4, 5):
        raise IrregularPickle
    view, at = memoryview(data), 2
    parts = [view[:2]]
    if data[2] != 0x95:
        return data
    while at < len(data):
        if data[at] != 0x95 or at + 9 > len(data):
            raise IrregularPickle
        end = at + 9 + int.from_bytes(data[at + 1 : at + 9], "little")
        if end > len(data):
            raise IrregularPickle
        parts.append(view[at + 9 : end])
        at = end
    return b"".join(parts)


def windows(data: bytes, rest: Remainder) -> Iterator[ObjectWindow]:
    """Yields the objects of a pickle, one part at a time.

    Before the next part, the caller must process the objects and move `rest.at` past them.
    """
    shapes: dict[int, list[OpcodeShape]] = {}
    while rest.at < len(data):
        before = rest.at
        window = ObjectWindow(data, rest.at, shapes)
        if not len(window.starts):
            return
        yield window
        if rest.at == before:
            raise IrregularPickle


def numbers_of_size(value: object) -> Sequence[object]:
    """Returns the numbers of a `torch.Size`."""
    if (
        not isinstance(value, BuiltValue)
        or not isinstance(value.arguments, tuple)
        or len(value.arguments) != 1
    ):
        raise IrregularPickle
    (numbers,) = value.arguments
    if not isinstance(numbers, tuple):
        raise IrregularPickle
    return numbers
