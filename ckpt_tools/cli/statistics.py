"""Prints statistics of values: a line for each tensor or each kind of tensor, and histograms."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tools.cli.render import BARS, count, format_size
from ckpt_tools.cli.tables import BOLD, GREEN, RED, style, table
from ckpt_tools.core.naming import is_optimizer_state
from ckpt_tools.errors import printable
from ckpt_tools.operations.stats import StatsResult

_MANY, _MOST_BINS = 40, 64


def show_stats(result: StatsResult) -> None:
    """Prints the statistics of a checkpoint. Many tensors are grouped by numbers in their names."""
    groups: dict[str, list[str]] = {}
    is_grouped = len(result.tensors) > _MANY
    for fqn in result.tensors:
        groups.setdefault(_kind(fqn) if is_grouped else fqn, []).append(fqn)
    order = sorted(groups, key=lambda name: is_optimizer_state(groups[name][0]))  # weights first
    rows = [_row(name, result, groups[name]) for name in order]
    table(
        ("tensor", "tensors", "dtype", "RMS", "max |x|", "zeros", "NaN", "infinite"),
        rows,
        right=(1, 3, 4, 5, 6, 7),
    )
    if result.histograms:
        print()
        _show_histogram(result)
    for note in result.notes:
        print(f"  note: {printable(note)}")
    for fqn in result.not_finite[:_MANY]:
        found = result.tensors.get(fqn)
        nans, infs = (found.num_nan, found.num_inf) if found else result.broken_parts[fqn]
        print(f"  {printable(fqn)}: {nans:,} NaN, {infs:,} infinite")
    if is_grouped:
        print("  --json lists each tensor")
    verdict = (
        style(f"not finite: {count(len(result.not_finite), 'tensor')}", RED)
        if result.not_finite
        else style("finite", GREEN)
    )
    read = f"{format_size(result.nbytes)} in {result.seconds:.2f} s"
    print(
        f"{style(printable(result.path), BOLD)}: {verdict}"
        f" ({count(len(result.tensors), 'tensor')}, {read})"
    )


def _kind(fqn: str) -> str:
    return re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", fqn)


def _row(name: str, result: StatsResult, names: list[str]) -> tuple[str, ...]:
    found = [result.tensors[fqn] for fqn in names]
    dtypes = sorted({result.dtypes[fqn] for fqn in names})
    return (
        printable(name),
        f"{len(names):,}",
        ", ".join(dtypes),
        _span(one.rms for one in found),
        f"{max(one.max_abs for one in found):.4g}",
        _share(sum(one.num_zeros for one in found), sum(one.numel for one in found)),
        *(
            f"{number:,}" if number else "-"
            for number in (sum(one.num_nan for one in found), sum(one.num_inf for one in found))
        ),
    )


def _span(values: Iterable[float]) -> str:
    low, *_, high = sorted(f"{value:.4g}" for value in values) * 2
    low, high = sorted((low, high), key=float)
    return low if low == high else f"{low} … {high}"


def _share(part: int, whole: int) -> str:
    if not part or not whole:
        return "-"
    return f"{100 * part / whole:.1f} %" if part * 1000 >= whole else "< 0.1 %"


def _show_histogram(result: StatsResult) -> None:
    """Prints the magnitudes of all tensors together, and what shorter types would lose of them."""
    total: dict[int, int] = {}
    for counts in result.histograms.values():
        for exponent, number in counts.items():
            total[exponent] = total.get(exponent, 0) + number
    if not total:
        print("  every value is zero or not finite")
        return
    low, high = max(min(total), max(total) - _MOST_BINS + 1), max(total)
    most = max(total.values())
    bars = "".join(
        BARS[min(len(BARS) - 1, total.get(e, 0) * len(BARS) // (most + 1))] if total.get(e) else " "
        for e in range(low, high + 1)
    )
    print(f"  magnitudes from 2^{low} to 2^{high + 1}, one column for each power of two")
    print(f"  {bars}")
    if low > min(total):
        print(f"  and smaller ones, from 2^{min(total)}")
    numel = sum(total.values())
    rows = [
        (name, _share(zeros, numel), _share(large, numel))
        for name, (zeros, large) in result.lost.items()
    ]
    print(f"  of {numel:,} finite values that are not zero:")
    table(("as", "become zero", "too large"), rows, right=(1, 2))
