"""Compares names to write with those of the model that a config describes.

transformers loads a file with other names without an error, and starts those weights at random.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.selection import matcher
from ckpt_tools.errors import CheckpointError, PlanError, printable
from ckpt_tools.formats.registry import open_source
from ckpt_tools.operations.convert.child_process import ask
from ckpt_tools.operations.dequantize import dequantize

_SHOWN = 4
_COMPARE = """
import json, sys
import torch, transformers
asked = json.loads(open(sys.argv[1]).read())
config = transformers.AutoConfig.from_pretrained(
    asked["base"], trust_remote_code=False, local_files_only=True
)
kind = find_class(asked["architectures"])
types = {name: getattr(torch, kind) for name, kind in asked["dtypes"].items()}
values = {n: torch.empty(s, dtype=types[n], device="meta") for n, s in asked["shapes"].items()}
options = {"trust_remote_code": False} if kind.__name__.startswith("Auto") else {}
_, info = kind.from_pretrained(
    None,
    config=config,
    state_dict=values,
    output_loading_info=True,
    device_map="meta",
    ignore_mismatched_sizes=True,  # they are told, and refused
    **options,
)
told = {key: sorted(map(str, value)) for key, value in info.items()}
try:  # from release 5: how the names of files become those in memory
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    rules = get_checkpoint_conversion_mapping(config.model_type) or []
except ImportError:
    rules = []
texts = [text for rule in rules for text in getattr(rule, "target_patterns", [])]
told["in_memory"] = sorted(n for n in values if any(text in n for text in texts))
print(json.dumps(told))
"""


def compare_with_model(
    base: str | os.PathLike[str],
    config: Mapping[str, Any],
    catalog: Catalog,
    is_part: bool,
    is_partial: bool,
    saved: Mapping[str, tuple[int, ...]] | None = None,
) -> list[str]:
    """Compares the names of tensors with those of a config's model; returns notes.

    Names that the weights in `base` have, or that transformers would save, need no further proof.
    For others, transformers says in a separate process what it would load; no weights are read
    there.

    Args:
        base: the directory of the config.
        config: its contents.
        catalog: the tensors to write, under their names in the target.
        is_part: the user chose a part of the tensors, so some are missing.
        is_partial: names may differ. Then they are only noted.
        saved: the names and shapes that transformers would save; None if unknown.

    Raises:
        PlanError: transformers would start weights at random, or ignore some.
    """
    there = shapes_in(base, any(entry.is_computed for entry in catalog.tensors.values()))
    if {fqn: entry.shape for fqn, entry in catalog.tensors.items()} in (there, saved):
        return []
    try:
        found, reason = _asked(base, config, catalog)
    except PlanError as error:
        if not is_partial:
            raise
        found, reason = None, str(error)
    if found is None:
        return _by_base(there, catalog.tensors, base, reason, is_partial)
    missing, unexpected = found.get("missing_keys", []), found.get("unexpected_keys", [])
    mismatched, told = found.get("mismatched_keys", []), []
    for what, names, is_allowed in (
        ("lacks", missing, is_part or is_partial),
        ("adds to the", unexpected, is_partial),
        ("has other shapes for", mismatched, False),
    ):
        if not names:
            continue
        message = (
            f"the result {what} names of the config's model: {some(names)}"
            f" ({printable(os.fspath(base))})"
        )
        if not is_allowed:
            raise PlanError(
                message,
                hint="transformers would start such weights at random, or ignore them: --map and"
                " --rename change names, --partial writes them as they are",
            )
        told.append(message)
    others, files = found.get("in_memory", []), "files on the Hub"
    if there:
        others = sorted(catalog.tensors.keys() - there.keys()) if not unexpected else []
        files = f"the files in {printable(os.fspath(base))}"
    if others:
        told.append(
            f"names of transformers in memory, which {files} have otherwise: {some(others)};"
            " transformers loads both, other programs may not"
        )
    return told


def shapes_in(base: str | os.PathLike[str], as_numbers: bool = False) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights in a model's directory; none if there are no weights.

    Args:
        base: the directory.
        as_numbers: of quantized weights, those of their numbers.
    """
    if not any(Path(base).glob("*.safetensors")):
        return {}
    try:
        source = open_source(base)
    except CheckpointError:  # weights of which parts are missing prove nothing
        return {}
    try:
        catalog = dequantize(source, matcher(())).shown.catalog if as_numbers else source.catalog
        return {fqn: entry.shape for fqn, entry in catalog.tensors.items()}
    finally:
        source.store.close()


def _asked(
    base: str | os.PathLike[str], config: Mapping[str, Any], catalog: Catalog
) -> tuple[dict[str, list[str]] | None, str]:
    """Returns what transformers would not find or not use; None and the reason if it cannot say."""
    asked = {
        "architectures": config.get("architectures"),
        "shapes": {fqn: list(entry.shape) for fqn, entry in catalog.tensors.items()},
        "dtypes": {fqn: entry.dtype.name for fqn, entry in catalog.tensors.items()},
    }
    result: dict[str, list[str]] | None
    result, reason = ask(_COMPARE, base, config, asked)
    return result, reason


def _by_base(
    there: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, TensorEntry],
    base: str | os.PathLike[str],
    reason: str,
    is_partial: bool,
) -> list[str]:
    """Compares with the weights in `base` alone, because transformers cannot say; returns notes."""
    others = sorted(tensors.keys() - there.keys()) if there else []
    where = printable(os.fspath(base))
    shapes = [fqn for fqn in tensors if fqn in there and tensors[fqn].shape != there[fqn]]
    if shapes:
        raise PlanError(
            f"the weights in {where} have other shapes than the result: {some(shapes)}",
            hint="give the directory of the model with these weights",
        )
    if others and not is_partial:
        raise PlanError(
            f"the weights in {where} have other names than the result: {some(others)}",
            hint="--map and --rename change names, --partial writes them as they are;"
            f" transformers did not say whether it loads them: {printable(reason)}",
        )
    told = [f"names that the weights in {where} lack: {some(others)}"] if others else []
    if missing := sorted(there.keys() - tensors.keys()):
        told.append(f"the result lacks names of the weights in {where}: {some(missing)}")
    if there:
        return told
    return [f"the names were not compared with the config's model: {printable(reason)}"]


def some(names: Sequence[str]) -> str:
    """Returns the first of some names, for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{printable(', '.join(names[:_SHOWN]))}{more}"
