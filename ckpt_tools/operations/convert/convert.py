"""Converts any checkpoint into the layout of another tool, names and optimizer state included.

It takes a training state apart, renames its entries, and assembles them for the target. The
transfer engine then copies the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Unpack, cast

from ckpt_tools.core.catalog import Catalog
from ckpt_tools.core.coverage import check as check_catalog
from ckpt_tools.core.naming import key_path, model_only
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
from ckpt_tools.operations.convert.families import (
    TORCHTITAN,
)
from ckpt_tools.operations.convert.flat_shapes import check_needed, lay_beside
from ckpt_tools.operations.convert.huggingface import (
    check_loads,
)
from ckpt_tools.operations.convert.layouts import TargetLayout
from ckpt_tools.operations.convert.new_names import with_other_names
from ckpt_tools.operations.convert.options import Conversion, check_request
from ckpt_tools.operations.convert.param_order import ModelOrder, read_order
from ckpt_tools.operations.convert.take_apart import check_used, take_apart
from ckpt_tools.operations.convert.targets import TARGETS
from ckpt_tools.operations.convert.training_state import TrainingState, in_order, refuse_unnamed
from ckpt_tools.operations.dequantize import Dequantized, dequantize
from ckpt_tools.operations.folder import note_on_others
from ckpt_tools.operations.merge_reshard import (
    not_taken,
    unknown_values,
)
from ckpt_tools.operations.quantize import Quantization
from ckpt_tools.operations.side_files import left_beside
from ckpt_tools.publish.destinations import open_destination
from ckpt_tools.publish.manifest import RENAMED_BY
from ckpt_tools.publish.sealed_source import open_sealed
from ckpt_tools.ranks.base import ALONE, Group
from ckpt_tools.transfer.options import Options, Path_
from ckpt_tools.transfer.result import TransferResult
from ckpt_tools.transfer.transfer import TransferRequest, transfer

_PARAM_ORDER, _OF_THE_FILE = "param_order", "of the file"  # in the manifest's `source`
_COPIES = ("bit16.",)  # DeepSpeed's second copy of the weights


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
            of_optimizers=() if may_copy else (OF_TORCHAO,),
        )
        numbers.refuse_resume(how.get("resume", False))
    source = numbers.shown
    taken = _taken_apart(source, to, how, bool(is_model), is_unordered)
    parts = with_other_names(taken, source, to, how)
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


def _dropped(before: Catalog, after: Catalog, parts: TrainingState) -> dict[str, int]:
    """Returns the top-level keys that are left out completely, with their bytes."""
    kept = {f.partition(".")[0] for f in after.tensors} if parts.optimizers else set()
    found: dict[str, int] = {}
    for fqn, nbytes in not_taken(before, after, parts.used).items():
        if (key := key_path(before, fqn)[0]) not in kept:
            found[key] = found.get(key, 0) + nbytes
    return found
