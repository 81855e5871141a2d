"""Writes NVFP4 codes of ModelOpt in the form of compressed-tensors, and back.

Both keep two codes in a byte, and a scale in e4m3 for 16 numbers: these bytes stay. ModelOpt
multiplies by one more scale, and compressed-tensors divides by one: it becomes its reciprocal.
Names and the config differ.

Sources: compressed-tensors 0.20, `nvfp4-pack-quantized`; Model-Optimizer, `export/quant_utils.py`
and `export/convert_hf_config.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog, QuantizedWeight, TensorEntry, one_chunk
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.quantized import described, find_quantized, may_be_codes
from ckpt_tools.engine.formulas import FP4, Rows
from ckpt_tools.engine.kernels import cast
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.in_memory import InMemoryFile
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.convert.model_names import some
from ckpt_tools.operations.formulas_of import FormulaFinder
from ckpt_tools.operations.quantization_config import ToldByConfig
from ckpt_tools.operations.quantize import NVFP4_FORMS
from ckpt_tools.operations.small_tensors import read_small
from ckpt_tools.publish.sealed_source import checked_manifest

_GROUP = 16  # numbers of a row that have one scale
_SINGLE = BY_NAME["float32"]
_OF_CACHE = ("k_scale", "v_scale", "kv_scale")
_CODES, _SCALE, _FACTOR, _INPUT = range(4)


class _Form(NamedTuple):
    """How a tool names the tensors of a module: codes, scales, factor, factor of activations.

    `shape` is that of a factor, and `divides` tells that numbers are divided by it.
    """

    tool: str
    scheme: str
    names: tuple[str, str, str, str]
    shape: tuple[int, ...]
    divides: bool


_FORMS: dict[str, _Form] = {
    "modelopt": _Form(
        "ModelOpt",
        "codes with scales",
        ("weight", "weight_scale", "weight_scale_2", "input_scale"),
        (),
        False,
    ),
    "compressed-tensors": _Form(
        "compressed-tensors",
        "compressed-tensors, packed",
        ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
        (1,),
        True,
    ),
}
assert tuple(_FORMS) == NVFP4_FORMS


class Rewritten(NamedTuple):
    """A model whose NVFP4 codes have another form.

    Attributes:
        catalog: the tensors to write.
        config: the `quantization_config`.
        files: other files that tell how it is quantized.
        notes: for the report.
    """

    catalog: Catalog
    config: dict[str, Any]
    files: dict[str, bytes]
    notes: list[str]


def rewrite(
    catalog: Catalog, to: str, source: Source, said: Mapping[str, Any], memory: InMemoryFile
) -> Rewritten:
    """Plans the other form for all quantized weights of a model.

    Args:
        catalog: the model.
        to: one of `NVFP4_FORMS`.
        source: its checkpoint. Factors are read, and proved.
        said: what its config says of its codes.
        memory: receives the new factors.

    Raises:
        PlanError: a weight is no NVFP4 of the other tool, or a factor has no reciprocal.
        IntegrityError: a factor is not what was sealed.
    """
    new = _FORMS[to]
    ((tool, old),) = ((name, form) for name, form in _FORMS.items() if name != to)
    _check_config(tool, said)
    modules = _modules_in(catalog, old, to)
    pairs = [*zip(old.names, new.names, strict=True)]
    renamed = {f"{m}.{before}": f"{m}.{after}" for m in modules for before, after in pairs}
    factors = {f"{m}.{old.names[i]}" for m in modules for i in (_FACTOR, _INPUT)}
    factors &= catalog.tensors.keys()
    has_inputs = _has_inputs(modules, factors, old, to)
    inverses = _reciprocals(source, [catalog.tensors[name] for name in sorted(factors)])
    tensors = dict[str, TensorEntry]()
    for fqn, entry in catalog.tensors.items():
        name = renamed.get(fqn, fqn)
        if name in tensors or (name != fqn and name in catalog.tensors):
            raise PlanError(f"--quantize {to}: there is a tensor of this name: {printable(name)!r}")
        made = entry.named(name)
        if fqn in factors:
            data = np.float32(inverses[fqn]).tobytes()
            chunks = one_chunk(whole(new.shape), memory.add(data))
            made = replace(
                made, dtype=_SINGLE, shape=new.shape, chunks=chunks, is_computed=True, relations=()
            )
        if (weight := modules.get(fqn.rpartition(".")[0])) is not None and fqn in renamed:
            parts = tuple(renamed.get(part, part) for part in weight.parts)
            made = replace(made, quantized=QuantizedWeight(parts[0], new.scheme, 4, parts))
        tensors[name] = made
    left, lost = _left(catalog, modules, to, said)
    config, files = _config(to, said, left, has_inputs)
    what = f"NVFP4 codes of {len(modules):,} modules in the form of {new.tool}, from {old.tool}'s"
    notes = [f"written anew: {what}. The bytes of codes and scales are the same"]
    if lost:
        notes.append(f"patterns of modules that are not quantized are left out: {some(lost)}")
    cache = [fqn for fqn in tensors if fqn.rpartition(".")[2] in _OF_CACHE]
    if cache:
        notes.append(f"scales of the cache keep their names: {some(cache)}")
    return Rewritten(replace(catalog, tensors=tensors), config, files, notes)


def _modules_in(catalog: Catalog, old: _Form, to: str) -> dict[str, QuantizedWeight]:
    """Returns the modules with codes of a tool, and their weights.

    Raises:
        PlanError: there are none, or there are other codes.
    """
    # under the names in the catalog: the checkpoint may have others
    weights = {w.codes: w for w in find_quantized(catalog.tensors).values()}
    finder = FormulaFinder(catalog.tensors, ToldByConfig())
    wrong = [codes for codes, w in weights.items() if not _has_form(w, old, finder)]
    if wrong or not weights:
        there = f"{printable(wrong[0])!r} is not" if wrong else "no weight is"
        raise PlanError(
            f"--quantize {to} rewrites NVFP4 codes of {old.tool}, and {there}:"
            f" {described(weights.values()) or 'the weights are numbers'}",
            hint="--dtype bf16 turns codes into numbers; fp8-block and others quantize numbers",
        )
    if others := may_be_codes(catalog.tensors.values()):
        raise PlanError(
            f"--quantize {to}: {some(others)} may be codes, too, and no tensor says of which form",
            hint="experts that are one tensor are not written anew",
        )
    return {codes.rpartition(".")[0]: weight for codes, weight in weights.items()}


def _has_inputs(modules: Mapping[str, object], factors: set[str], old: _Form, to: str) -> bool:
    """Tells whether activations have factors.

    Raises:
        PlanError: only those of some modules have, or the form of ModelOpt needs them.
    """
    name = old.names[_INPUT]
    without = [m for m in modules if f"{m}.{name}" not in factors]
    if without and len(without) < len(modules):
        raise PlanError(
            f"only some modules have a factor of activations: {some(without)} have no {name}",
            hint="were these layers, such as experts that no token reached, calibrated?",
        )
    if without and to == "modelopt":
        raise PlanError(
            f"--quantize modelopt: there are no factors of activations ({name}), and ModelOpt's"
            " NVFP4 has them",
            hint="these codes are for weights alone; keep the form of compressed-tensors",
        )
    return not without


def _has_form(weight: QuantizedWeight, form: _Form, finder: FormulaFinder) -> bool:
    """Tells whether a weight is a matrix in NVFP4 as a tool writes it."""
    found = finder.find(weight, {}) if not finder.small_parts(weight) else ""
    formula = None if isinstance(found, str) else found.formula
    return (
        isinstance(formula, Rows)
        and formula.code == FP4
        and formula.factor is not None
        and formula.divides == form.divides
        and len(formula.shape) == 2
        and weight.codes.endswith(f".{form.names[_CODES]}")
    )


def _reciprocals(source: Source, entries: Sequence[TensorEntry]) -> dict[str, float]:
    """Returns the float32 reciprocal of each factor, by its name.

    Raises:
        PlanError: one is not a positive finite number, or its reciprocal is none.
    """
    for entry in entries:
        if not entry.dtype.is_castable or whole(entry.shape).numel != 1:
            raise PlanError(
                f"a factor of NVFP4 codes is no single number: {printable(entry.fqn)!r} is"
                f" {entry.dtype.name} {list(entry.shape)}"
            )
    data = read_small(source, entries, checked_manifest(source))
    found: dict[str, float] = {}
    for entry in entries:
        single = np.empty(_SINGLE.itemsize, np.uint8)
        cast(np.frombuffer(data[entry.fqn], np.uint8), entry.dtype, single, _SINGLE)
        value = single.view(np.float32)[0]
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / value
        if not (value > 0 and math.isfinite(value) and 0 < inverse < math.inf):
            raise PlanError(
                f"a factor of NVFP4 codes has no reciprocal: {printable(entry.fqn)!r} is {value}",
                hint="ckpt stats shows such values; were these weights calibrated?",
            )
        found[entry.fqn] = float(inverse)
    return found


def _left(
    catalog: Catalog, modules: Mapping[str, object], to: str, said: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Returns the modules that are not quantized, and patterns that have no form in the other tool.

    They are those with a matrix of numbers, and those that the config names: an output layer that
    is tied has no tensor.
    """
    found = {
        module
        for fqn, entry in catalog.tensors.items()
        if fqn.endswith(".weight") and entry.quantized is None and len(entry.shape) > 1
        if (module := fqn.removesuffix(".weight")) not in modules
    }
    lost = []
    for name in map(str, (*_inner(said).get("exclude_modules", ()), *said.get("ignore", ()))):
        plain = name.removeprefix("re:")
        if not name.startswith("re:") and "*" not in name:
            found.add(name)
        elif to == "compressed-tensors" and not name.startswith("re:"):
            found.add("re:" + re.escape(name).replace(r"\*", ".*"))
        elif to == "modelopt" and re.fullmatch(r"(?:\w|\\\.|\.\*)+", plain):
            found.add(plain.replace(".*", "*").replace(r"\.", "."))
        else:
            lost.append(name)
    return sorted(found), lost


def _inner(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what ModelOpt's own file says."""
    inner = said.get("quantization")
    return inner if isinstance(inner, Mapping) else {}


def _check_config(tool: str, said: Mapping[str, Any]) -> None:
    """Refuses a config that says something else than NVFP4.

    Raises:
        PlanError: it does; the message has its words.
    """
    wrong: list[object] = []
    if said.get("transform_config"):
        wrong.append("weights are rotated (transform_config)")
    if tool == "modelopt":
        algorithms = {said.get("quant_algo"), _inner(said).get("quant_algo")} - {None}
        wrong += sorted(map(str, algorithms - {"NVFP4"}))
    else:
        groups = said.get("config_groups")
        for group in (groups or {}).values() if isinstance(groups, Mapping | None) else [None]:
            for part in ("weights", "input_activations"):
                one = group.get(part) if isinstance(group, Mapping) else {}
                is_left = one is None and part != "weights"
                told = (one.get("num_bits"), one.get("type")) if isinstance(one, Mapping) else ()
                if not is_left and told != (4, "float"):
                    wrong.append(f"{part}: {one}")
    if wrong:
        raise PlanError(
            f"the config says something else than NVFP4: {printable(str(wrong[0]))}",
            hint="only weights and activations of 4 bits are written in the other form",
        )


def _config(
    to: str, said: Mapping[str, Any], left: Sequence[str], has_inputs: bool
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns a `quantization_config`, and other files that tell the same."""
    cache = _cache_of(said)
    number: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": _GROUP}
    if to == "modelopt":
        inner = {**number, "dynamic": False}
        group = {"targets": ["Linear"], "weights": inner}
        config = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {**group, "input_activations": inner}},
            "ignore": list(left),
        }
        if cache:
            config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
        told = {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8" if cache else None,
            "group_size": _GROUP,
            "exclude_modules": list(left),
        }
        text = json.dumps({"producer": {"name": "modelopt"}, "quantization": told}, indent=2)
        return config, {"hf_quant_config.json": f"{text}\n".encode()}
    inner = {**number, "strategy": "tensor_group", "symmetric": True}
    weights: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {**inner, "dynamic": False},
        "input_activations": {**inner, "dynamic": "local"} if has_inputs else None,
        "output_activations": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": weights},
        "ignore": list(left),
    }
    if cache:
        config["kv_cache_scheme"] = {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "symmetric": True,
            "dynamic": False,
        }
    return config, {}


def _cache_of(said: Mapping[str, Any]) -> bool:
    """Tells whether a config has an fp8 cache of keys and values.

    Raises:
        PlanError: it has another one.
    """
    algorithm, scheme = _inner(said).get("kv_cache_quant_algo"), said.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and (
        (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        and not scheme.get("dynamic")
        and scheme.get("strategy") in (None, "tensor")
    ):
        scheme = "FP8"
    if any(told not in (None, "FP8") for told in (algorithm, scheme)):
        raise PlanError(
            "the config has a cache of keys and values in a form that is not known:"
            f" {printable(repr(scheme if algorithm in (None, 'FP8') else algorithm))}",
            hint="only that of fp8, with a scale for a tensor, is written anew",
        )
    return "FP8" in (algorithm, scheme)
