"""Shows a model with codes and scales in the place of its linear layers' weights.

They are computed when they are read, as `dequantize` computes numbers. What comes later writes them
like any tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog, Extent, QuantizedWeight, TensorEntry, one_chunk
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.plan import plan_values
from ckpt_tools.core.quantized import described, weights_in
from ckpt_tools.engine.computed import ComputedStore, PartsReading, result_nbytes
from ckpt_tools.engine.crc_watch import CrcWatch, read_whole
from ckpt_tools.engine.formulas import Formula, Part
from ckpt_tools.engine.quantize import (
    METHODS,
    Method,
    QuantizedCodes,
    QuantizedRows,
    QuantizedScales,
    Results,
)
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.convert.huggingface import read_config
from ckpt_tools.operations.convert.model_names import some
from ckpt_tools.operations.convert.transformers_names import ModelNames, ask_transformers
from ckpt_tools.publish.sealed_source import checked_manifest
from ckpt_tools.ranks.base import Group
from ckpt_tools.transfer.computed import prove_parts
from ckpt_tools.transfer.prove import prove_replicas, sealed_fingerprints

_FOLDER = "quantized/"  # before the names of computed files; no format looks into it
_EXPERT = ".experts."
_ENDING = ".weight"
_ROUTERS, _ROUTER_ENDINGS = ("gate", "router"), ("_gate", "_router")
_KEPT_BOXES = 1  # of numbers: results are kept instead
# methods that people ask for, and that need a run of the model on data
NVFP4_FORMS = ("modelopt", "compressed-tensors")  # in which NVFP4 codes are written anew
_CALIBRATED = ("gptq", "awq", "smoothquant", "autoround", "aqlm", "spinquant", "static")
_ACTIVATIONS = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
_WEIGHTS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "fp8-channel": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {**_ACTIVATIONS, "type": "float"},
    ),
    "int8-channel": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {**_ACTIVATIONS, "type": "int"},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": "torch.uint8",
        },
        None,
    ),
}


def method_of(name: str) -> Method:
    """Returns a way to quantize by its name.

    Raises:
        PlanError: there is none of this name.
    """
    if name in METHODS:
        return METHODS[name]
    known = f"{', '.join(METHODS)}; of NVFP4 codes, {' or '.join(NVFP4_FORMS)}"
    if any(word in name.lower() for word in _CALIBRATED):
        raise PlanError(
            f"--quantize {printable(name)!r} needs calibration: the model has to run on data",
            hint=f"without data there are {known}; llm-compressor and ModelOpt calibrate",
        )
    raise PlanError(f"--quantize: expected one of {known}, got {printable(name)!r}")


@dataclass(frozen=True)
class Quantization:
    """The plan to write a model with codes and scales.

    Attributes:
        method: how.
        catalog: the tensors to write.
        numbers: the same model before, which is read.
        weights: by the name of the weight, its rows.
        notes: for the report.
        left: modules with matrices that are not quantized, for the config: their names in files,
            and those in memory.
        formulas: by the name of the computed file.
        results: what is kept of an attempt.
    """

    method: Method
    catalog: Catalog
    numbers: Catalog
    weights: Mapping[str, QuantizedRows]
    notes: Sequence[str]
    left: Sequence[str]
    formulas: Mapping[str, Formula]
    results: Results

    def over(self, source: Source) -> Source:
        """Returns a source whose store computes codes and scales."""
        return replace(
            source,
            store=ComputedStore(
                source.store, self.formulas, lambda: self._begin(source), _KEPT_BOXES
            ),
        )

    def _begin(self, source: Source) -> PartsReading:
        self.results.clear()  # those of an attempt that read wrong bytes
        entries = [self.numbers.tensors[name] for name in self.weights]
        plan = plan_values(entries)
        sealed = sealed_fingerprints(checked_manifest(source), source, self.numbers, plan)
        prove_replicas(source, [e for e in entries if e.fqn not in sealed and not e.is_computed])
        located = source.format.locate(source.store, entries)
        return PartsReading(
            plan, located, CrcWatch(read_whole(plan, located, sealed), source.store)
        )

    def prove(self, source: Source, group: Group) -> None:
        """Compares the bytes that all ranks have read with their checksums.

        Args:
            source: of `over`.
            group: all ranks. Each calls it.

        Raises:
            IntegrityError: they are not what was written.
            PlanError: a weight has numbers that have no codes.
        """
        store = source.store
        assert isinstance(store, ComputedStore)
        below = replace(source, store=store.inner)
        prove_parts(store, below, self.numbers, self.weights, group)
        with group.phase("quantize"):
            for name, rows in self.weights.items():
                for problem in rows.problems.values():
                    raise PlanError(
                        f"a weight {problem}: {printable(name)!r}",
                        hint="--keep-dtype NAME writes it as it is; ckpt stats shows such numbers",
                    )

    def errors(self, group: Group) -> dict[str, float]:
        """Returns the relative error of each weight: the norm of all errors over its own.

        Each rank calls it.
        """
        mine = {name: rows.sums for name, rows in self.weights.items() if rows.sums}
        found: dict[str, dict[int, tuple[float, float]]] = {}
        for sums in group.all_gather(mine, "gather errors"):
            for name, units in sums.items():
                found.setdefault(name, {}).update(units)
        return {
            name: math.sqrt(
                sum(error for error, _ in found[name].values())
                / (sum(norm for _, norm in found[name].values()) or math.inf)
            )
            for name in self.weights
            if name in found
        }

    def config(self) -> dict[str, Any]:
        """Returns the `quantization_config` for transformers."""
        left = list(self.left)
        if self.method.name not in _WEIGHTS:
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": [self.method.rows, self.method.columns],
                "modules_to_not_convert": left,
            }
        form, weights, activations = _WEIGHTS[self.method.name]
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**weights, "symmetric": True, "dynamic": False},
                    "input_activations": activations,
                    "output_activations": None,
                }
            },
            "ignore": left,
        }


def quantize(
    catalog: Catalog,
    method: Method,
    base: str | os.PathLike[str],
    is_kept: Callable[[str], bool],
    dtype_of: Callable[[TensorEntry], DType],
) -> Quantization:
    """Plans codes and scales for the linear layers of a model.

    Embeddings, norms, routers, and what lies outside the numbered layers stay as they are, such as
    output layers.

    Args:
        catalog: the model, under the names of files on the Hub.
        method: how.
        base: the directory of the config.
        is_kept: tells by name which tensors stay as they are.
        dtype_of: the type of a tensor that stays. Scales of channels have that of their weight.

    Raises:
        PlanError: nothing says which layers are linear; or nothing is left to quantize.
    """
    if there := weights_in(catalog.tensors.values()):
        raise PlanError(
            f"--quantize is for numbers, and these weights are codes: {described(there)}",
            hint="--dtype bf16 turns them into numbers first",
        )
    model, reason = ask_transformers(base, read_config(base))
    if model is None:
        raise PlanError(
            "--quantize: transformers cannot say which layers of the config's model are linear:"
            f" {printable(reason)} ({printable(os.fspath(base))})",
            hint="is transformers installed, and does it know this model? It needs no weights for"
            " this and no GPU",
        )
    chosen, misfits = list[TensorEntry](), list[str]()
    left = dict.fromkeys(sorted(model.outputs))  # also one that is tied, and not in the files
    memory = dict[str, str]()  # the modules in memory of those that stay, where names differ
    for fqn, entry in catalog.tensors.items():
        module, own = _module_of(fqn), model.whole_of(fqn)
        if len(entry.shape) < 2 or (own is not None and _module_of(own) in model.tables):
            continue
        if _is_linear(fqn, entry, own, model) and not is_kept(fqn):
            if not _is_misfit(entry, method):
                chosen.append(entry)
                continue
            misfits.append(fqn)
        left[module] = None
        if own is not None:
            memory[module] = _module_of(own)
    if not chosen:
        raise PlanError(
            f"--quantize {method.name}: no weight of a linear layer is there to quantize",
            hint=f"{_misfit_reason(method)}: {some(misfits)}; fp8-channel takes all shapes"
            if misfits
            else "is it the config of these weights, with its architectures? Layers of other"
            " classes than torch's Linear, such as the Conv1D of GPT-2, are not quantized",
        )
    # a name in the config means all that is below it
    above = {entry.fqn[:at] for entry in chosen for at in _dots(entry.fqn)}
    names = [name for name in left if name and name not in above]
    told = [*dict.fromkeys([*names, *(memory[n] for n in names if n in memory)])]
    fused = [fqn for fqn, t in catalog.tensors.items() if "experts" in fqn and len(t.shape) > 2]
    notes = _notes(chosen, names, misfits, fused, method)
    return _planned(catalog, method, chosen, told, notes, dtype_of)


def _dots(name: str) -> Iterator[int]:
    return (at for at, character in enumerate(name) if character == ".")


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _is_linear(fqn: str, entry: TensorEntry, own: str | None, model: ModelNames) -> bool:
    """Tells whether a tensor is the weight of a linear layer in a numbered layer, or of an expert.

    Args:
        fqn, entry: the tensor.
        own: what it is in memory; None for one of several experts, which memory has as one tensor.
        model: what transformers tells.
    """
    module = _module_of(fqn)
    is_number = entry.dtype.is_castable and whole(entry.shape).numel > 0
    if not fqn.endswith(_ENDING) or len(entry.shape) != 2 or not is_number or _is_apart(module):
        return False
    if own is None:
        return fqn in model.files and _EXPERT in module
    return _module_of(own) in model.linear - model.outputs


def _is_apart(module: str) -> bool:
    """Tells whether a linear layer is a router, or outside the numbered layers, as outputs are."""
    parts = module.split(".")
    is_router = any(part in _ROUTERS or part.endswith(_ROUTER_ENDINGS) for part in parts)
    return is_router or not any(part.isdecimal() for part in parts[:-1])


def _is_misfit(entry: TensorEntry, method: Method) -> bool:
    """Tells whether a weight ends within a block.

    Of blocks of rows and columns, transformers without a GPU takes the size from the number of
    scales. So it reads other numbers if several blocks do not fill the weight.
    """
    rows, columns = entry.shape
    if method.rows == 1:
        return bool(method.columns and columns % method.columns)
    blocks = (rows, method.rows), (columns, method.columns)
    return any(dim > block and dim % block for dim, block in blocks)


def _misfit_reason(method: Method) -> str:
    block = f"{method.columns} columns" if method.rows == 1 else f"{method.rows} rows or columns"
    return f"not quantized, since blocks of {block} do not fill them"


def _notes(
    chosen: Sequence[TensorEntry],
    left: Sequence[str],
    misfits: Sequence[str],
    fused: Sequence[str],
    method: Method,
) -> list[str]:
    notes = [f"quantized: {len(chosen):,} weights of linear layers ({method.name})"]
    if left:
        notes.append(f"not quantized: {some(left)}")
    if misfits:
        notes.append(f"{_misfit_reason(method)}: {some(misfits)}")
    experts = [entry.fqn for entry in chosen if _EXPERT in entry.fqn]
    if experts and method.name == "int8-channel":
        notes.append(
            f"{len(experts):,} of them are weights of experts, which transformers 5.24 does not"
            " load from int8"
        )
    if fused and method.name in _WEIGHTS:
        notes.append(
            f"experts that are one tensor stay as they are: {some(fused)}; transformers 5.24"
            " loads those of gpt-oss beside codes, and not those of Llama 4"
        )
    return notes


def _planned(
    catalog: Catalog,
    method: Method,
    chosen: Iterable[TensorEntry],
    left: Sequence[str],
    notes: Sequence[str],
    dtype_of: Callable[[TensorEntry], DType],
) -> Quantization:
    """Returns the plan for the chosen weights."""
    tensors, weights = dict[str, TensorEntry](), dict[str, QuantizedRows]()
    formulas, sizes, results = dict[str, Formula](), dict(catalog.file_sizes), Results()
    by_name = {entry.fqn: entry for entry in chosen}
    for fqn, entry in catalog.tensors.items():
        if fqn not in by_name:
            tensors[fqn] = entry
            continue
        scales = BY_NAME[method.scales] if method.scales else dtype_of(entry)
        rows = QuantizedRows(fqn, Part(fqn, entry.shape, entry.dtype), method, scales, results)
        weights[fqn] = rows
        names = tuple(f"{fqn}{ending}" for ending in method.endings)
        taken = [name for name in names if name != fqn and name in catalog.tensors]
        if taken:
            raise PlanError(f"--quantize: there is a tensor of this name: {printable(taken[0])!r}")
        whose = QuantizedWeight(names[0], method.scheme, method.bits, names)
        for name, formula, kind, shape in (
            (names[0], QuantizedCodes(rows), BY_NAME[method.codes], rows.code_shape),
            (names[1], QuantizedScales(rows), scales, rows.scale_shape),
        ):
            file = _FOLDER + name
            formulas[file], sizes[file] = formula, result_nbytes(formula)
            tensors[name] = TensorEntry(
                name,
                kind,
                shape,
                one_chunk(whole(shape), Extent(file, 0, sizes[file])),
                stored=entry.stored_name,
                quantized=whose,
                is_computed=True,
            )
    shown = replace(catalog, tensors=tensors, file_sizes=sizes)
    return Quantization(method, shown, catalog, weights, notes, left, formulas, results)
