"""Turns quantized weights into numbers on the way: codes of fp8 or int8, times their scales.

A tile of codes is cast to float32 and multiplied by the scales of its blocks, then rounded once to
the wanted type. Scales are matrices that are 64 to 16,384 times smaller. They are read when the
first tile needs them.

Sources: DeepSeek-V3, `inference/kernel.py` (`weight_dequant`) and its config (`weight_block_size`);
compressed-tensors 0.20, `float-quantized` (`block_structure`) and `int-quantized`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.catalog import Catalog, QuantizedWeight, TensorEntry
from ckpt_tools.core.quantized import described, weights_in
from ckpt_tools.engine.execute import Alter
from ckpt_tools.errors import StorageError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.small_tensors import Singles, read_singles
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.sealed_source import checked_manifest
from ckpt_tools.storage import read
from ckpt_tools.storage.small_files import MAX_JSON_BYTES, parse_json

_SCHEMES = ("fp8 with scales of blocks", "fp8 with a scale", "codes with scales")
_CODES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_INT8 = "int8"  # only where a config says so: others keep two numbers in one
_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
# tensors of the same module with which a number is not just a code times a scale
_OTHER_FACTORS = re.compile(
    r".*(?:zero|offset|smooth|pre_quant|global_scale|scale_2|g_idx|shape).*"
)
# those of activations and of the cache, which numbers do not need
_OF_OTHERS = re.compile(
    r"(?:input|activation|output|[qkv]|kv|prob)_scale(?:_ub|_inv)?|scale_ub|scale_input"
)
_MAX_SCALES = 1 << 26  # of one weight, since they are held in memory
_IN_ORDER = (None, "weight", "static")  # orders in which groups are columns side by side
# patterns of modules that are matched in bounded time
_SIMPLE, _MOST_STARS = re.compile(r"\^?(?:[\w-]|\\\.|\.\*?)*\$?"), 4
_RECENT = 16  # weights whose scales are kept: more than there are threads
_DEEPSEEK_BLOCK, _DEEPSEEK = 128, "_scale_inv"  # the size where no config tells another one


class Dequantized(NamedTuple):
    """Tensors with numbers in place of codes.

    Attributes:
        tensors: without the scales of the weights that become numbers.
        alter: what multiplies the codes, by their stored name.
        notes: for the report.
        version: an opaque text that changes when the scales do; "" without any.
    """

    tensors: dict[str, TensorEntry]
    alter: Mapping[str, Alter]
    notes: list[str]
    version: str = ""

    def by_name(self, catalog: Catalog) -> dict[str, Alter]:
        """Returns what multiplies the codes by their name in a catalog, which may differ."""
        tensors = catalog.tensors.items()
        return {n: self.alter[t.stored_name] for n, t in tensors if t.stored_name in self.alter}


def dequantize(
    tensors: Mapping[str, TensorEntry], source: Source, is_kept: Callable[[str], bool]
) -> Dequantized:
    """Returns tensors in which codes of fp8 and int8 are numbers that can be cast.

    Weights of other schemes stay as they are, and so do weights whose blocks are not known for
    sure.

    Args:
        tensors: of a model, under any names.
        source: the checkpoint.
        is_kept: tells which tensors stay codes.
    """
    stored, held = source.catalog.tensors, {t.stored_name for t in tensors.values()}
    kept = {t.stored_name for fqn, t in tensors.items() if is_kept(fqn)}
    weights = [weight for weight in weights_in(tensors.values()) if weight.codes in held]
    modules = _by_module(stored) if weights else {}
    told = _told(source) if weights else _Told()
    if told.is_turned:
        return Dequantized(dict(tensors), {}, [])
    fitting = {
        w.codes: s
        for w in weights
        if (s := _scales_of(w, stored, modules, told.types_of(w.codes))) is not None
    }
    if not fitting:
        return Dequantized(dict(tensors), {}, [])
    manifest, recent = checked_manifest(source), _Recent()
    alter: dict[str, Alter] = {}
    done: list[QuantizedWeight] = []
    for weight in weights:
        scales = fitting.get(weight.codes)
        if scales is None or kept & {*weight.parts}:
            continue
        usual = _DEEPSEEK_BLOCK if scales.fqn.endswith(_DEEPSEEK) else 0
        blocks = _blocks(stored[weight.codes].shape, scales.shape, told.blocks, usual)
        if blocks is not None:
            of_one = partial(_read, source, scales, manifest, len(stored[weight.codes].shape))
            alter[weight.codes] = partial(_scale, partial(recent.get, weight.codes, of_one), blocks)
            done.append(weight)
    if not done:
        return Dequantized(dict(tensors), {}, [])
    found, gone = _without_scales(tensors, weights, done)
    left = f"; {len(gone):,} scales are left out, such as {printable(gone[0])!r}" if gone else ""
    files = sorted({c.extent.file for w in done for c in fitting[w.codes].chunks})
    version = f"{told} {[source.store.version(file) for file in files]}"
    return Dequantized(found, alter, [f"dequantized: {described(done)}{left}"], version)


def _without_scales(
    tensors: Mapping[str, TensorEntry],
    weights: Sequence[QuantizedWeight],
    done: Sequence[QuantizedWeight],
) -> tuple[dict[str, TensorEntry], list[str]]:
    """Returns the tensors without the scales of some weights, and the names of these."""
    codes, parts = {w.codes for w in done}, {part for w in done for part in w.parts}
    is_all = len(done) == len(weights)
    found, gone = dict[str, TensorEntry](), list[str]()
    for fqn, entry in tensors.items():
        name, last = entry.stored_name, entry.stored_name.rpartition(".")[2]
        if name in codes:
            found[fqn] = replace(entry, is_scaled=True)
        elif name in parts or (is_all and entry.quantized and _OF_OTHERS.fullmatch(last)):
            gone.append(fqn)
        elif is_all and entry.quantized and name not in entry.quantized.parts:
            found[fqn] = replace(entry, quantized=None)  # a parameter that is called a scale
        else:  # with weights that stay codes, it may be a scale of theirs
            found[fqn] = entry
    return found, gone


def _scales_of(
    weight: QuantizedWeight,
    stored: Mapping[str, TensorEntry],
    modules: Mapping[str, Sequence[str]],
    types: Sequence[str],
) -> TensorEntry | None:
    """Returns the scales of a weight; None if it has another formula than codes times scales."""
    codes, scales = stored.get(weight.codes), stored.get(weight.parts[1])
    if weight.scheme not in _SCHEMES or codes is None or codes.dtype.name not in types:
        return None
    if scales is None or scales.dtype.name not in _SCALES:
        return None
    beside = modules[weight.codes.rpartition(".")[0]]
    if any(map(_OTHER_FACTORS.fullmatch, beside)) or whole(scales.shape).numel > _MAX_SCALES:
        return None
    return scales


def _by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the last segments of names by what is before them."""
    found: dict[str, list[str]] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        found.setdefault(module, []).append(last)
    return found


class _Told(NamedTuple):
    """What a config tells: rows and columns of a block, and whether int8 is one number."""

    blocks: tuple[int, ...] = ()
    is_int8: bool = False
    ignored: tuple[re.Pattern[str], ...] = ()  # modules of which it does not tell that
    is_turned: bool = False  # codes times scales are the weights after a rotation

    def types_of(self, codes: str) -> Sequence[str]:
        """Returns the types of codes that a scale turns into numbers, for one weight."""
        module = codes.rpartition(".")[0]
        is_left = any(pattern.match(module) for pattern in self.ignored)
        return (*_CODES, _INT8) if self.is_int8 and not is_left else _CODES


def _told(source: Source) -> _Told:
    """Returns what the config beside a checkpoint tells of its codes."""
    with suppress(StorageError, ValueError, TypeError, KeyError, AttributeError):
        if source.folder.size("config.json") > MAX_JSON_BYTES:
            return _Told()
        config = parse_json(read(source.folder, "config.json"))
        said = config.get("quantization_config") or config["text_config"]["quantization_config"]
        groups = (said.get("config_groups") or {}).values()
        weights = [group["weights"] for group in groups]
        is_sorted = any(one.get("actorder") not in _IN_ORDER for one in weights)
        found = [said.get("weight_block_size"), *(one.get("block_structure") for one in weights)]
        found += [(1, size) for one in weights if (size := one.get("group_size")) and not is_sorted]
        blocks = {tuple(one) for one in found if one}
        is_clear = len(blocks) == 1 and all(
            type(n) is int and 0 < n < 1 << 40 for n in (*blocks,)[0]
        )
        ignored = [_pattern(name) for name in said.get("ignore") or ()]
        known = tuple(pattern for pattern in ignored if pattern is not None)
        is_int8 = said.get("quant_method") == "compressed-tensors" and all(
            (one.get("num_bits"), one.get("type"), one.get("symmetric", True)) == (8, "int", True)
            for one in weights
        )
        is_plain = not is_sorted and all(group.get("targets") == ["Linear"] for group in groups)
        return _Told(
            blocks.pop() if is_clear else (),
            bool(weights) and is_int8 and is_plain and len(known) == len(ignored),
            known,
            bool(said.get("transform_config")),
        )
    return _Told()


def _pattern(name: object) -> re.Pattern[str] | None:
    """Returns the modules that an entry of `ignore` means; None for one that may take long."""
    if not isinstance(name, str):
        return None
    if not name.startswith("re:"):
        return re.compile(rf"(?:.*\.)?{re.escape(name)}\Z")
    text = name.removeprefix("re:")
    is_simple = _SIMPLE.fullmatch(text) and text.count("*") <= _MOST_STARS
    return re.compile(text) if is_simple else None


def _blocks(
    shape: tuple[int, ...], scales: tuple[int, ...], told: tuple[int, ...], usual: int
) -> tuple[int, ...] | None:
    """Returns the elements of a block along each dim; None if that is not known for sure.

    Args:
        shape, scales: shapes of the codes and of their scales.
        told: the block of the last dims by a config; () if it tells none.
        usual: the block along every dim where nothing is told; 0 if there is none.
    """
    if not scales or whole(scales).numel == 1:
        return tuple(max(1, dim) for dim in shape)
    if len(scales) < len(shape):  # one for each row
        scales = (*scales, *(1,) * (len(shape) - len(scales)))
        told, usual = (), 0
    if len(scales) != len(shape) or len(told) > len(shape):
        return None
    if all(count in (1, dim) for dim, count in zip(shape, scales, strict=True)) and not told:
        return tuple(dim if n == 1 else 1 for dim, n in zip(shape, scales, strict=True))
    wanted = (*(1,) * (len(shape) - len(told)), *told) if told else (0,) * len(shape)
    found = []
    for dim, count, block in zip(shape, scales, wanted, strict=True):
        size = block or (1 if count == dim else usual)
        if not size or -(-dim // size) != count:
            size = dim if count == 1 and not told else 1 if count == dim and not told else 0
        found.append(size)
    return tuple(max(1, size) for size in found) if all(found) else None


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
    """Reads scales with as many dims as the codes have; one scale has none."""
    scales = read_singles(source, entry, manifest)
    shape = entry.shape if scales.size > 1 else ()
    return scales.reshape((*shape, *(1,) * (dims - len(shape))))


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
