"""Finds quantized weights in a catalog, by the names and types of their tensors.

A quantized weight is several tensors: codes, and what turns them into numbers (scales, zero points,
tables). Each of them means nothing alone: no cast, mean or magnitude of it is right.

Sources: the state dicts of bitsandbytes 0.50, compressed-tensors 0.20, torchao 0.18, GPTQModel,
AutoAWQ, ModelOpt, optimum-quanto and AQLM; of DeepSeek-V3 (`weight_scale_inv`; `scale` in its own
names), ComfyUI (`scale_weight`) and gpt-oss (`_blocks`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.core.catalog import Catalog, QuantizedWeight, TensorEntry


class Scheme(NamedTuple):
    """A way to quantize.

    The names of its tensors are templates: `{C}` is the name of the codes, `{P}` that name without
    its last segment, and `{B}` without `ending`.

    Attributes:
        name: for messages.
        ending: the end of the name of the codes; "" for any.
        needs: the tensors without which it is not this scheme.
        also: further tensors that may belong to it.
        bits: per number; 0 for those of an element of the codes, None if the names do not tell.
        methods: values of `quant_method` in a config of transformers.
        any_type: the codes may be stored as a floating-point type.
    """

    name: str
    ending: str
    needs: tuple[str, ...]
    also: tuple[str, ...]
    bits: int | None
    methods: tuple[str, ...]
    any_type: bool = False


_OF_INPUTS = tuple(
    f"{{P}}{name}"
    for name in (
        "input_scale",
        "input_zero_point",
        "input_global_scale",
        "activation_scale",
        "output_scale",
        "output_zero_point",
    )
)
_OF_TORCHAO = tuple(
    f"{{B}}_{name}"
    for name in (
        "zero_point",
        "act_pre_scale",
        "act_quant_scale",
        "act_quant_zero_point",
        "output_act_quant_scale",
        "per_tensor_scale",
        "act_per_tensor_scale",
        "group_zero",
        "row_scale",
        "sparse_metadata",
        "qzeros",
        "compensation",
    )
)
# names of numbers that belong to the quantized weights of a model, wherever they lie: those of
# activations, of the cache of keys and values, and upper bounds
_COMPANION = re.compile(r"(?:.+_)?(?:scales?|scale_ub|zero_point)")
_SCALED = ("compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "quark", "finegrained_fp8")
OF_TORCHAO, OF_BITSANDBYTES = "torchao optimizer", "bitsandbytes 8-bit optimizer"
OF_OPTIMIZERS = (OF_TORCHAO, OF_BITSANDBYTES)
# the first that fits counts
SCHEMES = (
    Scheme(
        "bitsandbytes 4-bit",
        "",
        ("{C}.absmax", "{C}.quant_map"),
        (
            "{C}.nested_absmax",
            "{C}.nested_quant_map",
            "{C}.quant_state.bitsandbytes__nf4",
            "{C}.quant_state.bitsandbytes__fp4",
        ),
        4,
        ("bitsandbytes",),
        any_type=True,  # FSDP needs codes in the type of the other weights
    ),
    Scheme(
        "bitsandbytes 8-bit", "weight", ("{P}SCB",), ("{P}weight_format",), 8, ("bitsandbytes",)
    ),
    Scheme(
        "GPTQ", "qweight", ("{P}scales", "{P}g_idx"), ("{P}qzeros",), None, ("gptq", "auto-round")
    ),
    Scheme("AWQ", "qweight", ("{P}scales", "{P}qzeros"), (), None, ("awq", "auto-round")),
    Scheme(
        "compressed-tensors, packed",
        "weight_packed",
        ("{P}weight_scale",),
        (
            "{P}weight_zero_point",
            "{P}weight_shape",
            "{P}weight_global_scale",
            "{P}weight_g_idx",
            *_OF_INPUTS,
        ),
        None,
        ("compressed-tensors",),
    ),
    Scheme("fp8 with scales of blocks", "", ("{C}_scale_inv",), _OF_INPUTS, 0, _SCALED),
    Scheme("fp8 with scales of blocks", "weight", ("{P}scale",), (), 0, _SCALED),
    Scheme("fp8 with a scale", "weight", ("{P}scale_weight",), ("{P}scale_input",), 0, ()),
    Scheme("AQLM", "codes", ("{P}codebooks", "{P}scales"), (), None, ("aqlm",)),
    Scheme(OF_BITSANDBYTES, "state1", ("{P}qmap1", "{P}absmax1"), (), 8, ()),
    Scheme(OF_BITSANDBYTES, "state2", ("{P}qmap2", "{P}absmax2"), (), 8, ()),
    Scheme(OF_TORCHAO, "exp_avg.codes", ("{P}scale",), ("{P}qmap",), None, ()),
    Scheme(OF_TORCHAO, "exp_avg_sq.codes", ("{P}scale",), ("{P}qmap",), None, ()),
    Scheme(
        "codes with scales",
        "",
        ("{C}_scale",),
        ("{C}_zero_point", "{C}_scale_2", "{C}_g_idx", "{C}_shape", *_OF_INPUTS),
        0,
        (*_SCALED, "eetq", "torchao", "quanto"),
    ),
    Scheme("mxfp4", "_blocks", ("{B}_scales",), (), 4, ("mxfp4",)),
    Scheme("mxfp4", ".blocks", ("{B}.scales",), (), 4, ("mxfp4",)),
    Scheme("EETQ", "weight", ("{P}weight_scales",), (), 8, ("eetq",)),
    Scheme("torchao", "_qdata", ("{B}_scale",), _OF_TORCHAO, None, ("torchao",)),
    Scheme("torchao", "_qdata", ("{B}_scale_and_zero",), _OF_TORCHAO, 4, ("torchao",)),
    Scheme("torchao", "_qdata", ("{B}_group_scale",), _OF_TORCHAO, 4, ("torchao",)),
    Scheme("torchao", "_int_data", ("{B}_scale",), (), 8, ("torchao",)),
    Scheme(
        "torchao",
        "_quantized_data",
        ("{B}_quantized_scalers",),
        ("{B}_quantization_factor", "{B}_scaler_mean", "{B}_nf4"),
        4,
        ("torchao",),
    ),
    Scheme("torchao", "_qdata_and_metadata", ("{B}_scale",), _OF_TORCHAO, None, ("torchao",)),
    Scheme("quanto", "_data", ("{B}_scale",), ("{B}_shift",), None, ("quanto",)),
    Scheme("HQQ", "W_q", ("{P}scale",), ("{P}zero",), None, ("hqq",)),
)
_BY_NAME = {scheme.name: scheme for scheme in SCHEMES}
# how the first name ends that each scheme needs
_COMPANION_ENDINGS = tuple(scheme.needs[0].partition("}")[2] for scheme in SCHEMES)
_SHORT_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
_PACKED_BITS = 32  # of an element of packed codes


def mark_quantized(catalog: Catalog) -> Catalog:
    """Returns the catalog, each part of a quantized weight marked: see `TensorEntry.quantized`."""
    found = find_quantized(catalog.tensors)
    if not found:
        return catalog
    marked = {
        fqn: replace(entry, quantized=found[fqn]) if fqn in found else entry
        for fqn, entry in catalog.tensors.items()
    }
    return replace(catalog, tensors=marked)


def find_quantized(tensors: Mapping[str, TensorEntry]) -> dict[str, QuantizedWeight]:
    """Returns the quantized weight that each tensor is a part of; only of such tensors."""
    found: dict[str, QuantizedWeight] = {}
    companions = [fqn for fqn in tensors if fqn.endswith(_COMPANION_ENDINGS)]  # in most models none
    schemes = [
        scheme
        for scheme, ending in zip(SCHEMES, _COMPANION_ENDINGS, strict=True)
        if any(fqn.endswith(ending) for fqn in companions)
    ]
    for fqn, entry in tensors.items() if schemes else ():
        for scheme in schemes:
            if not fqn.endswith(scheme.ending) or (entry.dtype.is_castable and not scheme.any_type):
                continue
            needs, also = (_names(which, fqn, scheme) for which in (scheme.needs, scheme.also))
            if not all(name in tensors for name in needs):
                continue
            parts = (fqn, *needs, *(name for name in also if name in tensors))
            kind = _by_shape(scheme, entry, tensors[needs[0]])
            bits = _bits(kind, entry, tensors, needs)
            weight = QuantizedWeight(fqn, kind.name, bits, parts)
            found |= {name: weight for name in parts if name not in found}
            found[fqn] = weight
            break
    of_model = (w for w in found.values() if w.scheme not in OF_OPTIMIZERS)
    if (first := next(of_model, None)) is not None:  # they belong to no single weight
        for fqn, entry in tensors.items():
            last = fqn.rpartition(".")[2]
            if fqn not in found and entry.dtype.is_castable and _COMPANION.fullmatch(last):
                found[fqn] = first
    return found


def _by_shape(scheme: Scheme, codes: TensorEntry, scales: TensorEntry) -> Scheme:
    """Returns the scheme that the shapes tell: GPTQ without `g_idx` has the names of AWQ.

    GPTQ packs the codes of eight inputs, AWQ those of eight outputs; the scales are per output.
    """
    if scheme.name == "AWQ" and codes.shape[-1:] == scales.shape[-1:]:
        return _BY_NAME["GPTQ"]
    return scheme


def _names(templates: Iterable[str], fqn: str, scheme: Scheme) -> list[str]:
    front, dot, _ = fqn.rpartition(".")
    whole = {
        "C": fqn,
        "P": front + dot,
        "B": fqn.removesuffix(scheme.ending) if scheme.ending else fqn,
    }
    return [template.format(**whole) for template in templates]


def _bits(
    scheme: Scheme, codes: TensorEntry, tensors: Mapping[str, TensorEntry], needs: list[str]
) -> int | None:
    """Returns the bits of one number; None if shapes and types do not tell."""
    if scheme.name == OF_TORCHAO:
        table = tensors.get(needs[0].removesuffix("scale") + "qmap")
        return 4 if table is not None and table.shape == (16,) else 8
    if scheme.bits == 0 and codes.dtype.name == "uint8":
        return 4 if f"{codes.fqn}_scale_2" in tensors else None  # NVFP4; others do not tell
    if scheme.bits == 0:
        return 4 if codes.dtype.name.startswith("float4") else codes.dtype.bits
    if scheme.bits is not None or len(codes.shape) != 2:
        return scheme.bits
    rows, columns = codes.shape
    scales = tensors[needs[0]].shape
    index = tensors.get(needs[0].removesuffix("scales") + "g_idx")
    if scheme.name == "GPTQ" and index is not None and index.nbytes:  # one number for each input
        return _PACKED_BITS * rows // index.shape[0]
    zeros = tensors.get(needs[0].removesuffix("scales") + "qzeros")
    if scheme.name == "GPTQ" and zeros is not None and scales[-1:] > (0,):
        return _PACKED_BITS * zeros.shape[-1] // scales[-1]
    if scheme.name == "AWQ" and scales and scales[-1]:  # columns of codes for each output
        return _PACKED_BITS * columns // scales[-1]
    if codes.dtype.name == "uint8" and scheme.name.startswith("compressed"):
        return 4  # NVFP4 and MXFP4: two numbers in a byte
    return None


def may_be_codes(tensors: Iterable[TensorEntry]) -> list[str]:
    """Returns the matrices of short integers beside floating-point numbers of the same module.

    They may be codes of a scheme that is not known here.
    """
    every = [entry for entry in tensors if entry.quantized is None]
    scaled = {entry.fqn.rpartition(".")[0] for entry in every if entry.dtype.is_castable}
    return [
        entry.fqn
        for entry in every
        if entry.dtype.name in _SHORT_INTEGERS
        and len(entry.shape) in (2, 3)  # of experts; a mask of attention has four dims
        and entry.fqn.rpartition(".")[0] in scaled
    ]


def beside_codes(tensors: Iterable[TensorEntry]) -> set[str]:
    """Returns the floating-point numbers of the modules that have `may_be_codes`."""
    every = list(tensors)
    modules = {name.rpartition(".")[0] for name in may_be_codes(every)}
    return {t.fqn for t in every if t.dtype.is_castable and t.fqn.rpartition(".")[0] in modules}


def methods_of(scheme: str) -> tuple[str, ...]:
    """Returns the values of `quant_method` that name a scheme in a config of transformers."""
    return _BY_NAME[scheme].methods


def weights_in(tensors: Iterable[TensorEntry]) -> list[QuantizedWeight]:
    """Returns the quantized weights that some tensors are parts of, each once."""
    found = {t.quantized.codes: t.quantized for t in tensors if t.quantized is not None}
    return list(found.values())


def described(weights: Iterable[QuantizedWeight]) -> str:
    """Returns how weights are quantized, for a message: `224 bitsandbytes 4-bit, 4 bits`."""
    kinds = Counter((weight.scheme, weight.bits) for weight in weights)
    return "; ".join(
        f"{number:,} {scheme}{f', {bits} bits' if bits else ''}"
        for (scheme, bits), number in kinds.items()
    )
