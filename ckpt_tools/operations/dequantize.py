"""Shows a checkpoint with numbers in the place of quantized weights.

The numbers are computed when they are read. All that comes later sees a plain tensor of float32:
names, key maps, casts, adapters, means.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog, Extent, QuantizedWeight, TensorEntry, one_chunk
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.naming import model_only, strip_wrappers
from ckpt_tools.core.plan import plan_values
from ckpt_tools.core.quantized import OF_OPTIMIZERS, described, weights_in
from ckpt_tools.engine.computed import ComputedStore, PartsReading, numbers_file
from ckpt_tools.engine.crc_watch import CrcWatch, read_whole
from ckpt_tools.engine.formulas import Formula
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.formulas_of import FormulaFinder
from ckpt_tools.operations.quantization_config import told_by_config
from ckpt_tools.operations.small_tensors import read_small
from ckpt_tools.publish.sealed_source import checked_manifest
from ckpt_tools.ranks.base import Group
from ckpt_tools.transfer.computed import prove_parts
from ckpt_tools.transfer.prove import prove_replicas

_SINGLE = BY_NAME["float32"]
# those of activations and of the cache, which numbers do not need
_OF_OTHERS = re.compile(
    r"(?:input|activation|output|[qkv]|kv|prob)_(?:global_)?scale(?:_ub|_inv)?|scale_ub|scale_input"
)
_SHOWN = 3


@dataclass(frozen=True)
class Dequantized:
    """A checkpoint that is shown with numbers; with none if it has no quantized weights.

    Attributes:
        shown: the checkpoint, with the numbers as tensors. Its store computes them.
        stored: the same store, with the catalog of what is stored.
        parts: by the name of the numbers, the stored tensors that they are computed from.
        weights, formulas: by the name of the numbers, the quantized weight, and its formula.
        notes: for the report.
    """

    shown: Source
    stored: Source
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    weights: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    formulas: Mapping[str, Formula] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def refuse_resume(self, resume: bool) -> None:
        """Refuses to continue an earlier attempt: nothing proves the numbers that it wrote.

        Raises:
            PlanError: with the way out.
        """
        if resume and self.parts:
            raise PlanError(
                "numbers of quantized weights are not resumed: what an earlier attempt read of"
                " their codes cannot be proved any more",
                hint="leave --resume out; or keep the codes, without --dtype and other names",
            )

    def kind(self, entry: TensorEntry) -> str:
        """Returns the type of a tensor; of numbers, that of their codes."""
        weight = self.weights.get(entry.stored_name) if entry.is_computed else None
        if weight is None:
            return entry.dtype.name
        codes = self.stored.catalog.tensors[weight.codes].dtype.name
        kind = described([weight]).partition(" ")[2]
        return f"{kind}, {codes}" if weight.scheme in OF_OPTIMIZERS else kind

    def prove(self, catalog: Catalog, group: Group) -> None:
        """Compares the bytes that all ranks have read with their checksums.

        What no process has read whole is read once more.

        Args:
            catalog: the tensors that were written.
            group: all ranks. Each calls it.

        Raises:
            IntegrityError: they are not what was written.
        """
        store = self.stored.store
        if not isinstance(store, ComputedStore):
            return
        files = {c.extent.file for t in catalog.tensors.values() if t.is_computed for c in t.chunks}
        names = {
            part
            for name, parts in self.parts.items()
            if numbers_file(name) in files
            for part in parts
        }
        prove_parts(store, self.stored, self.stored.catalog, names, group)


def dequantize(
    source: Source,
    is_kept: Callable[[str], bool],
    key: str | None = None,
    of_model: bool = True,
    of_optimizers: Collection[str] = (),
) -> Dequantized:
    """Shows quantized weights as numbers, where their formula is known for sure.

    Args:
        source: the checkpoint.
        is_kept: tells by name which tensors stay codes. A tensor has several names: the stored one,
            that within the model, and that without the prefixes of wrappers.
        key: of the model; found if None.
        of_model: show the weights of the model so.
        of_optimizers: also show moments of few bits so, of these schemes.

    Raises:
        IntegrityError: a tensor on which a formula depends is not what was sealed.
    """
    catalog = source.catalog
    if not weights_in(catalog.tensors.values()):
        return Dequantized(source, source)
    model = {t.stored_name: fqn for fqn, t in model_only(catalog, key)[0].tensors.items()}

    def stays(name: str) -> bool:
        names = (name, model.get(name, name))
        return any(is_kept(found) for n in names for found in (n, strip_wrappers(n)))

    weights = [
        weight
        for weight in weights_in(catalog.tensors.values())
        if weight.scheme in of_optimizers
        or (of_model and weight.codes in model and weight.scheme not in OF_OPTIMIZERS)
    ]
    wanted = [w for w in weights if not any(map(stays, w.parts))]
    manifest = checked_manifest(source)
    told = told_by_config(source, manifest)
    finder = FormulaFinder(catalog.tensors, told)
    small = {weight.codes: finder.small_parts(weight) for weight in wanted}
    entries = [catalog.tensors[name] for names in small.values() for name in names]
    values = read_small(source, entries, manifest)
    done: list[QuantizedWeight] = []
    formulas, reasons = dict[str, Formula](), Counter[tuple[str, str]]()
    names: dict[str, str] = {}
    for weight in wanted:
        found = finder.find(weight, {name: values[name] for name in small[weight.codes]})
        if isinstance(found, str):
            reasons[weight.scheme, found] += 1
            continue
        done.append(weight)
        names[weight.codes], formulas[found.name] = found.name, found.formula
    notes = [
        f"{number:,} {scheme} stay codes: {printable(why)}"
        for (scheme, why), number in reasons.most_common(_SHOWN)
    ]
    if more := sum(number for _, number in reasons.most_common()[_SHOWN:]):
        notes.append(f"{more:,} quantized weights stay codes for other reasons")
    if not done:
        return Dequantized(source, source, notes=notes)
    parts = {
        name: [*dict.fromkeys(part.name for part in formula.parts.values())]
        for name, formula in formulas.items()
    }
    every = [w for w in weights_in(catalog.tensors.values()) if w.scheme not in OF_OPTIMIZERS]
    is_all = all(weight.codes in names for weight in every)
    shown, gone = _shown(catalog, done, is_all, names, formulas)
    left = f"; {len(gone):,} scales and the like are left out, such as" if gone else ""
    left += f" {printable(gone[0])!r}" if gone else ""
    notes = [f"dequantized: {described(done)}{left}", *notes]

    def begin() -> PartsReading:
        entries = [
            catalog.tensors[n] for n in dict.fromkeys(p for ps in parts.values() for p in ps)
        ]
        sealed = manifest.tensors if manifest is not None else {}
        unsealed = [entry for entry in entries if entry.stored_name not in sealed]
        prove_replicas(source, unsealed)
        located = source.format.locate(source.store, entries)
        watch = CrcWatch(read_whole(plan_values(unsealed), located), source.store)
        return PartsReading(plan_values(entries), located, watch)

    by_file = {numbers_file(name): formula for name, formula in formulas.items()}
    store = ComputedStore(source.store, by_file, begin)
    return Dequantized(
        replace(source, store=store, catalog=shown),
        replace(source, store=store),
        parts,
        {names[weight.codes]: weight for weight in done},
        formulas,
        notes,
    )


def _shown(
    catalog: Catalog,
    done: Sequence[QuantizedWeight],
    is_all: bool,
    names: Mapping[str, str],
    formulas: Mapping[str, Formula],
) -> tuple[Catalog, list[str]]:
    """Returns a catalog with numbers in the place of codes, and the names of what is left out.

    Args:
        catalog: of what is stored.
        done: the weights that become numbers.
        is_all: no other quantized weights of a model are there, so what belongs to all of them can
            go, too.
        names: of the numbers, by the name of the codes.
        formulas: by the name of the numbers.
    """
    parts = {part for weight in done for part in weight.parts}
    tensors, gone = dict[str, TensorEntry](), list[str]()
    paths, sizes = dict(catalog.paths), dict(catalog.file_sizes)
    for fqn, entry in catalog.tensors.items():
        if (name := names.get(fqn)) is not None:
            shape, file = formulas[name].shape, numbers_file(name)
            sizes[file] = whole(shape).numel * _SINGLE.itemsize
            chunks = one_chunk(whole(shape), Extent(file, 0, sizes[file]))
            tensors[name] = TensorEntry(name, _SINGLE, shape, chunks, is_computed=True)
            if name != fqn and (path := paths.pop(fqn, None)):
                paths[name] = _renamed_path(path, fqn, name)
        elif fqn in parts or (
            is_all and entry.quantized and _OF_OTHERS.fullmatch(fqn.rpartition(".")[2])
        ):
            gone.append(fqn)
            paths.pop(fqn, None)
        elif is_all and entry.quantized and fqn not in entry.quantized.parts:
            tensors[fqn] = replace(entry, quantized=None)  # a parameter that is called a scale
        else:  # with weights that stay codes, it may be a scale of theirs
            tensors[fqn] = entry
    return replace(catalog, tensors=tensors, paths=paths, file_sizes=sizes), gone


def _renamed_path(path: tuple[str | int, ...], before: str, after: str) -> tuple[str | int, ...]:
    """Returns the keys of a tensor whose name has another end."""
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
    same = min(len(before), len(after)) if same is None else same
    last, removed = str(path[-1]), len(before) - same
    if removed > len(last):  # the last key was all of it, and the dot before it
        return path[:-1]
    return (*path[:-1], last[: len(last) - removed] + after[same:])
