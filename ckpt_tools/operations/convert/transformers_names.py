"""Converts between the names that transformers has in memory and those of its files.

From release 5, transformers keeps the experts of a layer as one tensor, and its files have one
tensor per expert. It converts when it saves and loads. This module asks transformers itself what a
model's conversion does. In a separate process, transformers converts tensors that have shapes and
no values, and the views and joins are noted. So every model of the installed release is known, and
no layout is guessed.

Source: transformers 5.24 `core_model_loading.revert_weight_conversion`, which `save_pretrained`
calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.grid import Relation
from ckpt_tools.core.relations import (
    JoinedMemory,
    StridedView,
    check_used_once,
    is_whole,
    relations_of,
)
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.convert.child_process import ask
from ckpt_tools.operations.convert.model_names import some
from ckpt_tools.operations.convert.relate import located, relate
from ckpt_tools.operations.convert.training_state import TrainingState, refuse_unnamed

HUB, MEMORY = "hub", "transformers"
NAMES = (HUB, MEMORY)
_TRACE = """
import json, sys
import torch, transformers
from torch.utils._python_dispatch import TorchDispatchMode
asked = json.loads(open(sys.argv[1]).read())
config = transformers.AutoConfig.from_pretrained(
    asked["base"], trust_remote_code=False, local_files_only=True
)
kind = find_class(asked["architectures"])
with torch.device("meta"):
    make = kind.from_config if kind.__name__.startswith("Auto") else kind._from_config
    options = {"trust_remote_code": False} if kind.__name__.startswith("Auto") else {}
    model = make(config, **options)
tensors = {
    n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in model.state_dict().items()
}
same = {}
for n, t in model.state_dict(keep_vars=True).items():
    same.setdefault(id(t), []).append(n)
memory = {t.untyped_storage()._cdata: n for n, t in tensors.items()}
joined, kept, aten = {}, [], torch.ops.aten
dtypes = {t.untyped_storage()._cdata: t.dtype for t in tensors.values()}

def is_known(t):
    where = t.untyped_storage()._cdata
    return where in memory and dtypes[where] == t.dtype

def view(t):
    where = t.untyped_storage()._cdata
    return [memory[where], t.storage_offset(), list(t.shape), list(t.stride())]

class Trace(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:  # other values than those of the model
            for t in torch.utils._pytree.tree_leaves((args, kwargs)):
                if isinstance(t, torch.Tensor):
                    memory.pop(t.untyped_storage()._cdata, None)
            return made
        if func in (aten.cat.default, aten.stack.default):
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            dim, at, parts = dim % made.dim(), 0, []
            for part in args[0]:
                piece = part.unsqueeze(dim) if func is aten.stack.default else part
                parts.append(([at if d == dim else 0 for d in range(made.dim())], piece))
                at += piece.shape[dim]
        elif func in (aten.clone.default, aten._to_copy.default) and made.dtype == args[0].dtype:
            parts = [([0] * made.dim(), args[0])]
        else:
            return made
        known = all(is_known(p) and p.dtype == made.dtype for _, p in parts)
        if made.is_contiguous() and known:
            name = f"#{len(joined)}"
            joined[name] = [list(made.shape), [[at, *view(p)] for at, p in parts]]
            memory[made.untyped_storage()._cdata] = name
            dtypes[made.untyped_storage()._cdata] = made.dtype
        kept.append((made, parts))  # their memory is not given to others
        return made

files, unsure = tensors, []
try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # before release 5, the names are the same
    revert_weight_conversion = None
if revert_weight_conversion is not None:
    with Trace():
        files = revert_weight_conversion(model, tensors)
    from transformers.conversion_mapping import get_model_conversion_mapping
    for rule in get_model_conversion_mapping(model):
        if any(getattr(step, "check_dims", False) for step in getattr(rule, "operations", [])):
            unsure += [n for n in tensors if any(p in n for p in rule.target_patterns)]
lost = [n for n, t in files.items() if not is_known(t)]
print(json.dumps({
    "release": transformers.__version__,
    "memory": {n: list(t.shape) for n, t in tensors.items()},
    "files": {n: view(t) for n, t in files.items() if n not in lost},
    "lost": lost,
    "unsure": unsure,
    "joined": joined,
    "tied": [names for names in same.values() if len(names) > 1],
    "linear": [n for n, m in model.named_modules() if type(m) is torch.nn.Linear],
    "tables": [n for n, m in model.named_modules() if isinstance(m, torch.nn.Embedding)],
    "outputs": [n for n, m in model.named_modules() if m is model.get_output_embeddings()],
}))
"""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The tensors of a model, as transformers has them in memory and in files.

    Attributes:
        release: of transformers.
        memory, files: the shape of each tensor, by name.
        relations: between memory (left) and files (right), by the name in files.
        lost: tensors in files that are not made of elements of tensors in memory.
        unsure: tensors in memory that some files have transposed, under the same name.
        tied: sets of names in memory that are one tensor.
        linear, tables, outputs: modules in memory: those of torch's class `Linear`, embeddings, and
            what gives the logits.
    """

    release: str
    memory: Mapping[str, tuple[int, ...]]
    files: Mapping[str, tuple[int, ...]]
    relations: Mapping[str, list[Relation]]
    lost: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    linear: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()

    def whole_of(self, name: str) -> str | None:
        """Returns the tensor in memory of which one in files is all, unchanged; None if none is."""
        relations = self.relations.get(name, ())
        if len(relations) != 1:
            return None
        left = relations[0].left.name
        return left if is_whole(relations[0], self.files[name], self.memory[left]) else None

    def from_memory(self) -> dict[str, list[Relation]]:
        """Returns the relations of tensors that files have otherwise, by their names there."""
        return {n: found for n, found in self.relations.items() if self.whole_of(n) != n}

    def from_files(self) -> dict[str, list[Relation]]:
        """Returns the same with the files on the left, by the names in memory."""
        found: dict[str, list[Relation]] = {}
        for relations in self.from_memory().values():
            for relation in relations:
                found.setdefault(relation.left.name, []).append(relation.inverse())
        return found


def ask_transformers(
    base: str | os.PathLike[str], config: Mapping[str, Any]
) -> tuple[ModelNames | None, str]:
    """Returns the tensors of a config's model; None and the reason if transformers cannot say.

    Args:
        base: the directory of the config.
        config: its contents.

    Raises:
        PlanError: transformers did not end.
    """
    asked = {"architectures": config.get("architectures")}
    told, reason = ask(_TRACE, base, config, asked)
    if told is None:
        return None, reason
    joined = {
        name: JoinedMemory(tuple(shape), [(tuple(at), _strided(*view)) for at, *view in parts])
        for name, (shape, parts) in told["joined"].items()
    }
    views = {name: _strided(*view) for name, view in told["files"].items()}
    names = ModelNames(
        told["release"],
        {name: tuple(shape) for name, shape in told["memory"].items()},
        {name: view.sizes for name, view in views.items()},
        {name: relations_of(name, view, joined) for name, view in views.items()},
        tuple(told["lost"]),
        tuple(told["unsure"]),
        tuple(map(tuple, told["tied"])),
        *(frozenset(told[kind]) for kind in ("linear", "tables", "outputs")),
    )
    return names, ""


def _strided(memory: str, offset: int, sizes: list[int], strides: list[int]) -> StridedView:
    return StridedView(memory, offset, tuple(sizes), tuple(strides))


def rename_as(
    parts: TrainingState,
    names: ModelNames,
    to: str,
    source: Source,
    where: str,
    is_partial: bool,
) -> TrainingState:
    """Returns a training state under the names of transformers' files, or of its memory.

    Args:
        parts: the training state.
        names: the tensors of its model.
        to: one of `NAMES`.
        source: where the tensors lie.
        where: the model's directory, for messages.
        is_partial: it may have other tensors than the model.

    Raises:
        PlanError: it has names of both kinds, another model, or a tensor that cannot be converted.
    """
    in_memory = names.from_memory()
    if not is_partial:
        _check_model(parts, names, where)
    others = {r.left.name for found in in_memory.values() for r in found}
    only = {
        MEMORY: _first(parts.model, others - names.files.keys()),
        HUB: _first(parts.model, in_memory.keys() - names.memory.keys()),
    }
    if only[MEMORY] and only[HUB]:
        raise PlanError(
            f"some tensors have names of transformers in memory ({printable(only[MEMORY])!r}), and"
            f" others those of files ({printable(only[HUB])!r})",
            hint="convert them one by one; --to hf --partial keeps all names",
        )
    if unsure := [name for name in names.unsure if name in parts.model]:
        what = f"files of this model may have {printable(unsure[0])!r} transposed"
        if not is_partial:
            raise PlanError(
                f"{what}, and nothing tells which of the two this one is ({printable(where)})",
                hint="save_pretrained of transformers converts it; --partial keeps all tensors",
            )
        parts.notes.append(f"{what}: it stays as it is, and so do all names")
        return parts
    found, left, right = (
        (in_memory, names.memory, names.files)
        if to == HUB
        else (names.from_files(), names.files, names.memory)
    )
    before = parts.model
    if only[HUB if to == MEMORY else MEMORY]:
        parts = _related(parts, names, found, left, right, source, where)
        what = "the names of files" if to == HUB else "its names in memory"
        parts.notes.append(
            f"names of transformers {names.release}: {len(before):,} tensors became"
            f" {len(parts.model):,} with {what}"
        )
        parts.notes += _others(parts, before.keys() - parts.model.keys())
        kind = "of files" if to == HUB else "in memory"
        parts.renamed_by.append(f"transformers {names.release} (names {kind})")
    if not is_partial and (lacking := right.keys() - parts.model.keys()):
        parts.notes.append(
            f"the config's model has names that the result lacks: {some(sorted(lacking))}"
        )
    return parts


def _related(
    parts: TrainingState,
    names: ModelNames,
    found: Mapping[str, list[Relation]],
    left: Mapping[str, tuple[int, ...]],
    right: Mapping[str, tuple[int, ...]],
    source: Source,
    where: str,
) -> TrainingState:
    """Returns the training state with other tensors, after the proof that nothing is lost."""
    if names.lost:
        raise PlanError(
            f"{len(names.lost)} tensors of transformers' files are not made of parts of those in"
            f" memory: {some(names.lost)} ({printable(where)})",
            hint="save_pretrained of transformers converts them; --to hf --partial keeps all names",
        )
    refuse_unnamed(parts, "other names of parameters change their state, too")
    every = [relation for relations in found.values() for relation in relations]
    used = {relation.left.name: left[relation.left.name] for relation in every}
    check_used_once(every, used)
    return relate(parts, found, left, right, source, located(parts, used, source))


def _check_model(parts: TrainingState, names: ModelNames, where: str) -> None:
    """Refuses a model with names or shapes that the config's model has nowhere."""
    unknown = [n for n in parts.model if n not in names.memory and n not in names.files]
    if unknown:
        is_quantized = all(parts.model[name].quantized is not None for name in unknown)
        raise PlanError(
            f"the config's model has no {some(unknown)} ({printable(where)})",
            hint="--dtype bf16 turns quantized weights into numbers, which have other names"
            if is_quantized
            else "is it the config of these weights? --rename changes names, --partial keeps these",
        )
    for name, entry in parts.model.items():
        shapes = {kind[name] for kind in (names.memory, names.files) if name in kind}
        if entry.shape not in shapes:
            raise PlanError(
                f"{printable(name)!r} has the shape {list(entry.shape)}, and in the config's model"
                f" {' or '.join(str(list(shape)) for shape in shapes)} ({printable(where)})",
                hint="give the directory of the model with these weights",
            )


def _others(parts: TrainingState, gone: Iterable[str]) -> list[str]:
    """Returns a note on tensors beside the model that have names which the model has no more."""
    endings = set(gone)
    found = [
        name
        for name in parts.tensors
        if any(name[at + 1 :] in endings for at, sign in enumerate(name) if sign == ".")
    ]
    if not found:
        return []
    return [f"not of the model, so with the same names as before: {some(found)}"]


def _first(names: Iterable[str], among: Iterable[str]) -> str:
    among = set(among)
    return next((name for name in names if name in among), "")
