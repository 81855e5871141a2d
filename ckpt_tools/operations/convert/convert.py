"""Converts any checkpoint into the layout of another tool, names and optimizer state included.

It takes a training state apart, renames its entries, and assembles them for the target. The
transfer engine then copies the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack, cast

from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.coverage import check as check_catalog
from ckpt_tools.core.naming import key_path, model_only, strip_wrappers, stripped_from, stripper
from ckpt_tools.core.quantized import OF_TORCHAO, weights_in
from ckpt_tools.core.selection import matcher
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats import torch_save
from ckpt_tools.formats.per_rank import files as per_rank
from ckpt_tools.formats.per_rank.flat_param import read_shapes
from ckpt_tools.formats.registry import (
    Source,
)
from ckpt_tools.operations.arguments import checked
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
from ckpt_tools.operations.convert.flat_shapes import check_needed, lay_beside
from ckpt_tools.operations.convert.huggingface import (
    check_loads,
    head_counts,
    quantization_of,
    read_config,
    untie,
)
from ckpt_tools.operations.convert.key_map import apply_map, check_settings
from ckpt_tools.operations.convert.layouts import TargetLayout
from ckpt_tools.operations.convert.map_file import KeyMap, read_map
from ckpt_tools.operations.convert.model_names import shapes_in
from ckpt_tools.operations.convert.options import Conversion, check_request, substitute
from ckpt_tools.operations.convert.param_order import ModelOrder, read_order
from ckpt_tools.operations.convert.take_apart import check_used, take_apart
from ckpt_tools.operations.convert.targets import TARGETS
from ckpt_tools.operations.convert.training_state import TrainingState, in_order, refuse_unnamed
from ckpt_tools.operations.convert.transformers_names import (
    HUB,
    MEMORY,
    ask_transformers,
    rename_as,
)
from ckpt_tools.operations.dequantize import Dequantized, dequantize
from ckpt_tools.operations.folder import note_on_others
from ckpt_tools.operations.merge_reshard import (
    not_taken,
    unknown_values,
)
from ckpt_tools.operations.quantization_config import told_by, told_by_config
from ckpt_tools.operations.quantize import Quantization
from ckpt_tools.operations.side_files import left_beside
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.publish.manifest import RENAMED_BY
from ckpt_tools.publish.sealed_source import checked_manifest, open_sealed
from ckpt_tools.ranks.base import ALONE, Group
from ckpt_tools.transfer.options import Options, Path_
from ckpt_tools.transfer.result import TransferResult
from ckpt_tools.transfer.transfer import TransferRequest, transfer

_PARAM_ORDER, _OF_THE_FILE = "param_order", "of the file"  # in the manifest's `source`
_COPIES = ("bit16.",)  # DeepSpeed's second copy of the weights
_OWNERS = {TORCHTITAN: "torchtitan's", META: "Meta's"}
_INPUT, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"  # of Llama on the Hub


@checked(Conversion)
def convert(src: Path_, dst: Path_, *, to: str, **how: Unpack[Conversion]) -> TransferResult:
    """Writes a checkpoint in another layout.

    Args:
        src: a checkpoint of any format that can be read, or a directory with one below.
        dst: the directory to write; for `safetensors` and `torch`, the file.
        to: one of `TARGETS`.
        **how: see `Conversion`.

    Raises:
        CheckpointError: see the tree in `errors`. Then `dst` is as it was before.
    """
    check_request(to, str(dst), how)
    storage_options = how.get("storage_options")
    source, manifest = open_sealed(src, storage_options, lay_beside(how.get("shapes")))
    if how.get("param_order") != "model":  # "model" also uses the shapes file
        check_needed(how.get("shapes"), source.catalog)
    is_unordered = manifest is not None and manifest.source.get(_PARAM_ORDER) == _OF_THE_FILE
    others = note_on_others(src, source.store)
    result = convert_source(source, dst, to, how, is_unordered=is_unordered)
    return replace(result, notes=(*result.notes, *others))


def convert_source(
    source: Source,
    dst: Path_,
    to: str,
    how: Conversion,
    operation: str = "convert",
    changes: str = "",
    prove: Callable[[Group], None] | None = None,
    about: Mapping[str, Any] | None = None,
    is_unordered: bool = False,
) -> TransferResult:
    """Writes an opened checkpoint in another layout.

    The arguments are those of `prepare`; `prove` is called beside the proof of `prepare`.
    """
    group = how.get("group") or ALONE
    with group.phase("plan the conversion"):
        request, parts, quantization = prepare(
            source, dst, to, how, operation, changes, about, is_unordered
        )
    if prove is not None:
        request = replace(request, prove=_all_of(prove, request.prove))
    result = transfer(request)
    if quantization is not None and not result.is_dry_run:
        result = replace(result, quantization_errors=quantization.errors(group))
    is_model = how.get("model_only") or TARGETS[to].is_model
    parts.notes.extend(_notes_on(source.catalog, to, bool(is_model)))
    if how.get("check") and not result.is_dry_run and group.rank == 0:
        parts.notes.append(
            "transformers loads it: no name missing or unexpected, every tensor as it was written"
        )
    return replace(result, notes=(*result.notes, *parts.notes))


class Prepared(NamedTuple):
    """What has to be written for another layout.

    Attributes:
        request: for the transfer.
        parts: the training state, with its notes.
        quantization: how its weights are quantized; None if they are not.
    """

    request: TransferRequest
    parts: TrainingState
    quantization: Quantization | None


def prepare(
    source: Source,
    dst: Path_,
    to: str,
    how: Conversion,
    operation: str = "convert",
    changes: str = "",
    about: Mapping[str, Any] | None = None,
    is_unordered: bool = False,
) -> Prepared:
    """Returns what has to be written for another layout.

    Args:
        source: the checkpoint.
        dst, to, how: as for `convert`, and checked.
        operation, changes, about: see `TransferRequest`.
        is_unordered: the groups of its optimizers do not list parameters in the order of the job.
    """
    storage_options = how.get("storage_options")
    is_model = how.get("model_only") or TARGETS[to].is_model
    if how.get("names") == TORCHTITAN and to == "dcp" and not is_model:
        how = {**how, "optimizer": how.get("optimizer") or "flat"}  # as torchtitan names it
    numbers = Dequantized(source, source)
    weights = weights_in(source.catalog.tensors.values())
    moments = {part for w in weights if w.scheme == OF_TORCHAO for part in w.parts}
    may_copy = is_model or not (
        TARGETS[to].is_local or any(how.get(key) for key in ("optimizer", "key_map", "names"))
    )
    if how.get("dtype") is not None or (moments and not may_copy):
        is_kept = matcher(how.get("keep_dtype", ()))
        numbers = dequantize(
            source,
            lambda name: name not in moments and is_kept(name),
            of_model=how.get("dtype") is not None,
            of_optimizers=not may_copy,
        )
        numbers.refuse_resume(how.get("resume", False))
    source = numbers.shown
    taken = _taken_apart(source, to, how, bool(is_model), is_unordered)
    parts = _with_other_names(taken, source, to, how)
    parts.tensors = {fqn: t for fqn, t in parts.tensors.items() if not fqn.startswith(_COPIES)}
    parts.is_dequantized = any(entry.is_computed for entry in parts.model.values())
    parts.notes += numbers.notes
    if not parts.model and not parts.optimizers and not parts.tensors:
        what = f"no tensors are left of {len(source.catalog.tensors)} ({printable(source.path)})"
        raise PlanError(what, hint=f"ckpt inspect {source.path}")
    about = {**(about or {}), **_order_of(parts, how)}
    if parts.renamed_by:
        about[RENAMED_BY] = list(parts.renamed_by)
    layout = TargetLayout(source, parts, how, bool(is_model))
    catalog, form, request = layout.lay_out(to, str(dst))
    quantization = layout.quantization
    sizes = {**catalog.file_sizes, **source.catalog.file_sizes}
    catalog = replace(catalog, memory_files=layout.memory_file.files, file_sizes=sizes)
    check_catalog(catalog, shares=True)
    options = cast(
        Options, {key: value for key, value in how.items() if key in Options.__annotations__}
    )
    accept = check_loads if how.get("check") else None
    read = numbers.stored.with_memory_files(layout.memory_file.files)
    below = layout.before or catalog  # before weights are quantized
    if quantization is not None:
        read, below = quantization.over(read), quantization.numbers
    wanted = TransferRequest(
        operation,
        read,
        catalog,
        open_destination(dst, storage_options, accept),
        form,
        request,
        options,
        left_out=_dropped(source.catalog, below, layout.parts),
        changes=changes,
        prove=partial(_prove, numbers, quantization, read, below),
        about=about,
        proves_inverse=operation == "convert" and how.get("prove", True),
    )
    return Prepared(wanted, parts, quantization)


def _all_of(*proofs: Callable[[Group], None] | None) -> Callable[[Group], None]:
    def prove(group: Group) -> None:
        for proof in proofs:
            if proof is not None:
                proof(group)

    return prove


def _prove(
    numbers: Dequantized,
    quantization: Quantization | None,
    read: Source,
    below: Catalog,
    group: Group,
) -> None:
    """Compares with their checksums what computed tensors were made of."""
    numbers.prove(below, group)
    if quantization is not None:
        quantization.prove(read, group)


def _taken_apart(
    source: Source, to: str, how: Conversion, is_model: bool, is_unordered: bool
) -> TrainingState:
    """Returns the training state of a source, with the optimizers named as the target wants them.

    Raises:
        PlanError: the user's order does not fit, or an optimizer cannot be named so.
    """
    given = read_order(how.get("param_order"))
    if is_model and given is not None:
        raise PlanError("--param-order is for optimizers, and only the model is written")
    order = _model_order(source) if isinstance(given, str) else given
    keeps_order = source.format in (torch_save, per_rank)
    taken = take_apart(source.catalog, source.store, order, keeps_order, is_model)
    if is_unordered:
        for optimizer in taken.optimizers:
            optimizer.has_order = optimizer.is_numbered
    is_numbered = not is_model and (
        TARGETS[to].namings == ("ids",) or how.get("optimizer") == "ids"
    )
    names_anew = is_numbered or (not is_model and how.get("optimizer") is not None)
    moments = [w for w in weights_in(source.catalog.tensors.values()) if w.scheme == OF_TORCHAO]
    if names_anew and moments:
        raise PlanError(
            "moments of few bits that stay codes are not named anew:"
            f" {printable(moments[0].codes)!r} ({len(moments)} of {OF_TORCHAO})",
            hint="leave --optimizer out to copy them as they are; CheckpointManager.resume and"
            " ckpt_tools.load take them; or --model-only",
        )
    check_used(
        order,
        [o.prefix for o in taken.optimizers if o.is_numbered or (is_numbered and not o.has_order)],
    )
    if is_numbered:
        taken.optimizers = [in_order(optimizer, order) for optimizer in taken.optimizers]
    if how.get("optimizer") in ("groups", "flat"):
        if taken.untouched:
            whose = printable(taken.untouched[0])
            raise PlanError(
                f"--optimizer {how.get('optimizer')} names the parameters, and the state of"
                f" {whose!r} is not by parameter",
                hint=(
                    "LBFGS and the like keep one state for all parameters: leave --optimizer out"
                    " to copy it unchanged"
                ),
            )
        refuse_unnamed(taken, f"--optimizer {how.get('optimizer')} names the parameters")
    return taken


def _order_of(parts: TrainingState, how: Conversion) -> dict[str, str]:
    """Returns what the manifest says of the order in groups; adds a note if it is not the job's.

    A checkpoint with options for each parameter lists no order. Groups that are made of it have
    one, which must not become numbers later.
    """
    if how.get("optimizer") == "flat" or not parts.optimizers:
        return {}
    names = [o.prefix for o in parts.optimizers if not o.has_order and not o.is_unnamed]
    if not names:
        return {}
    parts.notes.append(
        f"{printable(', '.join(names))}: the groups list the parameters in the order of the file,"
        " because nothing tells that of the job; --optimizer ids will need --param-order"
    )
    return {_PARAM_ORDER: _OF_THE_FILE}


def _notes_on(catalog: Catalog, to: str, is_model: bool) -> list[str]:
    """Returns what a conversion leaves behind of the source, or gives another name."""
    top = catalog.extras.get(torch_save.TOP_LEVEL)
    beside = [] if TARGETS[to].keeps_beside or is_model else left_beside(catalog)
    renamed = [f"the source has {top}"] if top else []
    return [*renamed, *beside, *unknown_values(catalog, only_model=is_model)]


def _model_order(source: Source) -> ModelOrder:
    """Returns the order of a model's parameters, from `--shapes` or a state dict.

    safetensors and DCP do not keep this order.
    """
    shapes = read_shapes(source.store, source.store.list_files())
    if shapes:
        return ModelOrder(tuple(shapes))
    if source.format not in (torch_save, per_rank):
        return ModelOrder(())
    return ModelOrder(tuple(model_only(source.catalog)[0].tensors))


def _with_other_names(
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


def _dropped(before: Catalog, after: Catalog, parts: TrainingState) -> dict[str, int]:
    """Returns the top-level keys that are left out completely, with their bytes."""
    kept = {f.partition(".")[0] for f in after.tensors} if parts.optimizers else set()
    found: dict[str, int] = {}
    for fqn, nbytes in not_taken(before, after, parts.used).items():
        if (key := key_path(before, fqn)[0]) not in kept:
            found[key] = found.get(key, 0) + nbytes
    return found
