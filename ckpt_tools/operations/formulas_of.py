"""Which formula turns the codes of a quantized weight into numbers?

Names, types and shapes of its tensors tell, and the config beside a checkpoint. If they do not tell
for sure, there is a reason in place of a formula.

Sources: DeepSeek-V3, `inference/kernel.py` (`weight_dequant`) and its config (`weight_block_size`);
compressed-tensors 0.20 (`naive-quantized`, `int-quantized`, `pack-quantized`,
`nvfp4-pack-quantized`, `mxfp4-pack-quantized`); ModelOpt's NVFP4 (`weight_scale_2`); transformers
5.24, `integrations/mxfp4.py`; bitsandbytes 0.50, `functional.py`, `optim/optimizer.py`; AutoGPTQ's
and GPTQModel's `checkpoint_format`; AutoAWQ's GEMM layout; torchao 0.18, `optim/subclass_*.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import QuantizedWeight, TensorEntry
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.quantized import OF_BITSANDBYTES, OF_OPTIMIZERS, OF_TORCHAO, weights_in
from ckpt_tools.engine.formulas import (
    FP4,
    Codes,
    Flat,
    Formula,
    Grid,
    Part,
    Rows,
    TableBlocks,
    TableRows,
    Turned,
    Words,
)
from ckpt_tools.errors import StorageError
from ckpt_tools.operations.quantization_config import ToldByConfig
from ckpt_tools.storage.small_files import parse_json

_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
# tensors that may lie beside codes without a meaning for their numbers: biases, and scales of
# activations, of the cache, and upper bounds
_BESIDE = re.compile(
    r"(?:.*_)?bias|(?:input|activation|output)_.*|scale_(?:ub|input)|.*_scale_ub"
    r"|(?:[qkv]|kv|prob)_(?:scale|zero_point)"
)
_MAX_SCALES = 1 << 26  # of one weight, where they are held in memory
_MAX_COLUMNS = 1 << 24  # of rows, which are computed as a whole
_MAX_WORDS_BYTES = 1 << 30  # of a matrix that is read whole
DEEPSEEK_BLOCK, DEEPSEEK = 128, "_scale_inv"  # the size where no config tells another one
_WORD_BITS, _AWQ_PER_WORD = 32, 8
_GPTQ_ZEROS = {"gptq": 1, "gptq_v2": 0}  # by format: what a stored zero point lacks
_GPTQ_BITS = (2, 3, 4, 8)
_MOMENT_BLOCK = 256  # of bitsandbytes' 8-bit optimizers
_FLAT_BLOCKS = tuple(1 << n for n in range(5, 13))  # of bitsandbytes
_MOST_OFFSET = 1e30
_PER_SCB = 7.874015718698502e-3  # bitsandbytes' float32 of 1/127
# experts of gpt-oss, which transformers has transposed against their codes
_TURNED = ("gate_up_proj", "down_proj")


class _Unsure(Exception):
    """The formula of a weight is not known for sure; the text is the reason."""


class Numbers(NamedTuple):
    """The numbers that a quantized weight becomes: their name, and their formula."""

    name: str
    formula: Formula


class FormulaFinder:
    """Finds the formulas of the weights of one checkpoint."""

    def __init__(self, stored: Mapping[str, TensorEntry], told: ToldByConfig) -> None:
        """Takes the stored tensors, and what their config tells."""
        self._stored, self._told = stored, told
        self._modules = _by_module(stored)
        self._of_others = _shared(weights_in(stored.values()))

    def small_parts(self, weight: QuantizedWeight) -> list[str]:
        """Returns the stored tensors of a weight whose values its formula depends on."""
        if weight.scheme == "compressed-tensors, packed":
            return [part for part in weight.parts if part.endswith("weight_shape")]
        endings = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
        return [part for part in weight.parts if part.endswith((*endings, ".weight_format"))]

    def find(self, weight: QuantizedWeight, small: Mapping[str, bytes]) -> Numbers | str:
        """Returns the numbers of a weight; or the reason why it has to stay codes.

        Args:
            weight: with all of its parts in the checkpoint.
            small: the bytes of its `small_parts`.
        """
        is_weight = weight.scheme not in OF_OPTIMIZERS  # no config tells of moments
        if is_weight and not self._told.is_clear:
            return "the config beside it is not understood"
        if is_weight and self._told.is_turned:
            return "its config says that weights are rotated (transform_config)"
        name = numbers_name(weight)
        if name != weight.codes and name in self._stored:
            return "another tensor has the name that its numbers would have"
        try:
            formula = self._formula(weight, small)
        except _Unsure as reason:
            return str(reason)
        if isinstance(formula, Rows) and formula.matrix[1] > _MAX_COLUMNS:
            return f"a row has more than {_MAX_COLUMNS:,} numbers"
        return Numbers(name, formula)

    def _formula(self, weight: QuantizedWeight, small: Mapping[str, bytes]) -> Formula:
        scheme = weight.scheme
        if scheme.startswith("fp8") or scheme == "codes with scales":
            return self._scaled(weight)
        if scheme == "compressed-tensors, packed":
            return self._packed(weight, small)
        if scheme == "mxfp4":
            return self._mxfp4(weight)
        if scheme in ("GPTQ", "AWQ"):
            return self._words(weight)
        if scheme == "bitsandbytes 4-bit":
            return self._flat(weight, small)
        if scheme == "bitsandbytes 8-bit":
            return self._by_127(weight, small)
        if scheme == OF_TORCHAO:
            return self._moment(weight)
        if scheme == OF_BITSANDBYTES:
            return self._flat_moment(weight)
        raise _Unsure("no formula is known for this scheme")

    def _part(self, name: str, is_raw: bool = False, dtype: str = "") -> Part:
        entry = self._stored[name]
        return Part(name, entry.shape, BY_NAME[dtype] if dtype else entry.dtype, is_raw)

    def _refuse_others(self, weight: QuantizedWeight, used: Iterable[str]) -> None:
        """Refuses a module that has other tensors that may belong to the formula.

        Raises:
            _Unsure: with one of them.
        """
        module, dot, _ = weight.codes.rpartition(".")
        last = {name.rpartition(".")[2] for name in used}
        last |= self._of_others.get(module, set())
        beside = [n for n in self._modules[module] if n not in last]
        unknown = [n for n in beside if not _BESIDE.fullmatch(n)]
        if unknown:
            raise _Unsure(f"beside it lies {module}{dot}{unknown[0]}, whose meaning is not known")

    # ---- codes with scales -----------------------------------------------------------------------

    def _scaled(self, weight: QuantizedWeight) -> Formula:
        codes, scales = self._stored[weight.codes], self._stored[weight.parts[1]]
        if codes.dtype.name == "uint8":
            return self._nvfp4(weight, f"{weight.codes}_scale_2", divides=False)
        if codes.dtype.name not in self._told.types_of(weight.codes):
            raise _Unsure(
                f"no config says that a code of {codes.dtype.name} is one number of 8 bits"
            )
        if scales.dtype.name not in _SCALES or whole(scales.shape).numel > _MAX_SCALES:
            raise _Unsure(f"its scales are {scales.dtype.name} {list(scales.shape)}")
        zero = f"{weight.codes}_zero_point"
        has_zeros = not self._told.is_symmetric and codes.dtype.name == "int8"
        used = [weight.codes, scales.fqn, *([zero] if has_zeros else ())]
        if has_zeros and zero not in self._stored:
            raise _Unsure("its config says that it has zero points, and they are not there")
        self._refuse_others(weight, used)
        usual = DEEPSEEK_BLOCK if scales.fqn.endswith(DEEPSEEK) else 0
        blocks = blocks_of(codes.shape, scales.shape, self._told.blocks, usual)
        if blocks is None:
            raise _Unsure("the size of its blocks is not known for sure")
        zeros = None
        if has_zeros:
            entry = self._stored[zero]
            if entry.dtype.name != "int8" or entry.shape != scales.shape:
                raise _Unsure(f"its zero points are {entry.dtype.name} {list(entry.shape)}")
            zeros = _grid(self._part(zero), codes.shape, blocks)
        return Rows(
            codes.shape,
            Codes(8, kind=codes.dtype.name),
            self._part(weight.codes, is_raw=True),
            _grid(self._part(scales.fqn), codes.shape, blocks),
            zeros,
        )

    def _nvfp4(self, weight: QuantizedWeight, factor: str, divides: bool) -> Formula:
        codes, scales = self._stored[weight.codes], self._stored[weight.parts[1]]
        shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if codes.shape else ()
        is_nvfp4 = (
            len(codes.shape) > 1
            and scales.dtype.name == "float8_e4m3fn"
            and scales.shape == (*codes.shape[:-1], codes.shape[-1] // 8)
            and codes.shape[-1] % 8 == 0
        )
        one = self._stored.get(factor)
        if not is_nvfp4 or one is None or whole(one.shape).numel != 1:
            raise _Unsure("its codes are bytes, and shapes and types are not those of NVFP4")
        if one.dtype.name not in _SCALES:
            raise _Unsure(f"its global scale is {one.dtype.name}")
        self._refuse_others(weight, [weight.codes, scales.fqn, factor])
        grid = Grid(self._part(scales.fqn), scales.shape, (*(1,) * (len(shape) - 1), 16))
        return Rows(
            shape,
            FP4,
            self._part(weight.codes, is_raw=True),
            grid,
            factor=self._part(factor),
            divides=divides,
        )

    def _by_127(self, weight: QuantizedWeight, small: Mapping[str, bytes]) -> Formula:
        codes, scales = self._stored[weight.codes], self._stored[weight.parts[1]]
        if any(any(data) for data in small.values()):
            raise _Unsure("its weight_format is not that of rows")
        is_plain = len(codes.shape) == 2 and scales.shape == codes.shape[:1]
        if not is_plain or codes.dtype.name != "int8" or scales.dtype.name not in _SCALES:
            raise _Unsure("shapes and types are not those of 8 bits of bitsandbytes")
        self._refuse_others(weight, weight.parts)
        grid = _grid(self._part(scales.fqn), codes.shape, (1, codes.shape[1]))
        code = Codes(8, kind="int8")
        return Rows(codes.shape, code, self._part(weight.codes, True), grid, after=_PER_SCB)

    def _moment(self, weight: QuantizedWeight) -> Formula:
        """Returns the formula of a moment of torchao, as a save of this tool has it."""
        codes, scales = self._stored[weight.codes], self._stored[weight.parts[1]]
        name = weight.codes.removesuffix("codes") + "qmap"
        numbers = whole(self._stored[name].shape).numel if name in self._stored else 0
        kind = {("uint8", 256): 8, ("uint8", 16): 4, ("float8_e4m3fn", 0): 8}
        bits = kind.get((codes.dtype.name, numbers), 0)
        shape = (*codes.shape[:-1], codes.shape[-1] * 8 // bits) if bits and codes.shape else ()
        groups = scales.shape[-1] if scales.shape else 0
        fits = shape and groups and scales.shape[:-1] == shape[:-1] and shape[-1] % groups == 0
        if not fits or scales.dtype.name not in _SCALES:
            raise _Unsure("shapes and types are not those of a moment of torchao")
        self._refuse_others(weight, weight.parts)
        blocks = (*(1,) * (len(shape) - 1), shape[-1] // groups)
        grid = Grid(self._part(scales.fqn), scales.shape, blocks)
        part = self._part(weight.codes, is_raw=True)
        if not numbers:
            return Rows(shape, Codes(8, kind=codes.dtype.name), part, grid)
        return TableRows(shape, Codes(bits), part, grid, table=self._part(name))

    def _flat_moment(self, weight: QuantizedWeight) -> Formula:
        """Returns the formula of a moment of bitsandbytes: codes of a table, in blocks."""
        codes, table, scales = (self._stored[part] for part in weight.parts)
        numel, count = whole(codes.shape).numel, whole(scales.shape).numel
        is_flat = len(scales.shape) == 1 and -(-numel // _MOMENT_BLOCK) == count
        types = (codes.dtype.name, table.dtype.name, scales.dtype.name)
        is_known = types == ("uint8", "float32", "float32") and table.shape == (256,)
        if not is_known or not is_flat or not codes.shape or count > _MAX_SCALES:
            raise _Unsure("shapes and types are not those of a moment of bitsandbytes")
        self._refuse_others(weight, weight.parts)
        grid = Grid(self._part(scales.fqn), scales.shape, (_MOMENT_BLOCK,))
        part = self._part(weight.codes, is_raw=True)
        return TableBlocks(codes.shape, Codes(8), part, grid, table=self._part(table.fqn))

    # ---- packed codes in rows --------------------------------------------------------------------

    def _packed(self, weight: QuantizedWeight, small: Mapping[str, bytes]) -> Formula:
        codes, scales = self._stored[weight.codes], self._stored[weight.parts[1]]
        front = weight.codes.removesuffix("weight_packed")
        factor, shape_name = f"{front}weight_global_scale", f"{front}weight_shape"
        if codes.dtype.name == "uint8" and factor in self._stored:
            return self._nvfp4(weight, factor, divides=True)
        if codes.dtype.name == "uint8":
            return self._microscaled(weight, is_flat=True)
        if shape_name in small:
            columns = _columns_by_shape(codes.shape, small[shape_name])
        else:
            columns = _columns_by_groups(self._told, weight, self._stored)
        if codes.dtype.name != "int32" or len(codes.shape) < 2 or columns < 1:
            raise _Unsure("shapes and types are not those of packed integers")
        if self._told.is_sorted or f"{front}weight_g_idx" in self._stored:
            raise _Unsure("its groups are not columns side by side (weight_g_idx)")
        shape, zero = (*codes.shape[:-1], columns), f"{front}weight_zero_point"
        self._refuse_others(weight, [weight.codes, scales.fqn, shape_name, zero])
        fitting = [b for b in range(1, 9) if _num_words(columns, b) == codes.shape[-1]]
        bits = self._told.bits or (fitting[0] if len(fitting) == 1 else 0)
        if bits not in fitting:
            raise _Unsure("the bits of a code are not known for sure")
        per_word = _WORD_BITS // bits  # older releases left the other bits of a word unused
        if _WORD_BITS % bits and -(-columns // per_word) == codes.shape[-1]:
            raise _Unsure("an older layout of its codes has the same shape")
        groups = scales.shape[-1] if scales.shape else 0
        is_one = whole(scales.shape).numel == 1
        size = self._told.group_size if groups > 1 else columns
        size = size or (columns // groups if groups and columns % groups == 0 else 0)
        is_known = size > 0 and (groups < 2 or self._told.group_size or size & (size - 1) == 0)
        fits = is_known and -(-columns // size) == groups and scales.shape == (*shape[:-1], groups)
        if scales.dtype.name not in _SCALES or not (is_one or fits):
            raise _Unsure(f"its scales are {scales.dtype.name} {list(scales.shape)}")
        blocks = shape if is_one else (*(1,) * (len(shape) - 1), size)
        grid = _grid(self._part(scales.fqn), shape, blocks)
        code = Codes(bits, lowest=-(1 << (bits - 1)))
        if (zero in self._stored) == self._told.is_symmetric:
            raise _Unsure("its config says otherwise about zero points than its tensors")
        rows = Rows(shape, code, self._part(weight.codes, is_raw=True), grid)
        return self._with_zeros(rows, zero, groups) if zero in self._stored else rows

    def _with_zeros(self, rows: Rows, zero: str, groups: int) -> Rows:
        """Returns a formula with zero points, which are packed by columns."""
        entry, bits = self._stored[zero], rows.code.bits
        *lead, count, _ = rows.shape
        if entry.dtype.name != "int32" or entry.shape != (
            *lead,
            -(-count * bits // _WORD_BITS),
            groups,
        ):
            raise _Unsure(f"its zero points are {entry.dtype.name} {list(entry.shape)}")
        zeros = replace(rows.scales, part=self._part(zero, is_raw=True))
        return replace(rows, zeros=zeros, packed_zeros=rows.code)

    def _mxfp4(self, weight: QuantizedWeight) -> Formula:
        name = numbers_name(weight)
        is_turned = weight.codes.endswith("_blocks")
        if is_turned and name.rpartition(".")[2] not in _TURNED:
            raise _Unsure("only experts of gpt-oss are known to have such names")
        found = self._microscaled(weight, is_flat=False)
        return Turned(found, 32) if is_turned else found

    def _microscaled(self, weight: QuantizedWeight, is_flat: bool) -> Rows:
        """Returns the formula of MXFP4: codes `[…, n / 2]` if `is_flat`, else `[…, n / 32, 16]`."""
        codes, scales = self._stored[weight.codes], self._stored[weight.parts[1]]
        groups = scales.shape[-1] if scales.shape else 0
        behind = (16 * groups,) if is_flat else (groups, 16)
        lead = codes.shape[: -len(behind)]
        is_byte = scales.dtype.name in ("uint8", "float8_e8m0fnu")
        fits = codes.shape == (*lead, *behind) and scales.shape == (*lead, groups)
        if not lead or not groups or not fits or not is_byte or codes.dtype.name != "uint8":
            raise _Unsure("shapes and types are not those of MXFP4")
        self._refuse_others(weight, weight.parts)
        part = self._part(scales.fqn, dtype="float8_e8m0fnu")
        grid = Grid(part, scales.shape, (*(1,) * len(lead), 32))
        return Rows((*lead, 32 * groups), FP4, self._part(weight.codes, True), grid)

    # ---- words that are transposed against the weight --------------------------------------------

    def _words(self, weight: QuantizedWeight) -> Formula:
        front, is_awq = weight.codes.removesuffix("qweight"), weight.scheme == "AWQ"
        names = {
            "codes": weight.codes,
            "scales": f"{front}scales",
            "zeros": f"{front}qzeros",
            "groups": f"{front}g_idx",
        }
        there = {r: self._stored[name] for r, name in names.items() if name in self._stored}
        bits, lowest = self._told_of_words(is_awq, "groups" in there)
        if "zeros" not in there:
            raise _Unsure("it has no zero points")
        types = {role: entry.dtype.name for role, entry in there.items()}
        if types.pop("scales") not in _SCALES or {*types.values()} != {"int32"}:
            raise _Unsure("types are not those of its scheme")
        if any(len(t.shape) != (1 if role == "groups" else 2) for role, t in there.items()):
            raise _Unsure("shapes are not those of its scheme")
        if not all(whole(entry.shape).numel for entry in there.values()):
            raise _Unsure("it has no elements")
        groups, outputs = there["scales"].shape
        rows, columns = there["codes"].shape
        inputs = rows if is_awq else rows * _WORD_BITS // bits
        if is_awq:
            fits = columns * _AWQ_PER_WORD == outputs and inputs % 2 == 0
        else:
            fits = (rows, columns) == (_num_words(inputs, bits), outputs)
        fits &= there["zeros"].shape == (groups, outputs * bits // _WORD_BITS)
        if not fits or outputs * bits % _WORD_BITS or rows * columns * 4 > _MAX_WORDS_BYTES:
            raise _Unsure("shapes are not those of its scheme, or its config says otherwise")
        size = self._told.said.get("group_size", self._told.said.get("q_group_size"))
        group = size if type(size) is int and size > 0 else -(-inputs // groups)
        of_each = there["groups"].shape if "groups" in there else (inputs,)
        if -(-inputs // group) != groups or of_each != (inputs,):
            raise _Unsure("its groups are not those of its config")
        self._refuse_others(weight, names.values())
        parts = {r: self._part(names[r], is_raw=r != "scales") for r in there}
        return Words((outputs, inputs), bits, group, lowest, is_awq, parts)

    def _told_of_words(self, is_awq: bool, has_groups: bool) -> tuple[int, int]:
        """Returns the bits of a code of GPTQ or AWQ, and what its stored zero points lack."""
        said = self._told.said
        if said.get("quant_method") != ("awq" if is_awq else "gptq"):
            raise _Unsure("no config beside it says how its codes are packed")
        if said.get("dynamic"):
            raise _Unsure("its config has rules for single modules (dynamic)")
        if said.get("desc_act") and not has_groups:
            raise _Unsure("its config says that groups are in another order, and g_idx is missing")
        bits = said.get("bits", said.get("w_bit", 4 if is_awq else None))
        form = said.get("checkpoint_format", said.get("format", "gptq"))
        if is_awq and (type(bits) is not int or bits != 4 or said.get("version", "gemm") != "gemm"):
            raise _Unsure("its config says something else than 4 bits, version gemm")
        if is_awq:
            return 4, 0
        if type(bits) is not int or bits not in _GPTQ_BITS or form not in [*_GPTQ_ZEROS]:
            raise _Unsure("its config does not tell bits and format")
        return bits, _GPTQ_ZEROS[form]

    # ---- blocks of the flat weight ---------------------------------------------------------------

    def _flat(self, weight: QuantizedWeight, small: Mapping[str, bytes]) -> Formula:
        if len(small) != 1:
            raise _Unsure("its shape is not known: there is no quant_state")
        said: Any = None
        with suppress(ValueError, StorageError):
            said = parse_json(next(iter(small.values())))
        said = said if isinstance(said, Mapping) else {}
        shape = said.get("shape")
        block = said.get("blocksize")
        if (
            not isinstance(shape, list)
            or not all(type(n) is int and 0 < n < 1 << 40 for n in shape)
            or type(block) is not int
            or block not in _FLAT_BLOCKS
        ):
            raise _Unsure("its quant_state tells no shape or no usual size of blocks")
        numel = math.prod(shape)
        nested = f"{weight.codes}.nested_absmax" in weight.parts
        names = {
            "codes": weight.codes,
            "scales": f"{weight.codes}.absmax",
            "map": f"{weight.codes}.quant_map",
        }
        if nested:
            names |= {
                "nested_scales": f"{weight.codes}.nested_absmax",
                "nested_map": f"{weight.codes}.nested_quant_map",
            }
        if any(name not in self._stored for name in names.values()):
            raise _Unsure("a part of its nested scales is missing")
        there = {role: self._stored[name] for role, name in names.items()}
        numels = {role: whole(entry.shape).numel for role, entry in there.items()}
        codes, blocks = there["codes"], -(-numel // block)
        fits = (
            codes.shape[1:] == (1,)
            and codes.nbytes == -(-numel // (2 * codes.dtype.itemsize)) * codes.dtype.itemsize
        )
        fits = fits and numels["scales"] == blocks and numels["map"] == 16
        size, offset = said.get("nested_blocksize", 0), said.get("nested_offset", 0.0)
        floats = [there[r].dtype.name for r in names if r not in ("codes", "scales")]
        if nested:
            fits = fits and type(size) is int and 0 < size < 1 << 40
            fits = fits and type(offset) in (int, float) and abs(offset) < _MOST_OFFSET
            fits = fits and numels["nested_scales"] == -(-blocks // size)
            fits = fits and numels["nested_map"] == 256 and there["scales"].dtype.name == "uint8"
        else:
            size, offset, floats = 0, 0.0, [*floats, there["scales"].dtype.name]
        if not fits or len(there["scales"].shape) != 1 or not {*floats} <= {*_SCALES}:
            raise _Unsure("shapes and types are not those of its quant_state")
        self._refuse_others(weight, weight.parts)
        parts = {
            role: self._part(name, is_raw=role == "codes" or (role == "scales" and nested))
            for role, name in names.items()
        }
        return Flat(tuple(shape), block, parts, size, float(offset))


def numbers_name(weight: QuantizedWeight) -> str:
    """Returns the name that the numbers of a weight have."""
    if weight.scheme == OF_TORCHAO:
        return weight.codes.removesuffix(".codes")
    if weight.scheme in ("GPTQ", "AWQ"):
        return weight.codes.removesuffix("qweight") + "weight"
    if weight.scheme == "compressed-tensors, packed":
        return weight.codes.removesuffix("_packed")
    if weight.scheme == "mxfp4":
        return weight.codes[: -len("_blocks")]  # or ".blocks"
    return weight.codes


def _columns_by_groups(
    told: ToldByConfig, weight: QuantizedWeight, stored: Mapping[str, TensorEntry]
) -> int:
    """Returns the columns of packed integers, if a config tells groups that fill the words."""
    codes, scales = stored[weight.codes], stored[weight.parts[1]]
    if not codes.shape or not scales.shape or not told.group_size or not told.bits:
        return 0
    columns = scales.shape[-1] * told.group_size
    return columns if columns * told.bits == codes.shape[-1] * _WORD_BITS else 0


def _num_words(columns: int, bits: int) -> int:
    return -(-columns * bits // _WORD_BITS)


def _columns_by_shape(packed: Sequence[int], data: bytes) -> int:
    """Returns the columns that `weight_shape` tells; 0 if it does not fit the packed codes."""
    dims = [
        int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, len(data), 8)
    ]
    return dims[-1] if len(dims) == len(packed) and dims[:-1] == [*packed[:-1]] else 0


def _grid(part: Part, shape: Sequence[int], blocks: tuple[int, ...]) -> Grid:
    """Returns numbers of blocks, with as many dims as a weight has."""
    dims = max(1, len(shape))
    own = part.shape if whole(part.shape).numel > 1 else ()
    blocks = blocks or (1,)
    return Grid(part, (*own, *(1,) * (dims - len(own))), blocks)


def _shared(weights: Iterable[QuantizedWeight]) -> dict[str, set[str]]:
    """Returns the last segments of all parts, of modules that have several quantized weights."""
    found: dict[str, list[QuantizedWeight]] = {}
    for weight in weights:
        found.setdefault(weight.codes.rpartition(".")[0], []).append(weight)
    return {
        module: {part.rpartition(".")[2] for weight in mine for part in weight.parts}
        for module, mine in found.items()
        if len(mine) > 1
    }


def _by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the last segments of names by what is before them."""
    found: dict[str, list[str]] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        found.setdefault(module, []).append(last)
    return found


def blocks_of(
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
