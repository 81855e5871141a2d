"""Strided copies and casts between a read and a write, in numpy, without torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy import typing as npt

from ckpt_tools.core.box import Box, row_major_strides
from ckpt_tools.core.dtypes import DType

Bytes = npt.NDArray[np.uint8]
_WORDS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}
_FLOATS: dict[str, np.dtype[Any]] = {
    "float64": np.dtype("f8"),
    "float32": np.dtype("f4"),
    "float16": np.dtype("f2"),
}
# numpy lets go of the interpreter for each operation, and another thread takes it. With shorter
# blocks, two threads wait for it most of the time
_BLOCK_NUMEL = 1 << 19
_KEPT_BYTES = (32 << 20) - (1 << 16)  # glibc takes no more than 32 MiB as a measure
_LARGEST = {"bfloat16": 3.3895e38, "float16": 65504.0}  # what rounds to a finite number
_BF16_INF, _SIGN = np.uint16(0x7F80), np.uint16(0x8000)


def view(
    data: Bytes, sizes: Sequence[int], itemsize: int, strides: Sequence[int] | None = None
) -> npt.NDArray[np.generic]:
    """Returns bytes as an array of `sizes`, with elements that are plain words of `itemsize` bytes.

    `strides` are in elements.
    """
    steps = [s * itemsize for s in strides or row_major_strides(sizes)]
    return np.ndarray(
        tuple(sizes),
        _WORDS.get(itemsize) or np.dtype(f"V{itemsize}"),
        buffer=data.data,
        strides=steps,
    )


def scatter(
    data: Bytes,
    box: Box,
    into: Bytes,
    frame: Box,
    itemsize: int,
    strides: Sequence[int] | None = None,
) -> None:
    """Copies the elements of `box` to their places in `frame`, a row-major buffer."""
    box = box.within(frame)
    sizes = frame.sizes
    if strides is None:
        box, sizes, itemsize = _join_contiguous(box, sizes, itemsize)
    view(into, sizes, itemsize)[box.slices()] = view(data, box.sizes, itemsize, strides)


def gather(data: Bytes, frame: Box, into: Bytes, box: Box, itemsize: int) -> None:
    """Copies the elements of `box` from `frame` to `into`; both buffers are row-major."""
    box, sizes, itemsize = _join_contiguous(box.within(frame), frame.sizes, itemsize)
    view(into, box.sizes, itemsize)[...] = view(data, sizes, itemsize)[box.slices()]


def _join_contiguous(
    box: Box, sizes: tuple[int, ...], itemsize: int
) -> tuple[Box, tuple[int, ...], int]:
    """Merges contiguous elements into wide ones, so that numpy moves wide values and not elements.

    Args:
        box: piece of a row-major array of `sizes`, in its coordinates.

    Returns:
        The same piece and array in wide elements, and their width in bytes.
    """
    ndim = len(sizes)
    while ndim and box.sizes[ndim - 1] == sizes[ndim - 1]:
        ndim -= 1
        itemsize *= sizes[ndim]
    offsets, extent, full = box.offsets[:ndim], box.sizes[:ndim], sizes[:ndim]
    if ndim and full[-1] % extent[-1] == 0 and offsets[-1] % extent[-1] == 0:
        joined = extent[-1]
        offsets, extent, full = (
            (*offsets[:-1], offsets[-1] // joined),
            (*extent[:-1], 1),
            (*full[:-1], full[-1] // joined),
        )
        itemsize *= joined
    return Box(offsets, extent), full, itemsize


@functools.cache
def keep_freed_memory() -> None:
    """Lets this process keep memory that it frees, for the next temporary arrays of this size.

    glibc gives freed memory back to the kernel, and gets it again page by page. With arrays of some
    megabytes, that takes as long as the arithmetic. It keeps up to twice the largest block that was
    ever freed, so one block is freed. Nobody touches it, so it costs no memory.
    """
    np.empty(_KEPT_BYTES, np.uint8)


def cast(data: Bytes, src: DType, into: Bytes, dst: DType) -> int:
    """Converts floating-point values and rounds to nearest even, as torch does.

    Values pass through float32 in the cases where torch does the same.

    Args:
        data: values of type `src`, contiguous.
        into: buffer for as many values of type `dst`.

    Returns:
        The number of finite values that became infinite.
    """
    keep_freed_memory()
    overflowed = 0
    src_block, dst_block = _BLOCK_NUMEL * src.itemsize, _BLOCK_NUMEL * dst.itemsize
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(-(-len(data) // src_block)):
            part = data[number * src_block : (number + 1) * src_block]
            overflowed += _cast_block(
                part, src, into[number * dst_block : (number + 1) * dst_block], dst
            )
    return overflowed


@functools.cache
def _singles_of(name: str) -> npt.NDArray[np.float32]:
    """Returns the value of each code of an 8-bit type, as float32. Those of int8 are the integers.

    Sources: OCP 8-bit Floating Point Specification 1.0 (e4m3fn, e5m2), OCP Microscaling Formats 1.0
    (e8m0), and for `fnuz`, which have no infinity and no negative zero, LLVM's APFloat.
    """
    codes = np.arange(256)
    if name == "int8":
        return codes.astype(np.int8).astype(np.float32)
    if name == "float8_e8m0fnu":
        return np.where(codes == 255, np.nan, 2.0 ** (codes - 127.0)).astype(np.float32)
    is_fnuz, bits = name.endswith("fnuz"), 3 if "e4m3" in name else 2
    magnitudes = codes & 127
    exponents, fractions = magnitudes >> bits, (magnitudes & ((1 << bits) - 1)) / (1 << bits)
    bias = (1 << (6 - bits)) - 1 + is_fnuz
    normal = 2.0 ** (exponents - bias) * (1 + fractions)
    values = np.where(exponents == 0, 2.0 ** (1 - bias) * fractions, normal)
    if is_fnuz:
        values[128] = np.nan
    elif bits == 3:
        values[magnitudes == 127] = np.nan
    else:
        values[magnitudes == 124] = np.inf
        values[magnitudes > 124] = np.nan
    return np.where(codes > 127, -values, values).astype(np.float32)


@functools.cache
def _pairs_of(name: str) -> npt.NDArray[np.uint64]:
    """Returns the two values of each pair of codes: a look for two takes half the time."""
    singles, codes = _singles_of(name), np.arange(1 << 16)
    return np.stack([singles[codes & 255], singles[codes >> 8]], axis=1).view(np.uint64).ravel()


def _from_codes(data: Bytes, name: str, values: npt.NDArray[np.float32]) -> None:
    even = len(data) // 2 * 2
    pairs = data[:even].view(np.uint16)
    np.take(_pairs_of(name), pairs, out=values[:even].view(np.uint64), mode="clip")
    values[even:] = _singles_of(name)[data[even:]]


def _to_singles(data: Bytes, src: DType, singles: npt.NDArray[np.float32]) -> None:
    if src.itemsize == 1:
        _from_codes(data, src.name, singles)
    elif src.name == "bfloat16":  # numpy has no bfloat16: it is the upper half of a float32
        bits = singles.view(np.uint32)
        bits[:] = data.view(np.uint16)
        bits <<= np.uint32(16)
    else:
        singles[:] = data.view(_FLOATS[src.name])


def _cast_block(data: Bytes, src: DType, into: Bytes, dst: DType) -> int:
    if dst.name == "float32" and src.name != "float64":  # which has all of their values
        _to_singles(data, src, into.view(np.float32))
        return 0
    values: npt.NDArray[Any]
    if src.name in _FLOATS:
        values = data.view(_FLOATS[src.name])
    else:
        values = np.empty(len(data) // src.itemsize, np.float32)
        _to_singles(data, src, values)
    if dst.name == "float64":
        into.view(np.float64)[:] = values
        return 0
    singles = values.astype(np.float32, copy=False)
    if src.name != "float64" and _are_tame(singles, _LARGEST.get(dst.name, 0.0)):
        if dst.name == "bfloat16":
            _round(singles, into.view(np.uint16))
        else:
            into.view(_FLOATS[dst.name])[:] = singles
        return 0
    if dst.name == "bfloat16":
        result = into.view(np.uint16)
        round_to_bfloat16(singles, result)
        num_inf = int(np.count_nonzero((result & ~_SIGN) == _BF16_INF))
    else:
        out = into.view(_FLOATS[dst.name])
        out[:] = singles
        num_inf = int(np.count_nonzero(np.isinf(out)))
    return num_inf - int(np.count_nonzero(np.isinf(values))) if num_inf else 0


def round_to_bfloat16(singles: npt.NDArray[np.float32], into: npt.NDArray[np.uint16]) -> None:
    """Rounds float32 values to bfloat16, to even if two are equally near."""
    _round(singles, into)
    nan = np.isnan(singles)
    if nan.any():
        bits = singles.view(np.uint32)[nan]
        into[nan] = (bits >> 16).astype(np.uint16) & _SIGN | np.uint16(0x7FC0)


def _round(singles: npt.NDArray[np.float32], into: npt.NDArray[np.uint16]) -> None:
    bits = singles.view(np.uint32)
    rounded = bits >> 16
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= 16
    into[:] = rounded


def _are_tame(singles: npt.NDArray[np.float32], largest: float) -> bool:
    """Tells whether all values lie between `-largest` and `largest`; not if there is NaN."""
    if not largest or not singles.size:
        return False
    return bool(-largest <= np.min(singles) and np.max(singles) <= largest)


_NUMBERS: dict[str, npt.DTypeLike] = {
    **_FLOATS,
    **{
        name: np.dtype(name)
        for name in (
            "int64",
            "int32",
            "int16",
            "int8",
            "uint64",
            "uint32",
            "uint16",
            "uint8",
            "bool",
        )
    },
    "complex64": np.dtype("c8"),
    "complex128": np.dtype("c16"),
}
# exponent bits, mantissa bits, bias, whether the largest exponent means infinity and NaN, and the
# other codes that are NaN
_SMALL = {
    "float8_e4m3fn": (4, 3, 7, False, (0x7F, 0xFF)),
    "float8_e5m2": (5, 2, 15, True, ()),
    "float8_e4m3fnuz": (4, 3, 8, False, (0x80,)),
    "float8_e5m2fnuz": (5, 2, 16, False, (0x80,)),
}


def to_float64(data: Bytes, dtype: DType) -> npt.NDArray[Any]:
    """Returns values as float64 (or complex128), so that any two types can be compared.

    A type without numeric values is returned as the numbers of its bytes.

    Args:
        data: contiguous values.
        dtype: their type. An int64 beyond 2**53 is rounded.
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN is one, too
        if dtype.name == "bfloat16":
            wide = data.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).astype(np.float64)
        if dtype.name == "complex32":
            return (data.view(np.float16).astype(np.float64)).view(np.complex128)
        if dtype.name in _SMALL or dtype.name == "float8_e8m0fnu":
            return _small_floats(dtype.name)[data]
        words = data.view(_NUMBERS.get(dtype.name, np.uint8))
        return words.astype(np.complex128 if words.dtype.kind == "c" else np.float64)


_DOT_NUMEL = 1 << 13  # OpenBLAS uses several threads from 10,000 elements on


def inner(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Returns the real part of the sum of conj(a) * b.

    It works in parts so short that BLAS starts no threads, which would wait for ours.
    """
    parts = range(0, len(a), _DOT_NUMEL)
    return float(sum(np.real(np.vdot(a[i : i + _DOT_NUMEL], b[i : i + _DOT_NUMEL])) for i in parts))


@functools.cache
def _small_floats(name: str) -> npt.NDArray[np.float64]:
    """Returns the value of each of the 256 codes of an 8-bit float."""
    code = np.arange(256)
    if name == "float8_e8m0fnu":
        return np.where(code == 0xFF, np.nan, np.exp2(code.astype(np.float64) - 127))
    exponent_bits, mantissa_bits, bias, has_inf, nans = _SMALL[name]
    exponent, mantissa = (
        (code >> mantissa_bits) & ((1 << exponent_bits) - 1),
        code & ((1 << mantissa_bits) - 1),
    )
    fraction = mantissa / (1 << mantissa_bits)
    values = np.where(
        exponent == 0,
        fraction * 2.0 ** (1 - bias),
        (1 + fraction) * np.exp2(exponent - float(bias)),
    )
    if has_inf:
        values = np.where(
            exponent == (1 << exponent_bits) - 1, np.where(mantissa == 0, np.inf, np.nan), values
        )
    values = np.where(np.isin(code, nans), np.nan, values)
    return np.where(code & 0x80, -values, values)
