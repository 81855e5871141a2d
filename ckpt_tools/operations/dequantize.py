"""Turns quantized weights into numbers on the way: codes of fp8 or int8, times their scales.

A tile of codes is cast to float32 and multiplied by the scales of its blocks, then rounded once to
the wanted type. Scales are matrices that are 64 to 16,384 times smaller. They are read when the
first tile needs them.

Sources: DeepSeek-V3, `inference/kernel.py` (`weight_dequant`) and its config (`weight_block_size`);
compressed-tensors 0.20, `float-quantized` and symmetric `int-quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import Catalog, QuantizedWeight, TensorEntry
from ckpt_tools.core.checksum import crc64nvme, hex64
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.plan import Slot, Target, plan_transfer
from ckpt_tools.core.quantized import described, weights_in
from ckpt_tools.engine.execute import Alter, execute_batches
from ckpt_tools.engine.kernels import cast
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, schedule, tile_bytes
from ckpt_tools.engine.sinks import FillSink
from ckpt_tools.errors import IntegrityError, StorageError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.sealed_source import checked_manifest
from ckpt_tools.storage import MemoryStore, read
from ckpt_tools.storage.small_files import MAX_JSON_BYTES, parse_json

_SCHEMES = ("fp8 with scales of blocks", "fp8 with a scale", "codes with scales")
_CODES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8")
_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
_OF_OTHERS = ("_zero_point", "_scale_2", "_g_idx", "_shape")  # such weights have other formulas
_MAX_SCALES = 1 << 26  # of one weight, since they are held in memory
_RECENT = 16  # weights whose scales are kept: more than there are threads
_USUAL_BLOCK = 128
_BLOCKS = (16, 32, 64, 256, 512)
_SINGLE = BY_NAME["float32"]
Singles = npt.NDArray[np.float32]


class Dequantized(NamedTuple):
    """Tensors with numbers in place of codes.

    Attributes:
        tensors: without the scales of the weights that become numbers.
        alter: what multiplies the codes, by their stored name.
        notes: for the report.
    """

    tensors: dict[str, TensorEntry]
    alter: Mapping[str, Alter]
    notes: list[str]

    def by_name(self, catalog: Catalog) -> dict[str, Alter]:
        """Returns what multiplies the codes by their name in a catalog, which may differ."""
        tensors = catalog.tensors.items()
        return {n: self.alter[t.stored_name] for n, t in tensors if t.stored_name in self.alter}


def dequantize(
    tensors: Mapping[str, TensorEntry], source: Source, is_kept: Callable[[str], bool]
) -> Dequantized:
    """Returns tensors in which codes of fp8 and int8 are numbers that can be cast.

    Weights of other schemes stay as they are.

    Args:
        tensors: of a model, under any names.
        source: the checkpoint.
        is_kept: tells which tensors stay codes.
    """
    stored = source.catalog.tensors
    kept = {t.stored_name for fqn, t in tensors.items() if is_kept(fqn)}
    told: tuple[int, ...] | None = None
    manifest: Manifest | None = None
    recent = _Recent()
    alter: dict[str, Alter] = {}
    done: list[QuantizedWeight] = []
    weights = weights_in(tensors.values())
    for weight in weights:
        scales = _scales_of(weight, stored)
        if scales is None or kept & {*weight.parts}:
            continue
        if not done:
            told, manifest = _told_blocks(source), checked_manifest(source)
        blocks = _blocks(stored[weight.codes].shape, scales.shape, told)
        if blocks is not None:
            of_one = partial(_read, source, scales, manifest, len(stored[weight.codes].shape))
            alter[weight.codes] = partial(_scale, partial(recent.get, weight.codes, of_one), blocks)
            done.append(weight)
    if not done:
        return Dequantized(dict(tensors), {}, [])
    parts = {part for weight in done for part in weight.parts}
    rest = [weight for weight in weights if weight.codes not in alter]
    is_all = not rest  # then nothing needs the scales of the cache, for example
    found, gone = dict[str, TensorEntry](), list[str]()
    for fqn, entry in tensors.items():
        if entry.stored_name in alter:
            found[fqn] = replace(entry, is_scaled=True)
        elif entry.quantized is not None and (is_all or entry.stored_name in parts):
            gone.append(fqn)
        elif entry.quantized in done:  # of no weight in particular
            found[fqn] = replace(entry, quantized=rest[0])
        else:
            found[fqn] = entry
    notes = [
        f"dequantized: {described(done)}; {len(gone):,} scales are left out, such as"
        f" {printable(gone[0])!r}"
        if gone
        else f"dequantized: {described(done)}"
    ]
    return Dequantized(found, alter, notes)


def _scales_of(weight: QuantizedWeight, stored: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """Returns the scales of a weight; None if it has another formula than codes times scales."""
    codes = stored.get(weight.codes)
    if weight.scheme not in _SCHEMES or codes is None or codes.dtype.name not in _CODES:
        return None
    others = [name for name in weight.parts[1:] if name.endswith(_OF_OTHERS)]
    scales = stored.get(weight.parts[1])
    if others or scales is None or scales.dtype.name not in _SCALES:
        return None
    return scales if whole(scales.shape).numel <= _MAX_SCALES else None


def _told_blocks(source: Source) -> tuple[int, ...] | None:
    """Returns the rows and columns of a block by the config beside a checkpoint, if it tells."""
    with suppress(StorageError, ValueError, TypeError, KeyError):
        if source.folder.size("config.json") > MAX_JSON_BYTES:
            return None
        config = parse_json(read(source.folder, "config.json"))
        found = config["quantization_config"]["weight_block_size"]
        if isinstance(found, list) and all(type(n) is int and n > 0 for n in found):
            return tuple(found)
    return None


def _blocks(
    shape: tuple[int, ...], scales: tuple[int, ...], told: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Returns the elements of a block along each dim; None if the shapes do not tell."""
    if not scales or whole(scales).numel == 1:
        return tuple(max(1, dim) for dim in shape)
    if len(scales) < len(shape):  # one for each row
        scales = (*scales, *(1,) * (len(shape) - len(scales)))
    if len(scales) != len(shape):
        return None
    wanted = (0,) * (len(shape) - len(told)) + told if told and len(told) <= len(shape) else ()
    found = [
        _block(dim, count, wanted[number] if wanted else 0)
        for number, (dim, count) in enumerate(zip(shape, scales, strict=True))
    ]
    return tuple(found) if all(found) else None


def _block(dim: int, count: int, told: int) -> int:
    """Returns the elements of a block along a dim of so many scales; 0 if that is not clear."""
    if count in (1, dim):
        return max(1, dim) if count == 1 else 1
    fitting = [n for n in (told, _USUAL_BLOCK) if n and -(-dim // n) == count]
    others = [n for n in _BLOCKS if -(-dim // n) == count]
    return fitting[0] if fitting else others[0] if len(others) == 1 else 0


class _Recent:
    """The scales of the weights that were needed last."""

    def __init__(self) -> None:
        self._lock, self._found = Lock(), dict[str, Singles]()

    def get(self, codes: str, read: Callable[[], Singles]) -> Singles:
        """Returns the scales of a weight, by the name of its codes."""
        with self._lock:
            values = self._found.pop(codes, None)
            values = self._found[codes] = read() if values is None else values
            if len(self._found) > _RECENT:
                del self._found[next(iter(self._found))]
            return values


def _read(source: Source, entry: TensorEntry, manifest: Manifest | None, dims: int) -> Singles:
    """Reads scales as float32, with as many dims as the codes have.

    Raises:
        IntegrityError: they are not what was sealed.
    """
    data = bytearray(entry.nbytes)
    slot = Slot(whole(entry.shape), "", 0)
    target = Target("scales", {"": entry.nbytes}, {entry.fqn: (slot,)})
    plan = plan_transfer(Catalog("scales", {entry.fqn: entry}), target)
    located = source.format.locate(source.store, [entry])
    batches = schedule(plan, located, *tile_bytes(DEFAULT_MEMORY_BYTES, 1))
    sink = FillSink(MemoryStore({"": memoryview(data)}))
    execute_batches(batches, source.store, sink, 1, looks_ahead=False)
    sealed = manifest.tensors.get(entry.fqn) if manifest is not None else None
    if sealed is not None and hex64(crc64nvme(data)) != sealed.fingerprint:
        raise IntegrityError(
            f"scales are not what was sealed: expected CRC-64 {sealed.fingerprint}, got"
            f" {hex64(crc64nvme(data))} ({printable(entry.fqn)!r})",
            hint="ckpt verify names what is damaged; restore the file",
        )
    singles = np.empty(whole(entry.shape).numel * _SINGLE.itemsize, np.uint8)
    cast(np.frombuffer(data, np.uint8), entry.dtype, singles, _SINGLE)
    shape = entry.shape if whole(entry.shape).numel > 1 else ()
    return singles.view(np.float32).reshape((*shape, *(1,) * (dims - len(shape))))


def _scale(
    scales: Callable[[], Singles], blocks: tuple[int, ...], box: Box, values: Singles
) -> None:
    """Multiplies the numbers of a box by their scales."""
    found = scales()
    index: list[npt.NDArray[Any]] = [
        np.arange(offset, offset + size) // block
        for offset, size, block in zip(box.offsets, box.sizes, blocks, strict=True)
    ]
    if not index:
        values *= found
        return
    columns, counts = np.unique(index[-1], return_counts=True)
    rows = found[np.ix_(*index[:-1], columns)]
    values *= np.repeat(rows, counts, axis=-1)
