"""Quantizes weights: which rows of numbers become which codes and scales, without calibration.

The arithmetic is float32. Codes are rounded to nearest, to even if two are equally near.

Sources: transformers 5.24 `finegrained_fp8.Fp8Quantize` for blocks of fp8; compressed-tensors 0.20
`calculate_qparams` and `generate_mx_scales` for the others; OCP Microscaling Formats 1.0 for the
values of mxfp4.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import Box
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.shared_cache import SharedCache
from ckpt_tools.engine.formulas import FP4, Formula, Found, Part, Singles, Unit
from ckpt_tools.engine.kernels import Bytes, cast, inner

_UNIT_NUMEL = 1 << 20
_BLOCK_NUMEL = 1 << 18  # of one operation of numpy: see `kernels`
_KEPT_BYTES, _KEPT_UNITS = 16 << 20, 4  # of codes
_KEPT_SCALES = 32 << 20
_SINGLE = BY_NAME["float32"]
_MOST_FP8 = np.float32(448.0)
_HALF_INT8 = np.float32(127.5)  # half of the range of int8, by compressed-tensors
_MX_BIAS, _MX_LARGEST, _FP4_EXPONENT = 127, 254, 2


class Rounding(NamedTuple):
    """How numbers become codes: by the upper 16 bits of a float32, of which the last is sticky.

    The sticky bit is set if any lower bit is. The types have so few bits that no number with it
    lies halfway between two codes. Larger numbers become the largest code.

    Attributes:
        codes: `[65536]`, the nearest code.
        values: `[65536]`, its value.
    """

    codes: npt.NDArray[np.uint8]
    values: Singles

    def of(self, numbers: Singles) -> tuple[npt.NDArray[np.uint8], Singles]:
        """Returns the codes of numbers without NaN, and their values."""
        bits = numbers.view(np.uint32)
        words = (bits >> np.uint32(16)).astype(np.uint16)
        words |= (bits & np.uint32(0xFFFF)) != 0
        keys = words.astype(np.intp)
        return np.take(self.codes, keys, mode="clip"), np.take(self.values, keys, mode="clip")


def _rounding(magnitudes: npt.NDArray[np.float64], sign_bit: int) -> Rounding:
    """Returns the rounding to codes whose values rise from 0, each with a sign."""
    keys = np.arange(1 << 16, dtype=np.uint32)
    with np.errstate(invalid="ignore"):  # some are NaN: those are refused before
        numbers = (keys << np.uint32(16)).view(np.float32).astype(np.float64)
    halves = (magnitudes[1:] + magnitudes[:-1]) / 2
    sizes = np.abs(numbers)
    codes = np.searchsorted(halves, sizes)
    is_tie = (codes < len(halves)) & (sizes == halves[np.minimum(codes, len(halves) - 1)])
    codes += is_tie & (codes % 2 == 1)
    values = np.copysign(magnitudes[codes], numbers).astype(np.float32)
    signed = codes | np.where(np.signbit(numbers), sign_bit, 0)
    return Rounding(signed.astype(np.uint8), values)


@cache
def _to_fp8() -> Rounding:
    codes, singles = np.arange(127, dtype=np.uint8), np.empty(127, np.float32)
    cast(codes, BY_NAME["float8_e4m3fn"], singles.view(np.uint8), _SINGLE)
    return _rounding(singles.astype(np.float64), 0x80)


@cache
def _to_fp4() -> Rounding:
    return _rounding(np.array(FP4.values[:8], np.float64), 8)


class Quantized(NamedTuple):
    """Some rows of a weight, quantized.

    Attributes:
        codes, scales: bytes of the rows, row-major.
        error, norm: sums of squares: of the errors, and of the numbers.
    """

    codes: Bytes
    scales: Bytes
    error: float
    norm: float


@dataclass(frozen=True)
class Method:
    """A way to quantize a matrix.

    Attributes:
        name: for users.
        codes, scales: types of what is stored; "" for scales of the type of the other weights.
        endings: what follows the name of the weight in those of the codes and the scales.
        rows, columns: of a block with one scale; 0 for all columns.
        bits: of a code.
        scheme: see `core.quantized`.
        compute: quantizes whole blocks of rows, `[n, columns]`; the type is that of the scales.
    """

    name: str
    codes: str
    scales: str
    endings: tuple[str, str]
    rows: int
    columns: int
    bits: int
    scheme: str
    compute: Callable[[Singles, DType], Quantized]


class _Totals:
    """Sums of squares of blocks."""

    def __init__(self) -> None:
        self.error = self.norm = 0.0

    def add(self, numbers: Singles, errors: Singles) -> None:
        self.error += _square_sum(errors)
        self.norm += _square_sum(numbers)


def _square_sum(numbers: Singles) -> float:
    flat = numbers.reshape(-1)
    found = inner(flat, flat)
    if 1e-30 < found < np.inf:
        return found
    wide = flat.astype(np.float64)  # squares that float32 cannot hold
    return inner(wide, wide)


def _finite(sizes: Singles) -> Singles:
    """Returns the largest sizes of blocks.

    Raises:
        ValueError: a block has a number that is infinite or NaN.
    """
    if not np.isfinite(sizes).all():
        raise ValueError("has numbers that are infinite or NaN")
    return sizes


def _fp8_blocks(numbers: Singles, kind: DType, size: int = 128) -> Quantized:
    del kind
    (rows, columns), to_fp8, totals = numbers.shape, _to_fp8(), _Totals()
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty((-(-rows // size), -(-columns // size)), np.float32)
    width = _BLOCK_NUMEL // size
    for top in range(0, rows, size):
        for left in range(0, columns, width):
            at = slice(top, top + size), slice(left, left + width)
            part = np.ascontiguousarray(numbers[at])
            starts = np.arange(0, part.shape[1], size)
            most = _finite(np.maximum.reduceat(np.abs(part).max(axis=0), starts))
            factors = np.divide(np.float32(1), most, out=np.ones_like(most), where=most > 0)
            factors[most > 0] *= _MOST_FP8  # as torch divides
            factors[np.isinf(factors)] = 1  # all are next to nothing, and become 0
            inverse = np.float32(1) / factors
            wide, back = (np.repeat(f, size)[: part.shape[1]] for f in (factors, inverse))
            codes[at], values = to_fp8.of(part * wide)
            values *= back
            values -= part
            totals.add(part, values)
            first = left // size
            scales[top // size, first : first + len(starts)] = inverse
    return Quantized(codes.reshape(-1), scales.reshape(-1).view(np.uint8), *_sums(totals))


def _sums(totals: _Totals) -> tuple[float, float]:
    return totals.error, totals.norm


def _channels(numbers: Singles, kind: DType, is_float: bool) -> Quantized:
    (rows, columns), totals = numbers.shape, _Totals()
    most = _MOST_FP8 if is_float else _HALF_INT8
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty(rows * kind.itemsize, np.uint8)
    step = max(1, _BLOCK_NUMEL // columns)
    for top in range(0, rows, step):
        part = numbers[top : top + step]
        sizes = _finite(np.abs(part).max(axis=1)) / most
        stored = scales[top * kind.itemsize : (top + len(part)) * kind.itemsize]
        cast(sizes.view(np.uint8), _SINGLE, stored, kind)
        back = _single(stored, kind)
        if not np.isfinite(back).all():
            raise ValueError(f"has scales that are too large for {kind.name}")
        if (is_zero := back == 0).any():
            back[is_zero] = _smallest(kind)
            cast(back.view(np.uint8), _SINGLE, stored, kind)
        scaled = part / back[:, None]
        if is_float:
            codes[top : top + step], values = _to_fp8().of(scaled)
        else:
            values = np.clip(np.rint(scaled, out=scaled), -128, 127, out=scaled)
            codes[top : top + step] = values.astype(np.int8).view(np.uint8)
        values *= back[:, None]
        values -= part
        totals.add(part, values)
    return Quantized(codes.reshape(-1), scales, *_sums(totals))


def _single(data: Bytes, kind: DType) -> Singles:
    singles = np.empty(len(data) // kind.itemsize, np.float32)
    cast(data, kind, singles.view(np.uint8), _SINGLE)
    return singles


def _smallest(kind: DType) -> np.float32:
    """Returns the scale of zeros: the step above 1 of a type, as in compressed-tensors."""
    return np.float32(2.0 ** -{"bfloat16": 7, "float16": 10}.get(kind.name, 23))


def _mxfp4(numbers: Singles, kind: DType, size: int = 32) -> Quantized:
    del kind
    (rows, columns), to_fp4, totals = numbers.shape, _to_fp4(), _Totals()
    codes = np.empty((rows, columns // 2), np.uint8)
    scales = np.empty((rows, columns // size), np.uint8)
    step = max(1, _BLOCK_NUMEL // columns)
    for top in range(0, rows, step):
        part = numbers[top : top + step]
        groups = part.reshape(len(part), -1, size)
        most = _finite(np.abs(groups).max(axis=2))
        # from 1.75 times a power of two on, the next one: 7 would be rounded to 8, and be cut to 6
        exponents = (most.view(np.uint32) + np.uint32(1 << 21)) >> np.uint32(23)
        stored = np.clip(exponents.astype(np.int32) - _FP4_EXPONENT, 0, _MX_LARGEST)
        back = np.ldexp(np.float32(1), stored - _MX_BIAS).astype(np.float32)
        scaled = groups * np.ldexp(np.float32(1), _MX_BIAS - stored).astype(np.float32)[..., None]
        found, values = to_fp4.of(scaled)
        pairs = found.reshape(len(part), -1, 2)
        codes[top : top + step] = pairs[..., 0] | pairs[..., 1] << 4
        scales[top : top + step] = stored
        values *= back[..., None]
        values -= groups
        totals.add(groups, values)
    return Quantized(codes.reshape(-1), scales.reshape(-1), *_sums(totals))


METHODS = {
    method.name: method
    for method in (
        Method(
            name="fp8-block",
            codes="float8_e4m3fn",
            scales="float32",
            endings=("", "_scale_inv"),
            rows=128,
            columns=128,
            bits=8,
            scheme="fp8 with scales of blocks",
            compute=_fp8_blocks,
        ),
        Method(
            name="fp8-channel",
            codes="float8_e4m3fn",
            scales="",
            endings=("", "_scale"),
            rows=1,
            columns=0,
            bits=8,
            scheme="codes with scales",
            compute=partial(_channels, is_float=True),
        ),
        Method(
            name="int8-channel",
            codes="int8",
            scales="",
            endings=("", "_scale"),
            rows=1,
            columns=0,
            bits=8,
            scheme="codes with scales",
            compute=partial(_channels, is_float=False),
        ),
        Method(
            name="mxfp4",
            codes="uint8",
            scales="uint8",
            endings=("_packed", "_scale"),
            rows=1,
            columns=32,
            bits=4,
            scheme="compressed-tensors, packed",
            compute=_mxfp4,
        ),
    )
}


class Results:
    """Codes and scales that were computed and may be needed again, of all weights together.

    Codes are needed again where a read ends within a unit. Scales may be written long after their
    codes: they are kept longer.
    """

    def __init__(self) -> None:
        self.clear()

    def unit(self, key: tuple[str, int], make: Callable[[], Quantized]) -> Quantized:
        """Returns a unit, by its weight and its first row."""
        scales = self._scales  # of this attempt

        def made() -> Quantized:
            found = make()
            scales.get(key, lambda: found.scales)
            return found

        return self._units.get(key, made)

    def scales(self, key: tuple[str, int], make: Callable[[], Quantized]) -> Bytes:
        """Returns the scales of a unit."""
        found = self._scales.find(key)
        return self.unit(key, make).scales if found is None else found

    def clear(self) -> None:
        """Forgets everything: the next attempt reads all numbers anew."""
        self._units = SharedCache[tuple[str, int], Quantized](
            _KEPT_BYTES, _KEPT_UNITS, lambda found: len(found.codes)
        )
        self._scales = SharedCache[tuple[str, int], Bytes](_KEPT_SCALES, 0, len)


class QuantizedRows:
    """One weight whose codes and scales are computed together, in units of rows."""

    def __init__(
        self, fqn: str, part: Part, method: Method, scales: DType, results: Results
    ) -> None:
        """Takes the weight.

        Args:
            fqn: its name, for messages.
            part: its numbers, `[rows, columns]`.
            method: how to quantize it.
            scales: the type of its scales.
            results: keeps some units.
        """
        self.fqn, self.part, self.method, self.scale_type = fqn, part, method, scales
        self.results = results
        self.rows, self.columns = part.shape
        wide = -(-self.columns // method.columns) if method.columns else 1
        self.code_shape = self.rows, self.columns * method.bits // 8
        self.scale_shape = -(-self.rows // method.rows), wide
        usual = _UNIT_NUMEL // self.columns // method.rows * method.rows
        self.unit_rows = max(method.rows, usual)
        self.sums: dict[int, tuple[float, float]] = {}  # by first row: error and norm
        self.problems: dict[int, str] = {}  # why numbers have no codes, by first row

    def box(self, first: int) -> Box:
        """Returns the rows of a unit."""
        return Box((first, 0), (min(self.unit_rows, self.rows - first), self.columns))

    def codes_of(self, first: int, found: Found) -> Bytes:
        """Returns the codes of a unit, by its first row."""
        return self.results.unit((self.fqn, first), lambda: self._compute(first, found)).codes

    def scales_of(self, first: int, found: Found) -> Bytes:
        """Returns the scales of a unit, by its first row."""
        return self.results.scales((self.fqn, first), lambda: self._compute(first, found))

    def _compute(self, first: int, found: Found) -> Quantized:
        numbers = found["numbers"]
        self.problems.pop(first, None)
        try:
            with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
                unit = self.method.compute(numbers, self.scale_type)
        except ValueError as error:  # told once the bytes are proved: they may be damaged
            self.problems[first] = str(error)
            unit = self.method.compute(np.zeros_like(numbers), self.scale_type)
        self.sums[first] = unit.error, unit.norm
        return unit


@dataclass(frozen=True)
class _OfUnits(Formula):
    """Bytes of codes or scales. A unit is one of the weight."""

    weight: QuantizedRows
    item: ClassVar[np.dtype[np.uint8]] = np.dtype(np.uint8)

    @cached_property
    def parts(self) -> Mapping[str, Part]:  # type: ignore[override]
        """Returns the numbers."""
        return {"numbers": self.weight.part}

    @property
    @abstractmethod
    def row_nbytes(self) -> int:
        """Bytes of a row of what is stored."""

    @property
    @abstractmethod
    def block_rows(self) -> int:
        """Rows of numbers in a row of what is stored."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Returns the bytes as a matrix."""
        return -(-self.weight.rows // self.block_rows), self.row_nbytes

    def unit(self, at: int) -> Unit:
        rows = self.weight.unit_rows // self.block_rows
        low = at // self.row_nbytes // rows * rows
        high = min(self.shape[0], low + rows)
        start, stop = low * self.row_nbytes, high * self.row_nbytes
        return Unit(start, stop, {"numbers": self.weight.box(low * self.block_rows)})

    def first_row(self, start: int) -> int:
        """Returns the first row of numbers of the unit that has a byte."""
        row, rows = start // self.row_nbytes * self.block_rows, self.weight.unit_rows
        return row // rows * rows


class QuantizedCodes(_OfUnits):
    """The codes of a weight."""

    @property
    def row_nbytes(self) -> int:
        return self.weight.code_shape[1]

    @property
    def block_rows(self) -> int:
        return 1

    def fill(self, found: Found, start: int, into: Bytes) -> None:
        first = self.first_row(start)
        codes = self.weight.codes_of(first, found)
        at = start - first * self.row_nbytes
        into[:] = codes[at : at + len(into)]


class QuantizedScales(_OfUnits):
    """The scales of a weight."""

    @property
    def row_nbytes(self) -> int:
        return self.weight.scale_shape[1] * self.weight.scale_type.itemsize

    @property
    def block_rows(self) -> int:
        return self.weight.method.rows

    def fill(self, found: Found, start: int, into: Bytes) -> None:
        first = self.first_row(start)
        scales = self.weight.scales_of(first, found)
        at = start - first // self.block_rows * self.row_nbytes
        into[:] = scales[at : at + len(into)]
