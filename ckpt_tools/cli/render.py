"""Prints results as aligned tables and trees, with colours on a terminal.

It depends only on the results, not on the operations' code.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from ckpt_tools.cli.tables import BOLD, style, table
from ckpt_tools.core.naming import find_optimizers, key_path
from ckpt_tools.errors import printable, redacted
from ckpt_tools.storage.base import is_url

if TYPE_CHECKING:
    from ckpt_tools.loop.steps.retention import Pruned
    from ckpt_tools.operations.copy import CopyResult
    from ckpt_tools.operations.folder import Entry
    from ckpt_tools.operations.inspect import Report, Total
    from ckpt_tools.operations.presence import Presence
    from ckpt_tools.operations.run_bytes import StepBytes
    from ckpt_tools.operations.thin import ThinResult
    from ckpt_tools.publish.base import Leftover
    from ckpt_tools.run.step import Step
    from ckpt_tools.transfer.result import TransferResult

_MAX_ROWS = 40
_MAX_ERRORS = 5


_FINITE = {True: "yes", False: "no", None: "-"}
_OBJECTS = 20  # most objects that are named
# extras that are of no interest to users
_OWN_NOTES, _MAX_NOTE = ("format", "dcp_version", "checkpoint_id", "save_id"), 200


def format_size(nbytes: int) -> str:
    """Returns a number of bytes for users, in powers of 1000: 1.06 GB."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < 5:
        value, unit = value / 1000, unit + 1
    return (
        f"{nbytes} B"
        if unit == 0
        else f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {'BKMGTP'[unit]}B"
    )


def count(number: int, noun: str) -> str:
    """Returns a number with its noun: 1 entry, 2 entries."""
    return (
        f"{number:,} {noun}"
        if number == 1
        else f"{number:,} " + (f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s")
    )


# ---- inspect -------------------------------------------------------------------------------------


def show_report(report: Report, *, tree: bool, files: bool) -> None:
    """Prints a report: the summary, then the tree or the files if requested."""
    world = f", written by {count(report.world_size, 'rank')}" if report.world_size else ""
    print(style(printable(report.path), BOLD))
    total = report.total
    print(
        f"  {report.format}{world}: {count(total.num_tensors, 'tensor')},"
        f" {format_size(total.nbytes)}, {count(total.num_objects, 'object')}"
    )
    for key, value in islice(
        ((k, v) for k, v in report.extras.items() if v and k not in _OWN_NOTES), _OBJECTS
    ):
        print(f"  {printable(key)}: {printable(value)[:_MAX_NOTE]}")
    if report.catalog.unread:
        some = [
            f"{printable(name)} ({printable(kind)})"
            for name, kind in islice(report.catalog.unread.items(), _OBJECTS)
        ]
        print(
            f"  not read: {', '.join(some)}{' …' if len(report.catalog.unread) > _OBJECTS else ''}"
        )
    print()
    _totals("key", _weights_first(report))
    print()
    _totals("dtype", _largest_first(report.by_dtype))
    if report.optimizer_states:
        print()
        _totals("optimizer state", _largest_first(report.optimizer_states))
    if tree:
        print()
        _show_tree(report)
    else:
        _show_objects(report)
    if files:
        print()
        _show_files(report)
    if report.presence is not None:
        print()
        _show_presence(report.presence)


def _show_presence(presence: Presence) -> None:
    kinds = {"hub": ", by the Hub's names", "transformers": ", by transformers' names in memory"}
    kind = kinds.get(presence.naming, "")
    print(f"compared with {printable(presence.base)} ({printable(presence.told_by)}){kind}")
    if presence.is_complete:
        print(f"  all {len(presence.expected):,} tensors of the model are present")
    for line in presence.lines():
        print(f"  {line}")


def _weights_first(report: Report) -> Mapping[str, Total]:
    """Returns the sums per key: first those of models, then optimizers; the largest first."""
    optimizers = {root[0] for root in find_optimizers(report.catalog)}
    rows = _largest_first(report.by_key)
    return {key: rows[key] for key in sorted(rows, key=lambda key: key in optimizers)}


def _largest_first(totals: Mapping[str, Total]) -> Mapping[str, Total]:
    return dict(sorted(totals.items(), key=lambda item: -item[1].nbytes))


def _totals(label: str, totals: Mapping[str, Total]) -> None:
    rows = list(totals.items())
    table(
        (label, "tensors", "objects", "bytes"),
        [
            (printable(k), f"{t.num_tensors:,}", f"{t.num_objects:,}", format_size(t.nbytes))
            for k, t in rows[:_MAX_ROWS]
        ],
        right=(1, 2, 3),
    )
    if len(rows) > _MAX_ROWS:
        print(f"  … and {len(rows) - _MAX_ROWS} more")


def _show_objects(report: Report) -> None:
    """Prints the names of objects. Those with a common beginning are folded into one line."""
    if not report.catalog.objects:
        return
    print("\n  objects (not unpickled):")
    groups: dict[str, list[str]] = {}
    for name in report.catalog.objects:
        path = key_path(report.catalog, name)
        groups.setdefault(".".join(path[:2]) if len(path) > 2 else name, []).append(name)
    for shown, names in islice(groups.items(), _OBJECTS):
        folded = names[0] if len(names) == 1 else f"{shown}.* ({len(names):,})"
        print(f"    {printable(folded)}")
    if len(groups) > _OBJECTS:
        print(f"    … and {len(groups) - _OBJECTS:,} more; all of them with --json")


def _show_tree(report: Report) -> None:
    root: dict[str, Any] = {}
    for fqn, entry in report.catalog.tensors.items():
        node = root
        *parents, leaf = [
            s for key in key_path(report.catalog, fqn) for s in (key.split(".") if key else [key])
        ]
        for segment in parents:
            node = node.setdefault(segment, {})
            if not isinstance(node, dict):
                break
        if isinstance(node, dict):
            node[leaf] = (list(entry.shape), entry.dtype.name, entry.nbytes, len(entry.chunks))
    rows: list[tuple[str, str, str, str, str]] = []
    _walk(root, "", rows)
    table(("tree", "shape", "dtype", "chunks", "bytes"), rows, right=(3, 4))


def _bytes_below(node: Any) -> int:
    return sum(map(_bytes_below, node.values())) if isinstance(node, dict) else node[2]


def _signature(node: Any) -> object:
    """Returns a key that is equal for subtrees with the same names, shapes and dtypes."""
    return (
        tuple((k, _signature(v)) for k, v in node.items())
        if isinstance(node, dict)
        else (tuple(node[0]), node[1])
    )


def _walk(node: Mapping[str, Any], indent: str, rows: list[tuple[str, str, str, str, str]]) -> None:
    """Adds a subtree's rows. Equal children with consecutive numbers share one row."""
    names = sorted(
        node,
        key=lambda n: (0, int(n), "") if n.isascii() and n.isdigit() and len(n) < 10 else (1, 0, n),
    )
    at = 0
    while at < len(names):
        name, child = names[at], node[names[at]]
        label, inner = printable(name), child
        # an only child goes on its parent's line
        while isinstance(inner, dict) and len(inner) == 1:
            key, inner = next(iter(inner.items()))
            label += "." + printable(key)
        if not isinstance(inner, dict):
            shape, dtype, nbytes, num_chunks = inner
            rows.append((indent + label, str(shape), dtype, str(num_chunks), format_size(nbytes)))
            at += 1
            continue
        end = at + 1
        while (
            name.isdigit()
            and end < len(names)
            and isinstance(node[names[end]], dict)
            and _signature(node[names[end]]) == _signature(child)
        ):
            end += 1
        if end - at > 1:
            label = f"{name}–{names[end - 1]}{label[len(name) :]} (each)"
        rows.append((indent + label, "", "", "", format_size(_bytes_below(inner))))
        _walk(inner, indent + "  ", rows)
        at = end


def _show_files(report: Report) -> None:
    rows = [
        (
            printable(f.name),
            "–" if f.rank is None else str(f.rank),
            f"{f.num_chunks:,}",
            f"{f.num_objects:,}",
            format_size(f.payload_nbytes),
            format_size(f.nbytes),
        )
        for f in report.files
    ]
    table(
        ("file", "rank", "chunks", "objects", "payload", "file size"),
        rows[: _MAX_ROWS * 4],
        right=(1, 2, 3, 4, 5),
    )
    print()
    table(
        ("tensor", "rank", "elements", "bytes"),
        list(islice(_parts(report), _MAX_ROWS * 4)),
        right=(1, 3),
    )
    more = sum(f.num_chunks for f in report.files) - _MAX_ROWS * 4
    if more > 0:
        print(f"  … and {more:,} more; all of them with --json")


def _parts(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """Yields a row for each chunk, by tensor and rank."""
    ranks, files = report.catalog.ranks, report.catalog.file_sizes
    for fqn, entry in report.catalog.tensors.items():
        for box, extent in sorted(
            (c for c in entry.chunks if c.extent.file in files),
            key=lambda c: ranks.get(c.extent.file, 0),
        ):
            elements = ", ".join(
                f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True)
            )
            rank = ranks.get(extent.file)
            yield (
                printable(fqn),
                "–" if rank is None else str(rank),
                elements,
                format_size(box.numel * entry.dtype.itemsize),
            )


def report_as_json(report: Report) -> dict[str, Any]:
    """Returns a report as plain values, with the chunks of every tensor."""
    catalog = report.catalog
    return {
        "path": report.path,
        "format": report.format,
        "world_size": report.world_size,
        "extras": dict(report.extras),
        "unread": dict(catalog.unread),
        "total": report.total._asdict(),
        "by_dtype": {k: v._asdict() for k, v in report.by_dtype.items()},
        "by_key": {k: v._asdict() for k, v in report.by_key.items()},
        "optimizer_states": {k: v._asdict() for k, v in report.optimizer_states.items()},
        "files": [{"name": f.name, "rank": f.rank, "nbytes": f.nbytes} for f in report.files],
        "tensors": {
            fqn: {
                "dtype": t.dtype.name,
                "shape": t.shape,
                "nbytes": t.nbytes,
                "chunks": [
                    {"offsets": c.box.offsets, "sizes": c.box.sizes, "file": c.extent.file}
                    for c in t.chunks
                ],
            }
            for fqn, t in catalog.tensors.items()
        },
        "objects": {
            fqn: {"file": o.extent.file, "nbytes": o.extent.nbytes}
            for fqn, o in catalog.objects.items()
        },
    } | ({"presence": _presence_as_json(report.presence)} if report.presence else {})


def _presence_as_json(presence: Presence) -> dict[str, Any]:
    return {
        "base": presence.base,
        "told_by": presence.told_by,
        "naming": presence.naming,
        "prefix": presence.prefix,
        "is_complete": presence.is_complete,
        "num_expected": len(presence.expected),
        "missing": presence.missing,
        "unexpected": presence.unexpected,
        "other_shapes": {
            name: {"shape": got, "expected": wanted}
            for name, (got, wanted) in presence.other_shapes.items()
        },
    }


# ---- merge, reshard ------------------------------------------------------------------------------


def show_transfer(result: TransferResult, src: str = "") -> None:
    """Prints the result of a transfer, or the plan of a dry run.

    Args:
        result: of the transfer.
        src: the given path. The one below it that was taken is shown.
    """
    verb = "would write" if result.is_dry_run else "wrote"
    took = "" if result.is_dry_run else f" in {result.seconds:.2f} s"
    objects = f" and {count(result.num_objects, 'object')}" if result.num_objects else ""
    print(
        f"{verb} {style(printable(result.destination), BOLD)}:"
        f" {count(result.num_tensors, 'tensor')}{objects}, {format_size(result.written_nbytes)},"
        f" {count(len(result.files), 'file')}{took}"
    )
    if src and os.path.realpath(src) != os.path.realpath(result.source) and not is_url(src):
        print(f"  from {printable(result.source)}")
    if result.kept_nbytes:
        print(f"  {format_size(result.kept_nbytes)} of it was there from an earlier attempt")
    if result.store_nbytes:
        client = max(0, result.written_nbytes - result.store_nbytes)
        how, rest = _own_copy(result.destination)
        print(f"  {format_size(result.store_nbytes)} {how}, {format_size(client)} {rest}")
    print(
        "  by dtype: "
        + ", ".join(
            f"{k} {format_size(v)}"
            for k, v in sorted(result.bytes_by_dtype.items(), key=lambda i: -i[1])
        )
    )
    if result.num_proved:
        print(
            f"  proved: the inverse gave {count(result.num_proved, 'tensor')} of the source back,"
            f" {format_size(result.proved_nbytes)}"
        )
    if result.left_out:
        print(
            "  left out: "
            + ", ".join(f"{printable(k)} ({format_size(v)})" for k, v in result.left_out.items())
        )
    if result.stripped:
        print(
            "  stripped: "
            + ", ".join(f"{printable(k)} ({count(v, 'name')})" for k, v in result.stripped.items())
        )
    for fqn, number in list(result.overflowed.items())[:_MAX_ROWS]:
        print(f"  overflow: {count(number, 'finite value')} became infinite in {printable(fqn)}")
    for note in result.notes:
        print(f"  note: {note}")
    _show_quantization_errors(result.quantization_errors)
    if result.is_dry_run:
        _show_plan(result)


def _show_quantization_errors(errors: Mapping[str, float]) -> None:
    """Prints the relative error of the weights that lost most."""
    if not errors:
        return
    most = sorted(errors.items(), key=lambda item: (-item[1], item[0]))[:_MAX_ERRORS]
    from statistics import median  # it imports much

    print()
    table(
        ("largest errors of codes", "of the norm"),
        [(printable(fqn), f"{error:.2%}") for fqn, error in most],
        right=(1,),
    )
    if more := len(errors) - len(most):
        print(f"{more:,} more are smaller; median {median(errors.values()):.2%}")


def _show_plan(result: TransferResult) -> None:
    print(
        f"  plan: {result.num_copies:,} {'copy' if result.num_copies == 1 else 'copies'}, read"
        f" {format_size(result.read_nbytes)} for {format_size(result.needed_nbytes)} needed"
        f" (amplification {result.read_amplification:.3f}),"
        f" write {format_size(result.written_nbytes)}"
    )
    table(
        ("file", "bytes"),
        [(printable(n), format_size(b)) for n, b in list(result.files.items())[:_MAX_ROWS]],
        right=(1,),
    )
    if len(result.files) > _MAX_ROWS:
        print(f"  … and {len(result.files) - _MAX_ROWS} more files")


# ---- ls, prune -----------------------------------------------------------------------------------


def some_names(names: Sequence[str]) -> str:
    """Returns names on one line; only the first ones if they are many."""
    more = f" and {len(names) - _OBJECTS} more" if len(names) > _OBJECTS else ""
    return ", ".join(map(printable, names[:_OBJECTS])) + more


def show_entries(entries: Sequence[Entry]) -> None:
    """Prints what lies in a folder. Files that are nothing of a checkpoint share one line."""
    shown = [one for one in entries if one.about and one.is_opened]
    rows = [
        (
            printable(one.name),
            one.kind,
            "-" if one.nbytes is None else format_size(one.nbytes),
            one.about,
        )
        for one in shown
    ]
    if rows:
        table(("name", "kind", "bytes", "what it is"), rows, right=(2,))
    if plain := [one.name for one in entries if not one.about]:
        print(f"  other files: {some_names(plain)}")
    if unopened := sum(not one.is_opened for one in entries):
        print(f"  … and {unopened:,} more, which were not opened")
    if not entries:
        print("  nothing lies here")


BARS = "▁▂▃▄▅▆▇█"
_MAX_SPARKS = 60


def sparkline(values: Sequence[float]) -> str:
    """Returns a line of bars, one for each value; a value that is not finite is a blank."""
    values = values[-_MAX_SPARKS:]
    halves = [value / 2 for value in values]  # the difference of two large ones has no room
    finite = [value for value in halves if math.isfinite(value)]
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) - low
    return "".join(
        BARS[min(7, int(8 * ((value - low) / span))) if span else 3]
        if math.isfinite(value)
        else " "
        for value in halves
    )


def _metrics_of(step: Step) -> Mapping[str, float | None]:
    return step.manifest.metrics if step.manifest is not None else {}


def _value(metrics: Mapping[str, float | None], name: str) -> str:
    if name not in metrics:
        return ""
    value = metrics[name]
    return "not finite" if value is None else f"{value:.6g}"


def _show_metrics(steps: Sequence[Step]) -> None:
    """Prints a sparkline of each metric over the steps."""
    names = dict.fromkeys(name for step in steps for name in _metrics_of(step))
    for name in names:
        known = [step for step in steps if name in _metrics_of(step)]
        found = [_metrics_of(step).get(name) for step in known]
        values = [math.nan if value is None else value for value in found]
        line = f"{sparkline(values)}  {values[0]:.4g} → {values[-1]:.4g}"
        if len(values) == 1:
            line = f"{values[0]:.4g}"
        line += f" (step {known[-1].number:,})" * (known[-1] is not steps[-1])
        print(f"{printable(name)}: {line}")


def _timing_of(step: Step) -> Mapping[str, float | None]:
    return step.manifest.timing if step.manifest is not None else {}


def _shown_time(created: str) -> str:
    """Returns a time of ISO 8601 for a table, without its seconds."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):.*\+00:00", str(created))
    return f"{found[1]} {found[2]}Z" if found else printable(str(created))


def show_steps(
    steps: Sequence[Step], with_metrics: bool = False, with_timing: bool = False
) -> None:
    """Prints the steps of a run, one line per step, and then a line for each metric."""
    rows = []
    complete = [step for step in steps if not step.problem and not step.superseded_by]
    tables = [_metrics_of] * with_metrics + [_timing_of] * with_timing
    columns = [
        (of, name) for of in tables for name in dict.fromkeys(n for s in steps for n in of(s))
    ]
    for step in steps:
        made, ranks = (
            ("", "")
            if step.manifest is None
            else (_shown_time(step.manifest.created), str(step.manifest.world_size or ""))
        )
        state = (
            f"cannot be read: {printable(step.problem)}"
            if step.error is not None
            else f"incomplete: {printable(step.problem)}"
            if step.problem
            else "complete"
            if step.manifest
            else "another tool's: retention leaves it alone"
        )
        state = "superseded by a rollback" if step.superseded_by else state
        state += f", not counted: {step.twin_note}" if step.twin else ""
        state += ", pinned" if step.is_pinned else ""
        state += f", thinned: no {printable(', '.join(step.thinned))}" if step.thinned else ""
        salvaged = step.manifest.salvage_note if step.manifest is not None else ""
        state += f", {salvaged}" if salvaged else ""
        state += f", not finite: {step.not_finite}" if step.not_finite else ""
        values = [_value(of(step), name) for of, name in columns]
        rows.append(
            (
                printable(step.name),
                format_size(step.nbytes),
                made,
                ranks,
                _FINITE[step.is_finite],
                *values,
                state,
            )
        )
    names = [printable(name) + " s" * (of is _timing_of) for of, name in columns]
    head = ("name", "bytes", "saved", "ranks", "finite", *names, "state")
    table(head, rows, right=(1, 3, *range(5, 5 + len(names))))
    _show_stored(steps)
    _show_metrics(complete)


def _show_stored(steps: Sequence[Step]) -> None:
    """Prints the bytes that steps take on the disk, if they share some."""
    from ckpt_tools.run.shared_files import stored_nbytes

    total, stored = sum(step.nbytes for step in steps), stored_nbytes(steps)
    if stored < total:
        text = f"{format_size(stored)} on the disk for {format_size(total)}"
        print(f"{text}: steps share files of what stayed the same")


def show_pruned(result: Pruned, leftovers: Sequence[Leftover], is_dry_run: bool) -> None:
    """Prints the steps that a prune removed (or would remove), and those that it kept."""
    verb = "would remove" if is_dry_run else "removed"
    for step in result.removed:
        print(f"{verb} {printable(redacted(str(step.path)))}  {format_size(step.nbytes)}")
    for path, reason in result.kept.items():
        print(f"kept {printable(path)}: {reason}")
    for path, rules in result.policies.items() if is_dry_run else ():
        print(f"stays {printable(path)}: {printable(rules)}")
    for path, problem in result.damaged.items():
        print(f"not counted, and kept: {printable(path)}: {problem}")
    for path, error in result.failed.items():
        print(f"could not remove {printable(path)}: {error}", file=sys.stderr)
    for path, error in result.unreadable.items():
        print(f"not counted, since it cannot be read: {printable(path)}: {error}", file=sys.stderr)
    _show_leftovers(leftovers, verb)
    if result.removed:
        total = sum(step.nbytes for step in result.removed)
        shared = f"; {format_size(result.freed_nbytes)} of them free, other steps share the rest"
        print(
            f"{verb} {count(len(result.removed), 'step')}, {format_size(total)}"
            + shared * (result.freed_nbytes < total)
        )
    if not (result.removed or result.failed or leftovers):
        print("nothing to remove")


def show_unfinished(sizes: Sequence[int]) -> None:
    """Tells on stderr of hidden directories with unfinished work, given the bytes of each."""
    if sizes:
        print(
            f"unfinished: {format_size(sum(sizes))} in"
            f" {count(len(sizes), 'hidden directory')}; the next save or ckpt prune removes what a"
            " dead job left",
            file=sys.stderr,
        )


def _show_leftovers(leftovers: Sequence[Leftover], verb: str) -> None:
    for left in leftovers:
        if left.problem:
            print(f"could not look at {printable(left.url)}: {left.problem}", file=sys.stderr)
        else:
            size = f"{format_size(left.nbytes)}, " if left.nbytes is not None else ""
            print(f"{verb} {printable(left.url)}  {size}what a dead job left")


def pruned_as_json(
    result: Pruned, leftovers: Sequence[Leftover], is_dry_run: bool
) -> dict[str, Any]:
    """Returns the result of a prune as plain values."""
    reasons = {
        "policies": result.policies,
        "kept": result.kept,
        "damaged": result.damaged,
        "failed": result.failed | {left.url: left.problem for left in leftovers if left.problem},
        "unreadable": result.unreadable,
    }
    sizes = [left.nbytes for left in leftovers if not left.problem]
    return {
        "steps": [step_as_json(s) for s in result.removed],
        "freed_nbytes": result.freed_nbytes,
        **reasons,
        "leftovers": [left.url for left in leftovers if not left.problem],
        "leftover_nbytes": None if None in sizes else sum(filter(None, sizes)),
        "is_dry_run": is_dry_run,
    }


def show_copy(result: CopyResult) -> None:
    """Prints the result of a copy."""
    verb = "would copy" if result.is_dry_run else "copied"
    where, total = printable(result.destination), sum(result.files.values())
    files = count(len(result.files), "file")
    print(f"{verb} {where}: {files}, {format_size(total)} in {result.seconds:.2f} s")
    how, rest = _own_copy(result.destination)
    parts = (
        (rest, result.client_nbytes),
        (how, result.store_nbytes),
        ("there already", result.kept_nbytes),
    )
    print("  " + ", ".join(f"{format_size(nbytes)} {what}" for what, nbytes in parts if nbytes))
    for note in result.notes:
        print(f"  note: {printable(note)}")


def _own_copy(destination: str) -> tuple[str, str]:
    """Returns what a store does with bytes that it copies by itself, and what happens to others."""
    if is_url(destination):
        return "copied within the store", "through this machine"
    return "cloned (both files share the blocks)", "written"


def step_as_json(step: Step) -> dict[str, Any]:
    """Returns a step as plain values."""
    return {
        "kind": "step",
        "step": step.number,
        "path": redacted(str(step.path)),
        "nbytes": step.nbytes,
        "is_complete": not step.problem,
        "is_readable": step.error is None,
        "problem": step.problem,
        "world_size": step.manifest.world_size if step.manifest else None,
        "created": step.manifest.created if step.manifest else None,
        "superseded": bool(step.superseded_by),
        "is_pinned": step.is_pinned,
        "is_finite": step.is_finite,
        "not_finite": step.manifest.not_finite if step.manifest else [],
        "metrics": dict(_metrics_of(step)),
        "thinned": list(step.thinned),
        "timing": dict(_timing_of(step)),
    }


def entry_as_json(folder: str, entry: Entry) -> dict[str, Any]:
    """Returns an entry of a folder without steps as plain values; its `step` is None."""
    return {
        "kind": entry.kind,
        "step": None,
        "path": redacted(f"{folder.rstrip('/')}/{entry.name.removesuffix('/')}"),
        "nbytes": entry.nbytes,
        "is_readable": entry.is_readable,
        "about": entry.about,
    }


# ---- thin ----------------------------------------------------------------------------------------


def price_of(nbytes: int, price: float) -> str:
    """Returns what bytes cost for a month, at a price for a GB."""
    return f"{nbytes / 1e9 * price:,.2f} a month at {price:g} per GB"


def show_thinned(result: ThinResult, price: float | None) -> None:
    """Prints the steps that were thinned, or would be, and the bytes that this frees."""
    rows = [
        (
            f"{step.number:,}",
            format_size(step.before_nbytes),
            format_size(step.after_nbytes),
            printable(", ".join(step.dropped)),
        )
        for step in result.thinned
    ]
    if rows:
        table(("step", "before", "after", "removed"), rows, right=(0, 1, 2))
    for path, reason in result.kept.items():
        print(f"  full: {printable(path)}: {printable(reason)}")
    verb = "would free" if result.is_dry_run else "freed"
    cost = f", {price_of(result.freed_nbytes, price)}" if price is not None else ""
    print(f"{verb} {format_size(result.freed_nbytes)} in {count(len(rows), 'step')}{cost}")


# ---- du ------------------------------------------------------------------------------------------


def show_bytes(root: str, found: Sequence[StepBytes], price: float | None) -> None:
    """Prints the bytes of each step, their sums, and what could be removed."""
    from ckpt_tools.operations.run_bytes import THIN

    names = ("model", "optimizer", "other", "reclaimable")

    def row(name: str, total: int, parts: Iterable[int], why: str) -> tuple[str, ...]:
        return (name, format_size(total), *(format_size(n) if n else "-" for n in parts), why)

    rows = [
        row(
            printable(one.step.name),
            one.step.nbytes,
            (getattr(one, n) for n in names),
            one.why if one.why != THIN else "",
        )
        for one in found
    ]
    sums = [sum(getattr(one, name) for one in found) for name in names]
    total = sum(one.step.nbytes for one in found)
    rows.append(row("all", total, sums, ""))
    if any(cells[-1] for cells in rows):
        table(("name", "bytes", *names, "note"), rows, right=range(1, 6))
    else:
        table(("name", "bytes", *names), [cells[:-1] for cells in rows], right=range(1, 6))
    _show_stored([one.step for one in found])
    cost = f": {price_of(sums[-1], price)}" if price is not None else ""
    print(f"{format_size(sums[-1])} of {format_size(total)} can be removed by ckpt thin{cost}")
    if any(one.why == THIN for one in found):
        print(f"  {THIN.replace('ROOT', shlex.quote(redacted(root)))}")
