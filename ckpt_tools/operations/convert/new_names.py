"""Gives a training state the names and the layout that are wanted.

Prefixes of wrappers go first. Then come a key map, rules of the user, the names of transformers,
and those of torchtitan or Meta. Scales of quantized weights follow their codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.naming import strip_wrappers, stripped_from, stripper
from ckpt_tools.core.quantized import weights_in
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.convert.blocks import HeldScales, hold_scales
from ckpt_tools.operations.convert.families import (
    FAMILIES,
    HUB_ENDING,
    MAPPED_NAMES,
    META,
    TORCHTITAN,
    family_of,
    foreign_names,
    naming_of,
)
from ckpt_tools.operations.convert.huggingface import (
    head_counts,
    quantization_of,
    read_config,
    untie,
)
from ckpt_tools.operations.convert.key_map import apply_map, check_settings
from ckpt_tools.operations.convert.map_file import KeyMap, read_map
from ckpt_tools.operations.convert.model_names import shapes_in
from ckpt_tools.operations.convert.options import Conversion, substitute
from ckpt_tools.operations.convert.training_state import TrainingState, refuse_unnamed
from ckpt_tools.operations.convert.transformers_names import (
    HUB,
    MEMORY,
    ask_transformers,
    rename_as,
)
from ckpt_tools.operations.quantization_config import told_by, told_by_config
from ckpt_tools.publish.sealed_source import checked_manifest
from ckpt_tools.transfer.options import Path_

_OWNERS = {TORCHTITAN: "torchtitan's", META: "Meta's"}
_INPUT, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"  # of Llama on the Hub


def with_other_names(
    parts: TrainingState, source: Source, to: str, how: Conversion
) -> TrainingState:
    """Returns the training state under the names that are wanted, and in their layout."""
    if not how.get("keep_prefix"):
        parts = _stripped(parts, has_keys=bool(source.catalog.paths))
    held = _held(parts, source, how)
    parts = _renamed(parts if held is None else held.parts, source, to, how)
    parts = _named_by_transformers(parts, to, how, source)
    if how.get("names") in MAPPED_NAMES:
        parts = _named_by_map(parts, how, source)
    return parts if held is None else held.put_back(parts, source)


def _held(parts: TrainingState, source: Source, how: Conversion) -> HeldScales | None:
    """Returns a training state without scales, which will follow their codes; None if none do."""
    base, key_map = how.get("base"), how.get("key_map")
    if (base is None and key_map is None) or how.get(
        "rename"
    ):  # rules of the user name scales, too
        return None
    if not weights_in(parts.model.values()):
        return None
    told = told_by_config(source, checked_manifest(source))
    if base is not None and not told.said:
        told = told_by(quantization_of(base, read_config(base))[1])
    keys = _read_map(key_map, how) if key_map is not None else None
    return hold_scales(parts, source, told, keys)


def _read_map(key_map: Path_, how: Conversion) -> KeyMap:
    return read_map(key_map, _numbers(how.get("base"), how.get("settings") or {}))


def _renamed(parts: TrainingState, source: Source, to: str, how: Conversion) -> TrainingState:
    """Returns the training state under the names of the target."""
    key_map = how.get("key_map") or _found_map(parts, to, how)
    if key_map:
        keys = _read_map(key_map, how)
        check_settings(keys, how.get("settings") or {})
        refuse_unnamed(parts, "a key map changes parameters and their state")
        parts = apply_map(parts, keys, source, bool(how.get("partial")))
        parts.renamed_by.append(keys.title)
    for rule in how.get("rename", ()):
        before, parts = parts, parts.renamed(substitute(rule))
        states = zip(parts.optimizers, before.optimizers, strict=True)
        if parts.model.keys() == before.model.keys() and all(
            new.state.keys() == old.state.keys() for new, old in states
        ):
            some = ", ".join(map(printable, list(parts.model)[:3]))
            raise PlanError(
                f"--rename {printable(rule)!r} changes no name", hint=f"names look like: {some}"
            )
        parts.renamed_by.append(f"--rename {printable(rule)}")
    return parts


def _found_map(parts: TrainingState, to: str, how: Conversion) -> str | None:
    """Returns the map of another framework's names to those of the Hub, and notes it.

    It is looked for if these are wanted, and the config says which model it is.
    """
    base, wanted = how.get("base"), how.get("names")
    naming = naming_of(list(parts.model)) if base is None and to == "hf" else ""
    if naming and not naming.endswith(HUB_ENDING):
        parts.notes.append(f"the names are {naming}")
    if base is None or (wanted is None and to != "hf") or not parts.model or how.get("rename"):
        return None
    try:
        family = foreign_names(parts.model, read_config(base))
    except PlanError as error:
        if not how.get("partial"):
            raise
        parts.notes.append(f"all names are kept: {error}")
        return None
    if family is None:
        return None
    parts.notes.append(
        f"the names are those of {family.writers} for {family.title}: converted with the map"
        f" {family.to_hub}"
    )
    return family.to_hub


def _named_by_map(parts: TrainingState, how: Conversion, source: Source) -> TrainingState:
    """Returns the training state with the names of torchtitan or Meta, from those of the Hub.

    Raises:
        PlanError: there is no map for the config's model.
    """
    base, wanted = how.get("base"), how.get("names")
    assert base is not None and wanted is not None  # `check_request` has seen it
    family = family_of(config := read_config(base))
    if family is None or wanted not in family.namings:
        all_of = (one.model_types for one in FAMILIES if wanted in one.namings)
        known = ", ".join(kind for kinds in all_of for kind in kinds)
        raise PlanError(
            f"--names {wanted}: no map for {printable(str(config.get('model_type')))!r}",
            hint=f"known are {known}; --map FILE takes a map of your own",
        )
    key_map = family.from_hub(wanted)
    parts.notes.append(f"converted to {_OWNERS[wanted]} names with the map {key_map}")
    model: Mapping[str, TensorEntry] = parts.model
    if wanted == META:
        model = _with_output(model, config, parts.notes)
    else:
        model = untie(source, Catalog("model", parts.model), config, parts.notes).tensors
    parts = replace(parts, model=dict(model), prefix=())  # they have no key above the model
    keys = read_map(key_map, _numbers(base, {}))
    refuse_unnamed(parts, "a key map changes parameters and their state")
    parts.renamed_by.append(keys.title)
    return apply_map(parts, keys, source, bool(how.get("partial")))


def _with_output(
    model: Mapping[str, TensorEntry], config: Mapping[str, Any], notes: list[str]
) -> Mapping[str, TensorEntry]:
    """Returns a model with an output of its own: Meta's files have both of two tied weights."""
    found = model.get(_INPUT)
    if not config.get("tie_word_embeddings") or _OUTPUT in model or found is None:
        return model
    notes.append(f"{_OUTPUT} is tied to {_INPUT}, and written, too, as in Meta's files")
    return {**model, _OUTPUT: found.named(_OUTPUT)}


def _named_by_transformers(
    parts: TrainingState, to: str, how: Conversion, source: Source
) -> TrainingState:
    """Returns the training state with the names of transformers' files, or of its memory.

    Directories for transformers have those of files, unless `names` says otherwise.
    """
    base, wanted = how.get("base"), how.get("names")
    if base is None or (wanted is None and to != "hf") or not parts.model:
        return parts
    if wanted in MAPPED_NAMES:  # their maps are from the Hub's names
        wanted = HUB
        if family_of(read_config(base)) is None:
            return parts  # refused later
    is_computed = any(entry.is_computed for entry in parts.model.values())
    if wanted is None and parts.model.keys() <= shapes_in(base, is_computed).keys():
        return parts  # the directory has files with these names
    try:
        names, reason = ask_transformers(base, read_config(base))
        if names is None:
            return _unknown_to_transformers(parts, how, reason)
        is_partial = wanted is None or bool(how.get("partial"))
        parts = rename_as(parts, names, wanted or HUB, source, str(base), is_partial)
    except PlanError as error:
        if wanted is not None or not how.get("partial"):
            raise
        parts.notes.append(f"all names are kept: {error}")
        return parts
    if wanted != MEMORY:
        parts.saved_by_transformers = names.files
    return parts


def _unknown_to_transformers(parts: TrainingState, how: Conversion, reason: str) -> TrainingState:
    """Returns a training state with its own names, since transformers knows no others.

    Raises:
        PlanError: its names are wanted.
    """
    wanted = how.get("names")
    if wanted in MAPPED_NAMES:
        why = printable(reason)
        parts.notes.append(f"the names were not compared with the config's model: {why}")
    elif wanted is not None:
        raise PlanError(
            f"--names {wanted}: transformers cannot say what the names of the config's model"
            f" are: {printable(reason)} ({printable(str(how.get('base')))})"
        )
    return parts  # else a note comes with the comparison of names


def _numbers(base: Path_ | None, settings: Mapping[str, int]) -> dict[str, int]:
    """Returns the numbers that a key map needs: the user's, and those of a model's config.

    Raises:
        PlanError: the two differ.
    """
    found = head_counts(base) if base is not None else {}
    for name, number in settings.items():
        if found.get(name, number) != number:
            raise PlanError(
                f"--set {printable(name)}={number}, but the config has {found[name]}"
                f" ({printable(str(base))})"
            )
    return found | dict(settings)


def _stripped(parts: TrainingState, has_keys: bool) -> TrainingState:
    """Returns the training state without the prefixes of wrappers, and notes them.

    Args:
        parts: the training state.
        has_keys: the format keeps the keys above the model. If it has only names, `module.` is the
            prefix of a wrapper and not a key.
    """
    prefix = (
        parts.prefix
        if has_keys
        else tuple(key for key in parts.prefix if strip_wrappers(f"{key}.x") != "x")
    )
    gone = (
        [".".join(key for key in parts.prefix if key not in prefix)] * len(parts.model)
        if prefix != parts.prefix
        else []
    )
    strip = stripper(parts.model)
    gone += [found for fqn in parts.model if (found := stripped_from(fqn, strip))]
    if gone:
        counts = ", ".join(f"{name}. ({number:,})" for name, number in Counter(gone).most_common(8))
        parts.notes.append(f"stripped from names: {printable(counts)}")
    return replace(parts.renamed(strip), prefix=prefix)
