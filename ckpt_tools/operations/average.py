"""Writes a weighted mean of checkpoints: their models, in any format and sharding.

The mean is a source like any other. So each target of `convert` can be written from it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog, Extent, one_chunk
from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.naming import find_model, key_path, shared_key
from ckpt_tools.core.plan import Plan, plan_values
from ckpt_tools.core.quantized import described, may_be_codes, weights_in
from ckpt_tools.core.selection import check_globs, chooser, keep, matcher, refuse_unread
from ckpt_tools.engine.crc_watch import CrcWatch, read_whole
from ckpt_tools.engine.mean import MeanStore, MeanTerm
from ckpt_tools.errors import NotACheckpointError, PlanError, printable, redacted
from ckpt_tools.formats import safetensors
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.convert import lora as adapters
from ckpt_tools.operations.convert.convert import convert_source
from ckpt_tools.operations.convert.flat_shapes import check_needed, lay_beside
from ckpt_tools.operations.convert.options import Conversion, check_request
from ckpt_tools.operations.convert.targets import TARGETS
from ckpt_tools.operations.dequantize import Dequantized, dequantize
from ckpt_tools.operations.merge_reshard import check_kept, left_out, model_view, target_dtype
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.sealed_source import open_sealed
from ckpt_tools.ranks.base import ALONE, Group
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import refuse_unreadable
from ckpt_tools.run.steps import list_steps
from ckpt_tools.transfer.options import Path_
from ckpt_tools.transfer.prove import (
    SealedFingerprint,
    prove_fingerprints,
    prove_replicas,
    sealed_fingerprints,
)
from ckpt_tools.transfer.result import TransferResult
from ckpt_tools.transfer.transfer import check_apart

SCHEDULES = ("linear", "cosine", "sqrt", "exponential")
_DECAY = 0.8  # of the weights of an exponential mean, from one checkpoint to the one before
_SHOWN, _MAX_WEIGHT = 12, 1e100
_RANGE = re.compile(r"([0-9]{1,18}):([0-9]{1,18}):([0-9]{1,18})")


@checked(Conversion, names_only=("to",))
def average(
    sources: Sequence[Path_] | Path_,
    dst: Path_,
    *,
    to: str | None = None,
    last: int | None = None,
    steps: str | None = None,
    weights: Sequence[float] | None = None,
    schedule: str | None = None,
    base_model: Path_ | None = None,
    scale: float = 1.0,
    **how: Unpack[Conversion],
) -> TransferResult:
    """Writes a weighted mean of the models of several checkpoints.

    It sums in float64 and rounds once. The result holds the model only, because a mean of
    optimizer states has no meaning. Tensors that are no floating-point numbers must be equal, or
    come from the last checkpoint, with a note.

    Args:
        sources: checkpoints, oldest first; or the directory of a run, with `last` or `steps`.
        dst: as for `convert`.
        to: a target of `convert`. If None, `safetensors` or `torch`, by the suffix of `dst`.
        last: take so many of the newest complete steps of the run.
        steps: take the steps `first:last:every` of the run, both ends included.
        weights: one for each checkpoint; divided by their sum. If None, `schedule` gives them.
        schedule: how the learning rate decays in the training that the mean stands for, one of
            `SCHEDULES`. `linear`, the default, is the plain mean.
        base_model: a checkpoint B. The result is B + scale * sum of w * (M - B).
        scale: see `base_model`.
        **how: see `Conversion`. `select`, `exclude`, `dtype` and `keep_dtype` are for names of the
            model as `merge` writes them.

    Raises:
        PlanError: the checkpoints do not fit each other, or an option does not fit.
        CheckpointError: see the tree in `errors`. Then `dst` is as it was before.
    """
    target = to or _target_of(os.fspath(dst))
    if how.get("resume"):
        raise PlanError("an average is not resumed: leave --resume out")
    # the names are final: those of `merge`, or all of them where these differ
    rest: Conversion = {
        **how,
        "model_only": True,
        "keep_prefix": True,
    }
    for key in ("select", "exclude", "dtype", "keep_dtype"):
        rest.pop(key, None)  # type: ignore[misc]
    check_request(target, str(dst), rest)
    least = 1 if base_model is not None else 2
    paths = _chosen_steps(sources, last, steps, least, how.get("storage_options"))
    factors = chosen_weights(len(paths), weights, schedule)
    divisor = math.fsum(factors)
    if base_model is not None:
        if not math.isfinite(scale):
            raise PlanError(f"--scale: expected a finite number, got {scale!r}")
        factors = [divisor * (1.0 - scale), *(scale * factor for factor in factors)]
        paths = [base_model, *paths]
    elif scale != 1.0:
        raise PlanError("--scale is for --pretrained: give both")
    group = how.get("group") or ALONE
    with group.phase("open all"):
        found = [_open(path, how) for path in paths]
        opened = [numbers.shown for numbers, _ in found]
        for source in opened:
            check_apart(source.path, os.fspath(dst))
        mean = _Mean([n for n, _ in found], [sealed for _, sealed in found], factors, divisor, how)
    if "ranks" in TARGETS[target].options and rest.get("ranks") is None:
        rest["ranks"] = opened[-1].catalog.world_size or 1
    about = {
        "of": [
            {"name": redacted(s.name), "weight": f / divisor}
            for s, f in zip(opened, factors, strict=True)
        ]
    }
    result = convert_source(
        mean.source, dst, target, rest, "average", mean.version, mean.prove, about
    )
    return replace(result, left_out=mean.left_out, notes=(*result.notes, *mean.notes()))


def _target_of(dst: str) -> str:
    for name, target in TARGETS.items():
        if target.suffixes and dst.endswith(target.suffixes):
            return name
    raise PlanError(
        f"the name does not tell what to write: {printable(dst)}",
        hint="name a .safetensors file, or give --to hf, dcp, …",
    )


def _open(path: Path_, how: Conversion) -> tuple[Dequantized, Manifest | None]:
    source, sealed = open_sealed(path, how.get("storage_options"), lay_beside(how.get("shapes")))
    check_needed(how.get("shapes"), source.catalog)
    if how.get("dtype") is None:
        return Dequantized(source, source), sealed
    return dequantize(source, matcher(how.get("keep_dtype", ()))), sealed


# ---- which checkpoints, with which weights -------------------------------------------------------


def _chosen_steps(
    sources: Sequence[Path_] | Path_,
    last: int | None,
    steps: str | None,
    least: int,
    options: Mapping[str, object] | None,
) -> list[Path_]:
    given = [sources] if isinstance(sources, (str, bytes, os.PathLike)) else list(sources)
    if last is None and steps is None:
        if len(given) < least:
            raise PlanError(
                f"a mean of {len(given)} checkpoints: give at least {least}",
                hint="or a run with --last N, or --steps FIRST:LAST:EVERY",
            )
        return given
    if len(given) != 1 or (last is not None and steps is not None):
        raise PlanError("expected one run, and either --last or --steps")
    root = open_root(given[0], options)
    there = list_steps(root)
    refuse_unreadable(there, "which steps are complete")
    complete = {s.number: s for s in there if not s.problem}
    if not complete:
        raise NotACheckpointError(f"no complete steps in {printable(str(root.path))}")
    if last is not None:
        if not least <= last <= len(complete):
            raise PlanError(
                f"--last {last}: expected at least {least}, and at most the number of complete"
                f" steps, {len(complete)}"
            )
        return [complete[number].path for number in sorted(complete)[-last:]]
    wanted = _numbers(steps or "")
    missing = [number for number in wanted if number not in complete]
    if missing:
        raise PlanError(
            f"--steps {printable(steps or '')}: not complete, or not there:"
            f" {', '.join(map(str, missing[:_SHOWN]))}{' …' if len(missing) > _SHOWN else ''}"
        )
    return [complete[number].path for number in wanted]


def _numbers(text: str) -> list[int]:
    match = _RANGE.fullmatch(text)
    first, stop, every = map(int, match.groups()) if match else (0, 0, 0)
    if not every or stop <= first or (stop - first) % every:
        raise PlanError(
            f"--steps {printable(text)!r}: expected FIRST:LAST:EVERY, such as 1000:5000:500",
            hint=_nearest(first, stop, every) if every and stop > first else None,
        )
    if (stop - first) // every >= 10_000:
        raise PlanError(f"--steps {printable(text)}: more than ten thousand steps")
    return list(range(first, stop + 1, every))


def _nearest(first: int, stop: int, every: int) -> str:
    last = max(first + every, stop - (stop - first) % every)
    return f"LAST is FIRST plus a multiple of EVERY: {first}:{last}:{every}"


def chosen_weights(
    count: int, weights: Sequence[float] | None, schedule: str | None
) -> list[float]:
    """Returns the weights of checkpoints, oldest first. The mean is divided by their sum.

    With constant learning rate and equal distances, the mean stands for training in which the
    learning rate decayed: the update before checkpoint i counts with the sum of the weights from i
    on. So the weights are the differences of that decay. Source: Tian and others, "WSM: Decay-Free
    Learning Rate Schedule via Checkpoint Merging", 2025, section 3.

    Args:
        count: of checkpoints.
        weights: as given, or None.
        schedule: one of `SCHEDULES`, or None for `linear`.

    Raises:
        PlanError: the weights are not as many, not finite, or sum up to 0.
    """
    if weights is not None:
        if schedule is not None:
            raise PlanError("give either weights or a schedule")
        values = [float(value) for value in weights]
        is_right = len(values) == count and all(abs(value) <= _MAX_WEIGHT for value in values)
        if not is_right or not math.fsum(values):
            raise PlanError(
                f"--weights: expected {count} finite numbers up to 1e100 whose sum is not 0, got"
                f" {', '.join(f'{value:g}' for value in values)}"
            )
        return values
    if schedule not in (None, *SCHEDULES):
        raise PlanError(
            f"--schedule: expected one of {', '.join(SCHEDULES)}, got {printable(str(schedule))!r}"
        )
    if schedule == "exponential":
        return [_DECAY ** (count - 1 - number) for number in range(count)]
    if schedule in (None, "linear"):
        return [1.0] * count
    left = [_decay(schedule, number / count) for number in range(count + 1)]
    return [left[number] - left[number + 1] for number in range(count)]


def _decay(schedule: str | None, done: float) -> float:
    """Returns what is left of the learning rate: 1 at the beginning, 0 at the end."""
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0 - math.sqrt(done)


# ---- the mean as a source ------------------------------------------------------------------------


@dataclass
class _Term:
    """One checkpoint, its model by the names of `merge`, and the checksums of its manifest."""

    numbers: Dequantized
    view: Catalog
    plan: Plan
    fingerprints: Mapping[str, SealedFingerprint]


class _Mean:
    """The mean of opened checkpoints, as a source whose tensors are computed when they are read."""

    def __init__(
        self,
        numbers: Sequence[Dequantized],
        sealed: Sequence[Manifest | None],
        weights: Sequence[float],
        divisor: float,
        how: Conversion,
    ) -> None:
        opened = [one.shown for one in numbers]
        views, self._stripped = _models_of(opened, how)
        _refuse_misfits(opened, views)
        self.left_out: dict[str, int] = {}
        for source, view in zip(opened, views, strict=True):
            self.left_out |= left_out(source.catalog, view)
        check_kept(how.get("keep_dtype", ()), how.get("dtype"), views[-1])
        self._terms = [_term(*found) for found in zip(numbers, views, sealed, strict=True)]
        newest, is_kept = views[-1], matcher(how.get("keep_dtype", ()))
        self._dtypes = {
            fqn: target_dtype(entry, how.get("dtype"), is_kept)
            for fqn, entry in newest.tensors.items()
        }
        self._mixed = [
            fqn
            for fqn, entry in newest.tensors.items()
            if any(view.tensors[fqn].dtype is not entry.dtype for view in views)
        ]
        shapes = {fqn: entry.shape for fqn, entry in newest.tensors.items()}
        terms = [_mean_term(term, f) for term, f in zip(self._terms, weights, strict=True)]
        self._store = MeanStore(terms, divisor, shapes, self._dtypes)
        self._computed = terms
        self.source = replace(
            opened[-1],
            store=self._store,
            format=safetensors,
            catalog=_computed_catalog(opened[-1].catalog, newest, self._dtypes),
        )
        self.version = f"{list(weights)} {divisor} " + str(
            crc64nvme(" ".join(map(self._store.version, shapes)).encode())
        )

    def prove(self, group: Group) -> None:
        """Compares the bytes that all ranks have read with the checksums of the checkpoints.

        Raises:
            IntegrityError: they are not what was written.
            PlanError: matrices differ that may be codes of quantized weights.
        """
        for computed in self._computed:
            computed.watch.prove({})
        self._store.share(group)
        differing = {fqn for fqn, _ in self._store.notes.differing}
        codes = may_be_codes(self._terms[-1].view.tensors.values())
        if wrong := [fqn for fqn in codes if fqn in differing]:
            raise PlanError(
                "no mean of matrices of integers that differ, beside numbers: they may be codes of"
                f" quantized weights, which mean nothing without their own scales: {_some(wrong)}",
                hint="average the models before you quantize",
            )
        for term, computed in zip(self._terms, self._computed, strict=True):
            found = computed.fingerprints.join()
            prove_fingerprints(term.numbers.stored, term.fingerprints, found)
            term.numbers.prove(term.view, group)

    def notes(self) -> list[str]:
        """Returns remarks on names, types and values."""
        notes = [
            f"stripped from names: {printable(prefix)} ({number:,})"
            for prefix, number in self._stripped.items()
        ]
        notes += dict.fromkeys(note for term in self._terms for note in term.numbers.notes)
        if self._mixed:
            notes.append(f"of several types, written as the last one has it: {_some(self._mixed)}")
        if differing := sorted({fqn for fqn, _ in self._store.notes.differing}):
            notes.append(
                f"no floating-point numbers, and not equal: taken from the last: {_some(differing)}"
            )
        for fqn, number in self._store.notes.num_overflowed().items():
            notes.append(f"{number:,} values of {printable(fqn)} became infinite")
        return notes


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return printable(", ".join(names[:_SHOWN])) + more


def _models_of(opened: Sequence[Source], how: Conversion) -> tuple[list[Catalog], dict[str, int]]:
    """Returns the model of each checkpoint under the same names, and what was stripped of the last.

    The names are those of `merge`. It keeps `model.` in a file that has names only, as in those of
    transformers with tied embeddings. If another source has other names, `model.` is a key.
    """
    found = [model_view(source.catalog, keep_prefix=False) for source in opened]
    if len({frozenset(view.tensors) for view, _ in found}) > 1:
        keys = [".".join(find_model(s.catalog) or shared_key(s.catalog)) or None for s in opened]
        by_key = [
            model_view(source.catalog, keep_prefix=False, key=key)
            for source, key in zip(opened, keys, strict=True)
        ]
        if len({frozenset(view.tensors) for view, _ in by_key}) == 1:
            found = by_key
    select, exclude = how.get("select", ()), how.get("exclude", ())
    names = list(dict.fromkeys(n for view, _ in found for n in (*view.tensors, *view.unread)))
    check_globs(select, names, "--select")
    check_globs(exclude, names, "--exclude")
    views = [
        _checked_view(source, keep(view, chooser(select, exclude)))
        for source, (view, _) in zip(opened, found, strict=True)
    ]
    return views, found[-1][1]


def _checked_view(source: Source, view: Catalog) -> Catalog:
    """Returns a model, if a mean of it has a meaning.

    Raises:
        PlanError: it is empty, an optimizer, an adapter, or of a type that is not averaged.
    """
    entries = [*source.catalog.tensors, *source.catalog.objects]
    if {"state", "param_groups"} <= {key_path(source.catalog, fqn)[0] for fqn in entries}:
        raise PlanError(f"it is the state of an optimizer ({redacted(source.path)})")
    refuse_unread(view)
    adapters.refuse_adapters(view.tensors, source.path)
    if not view.tensors:
        raise PlanError(
            f"no tensor of a model is left ({redacted(source.path)})",
            hint=f"ckpt inspect {redacted(source.path)}",
        )
    if weights := weights_in(view.tensors.values()):
        raise PlanError(
            f"no mean of quantized weights: {described(weights)}, such as"
            f" {printable(weights[0].codes)!r} in {redacted(source.path)}",
            hint="--dtype bf16 takes their numbers, where their formula is known",
        )
    for fqn, entry in view.tensors.items():
        name = entry.dtype.name
        if name.startswith(("float", "complex", "bfloat")) and not entry.dtype.is_castable:
            raise PlanError(
                f"no mean of {name} values: {printable(fqn)!r} in {redacted(source.path)}",
                hint="leave it out with --exclude, or average before you quantize",
            )
    return view


def _refuse_misfits(opened: Sequence[Source], views: Sequence[Catalog]) -> None:
    """Refuses checkpoints with other names or shapes than the last one.

    Raises:
        PlanError: with a table of what differs.
    """
    newest, rows = views[-1], list[str]()
    for source, view in zip(opened[:-1], views[:-1], strict=True):
        name = redacted(source.name)
        for fqn in sorted({*newest.tensors} ^ {*view.tensors}):
            where = "only in it" if fqn in view.tensors else "not in it"
            rows.append(f"{name}: {printable(fqn)}: {where}")
        for fqn, entry in newest.tensors.items():
            mine = view.tensors.get(fqn, entry)
            is_number = mine.dtype.is_castable and entry.dtype.is_castable
            if mine.shape != entry.shape or (mine.dtype is not entry.dtype and not is_number):
                had, has = (f"{t.dtype.name} {list(t.shape)}" for t in (mine, entry))
                rows.append(f"{name}: {printable(fqn)}: {had}, and {has} in the last")
    if rows:
        shown = "\n  ".join(rows[:_SHOWN])
        more = f"\n  … and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        raise PlanError(
            f"the checkpoints are not of one model; beside {redacted(opened[-1].name)}:\n"
            f"  {shown}{more}",
            hint="--exclude leaves out names that only some of them have",
        )


def _term(numbers: Dequantized, view: Catalog, sealed: Manifest | None) -> _Term:
    plan = plan_values(view.tensors.values())
    return _Term(numbers, view, plan, sealed_fingerprints(sealed, numbers.stored, view, plan))


def _mean_term(term: _Term, weight: float) -> MeanTerm:
    source, tensors = term.numbers.stored, list(term.view.tensors.values())
    unsealed = [t for t in tensors if t.fqn not in term.fingerprints]
    prove_replicas(source, unsealed)
    located = source.format.locate(source.store, tensors)
    return MeanTerm(
        redacted(source.path),
        source.store,
        {tensor.fqn: tensor for tensor in term.plan.tensors},
        located,
        weight,
        CrcWatch(read_whole(plan_values(unsealed), located), source.store),
    )


def _computed_catalog(newest: Catalog, view: Catalog, dtypes: Mapping[str, DType]) -> Catalog:
    """Returns a catalog in which each tensor is one chunk of a file of its own name."""
    entries, sizes = {}, {}
    for fqn, entry in view.tensors.items():
        box = whole(entry.shape)
        sizes[fqn] = box.numel * dtypes[fqn].itemsize
        chunks = one_chunk(box, Extent(fqn, 0, sizes[fqn]))
        entries[fqn] = replace(
            entry, fqn=fqn, dtype=dtypes[fqn], chunks=chunks, stored="", relations=()
        )
    return Catalog(newest.format, entries, file_sizes=sizes, world_size=1)
