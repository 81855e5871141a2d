"""Compares two checkpoints of any format, layout, store and world size.

It compares fingerprints first: if both manifests have the same one, nothing is read. The engine
reads the other tensors, with a sink that reads the second checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Unpack

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog, TensorEntry, one_chunk
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.plan import plan_values
from ckpt_tools.core.quantized import OF_OPTIMIZERS, described, may_be_codes, weights_in
from ckpt_tools.core.selection import check_globs, chooser, keep, matcher, refuse_unread
from ckpt_tools.core.threads import num_threads
from ckpt_tools.engine.compare import CompareSink, Tally
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, in_share, schedule, shares, tile_bytes
from ckpt_tools.errors import FormatError, PlanError, printable, redacted
from ckpt_tools.formats.registry import Source, open_source
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.convert.flat_shapes import check_needed, lay_beside
from ckpt_tools.operations.convert.object_reader import ObjectReader
from ckpt_tools.operations.dequantize import Dequantized, dequantize
from ckpt_tools.operations.merge_reshard import model_view
from ckpt_tools.publish.sealed_source import checked_manifest
from ckpt_tools.ranks.base import ALONE, check_agreement
from ckpt_tools.transfer.options import Path_, Reading, no_bar
from ckpt_tools.transfer.prove import prove_replicas, sealed_fingerprints


class Change(NamedTuple):
    """A tensor with another shape or element type in b, or an object with another length."""

    fqn: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    a_dtype: str
    b_dtype: str


class Difference(NamedTuple):
    """A tensor (or an object, as bytes) whose values differ.

    Attributes:
        fqn: its name.
        numel: its elements.
        num_different: number of elements that differ in their bits, or exceed the tolerance.
        first: index of the first such element.
        max_abs: the largest |a - b|; NaN if only one of the two is NaN.
        max_rel: the largest |a - b| / max(|a|, |b|).
        cosine: cosine of the angle between both; None if one is all zeros or not finite.
        is_object: whether it is an object, not a tensor. Only the number of different bytes means
            something then.
        is_code: whether it is a part of a quantized weight. Only the number of different elements
            means something then.
        rel_norm: the norm of a - b, by the norm of a; None if a is all zeros or not finite.
    """

    fqn: str
    numel: int
    num_different: int
    first: tuple[int, ...]
    max_abs: float
    max_rel: float
    cosine: float | None
    is_object: bool = False
    is_code: bool = False
    rel_norm: float | None = None

    @property
    def size(self) -> float:
        """How much differs, to sort by: `rel_norm`; infinite if it has none, 0 without values."""
        if self.is_code or self.is_object:
            return 0.0
        if self.rel_norm is None or not math.isfinite(self.max_abs):
            return math.inf
        return self.rel_norm


@dataclass(frozen=True, slots=True)
class DiffResult:
    """The differences of two checkpoints.

    Attributes:
        a, b: their paths.
        only_a, only_b: names that only one of them has.
        changes: tensors whose shape or dtype differs. If only the dtype differs, the values are
            compared, too.
        differences: tensors and objects whose values differ.
        num_equal: tensors and objects whose values are the same.
        num_by_fingerprint: how many of them have equal fingerprints in both manifests, so that
            nothing was read.
        compared_nbytes: bytes of a that were compared.
        notes: remarks.
        seconds: wall-clock time.
    """

    a: str
    b: str
    only_a: Sequence[str]
    only_b: Sequence[str]
    changes: Sequence[Change]
    differences: Sequence[Difference]
    num_equal: int
    num_by_fingerprint: int
    compared_nbytes: int
    notes: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def is_same(self) -> bool:
        """Tells whether there is no difference at all."""
        return not (self.only_a or self.only_b or self.changes or self.differences)


_SHOWN = 12


@checked(Reading)
def diff(
    a: Path_,
    b: Path_,
    *,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    atol: float = 0.0,
    rtol: float = 0.0,
    read_all: bool = False,
    **options: Unpack[Reading],
) -> DiffResult:
    """Compares two checkpoints by names, shapes, types and values.

    If they have no name in common, the models are compared by the names of `merge`. These names
    lack the model's key and the prefixes of wrappers.

    A quantized weight that both have in the same tensors is compared by these: codes, scales and
    the like. If they differ, or the other checkpoint has it otherwise, its numbers are compared.
    Within a tolerance, only these count.

    Args:
        a, b: checkpoints, or directories with one below; paths or URLs.
        select: globs of names; only entries that match one are compared.
        exclude: globs of names; entries that match one are not compared.
        atol, rtol: values are equal if |a - b| <= atol + rtol * |b|. If both are 0, only the same
            bits are equal.
        read_all: compare bytes even if both manifests have the same fingerprint.
        **options: see `Reading`.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    began = time.monotonic()
    group = options.get("group") or ALONE
    with group.phase("open both"):
        beside = lay_beside(options.get("shapes"))
        one, two = (open_source(path, options.get("storage_options"), beside) for path in (a, b))
        check_needed(options.get("shapes"), one.catalog, two.catalog)
        mine_shown, theirs_shown = _shown(one, two)
        one, two = mine_shown.stored, theirs_shown.stored
        left, right, notes = _views(
            mine_shown.shown.catalog, theirs_shown.shown.catalog, select, exclude
        )
        notes += dict.fromkeys((*mine_shown.notes, *theirs_shown.notes))
        if unknown := {**one.catalog.unknown, **two.catalog.unknown}:
            some = ", ".join(
                f"{printable(name)} ({printable(kind)})"
                for name, kind in list(unknown.items())[:_SHOWN]
            )
            notes.append(
                "not compared, since their types are not known:"
                f" {some}{' …' if len(unknown) > _SHOWN else ''}"
            )
        alike = _same_objects(one, left, two, right)
    check_agreement(
        group, [[(t.fqn, t.shape) for t in view.tensors.values()] for view in (left, right)]
    )
    mine, theirs = _entries(left), _entries(right)
    both = [(x, theirs[fqn]) for fqn, x in mine.items() if fqn in theirs]
    kinds = {
        x.fqn: (
            "bytes" if x.fqn in left.objects else mine_shown.kind(x),
            "bytes" if y.fqn in right.objects else theirs_shown.kind(y),
        )
        for x, y in both
    }
    changes = [
        Change(x.fqn, x.shape, y.shape, *kinds[x.fqn])
        for x, y in both
        if x.fqn not in alike and (x.shape != y.shape or kinds[x.fqn][0] != kinds[x.fqn][1])
    ]
    both = [
        (x, y)
        for x, y in both
        if x.fqn in alike
        or (x.shape == y.shape and (x.fqn in left.objects) == (y.fqn in right.objects))
    ]
    tensors = [(x, y) for x, y in both if x.fqn not in left.objects]
    known = set() if read_all else _known_equal(one, left, two, right, tensors)
    work = [(x, y) for x, y in tensors if x.fqn not in known]
    codes = {x.fqn for x, y in work if x.quantized is not None or y.quantized is not None}
    if codes:
        weights = described(weights_in(x for pair in work for x in pair))
        notes.append(
            f"compared for equality alone, as parts of quantized weights: {len(codes)} tensors"
            f" ({weights})"
        )
    if may_be := set(may_be_codes(x for x, _ in tensors)) & {x.fqn for x, _ in work}:
        codes |= may_be
        notes.append(
            "compared for equality alone, since they may be codes of quantized weights of an"
            f" unknown scheme: {len(may_be)} matrices of integers ({printable(min(may_be))}, …)"
        )
    objects = [(x, y) for x, y in both if x.fqn in left.objects and x.fqn not in alike]
    tallies = {
        **_compare(one, two, [p for p in work if p[0].fqn not in codes], atol, rtol, options),
        **_compare(one, two, [p for p in work if p[0].fqn in codes], 0.0, 0.0, options),
        **_compare(one, two, objects, 0.0, 0.0, options),
    }
    other = [x for x, _ in both if x.fqn in tallies and tallies[x.fqn].num_different]
    found = {
        x.fqn: _difference(x, tallies[x.fqn], x.fqn in left.objects, x.fqn in codes) for x in other
    }
    wrong = {x.quantized.codes for x in other if x.quantized is not None}
    by_value, within = _by_value(one, two, wrong, atol, rtol, options)
    found = {fqn: d for fqn, d in found.items() if not (atol or rtol) or fqn not in within}
    found |= by_value  # where codes are called so, too
    differences = list(found.values())
    for source in (one, two):
        source.store.close()
    return DiffResult(
        redacted(one.path),
        redacted(two.path),
        sorted(mine.keys() - theirs.keys()),
        sorted(theirs.keys() - mine.keys()),
        changes,
        differences,
        len({x.fqn for x, _ in both} - {d.fqn for d in differences} - {c.fqn for c in changes}),
        len(known),
        sum(x.nbytes for x, _ in both if x.fqn not in known),
        notes,
        time.monotonic() - began,
    )


def _same_objects(a: Source, left: Catalog, b: Source, right: Catalog) -> set[str]:
    """Returns the objects with equal values.

    Their bytes may differ: two writers pack the same number differently.
    """
    mine, theirs = ObjectReader(a.store), ObjectReader(b.store)
    names = [fqn for fqn in left.objects if fqn in right.objects]
    mine.will_read(left.objects[fqn] for fqn in names)
    theirs.will_read(right.objects[fqn] for fqn in names)
    found = set()
    for fqn in names:
        try:
            if mine.is_same(left.objects[fqn], theirs, right.objects[fqn]):
                found.add(fqn)
        except FormatError:  # the bytes are compared later
            continue
    return found


def _entries(catalog: Catalog) -> dict[str, TensorEntry]:
    """Returns all entries as tensors, objects as rows of bytes."""
    objects = {}
    for fqn, item in catalog.objects.items():
        box = whole((item.extent.nbytes,))
        objects[fqn] = TensorEntry(fqn, BY_NAME["uint8"], box.sizes, one_chunk(box, item.extent))
    return {**catalog.tensors, **objects}


def _shown(a: Source, b: Source) -> tuple[Dequantized, Dequantized]:
    """Returns both with numbers in the place of the weights that they do not store alike."""
    kinds = [{f: (t.dtype, t.shape) for f, t in s.catalog.tensors.items()} for s in (a, b)]
    shown = [dequantize(source, matcher(()), of_optimizers=OF_OPTIMIZERS) for source in (a, b)]
    mine, theirs = ({w.codes: s.formulas[name] for name, w in s.weights.items()} for s in shown)
    alike = {
        part
        for weight in weights_in(a.catalog.tensors.values())
        if all(kinds[0][part] == kinds[1].get(part) for part in weight.parts)
        # where one config does not tell the formula, nothing else can be compared
        and mine.get(codes := weight.codes, theirs.get(codes)) == theirs.get(codes, mine.get(codes))
        for part in weight.parts
    }
    one, two = (dequantize(s, alike.__contains__, of_optimizers=OF_OPTIMIZERS) for s in (a, b))
    return one, two


def _by_value(
    a: Source, b: Source, codes: Set[str], atol: float, rtol: float, options: Reading
) -> tuple[dict[str, Difference], set[str]]:
    """Compares the numbers of the weights with these codes, which both store alike.

    Returns:
        The differences by name, and the parts of the weights whose numbers do not differ.
    """
    if not codes:
        return {}, set()
    parts = {
        part
        for weight in weights_in(a.catalog.tensors.values())
        if weight.codes not in codes
        for part in weight.parts
    }
    one, two = (dequantize(s, parts.__contains__, of_optimizers=OF_OPTIMIZERS) for s in (a, b))
    theirs = two.shown.catalog.tensors
    pairs = [(one.shown.catalog.tensors[n], theirs[n]) for n in one.parts if n in two.parts]
    pairs = [(x, y) for x, y in pairs if x.shape == y.shape]
    tallies = _compare(one.stored, two.stored, pairs, atol, rtol, options)
    found = {
        x.fqn: _difference(x, tallies[x.fqn], False)
        for x, _ in pairs
        if x.fqn in tallies and tallies[x.fqn].num_different
    }
    equal = {x.fqn for x, _ in pairs} - found.keys()
    return found, {part for name in equal for part in one.weights[name].parts}


def _views(
    a: Catalog, b: Catalog, select: Sequence[str], exclude: Sequence[str]
) -> tuple[Catalog, Catalog, list[str]]:
    """Returns both catalogs under comparable names, and notes."""
    notes = []
    if not {*a.tensors, *a.objects} & {*b.tensors, *b.objects} and a.tensors and b.tensors:
        by_model = model_view(a, False)[0], model_view(b, False)[0]
        if by_model[0].tensors.keys() & by_model[1].tensors.keys():
            a, b = by_model
            notes.append(
                "no name is in both; compared by the names that merge gives, the model only"
            )
    names = dict.fromkeys([*a.tensors, *a.objects, *a.unread, *b.tensors, *b.objects, *b.unread])
    check_globs(select, list(names), "--select")
    check_globs(exclude, list(names), "--exclude")
    a, b = (keep(catalog, chooser(select, exclude)) for catalog in (a, b))
    for catalog in (a, b):
        refuse_unread(catalog)
    if not (a.tensors or a.objects or b.tensors or b.objects):
        raise PlanError(
            "there is nothing to compare: neither has a tensor or an object",
            hint="look at both: ckpt inspect",
        )
    return a, b, notes


def _known_equal(
    a: Source,
    left: Catalog,
    b: Source,
    right: Catalog,
    pairs: Sequence[tuple[TensorEntry, TensorEntry]],
) -> set[str]:
    """Returns the tensors with the same fingerprint and type in both manifests."""
    alike = [(x, y) for x, y in pairs if x.dtype is y.dtype]
    mine = sealed_fingerprints(checked_manifest(a), a, left, plan_values(x for x, _ in alike))
    theirs = sealed_fingerprints(checked_manifest(b), b, right, plan_values(y for _, y in alike))
    return {
        x.fqn
        for x, _ in alike
        if x.fqn in mine and x.fqn in theirs and mine[x.fqn].crc64 == theirs[x.fqn].crc64
    }


def _compare(
    a: Source,
    b: Source,
    pairs: Sequence[tuple[TensorEntry, TensorEntry]],
    atol: float,
    rtol: float,
    options: Reading,
) -> Mapping[str, Tally]:
    """Reads both sides of each pair, and returns the tallies of their differences."""
    jobs = num_threads(options.get("jobs"))
    tiles = tile_bytes((options.get("memory_bytes") or DEFAULT_MEMORY_BYTES) // 2, jobs)
    bar, group = options.get("progress") or no_bar, options.get("group") or ALONE

    def go(pairs: Sequence[tuple[TensorEntry, TensorEntry]], is_full: bool) -> dict[str, Tally]:
        total, plan = sum(x.nbytes for x, _ in pairs), plan_values(x for x, _ in pairs)
        share = shares(plan, group.size)[group.rank]
        taken = {t.fqn for t in in_share(plan, share)}
        mine, theirs = (
            [x for x, _ in pairs if x.fqn in taken],
            [y for _, y in pairs if y.fqn in taken],
        )
        with bar("diff", total) as advance, group.phase("compare"):
            sink = CompareSink(
                b.store, plan_values(theirs), b.format.locate(b.store, theirs), atol, rtol, is_full
            )
            batches = schedule(plan, a.format.locate(a.store, mine), *tiles, share)
            execute_batches(
                sink.pair(batches), a.store, sink, jobs, lambda nbytes: advance(nbytes * group.size)
            )
        return join_tallies(group.all_gather(sink.tallies, "gather differences"))

    with group.phase("compare replicas"):
        prove_replicas(a, [x for x, _ in pairs], jobs=jobs, group=group)
        prove_replicas(b, [y for _, y in pairs], jobs=jobs, group=group)
    tallies = go(pairs, is_full=False)
    partial = [
        (x, y)
        for x, y in pairs
        if x.fqn in tallies and tallies[x.fqn].num_different and tallies[x.fqn].is_partial
    ]
    # the cosine also needs the equal part of a tensor
    return {**tallies, **(go(partial, is_full=True) if partial else {})}


def join_tallies(found: Sequence[Mapping[str, Tally]]) -> dict[str, Tally]:
    """Returns the joined tallies of several processes, each of a part of the tensors."""
    joined: dict[str, Tally] = {}
    for tallies in found:
        for fqn, tally in tallies.items():
            joined.setdefault(fqn, Tally()).add(tally)
    return joined


def _difference(
    tensor: TensorEntry, tally: Tally, is_object: bool, is_code: bool = False
) -> Difference:
    index, left = [], tally.first
    for size in reversed(tensor.shape):
        index.append(left % size)
        left //= size
    numel, is_bytes = whole(tensor.shape).numel, is_code or is_object
    return Difference(
        tensor.fqn,
        numel,
        tally.num_different,
        tuple(reversed(index)),
        math.nan if is_bytes else tally.max_abs,
        math.nan if is_bytes else tally.max_rel,
        None if is_bytes else tally.cosine,
        is_object,
        is_code,
        None if is_bytes else tally.rel_norm,
    )
