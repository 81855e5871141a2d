"""The formulas of quantized weights: which boxes of which tensors become which numbers.

Every formula computes in float32. A weight is computed in *units*: ranges of its elements, each
from the same boxes of the stored tensors, so that a reader keeps few bytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.engine.kernels import Bytes, cast
from ckpt_tools.errors import FormatError, printable

Singles = npt.NDArray[np.float32]
_UNIT_NUMEL = 1 << 20  # of a weight whose rows lie one after the other
_BLOCK_NUMEL = 1 << 19  # of one operation of numpy: see `kernels`
_TURNED_ROWS = 64  # that are transposed at once, so that they stay in a processor's cache
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, e2m1
_WORD_BITS = 32
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word, lowest bits first


class Part(NamedTuple):
    """A stored tensor that a formula reads.

    Attributes:
        name: its stored name.
        shape: its shape.
        dtype: the type that its bytes are read as.
        is_raw: its bytes are needed, and not its values in float32.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    is_raw: bool = False


class Unit(NamedTuple):
    """Results `start <= i < stop`, row-major, with the boxes that they need."""

    start: int
    stop: int
    boxes: Mapping[str, Box]


# by role: bytes `[..., itemsize]`, or values in float32; a box is read when it is asked for
Found = Mapping[str, npt.NDArray[Any]]


class Formula(ABC):
    """A tensor that is computed, such as the numbers of one quantized weight.

    Attributes:
        shape: of the results.
        item: their type.
        parts: the tensors that it is computed from, by role.
    """

    shape: tuple[int, ...]
    item: ClassVar[np.dtype[Any]] = np.dtype(np.float32)
    parts: Mapping[str, Part]

    @abstractmethod
    def unit(self, at: int) -> Unit:
        """Returns the unit that has an element, by its number in row-major order."""

    @abstractmethod
    def fill(self, found: Found, start: int, into: npt.NDArray[Any]) -> None:
        """Computes results.

        Args:
            found: the contents of the boxes of one unit.
            start: number of the first element. All elements are of this unit.
            into: room for them.
        """


def value_of(part: Part, data: Bytes, sizes: Sequence[int]) -> npt.NDArray[Any]:
    """Returns the elements of a box of a part, as `Found` has them."""
    if part.is_raw:
        return data.reshape(*sizes, part.dtype.itemsize)
    single = BY_NAME["float32"]
    if part.dtype is single:
        return data.view(np.float32).reshape(sizes)
    into = np.empty(math.prod(sizes) * single.itemsize, np.uint8)
    cast(data, part.dtype, into, single)
    return into.view(np.float32).reshape(sizes)


# ---- codes: from bytes to numbers ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Codes:
    """A way to store codes in the bytes of a row, lowest bits first.

    Attributes:
        bits: of a code.
        values: of each code; () for integers from `lowest` on.
        lowest: the integer of code 0.
        kind: the type of codes of 8 bits; "" for packed ones.
    """

    bits: int
    values: tuple[float, ...] = ()
    lowest: int = 0
    kind: str = ""

    def decode(self, data: Bytes, into: Singles) -> None:
        """Fills `[n, columns]` from the bytes `[n, m]` of these columns; more bytes are padding."""
        rows, columns = into.shape
        if self.kind:
            whole_rows = np.ascontiguousarray(data[:, :columns])
            target = into if into.flags.c_contiguous else np.empty_like(into)
            cast(
                whole_rows.ravel(),
                BY_NAME[self.kind],
                target.reshape(-1).view(np.uint8),
                BY_NAME["float32"],
            )
            if target is not into:
                into[:] = target
        elif self.bits == 4 and columns % 2 == 0 and into.flags.c_contiguous:
            codes = data[:, : columns // 2]
            np.take(
                _pairs_of(self), codes, out=into.reshape(-1).view(np.uint64).reshape(rows, -1),
                mode="clip",
            )  # fmt: skip
        else:
            into[:] = np.take(_values_of(self), _dense(data, self.bits, columns))


FP4 = Codes(4, (*_FP4, *(-value for value in _FP4)))


@cache
def _values_of(codes: Codes) -> Singles:
    values = codes.values or range(codes.lowest, codes.lowest + (1 << codes.bits))
    return np.array(values, np.float32)


@cache
def _pairs_of(codes: Codes) -> npt.NDArray[np.uint64]:
    """Returns the two values of each byte of codes of 4 bits."""
    values, data = _values_of(codes), np.arange(256)
    return np.stack([values[data & 15], values[data >> 4]], axis=1).view(np.uint64).ravel()


def _dense(data: Bytes, bits: int, columns: int) -> npt.NDArray[np.uint8]:
    """Returns `[n, columns]` codes of up to 8 bits, which follow each other without gaps."""
    at = np.arange(columns) * bits
    first, shift = at >> 3, (at & 7).astype(np.uint16)
    low = data[:, first].astype(np.uint16)
    high = data[:, np.minimum(first + 1, data.shape[1] - 1)].astype(np.uint16)
    return ((low | high << np.uint16(8)) >> shift & np.uint16((1 << bits) - 1)).astype(np.uint8)


# ---- one number for each block -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grid:
    """One number for each block of a weight, such as its scales.

    Attributes:
        part: the stored tensor, with as many dims as the weight has once `shape` is its shape.
        shape: of the numbers.
        blocks: elements of a block along each dim.
    """

    part: Part
    shape: tuple[int, ...]
    blocks: tuple[int, ...]

    def is_by_row(self, shape: Sequence[int]) -> bool:
        """Tells whether each row of a weight has numbers of its own, in a stored row."""
        return self.part.shape[:-1] == tuple(shape[:-1]) and len(shape) > 1

    def of(self, found: Singles, lead: Sequence[int], rows: range, has_all: bool) -> Singles:
        """Returns `[n, groups]` or `[1, groups]`: the numbers of the blocks of each row.

        Args:
            found: the numbers, of all rows or of `rows`.
            lead: position of the matrix.
            rows: of the matrix.
            has_all: `found` has the numbers of all rows of all matrices.
        """
        if has_all:
            table = found.reshape(self.shape)
            table = table[tuple(n // b for n, b in zip(lead, self.blocks, strict=False))]
            block = self.blocks[-2] if len(self.blocks) > 1 else 1
            table = table.reshape(-1, self.shape[-1])
            lines = np.arange(rows.start, rows.stop) // block
            same = lines[:1] if lines[0] == lines[-1] else lines
            picked: Singles = table[same]
            return picked
        return found


def _apply(operation: np.ufunc, into: Singles, table: Singles, block: int, columns: range) -> None:
    """Subtracts the number of each block from its elements, or multiplies them by it."""
    is_even = columns.start % block == 0 and len(columns) % block == 0
    if table.shape[1] > 1 and block > 1 and is_even:
        each = table[:, columns.start // block : columns.stop // block, np.newaxis]
        parts = into.reshape(len(into), -1, block)  # a view: only a dim is cut
        operation(parts, each, out=parts)
    else:
        operation(into, spread(table, block, columns), out=into)


def spread(table: Singles, block: int, columns: range) -> Singles:
    """Returns the number of each of some columns, where each block of columns has one."""
    if table.shape[1] == 1:
        return table
    first, last = columns.start // block, (columns.stop - 1) // block
    if block == 1:
        return table[:, first : last + 1]
    wide = np.repeat(table[:, first : last + 1], block, axis=1)
    return wide[:, columns.start - first * block :][:, : len(columns)]


# ---- rows of codes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows(Formula):
    """Codes in rows: `(code - zero) * scale`, or `code * scale * after`.

    Roles: `codes`; `scales`, and `zeros` if there are any; `factor`, one number for all scales.

    Attributes:
        code: how codes lie in the bytes of a row.
        codes: the stored codes. They have as many bytes in a row as its numbers need, or more.
        scales, zeros: one number for each block.
        packed_zeros: how zero points lie in the words of `zeros`, which are packed by columns:
            `[rows * bits / 32, groups]`. The grid then has their blocks alone.
        factor: multiplies the scales, or divides them with `divides`.
        after: multiplies the products.
    """

    shape: tuple[int, ...]
    code: Codes
    codes: Part
    scales: Grid
    zeros: Grid | None = None
    packed_zeros: Codes | None = None
    factor: Part | None = None
    divides: bool = False
    after: float = 1.0

    @cached_property
    def parts(self) -> Mapping[str, Part]:  # type: ignore[override]
        """Returns the stored tensors, by role."""
        parts = {"codes": self.codes, "scales": self.scales.part}
        if self.zeros is not None:
            parts["zeros"] = self.zeros.part
        if self.factor is not None:
            parts["factor"] = self.factor
        return parts

    @cached_property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of each matrix."""
        return (1, 1, *self.shape)[-2:]  # type: ignore[return-value]

    @property
    def _rows_of_unit(self) -> int:
        return max(1, _UNIT_NUMEL // max(1, self.matrix[1]))

    def unit(self, at: int) -> Unit:
        rows, columns = self.matrix
        number, row = divmod(at // columns, rows)
        first = row // self._rows_of_unit * self._rows_of_unit
        last = min(rows, first + self._rows_of_unit)
        start = (number * rows + first) * columns
        return Unit(start, start + (last - first) * columns, self._boxes(number, first, last))

    def _boxes(self, number: int, first: int, last: int) -> dict[str, Box]:
        lead = self.lead(number)
        boxes = {}
        for role, part in self.parts.items():
            if role == "codes" or self._is_by_row(role):
                behind = part.shape[max(0, len(self.shape) - 1) :]
                own = (first,) if len(self.shape) > 1 else ()
                size = (last - first,) if len(self.shape) > 1 else ()
                boxes[role] = Box(
                    (*lead, *own, *(0,) * len(behind)), (*(1,) * len(lead), *size, *behind)
                )
            else:
                boxes[role] = whole(part.shape)
        return boxes

    def _is_by_row(self, role: str) -> bool:
        """Tells whether each row of the weight has numbers of its own in a part."""
        grid = {"scales": self.scales, "zeros": self.zeros}.get(role)
        if grid is None or (role == "zeros" and self.packed_zeros is not None):
            return False
        return grid.is_by_row(self.shape)

    def lead(self, number: int) -> tuple[int, ...]:
        """Returns the position of a matrix."""
        lead = self.shape[:-2]
        return tuple(int(n) for n in np.unravel_index(number, lead)) if lead else ()

    def fill(self, found: Found, start: int, into: Singles) -> None:
        rows, columns = self.matrix
        number, row = divmod(start // columns, rows)
        unit = self.unit(start)
        skip, count = start % columns, -(-(start % columns + len(into)) // columns)
        room = into.reshape(count, columns) if not skip and count * columns == len(into) else None
        target = np.empty((count, columns), np.float32) if room is None else room
        base = row - (unit.start // columns) % rows  # the first row among those of the unit
        step = max(1, _BLOCK_NUMEL // columns)
        for low in range(0, count, step):
            high = min(count, low + step)
            self.block(
                found,
                self.lead(number),
                range(row + low, row + high),
                range(columns),
                target[low:high],
                row - base,
            )
        if room is None:
            into[:] = target.reshape(-1)[skip : skip + len(into)]

    def block(
        self,
        found: Found,
        lead: Sequence[int],
        rows: range,
        columns: range,
        into: Singles,
        held_from: int = 0,
    ) -> None:
        """Computes rows and columns of a matrix.

        Args:
            found: as for `fill`.
            lead: position of the matrix.
            rows, columns: the columns begin and end on whole bytes of codes.
            into: `[rows, columns]`.
            held_from: the first row in `found`.
        """
        own = slice(rows.start - held_from, rows.stop - held_from)
        lines = found["codes"].reshape(-1, *found["codes"].shape[len(self.shape[:-1]) :])
        data = lines[own].reshape(len(rows), -1)
        at = slice(columns.start * self.code.bits // 8, None)
        self.decode(found, data[:, at], into)
        for role, grid in (("zeros", self.zeros), ("scales", self.scales)):
            if grid is None:
                continue
            is_by_row, table = self._is_by_row(role), found[role]
            if role == "zeros" and self.packed_zeros is not None:
                words = table.view("<u4")[..., 0][tuple(lead)]
                into -= spread(
                    _by_columns(words, self.packed_zeros, rows), grid.blocks[-1], columns
                )
                continue
            table = table.reshape(-1, table.shape[-1])[own] if is_by_row else table
            if role == "scales" and self.factor is not None:
                factor = found["factor"].reshape(-1)[0]
                table = table / factor if self.divides else table * factor
            numbers = grid.of(table, lead, rows, not is_by_row)
            operation = np.subtract if role == "zeros" else np.multiply
            _apply(operation, into, numbers, grid.blocks[-1], columns)
        if self.after != 1.0:
            into *= np.float32(self.after)

    def decode(self, found: Found, data: Bytes, into: Singles) -> None:
        """Fills `[n, columns]` with the numbers of codes, which are yet to be scaled."""
        del found
        self.code.decode(data, into)


@dataclass(frozen=True)
class TableRows(Rows):
    """Codes in rows whose numbers are those of a stored table, times the scale of their block.

    Roles: those of `Rows`, and `table`, with 256 or 16 numbers. Of two codes in a byte, that in the
    higher bits comes first.
    """

    table: Part = field(kw_only=True)

    @cached_property
    def parts(self) -> Mapping[str, Part]:  # type: ignore[override]
        """Returns the stored tensors, by role."""
        return {"codes": self.codes, "scales": self.scales.part, "table": self.table}

    def decode(self, found: Found, data: Bytes, into: Singles) -> None:
        table = found["table"].reshape(-1)
        if self.code.bits == 4:
            into[:] = _pairs(table).take(data).view(np.float32)[:, : into.shape[1]]
        else:
            into[:] = table.take(data[:, : into.shape[1]])


@dataclass(frozen=True)
class TableBlocks(TableRows):
    """Codes of 8 bits whose numbers are those of a stored table; blocks run over the flat weight.

    Roles: those of `TableRows`. The grid has one row of scales, for all blocks.
    """

    def fill(self, found: Found, start: int, into: Singles) -> None:
        table, scales = found["table"].reshape(-1), found["scales"].reshape(1, -1)
        first = start - self.unit(start).start
        codes = found["codes"].reshape(-1)[first : first + len(into)]
        for low in range(0, len(into), _BLOCK_NUMEL):
            target = into[low : low + _BLOCK_NUMEL]
            np.take(table, codes[low : low + _BLOCK_NUMEL], out=target, mode="clip")
            at = range(start + low, start + low + len(target))
            _apply(np.multiply, target[np.newaxis], scales, self.scales.blocks[-1], at)


def _pairs(table: Singles) -> npt.NDArray[np.uint64]:
    """Returns the two of 16 numbers for each byte; the higher bits have the first one."""
    pairs = np.stack([np.repeat(table, 16), np.tile(table, 16)], axis=1)
    return pairs.view(np.uint64).ravel()


def _by_columns(words: npt.NDArray[np.uint32], code: Codes, rows: range) -> Singles:
    """Returns `[n, columns]` codes of some rows, whose columns are packed in words."""
    low = rows.start // _WORD_BITS * _WORD_BITS  # these begin with a word
    last = -(-rows.stop * code.bits // _WORD_BITS)
    lines = np.ascontiguousarray(words[low * code.bits // _WORD_BITS : last].T).view(np.uint8)
    numbers = np.empty((len(lines), rows.stop - low), np.float32)
    code.decode(lines, numbers)
    return np.ascontiguousarray(numbers[:, rows.start - low :].T)


@dataclass(frozen=True)
class Turned(Formula):
    """A weight whose matrices are those of another formula, transposed. A unit is one matrix.

    The rows of this one are the columns of the other.
    """

    inner: Rows
    align: int  # columns of the other at which codes and blocks begin

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Returns the shape of the numbers."""
        *lead, rows, columns = self.inner.shape
        return (*lead, columns, rows)

    @property
    def parts(self) -> Mapping[str, Part]:  # type: ignore[override]
        """Returns the stored tensors, by role."""
        return self.inner.parts

    def unit(self, at: int) -> Unit:
        rows, columns = self.inner.matrix
        number = at // (rows * columns)
        start = number * rows * columns
        return Unit(start, start + rows * columns, self.inner._boxes(number, 0, rows))

    def fill(self, found: Found, start: int, into: Singles) -> None:
        rows, columns = self.inner.matrix
        number, at = divmod(start, rows * columns)
        first, last = at // rows, -(-(at + len(into)) // rows)
        low = first // self.align * self.align
        high = min(columns, -(-last // self.align) * self.align)
        skip = at - first * rows
        is_plain = not skip and (last - first) * rows == len(into)
        target = into.reshape(-1, rows) if is_plain else np.empty((last - first, rows), np.float32)
        step = max(1, _BLOCK_NUMEL // max(1, high - low))
        room = np.empty((step, high - low), np.float32)
        for row in range(0, rows, step):
            part = room[: min(step, rows - row)]
            self.inner.block(
                found,
                self.inner.lead(number),
                range(row, row + len(part)),
                range(low, high),
                part,
            )
            wanted = part[:, first - low : last - low]
            for top in range(0, len(part), _TURNED_ROWS):
                some = wanted[top : top + _TURNED_ROWS]
                target[:, row + top : row + top + len(some)] = some.T
        if not is_plain:
            into[:] = target.reshape(-1)[skip : skip + len(into)]


# ---- matrices of words, transposed against the weight --------------------------------------------


@dataclass(frozen=True)
class Words(Formula):
    """GPTQ and AWQ: words of 32 bits, in a matrix that is transposed against the weight.

    GPTQ packs the codes of one output, AWQ those of eight outputs. Roles: `codes`, `[inputs * bits
    / 32, outputs]` or `[inputs, outputs / 8]`; `zeros`, `[groups, outputs * bits / 32]`; `scales`,
    `[groups, outputs]`; `groups`, the group of each input, if there is such a tensor.

    Attributes:
        shape: outputs and inputs.
        bits: of a code.
        group: inputs of a group.
        lowest_zero: the zero point that is stored as 0: 1 in GPTQ's first format.
        is_awq: the codes of eight outputs are in a word.
    """

    shape: tuple[int, ...]
    bits: int
    group: int
    lowest_zero: int
    is_awq: bool
    parts: Mapping[str, Part]

    def unit(self, at: int) -> Unit:
        del at
        boxes = {role: whole(part.shape) for role, part in self.parts.items()}
        return Unit(0, math.prod(self.shape), boxes)

    def fill(self, found: Found, start: int, into: Singles) -> None:
        outputs, inputs = self.shape
        step = max(1, _BLOCK_NUMEL // inputs)
        step = -(-step // _WORD_BITS) * _WORD_BITS  # so that zero points begin with a word
        at, end = start, start + len(into)
        while at < end:
            low = at // inputs // step * step
            high = min(outputs, low + step)
            last = min(end, high * inputs)
            target = into[at - start : last - start]
            is_plain = at == low * inputs and last == high * inputs
            room = target.reshape(-1, inputs) if is_plain else np.empty((high - low, inputs), "f4")
            self._outputs(found, low, high, room)
            if not is_plain:
                target[:] = room.reshape(-1)[at - low * inputs :][: len(target)]
            at = last

    def _outputs(self, found: Found, low: int, high: int, into: Singles) -> None:
        """Computes the rows of some outputs."""
        words, code = found["codes"].view("<u4")[..., 0], Codes(self.bits)
        per_word = slice(low * self.bits // _WORD_BITS, -(-high * self.bits // _WORD_BITS))
        zeros = found["zeros"].view("<u4")[..., 0][:, per_word]
        if self.is_awq:
            code.decode(_awq_lines(words[:, per_word]), into)
            zero = _awq(zeros, high - low)
        else:
            lines = np.ascontiguousarray(words[:, low:high].T).view(np.uint8)
            code.decode(lines, into)
            zero = np.empty((len(zeros), high - low), np.float32)
            code.decode(np.ascontiguousarray(zeros).view(np.uint8), zero)
        zero += self.lowest_zero
        scales = found["scales"][:, low:high]
        if "groups" in found:
            index = found["groups"].view("<i4")[..., 0]
            if index.min() < 0 or index.max() >= len(scales):
                raise FormatError(
                    f"a group that does not exist: {printable(self.parts['groups'].name)!r} has"
                    f" {index.min()} to {index.max()}, and there are {len(scales)} (g_idx)"
                )
        if "groups" in found and not np.array_equal(index, np.arange(len(index)) // self.group):
            into -= zero.T[:, index]
            into *= scales.T[:, index]
        else:
            columns = range(into.shape[1])
            _apply(np.subtract, into, np.ascontiguousarray(zero.T), self.group, columns)
            _apply(np.multiply, into, np.ascontiguousarray(scales.T), self.group, columns)


def _awq(words: npt.NDArray[np.uint32], columns: int) -> Singles:
    """Returns the codes of 4 bits in words of AWQ: `[n, columns]` for `[n, columns / 8]`."""
    ordered = np.zeros(words.shape, np.uint32)
    for nibble, column in enumerate(_AWQ_COLUMNS):
        ordered |= (words >> np.uint32(4 * nibble) & np.uint32(15)) << np.uint32(4 * column)
    codes = np.empty((len(words), columns), np.float32)
    Codes(4).decode(ordered.view(np.uint8), codes)
    return codes


def _awq_lines(words: npt.NDArray[np.uint32]) -> Bytes:
    """Returns the codes of each output, two of inputs in a byte: `[8 m, n / 2]` for `[n, m]`."""
    first, second, low = words[0::2], words[1::2], np.uint32(0x0F0F0F0F)
    even = first & low | (second & low) << np.uint32(4)  # nibbles 0, 2, 4 and 6 of each word
    odd = first >> np.uint32(4) & low | second & ~low
    data = np.empty((*even.shape, len(_AWQ_COLUMNS)), np.uint8)
    for nibble, column in enumerate(_AWQ_COLUMNS):
        found = odd if nibble % 2 else even
        data[:, :, column] = found.view(np.uint8).reshape(*even.shape, 4)[:, :, nibble // 2]
    return np.ascontiguousarray(data.reshape(len(even), -1).T)


# ---- blocks over the flattened weight ------------------------------------------------------------


@dataclass(frozen=True)
class Flat(Formula):
    """4 bits of bitsandbytes: two codes in a byte, higher bits first; blocks of the flat weight.

    Roles: `codes`, `[n, 1]`; `scales`, one for each block; `map`, the 16 numbers. With nested
    scales, `scales` are codes of `nested_map`, times `nested_scales` of blocks of them, plus an
    offset.

    Attributes:
        block, nested_block: elements of a block of the weight, and of its scales.
        offset: of nested scales.
    """

    shape: tuple[int, ...]
    block: int
    parts: Mapping[str, Part]
    nested_block: int = 0
    offset: float = 0.0

    def unit(self, at: int) -> Unit:
        numel = math.prod(self.shape)
        start = at // _UNIT_NUMEL * _UNIT_NUMEL
        stop = min(numel, start + _UNIT_NUMEL)
        codes, scales = self.parts["codes"], self.parts["scales"]
        boxes = {role: whole(part.shape) for role, part in self.parts.items()}
        width = 2 * codes.dtype.itemsize  # numbers in a stored element
        ends = -(-stop // width)
        boxes["codes"] = Box((start // width, 0), (ends - start // width, 1))
        first, last = start // self.block, -(-stop // self.block)
        boxes["scales"] = Box((first, *(0,) * (len(scales.shape) - 1)), (last - first,))
        return Unit(start, stop, boxes)

    def fill(self, found: Found, start: int, into: Singles) -> None:
        unit = self.unit(start)
        scales = found["scales"].reshape(-1)
        if self.nested_block:
            scales = found["nested_map"].reshape(-1)[found["scales"].reshape(-1)]
            number = np.arange(len(scales)) + unit.start // self.block
            scales = scales * found["nested_scales"].reshape(-1)[number // self.nested_block]
            scales = scales + np.float32(self.offset)
        table, data = found["map"].reshape(-1), found["codes"].reshape(-1)
        pairs = _pairs(table)
        for low in range(0, len(into), _BLOCK_NUMEL):
            high = min(len(into), low + _BLOCK_NUMEL)
            first, last = start + low - unit.start, start + high - unit.start
            codes, target = data[first // 2 : -(-last // 2)], into[low:high]
            if first % 2 == last % 2 == 0:
                np.take(pairs, codes, out=target.view(np.uint64), mode="clip")
            else:
                numbers = pairs.take(codes, mode="clip").view(np.float32)
                target[:] = numbers[first % 2 :][: high - low]
            _apply(
                np.multiply, target[np.newaxis], scales[np.newaxis], self.block, range(first, last)
            )
