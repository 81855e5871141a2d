"""Measures the values of a checkpoint in one pass: magnitudes, zeros, NaN and infinity."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.logs import log
from ckpt_tools.core.plan import plan_values
from ckpt_tools.core.quantized import OF_OPTIMIZERS, described, may_be_codes, weights_in
from ckpt_tools.core.selection import check_globs, chooser, keep, matcher
from ckpt_tools.core.statistics import TensorStatistics
from ckpt_tools.core.threads import num_threads
from ckpt_tools.engine.crc_watch import CrcWatch, read_whole
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, in_share, schedule, shares, tile_bytes
from ckpt_tools.engine.statistics import SHORT_TYPES, StatisticsSink
from ckpt_tools.errors import IntegrityError, PlanError, printable, redacted
from ckpt_tools.formats.registry import Source, open_source
from ckpt_tools.operations.arguments import checked
from ckpt_tools.operations.convert.flat_shapes import check_needed, lay_beside
from ckpt_tools.operations.dequantize import Dequantized, dequantize
from ckpt_tools.publish.find_manifest import manifest_of
from ckpt_tools.publish.sealed_source import checked_manifest
from ckpt_tools.ranks.base import ALONE
from ckpt_tools.storage.retries import read_again_if_wrong
from ckpt_tools.transfer.options import Path_, Reading, no_bar
from ckpt_tools.transfer.prove import prove_fingerprints, prove_replicas, sealed_fingerprints


@dataclass(frozen=True, slots=True)
class StatsResult:
    """The statistics of a checkpoint.

    Attributes:
        path: the checkpoint.
        tensors: statistics by name, in the order of the checkpoint. Quantized weights have those of
            their numbers, where the formula is known; else their parts have none.
        dtypes: element type by name; of numbers, the scheme and bits of their codes.
        histograms: by name, how many finite nonzero values have a magnitude from `2**key` to less
            than twice that. Empty if that was not asked for.
        lost: with histograms, by short type: how many of these values it makes zero, and how many
            too large.
        broken_parts: parts of quantized weights with NaN or infinite values: how many of each.
        codes: of numbers of quantized weights, the stored name of their codes.
        nbytes: bytes that were read. 0 if the manifest had everything.
        notes: remarks.
        seconds: wall-clock time.
    """

    path: str
    tensors: Mapping[str, TensorStatistics]
    dtypes: Mapping[str, str]
    histograms: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    lost: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    broken_parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    codes: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0
    notes: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def not_finite(self) -> list[str]:
        """Returns the names of the tensors with NaN or infinite values."""
        found = [fqn for fqn, found in self.tensors.items() if not found.is_finite]
        return [*found, *self.broken_parts]


@checked(Reading)
def stats(
    src: Path_,
    *,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    histogram: bool = False,
    read_all: bool = False,
    **options: Unpack[Reading],
) -> StatsResult:
    """Measures every tensor of a checkpoint.

    If the manifest has the statistics, nothing is read. Otherwise the bytes are also compared with
    the checksums that the checkpoint has.

    Args:
        src: a checkpoint, or a directory with one below; a path or a URL.
        select: globs of names; only tensors that match one are measured.
        exclude: globs of names; tensors that match one are left out.
        histogram: also count magnitudes by power of two.
        read_all: read the values even if the manifest has their statistics.
        **options: see `Reading`.

    Raises:
        IntegrityError: the bytes are not those that were written.
        CheckpointError: it cannot be read.
    """
    began, group = time.monotonic(), options.get("group") or ALONE
    with group.phase("open it"):
        source = open_source(src, options.get("storage_options"), lay_beside(options.get("shapes")))
        check_needed(options.get("shapes"), source.catalog)
        numbers = dequantize(source, matcher(()), of_optimizers=OF_OPTIMIZERS)
        catalog = _chosen(numbers.shown.catalog, select, exclude)
        known = {} if histogram or read_all else sealed_statistics(source)
        sealed = {f: s for f, s in known.items() if f not in numbers.parts}
    notes = [
        f"not read, since ckpt does not read such values: {len(catalog.unread)} tensors"
    ] * bool(catalog.unread)
    notes += numbers.notes
    if parts := {fqn: t for fqn, t in catalog.tensors.items() if t.quantized is not None}:
        weights = weights_in(catalog.tensors.values())
        notes.append(
            "parts of quantized weights have no magnitudes; only NaN and infinity are searched:"
            f" {len(parts)} tensors ({described(weights)})"
        )
        catalog = keep(catalog, lambda fqn: fqn not in parts)
    if unknown := set(may_be_codes(catalog.tensors.values())):
        notes.append(
            "not measured, since they may be codes of quantized weights of an unknown scheme:"
            f" {len(unknown)} matrices of integers ({printable(min(unknown))}, …)"
        )
        catalog = keep(catalog, lambda fqn: fqn not in unknown)
    parts |= _unused_parts(numbers, chooser(select, exclude))
    work = [t for fqn, t in catalog.tensors.items() if fqn not in sealed and t.nbytes]
    work += [t for t in parts.values() if t.nbytes and _has_numbers(t)]
    chosen = replace(catalog, tensors={**catalog.tensors, **parts})
    sink = _measured_at_once(numbers, chosen, work, histogram, options) or read_again_if_wrong(
        source.store, lambda: _measure(numbers, chosen, work, histogram, options), group
    )
    numbers.stored.store.close()
    if sealed:
        count = sum(fqn in sealed for fqn in catalog.tensors)
        notes += [f"as their save measured them: {count} of the tensors"] * bool(count)
    empty = TensorStatistics(0, 0.0, 0.0, 0, 0, 0)
    found = {fqn: moments.result() for fqn, moments in sink.moments.items()}
    broken = {f: (t.num_nan, t.num_inf) for f, t in found.items() if f in parts and not t.is_finite}
    return StatsResult(
        redacted(source.path),
        {fqn: found.get(fqn) or sealed.get(fqn) or empty for fqn in catalog.tensors},
        {fqn: numbers.kind(entry) for fqn, entry in catalog.tensors.items()},
        {f: m.histogram() for f, m in sink.moments.items() if f not in parts} if histogram else {},
        _lost(sink, parts) if histogram else {},
        broken,
        {fqn: weight.codes for fqn, weight in numbers.weights.items() if fqn in catalog.tensors},
        sum(t.nbytes for t in work),
        notes,
        time.monotonic() - began,
    )


def _unused_parts(numbers: Dequantized, is_chosen: Callable[[str], bool]) -> dict[str, TensorEntry]:
    """Returns parts of quantized weights that their numbers do not need: scales of activations."""
    used = {part for parts in numbers.parts.values() for part in parts}
    shown = numbers.shown.catalog.tensors
    return {
        fqn: entry
        for fqn, entry in numbers.stored.catalog.tensors.items()
        if entry.quantized and fqn not in shown and fqn not in used and is_chosen(fqn)
    }


def sealed_statistics(source: Source) -> dict[str, TensorStatistics]:
    """Returns the statistics that a checkpoint's manifest has."""
    manifest = manifest_of(source.store)
    tensors = manifest.tensors if manifest is not None else {}
    return {fqn: t.statistics for fqn, t in tensors.items() if t.statistics is not None}


def _has_numbers(part: TensorEntry) -> bool:
    """Tells whether NaN in a part of a quantized weight is one: in scales, and in codes of fp8."""
    assert part.quantized is not None
    is_codes = part.quantized.codes == part.stored_name
    return part.dtype.name.startswith("float8") or (part.dtype.is_castable and not is_codes)


def _lost(sink: StatisticsSink, without: Container[str]) -> dict[str, tuple[int, int]]:
    every = (m.lost for fqn, m in sink.moments.items() if fqn not in without)
    total = sum(lost for lost in every if lost is not None)
    if isinstance(total, int):
        return {}
    return {t.name: (int(a), int(b)) for t, (a, b) in zip(SHORT_TYPES, total, strict=True)}


def _chosen(catalog: Catalog, select: Sequence[str], exclude: Sequence[str]) -> Catalog:
    names = [*catalog.tensors, *catalog.unread]
    check_globs(select, names, "--select")
    check_globs(exclude, names, "--exclude")
    chosen = keep(catalog, chooser(select, exclude))
    if not chosen.tensors:
        raise PlanError(
            f"there is no tensor to measure ({redacted(catalog.format)})",
            hint="ckpt inspect lists what it holds",
        )
    return chosen


def _measured_at_once(
    numbers: Dequantized,
    catalog: Catalog,
    tensors: Sequence[TensorEntry],
    histogram: bool,
    options: Reading,
) -> StatisticsSink | None:
    """Measures what an object store has, without a look at the position of each payload.

    Fingerprints prove that each lies at its usual position. Returns None if one does not, or if
    that cannot be tried.
    """
    group = options.get("group") or ALONE
    if group.size > 1 or not numbers.stored.store.capabilities.is_remote:
        return None
    try:
        return _measure(numbers, catalog, tensors, histogram, options, assumes=True)
    except IntegrityError as error:
        log.warning("read again: a payload lies elsewhere, or bytes were wrong: %s", error)
        return None


def _measure(
    numbers: Dequantized,
    catalog: Catalog,
    tensors: Sequence[TensorEntry],
    histogram: bool,
    options: Reading,
    assumes: bool = False,
) -> StatisticsSink:
    """Reads tensors once: measures their values, and proves their bytes.

    Args:
        numbers: the checkpoint.
        catalog: the tensors that were chosen.
        tensors: those of them to measure.
        histogram: also count magnitudes by power of two.
        options: see `Reading`.
        assumes: read the payloads of tensors with a fingerprint from their usual positions.
    """
    source = numbers.stored
    group, jobs = options.get("group") or ALONE, num_threads(options.get("jobs"))
    tiles = tile_bytes(options.get("memory_bytes") or DEFAULT_MEMORY_BYTES, jobs)
    sink, plan = StatisticsSink(histogram), plan_values(tensors)
    share = shares(plan, group.size)[group.rank]
    taken = {t.fqn for t in in_share(plan, share)}
    mine = [t for t in tensors if t.fqn in taken]
    bar, total = options.get("progress") or no_bar, sum(t.nbytes for t in tensors)
    with bar("stats", total) as advance, group.phase("measure"):
        fingerprints = sealed_fingerprints(checked_manifest(source), source, catalog, plan)
        prove_replicas(
            source, [t for t in tensors if t.fqn not in fingerprints], jobs=jobs, group=group
        )
        sure = [t for t in mine if assumes and t.fqn in fingerprints]
        unsure = [t for t in mine if not assumes or t.fqn not in fingerprints]
        located = {**source.assume(sure), **source.format.locate(source.store, unsure)}
        watched = read_whole(plan_values(t for t in mine if t.fqn not in fingerprints), located)
        watch = CrcWatch(watched, source.store)
        execute_batches(
            schedule(plan, located, *tiles, share),
            source.store,
            sink,
            jobs,
            lambda nbytes: advance(nbytes * group.size),
            crc_watch=watch,
        )
        watch.prove({})
    sink.share(group)
    with group.phase("prove"):
        prove_fingerprints(source, fingerprints, sink.fingerprints.join())
    numbers.prove(catalog, group)
    return sink
