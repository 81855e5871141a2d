"""Reads LoRA adapters for a merge, and extracts an adapter from a checkpoint.

A merge adds `scale * B @ A` to a weight of shape [out, in], tile by tile. B has shape [out, r] and
A has [r, in]. Both are small and stay in memory.

Source: peft 0.21 `tuners/lora/config.py`, `layer.py`, `utils/save_and_load.py`; confirmed on
adapters that it saved and merged.
"""

from __future__ import annotations

import functools
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ckpt_tools.core.box import Box
from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.naming import model_only
from ckpt_tools.engine.execute import Alter
from ckpt_tools.errors import FormatError, PlanError, StorageError, printable
from ckpt_tools.formats.registry import Source, open_source
from ckpt_tools.operations.small_tensors import Singles, read_singles
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.sealed_source import check_file, open_sealed
from ckpt_tools.storage import read
from ckpt_tools.storage.small_files import MAX_JSON_BYTES, parse_json

_PART = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.(?:(?P<adapter>[^.]+)\.)?weight"
)
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "layer_replication": "replicated layers",
    "modules_to_save": "modules that are saved whole",
    "trainable_token_indices": "trainable tokens",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA",
}
# for these, PEFT subtracts the adapter's first values from the weights
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MAX_ALPHA = 1e9
_MAX_PATTERNS = 4_096  # each is matched with each name
_MAX_PATTERN_CHARS, _MAX_PATTERN_BYTES = 4096, 1 << 17  # as text, and as a program of RE2
_MAX_MODULE_CHARS = 512
_MAX_RANK = 1 << 16  # both matrices are held in memory
_MAX_MATCH_S = 60.0  # of processor time
_WITH_PEFT = "load the base as the training did, and merge with PEFT (merge_and_unload)"
_FUSED = ("qkv", "query_key_value", "c_attn", "gate_up")  # modules that hold several projections


def read_lora(
    folder: str | os.PathLike[str],
    catalog: Catalog,
    model: Catalog,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Alter], list[str]]:
    """Returns the changes of an adapter by the name of the weight, and notes on assumptions.

    Args:
        folder: a PEFT directory: `adapter_config.json` and `adapter_model.safetensors`; a path or a
            URL.
        catalog: the weights to change.
        model: all weights of the model.
        storage_options: of the adapter's object store.

    Raises:
        PlanError: its kind cannot be merged, or it does not fit the weights.
        FormatError: it is malformed.
    """
    source, manifest = open_sealed(folder, storage_options)
    try:
        return _read_lora(source, manifest, catalog, model)
    finally:
        source.store.close()


def _read_lora(
    source: Source, manifest: Manifest | None, catalog: Catalog, model: Catalog
) -> tuple[dict[str, Alter], list[str]]:
    config = _config(source, manifest)
    sides: dict[str, dict[str, TensorEntry]] = {}
    # the directory of a job also has an optimizer
    adapter = model_only(source.catalog)[0] if source.catalog.paths else source.catalog
    for fqn, entry in adapter.tensors.items():
        match = _PART.fullmatch(fqn)
        if match is None:
            raise PlanError(
                f"an adapter with something else than LoRA matrices: {printable(fqn)!r}"
                f" ({printable(source.path)})",
                hint="merge it with PEFT itself: PeftModel.from_pretrained(…).merge_and_unload()",
            )
        pair = sides.setdefault(match["module"], {})
        if match["side"] in pair:
            raise PlanError(
                f"two adapters in one: {printable(match['module'])!r} has two matrices"
                f" {match['side']} ({printable(source.path)})",
                hint="give each adapter a directory of its own",
            )
        _refuse_other(entry)
        pair[match["side"]] = entry
    result: dict[str, Alter] = {}
    modules = _Modules(config, source.path)
    cut = _without_key(sides, model)
    flag = bool(config.get("fan_in_fan_out"))
    layout = _Layout({module[cut:]: pair for module, pair in sides.items()}, model, flag)
    for module, pair in sides.items():
        name = _weight_of(module[cut:], catalog)
        if pair.keys() != {"A", "B"}:
            raise PlanError(
                f"an adapter with one of its two matrices, {''.join(pair)}: {printable(module)!r}"
                f" ({printable(source.path)})",
                hint="save the adapter again, or take another copy",
            )
        if not name:
            raise PlanError(
                f"the adapter changes a weight that is not there: {printable(module)!r}"
                f" ({printable(source.path)})",
                hint=_way_out(module[cut:], catalog),
            )
        rank = pair["A"].shape[0]
        if not 0 < rank <= _MAX_RANK or len(module) > _MAX_MODULE_CHARS:
            raise FormatError(
                f"a LoRA matrix of rank {rank}, or a name of more than {_MAX_MODULE_CHARS}"
                f" characters: {printable(module)!r} ({printable(source.path)})"
            )
        _check_rank(
            modules.find("rank_pattern", module, config.get("r")), module, rank, source.path
        )
        alpha = modules.find("alpha_pattern", module, config["lora_alpha"])
        scale = float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)
        is_transposed = layout.is_transposed(module[cut:])
        _check_fit(catalog.tensors[name], pair, is_transposed)  # before anything is read
        a, b = (read_singles(source, pair[side], manifest) for side in "AB")
        result[name] = _alter(a, b, scale, is_transposed)
    return result, layout.notes


def _way_out(module: str, catalog: Catalog) -> str:
    """Returns the hint for an adapter of a module that has no plain weight in the model."""
    own = sorted(n for n in catalog.tensors if n.startswith(f"{module}.") and "bias" not in n)
    if own:
        return f"the base is quantized or split there ({printable(own[0])}): {_WITH_PEFT}"
    above = module.rpartition(".")[0]
    fused = sorted(
        n
        for n in catalog.tensors
        if n.startswith(f"{above}.") and any(part in n.removeprefix(above) for part in _FUSED)
    )
    if fused:
        return (
            f"the base has fused weights there ({printable(fused[0])}): split them with ckpt"
            f" convert --map, or {_WITH_PEFT}"
        )
    return (
        "its names must be those of the merged model: ckpt inspect both, and rename with ckpt"
        " convert --rename"
    )


def _check_rank(expected: Any, module: str, rank: int, where: str) -> None:
    """Refuses matrices of another rank than the config says: alpha is divided by the rank."""
    if expected is not None and (type(expected) is not int or expected != rank):
        raise PlanError(
            f"matrices of another rank than adapter_config.json says: expected r ="
            f" {printable(repr(expected))},"
            f" got {rank} ({printable(module)!r} in {printable(where)})",
            hint="take the config that was saved with these matrices",
        )


def _weight_of(module: str, catalog: Catalog) -> str:
    """Returns the name of a module's weight, "" if it has none."""
    return next(
        (n for n in (f"{module}.weight", f"{module}.base_layer.weight") if n in catalog.tensors), ""
    )


def _without_key(modules: Iterable[str], catalog: Catalog) -> int:
    """Returns how many characters the adapter's names are longer than those of the weights.

    If all names of a model begin with one key, such as `model.`, `merge` has stripped it.
    """
    names = list(modules)
    key = names[0].partition(".")[0] + "." if names else ""
    is_stripped = all(
        name.startswith(key)
        and not _weight_of(name, catalog)
        and _weight_of(name.removeprefix(key), catalog)
        for name in names
    )
    return len(key) if is_stripped else 0


class _Layout:
    """Finds out which weights are stored as [in, out] and which as [out, in].

    transformers' Conv1D stores [in, out], Linear stores [out, in].

    The config has only one flag. PEFT sets it anew at each module, so in a model with both kinds it
    describes only the last module. These rules decide instead, in this order:

    - A matrix that is not square shows its kind by its shape or its bias.
    - A square matrix has the same kind as others of its name.
    - A square matrix without a bias is Linear, because Conv1D always has a bias.
    - If nothing is Conv1D and the flag is not set, it is taken for Linear, with a note.
    - Otherwise it is refused.
    """

    def __init__(
        self, sides: Mapping[str, Mapping[str, TensorEntry]], catalog: Catalog, flag: bool
    ) -> None:
        self._flag, self._model = flag, catalog
        self._taken: list[str] = []
        self._seen: dict[str, set[bool]] = {}
        self._known: dict[str, bool] = {}
        for fqn, weight in catalog.tensors.items():
            module = fqn.removesuffix(".weight").removesuffix(".base_layer")
            if len(weight.shape) != 2 or weight.shape[0] == weight.shape[1]:
                continue
            bias = catalog.tensors.get(f"{fqn.removesuffix('weight')}bias")
            if "B" in sides.get(module, {}):
                self._learn(module, sides[module]["B"].shape[0] != weight.shape[0])
            elif (
                fqn.endswith(".weight")
                and bias is not None
                and len(bias.shape) == 1
                and bias.shape[0] in weight.shape
            ):
                self._learn(module, bias.shape[0] != weight.shape[0])

    def _learn(self, module: str, is_transposed: bool) -> None:
        self._known[module] = is_transposed
        self._seen.setdefault(module.rpartition(".")[2], set()).add(is_transposed)

    def is_transposed(self, module: str) -> bool:
        """Tells whether the weight of a module is stored as [in, out].

        Raises:
            PlanError: the files do not show it.
        """
        if module in self._known:
            return self._known[module]
        of_name = self._seen.get(module.rpartition(".")[2], set())
        if len(of_name) == 1:
            return next(iter(of_name))
        bias = _weight_of(module, self._model).removesuffix("weight") + "bias"
        if bias not in self._model.tensors and not self._flag:
            return False
        if self._flag or any(True in found for found in self._seen.values()):
            raise PlanError(
                f"the model has layers of Conv1D, and {printable(module)!r} is square: no file says"
                " whether it is one",
                hint="merge it with PEFT: model.merge_and_unload()",
            )
        self._taken.append(module)
        return False

    @property
    def notes(self) -> list[str]:
        """Returns notes on assumptions."""
        if not self._taken:
            return []
        names = printable(", ".join(self._taken[:3])) + (", …" if len(self._taken) > 3 else "")
        note = (
            f"{len(self._taken)} square weights of the adapter are taken for Linear, as all others"
            f" are: {names}"
        )
        return [note]


def version(
    folder: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> str:
    """Returns an opaque version of an adapter, which changes when its files change."""
    source = open_source(folder, storage_options)
    try:
        files = source.folder.list_files()
        return " ".join(f"{name} {source.folder.version(name)}" for name in files)
    finally:
        source.store.close()


def _config(source: Source, manifest: Manifest | None) -> Mapping[str, Any]:
    try:
        if source.folder.size("adapter_config.json") > MAX_JSON_BYTES:
            raise ValueError(f"more than {MAX_JSON_BYTES} bytes")
        data = read(source.folder, "adapter_config.json")
        check_file(manifest, "adapter_config.json", data)
        config: dict[str, Any] = parse_json(data)
        if not isinstance(config, dict):
            raise TypeError("it is no object")
        _check_scales(config)
    except StorageError as error:
        if not error.is_missing:
            raise
        raise PlanError(
            f"not a PEFT adapter: it has no adapter_config.json ({printable(source.path)})",
            hint="--lora takes the directory that PEFT saved",
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(
            f"adapter_config.json is malformed: {printable(str(error))} ({printable(source.path)})"
        ) from error
    odd = [what for key, what in _UNSUPPORTED.items() if config.get(key)]
    first_values = config.get("init_lora_weights")
    if isinstance(first_values, str) and first_values.startswith(_CHANGE_THE_BASE):
        raise PlanError(
            "the adapter belongs to a base model that its initialisation changed:"
            f" init_lora_weights {printable(first_values)!r} ({printable(source.path)})",
            hint=(
                "save it with PEFT's path_initial_model_for_weight_conversion, or merge it there:"
                " model.merge_and_unload()"
            ),
        )
    if config.get("peft_type") != "LORA" or odd or config.get("bias", "none") != "none":
        kind = ", ".join(odd) or (
            f"bias {config.get('bias')!r}"
            if config.get("peft_type") == "LORA"
            else str(config.get("peft_type"))
        )
        raise PlanError(
            f"an adapter of a kind that is not merged here: {printable(kind)}"
            f" ({printable(source.path)})",
            hint="PEFT can merge it",
        )
    return config


def _check_scales(config: Mapping[str, Any]) -> None:
    """Checks the numbers and patterns that scale an adapter.

    Raises:
        ValueError: a number is not finite, or a pattern is malformed.
    """
    if type(config.get("use_rslora", False)) is not bool:
        raise TypeError("use_rslora is true or false")
    scales = _patterns(config, "alpha_pattern")
    for name, value in {"lora_alpha": config["lora_alpha"], **scales}.items():
        if type(value) not in (int, float) or not abs(value) <= _MAX_ALPHA:
            raise ValueError(f"{name[:80]} is no finite number")
    for pattern in (*scales, *_patterns(config, "rank_pattern")):
        _compiled(pattern)


@functools.lru_cache(maxsize=2 * _MAX_PATTERNS)
def _compiled(pattern: str) -> Any:
    r"""Returns a pattern of an adapter's config, for the whole name of a module.

    RE2 matches in linear time. Python's own `re` would never end for some patterns.

    Raises:
        ValueError: the pattern is malformed, or needs what RE2 has not (`(?=`, `\1`).
    """
    if len(pattern) > _MAX_PATTERN_CHARS:
        raise ValueError(f"a pattern has more than {_MAX_PATTERN_CHARS} characters: {pattern[:80]}")
    import re2  # type: ignore[import-untyped]  # the package google-re2

    options = re2.Options()
    options.log_errors, options.max_mem = False, _MAX_PATTERN_BYTES
    try:
        return re2.compile(rf"(?:.*\.)?(?:{pattern})", options)
    except re2.error as error:
        raise ValueError(
            f"a pattern is malformed or cannot be matched in linear time: {pattern[:80]}: {error}"
        ) from error


class _Modules:
    """The values that a config's tables of patterns give to modules.

    Each pattern is matched with each name, so all of it has a limit of time.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where, self._left_s = config, where, _MAX_MATCH_S

    def find(self, key: str, module: str, default: Any) -> Any:
        """Returns the value of the first pattern in a table that matches.

        Raises:
            PlanError: all matches together took too long.
        """
        patterns, began = self._config.get(key) or {}, time.thread_time()
        found = next((v for p, v in patterns.items() if _compiled(p).fullmatch(module)), default)
        self._left_s -= time.thread_time() - began
        if self._left_s < 0:
            raise PlanError(
                f"matching {len(patterns)} patterns of {key} took longer than {_MAX_MATCH_S:g} s"
                f" ({printable(self._where)})",
                hint=_WITH_PEFT,
            )
        return found


def _patterns(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise TypeError(f"{key} is no object")
    if len(patterns) > _MAX_PATTERNS:
        raise ValueError(f"{key} has more than {_MAX_PATTERNS} entries")
    return patterns


def _refuse_other(entry: TensorEntry) -> None:
    """Refuses a tensor that is no matrix of numbers."""
    if len(entry.shape) != 2 or not entry.dtype.is_castable:
        raise PlanError(
            f"only LoRA of linear layers is merged: {printable(entry.fqn)!r} is {entry.dtype.name}"
            f" {list(entry.shape)}"
        )


def _check_fit(weight: TensorEntry, pair: Mapping[str, TensorEntry], is_transposed: bool) -> None:
    """Refuses matrices of other shapes than the weight needs."""
    product = (pair["B"].shape[0], pair["A"].shape[1])
    product = product[::-1] if is_transposed else product
    is_chain = pair["A"].shape[0] == pair["B"].shape[1]
    if weight.shape != product or not is_chain or not weight.dtype.is_castable:
        raise PlanError(
            f"the adapter does not fit: {printable(weight.fqn)!r} is {weight.dtype.name}"
            f" {list(weight.shape)}, B @ A is {list(product)}",
            hint=None if weight.dtype.is_castable else f"the base is quantized there: {_WITH_PEFT}",
        )


def _alter(a: Singles, b: Singles, scale: float, is_transposed: bool) -> Alter:
    """Returns a function that adds `scale * B @ A` to a box of a weight."""
    if is_transposed:  # the weight is stored [in, out]
        a, b = b.T, a.T

    def add(box: Box, values: Singles) -> None:
        rows, columns = box.slices()
        values += np.float32(scale) * (b[rows] @ a[:, columns])

    return add


def refuse_adapters(tensors: Mapping[str, TensorEntry], src: str) -> None:
    """Refuses a model that contains adapters, for targets that hold a plain model.

    PEFT has given the tensors of such a model other names.

    Raises:
        PlanError: the model contains adapters; the hint has the commands that can use them.
    """
    inside = next((fqn for fqn in tensors if _PART.fullmatch(fqn) or ".base_layer." in fqn), None)
    if inside is not None:
        raise PlanError(
            "the model has adapters of PEFT inside, and no program loads such names as a model:"
            f" {printable(inside)!r}",
            hint=(
                f"ckpt convert {printable(src)} ADAPTER --to peft --base DIR writes the adapter;"
                " ckpt merge BASE_MODEL OUT.safetensors --lora ADAPTER adds it to its model"
            ),
        )


def adapter_of(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns the tensors of a PEFT model's only adapter, as PEFT names them in a file.

    These names do not contain the adapter's own name.

    Raises:
        PlanError: there is none, or there are several.
    """
    found: dict[str, dict[str, TensorEntry]] = {}
    more = [
        fqn
        for fqn in tensors
        if ".modules_to_save." in fqn or (".lora_" in fqn and not _PART.fullmatch(fqn))
    ]
    if more:
        raise PlanError(
            "an adapter with something else than LoRA matrices is not written:"
            f" {printable(more[0])!r}" + (f" and {len(more) - 1} more" if len(more) > 1 else ""),
            hint="save it with PEFT itself: model.save_pretrained(DIR)",
        )
    for fqn, entry in tensors.items():
        if match := _PART.fullmatch(fqn):
            name = f"base_model.model.{match['module']}.lora_{match['side']}.weight"
            found.setdefault(match["adapter"] or "default", {})[name] = entry.named(name)
    if len(found) != 1:
        names = printable(", ".join(found))
        raise PlanError(
            f"the checkpoint holds {len(found)} LoRA adapters{': ' if found else ''}{names}; a PEFT"
            " directory has one",
            hint=(
                "choose with --select '*.NAME.weight'"
                if found
                else "their tensors are called ….lora_A.NAME.weight"
            ),
        )
    return next(iter(found.values()))
