"""Prints findings: the problems of a checkpoint, and the differences of two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ckpt_tools.cli.render import (
    count,
    format_size,
    show_transfer,
    some_names,
)
from ckpt_tools.cli.tables import BOLD, GREEN, RED, style, table
from ckpt_tools.core.naming import is_optimizer_state
from ckpt_tools.errors import printable
from ckpt_tools.operations.diff import Difference, DiffResult
from ckpt_tools.operations.salvage import SalvageResult
from ckpt_tools.operations.seal import SealResult
from ckpt_tools.operations.verify import VerifyResult

_SHOWN = 20


def show_verdict(result: VerifyResult, quick: bool = False) -> None:
    """Prints a verification's problems: files, entries, and then how much can still be read."""
    of_files = [p for p in result.problems if not p.fqn]
    for problem in of_files:
        print(f"  {problem}")
    found = [p for p in result.problems if p.fqn]
    if found:
        rows = [
            (
                printable(p.fqn),
                printable(p.file) or "-",
                "-" if p.start is None else str(p.start),
                "-" if p.rank is None else str(p.rank),
                p.what.removeprefix("is damaged: "),
            )
            for p in found[:_SHOWN]
        ]
        table(("entry", "file", "byte", "rank", "what"), rows, right=(2, 3), whole=(0, 1))
        _more(len(found))
    if result.findings:
        seen = [
            (
                printable(f.fqn),
                str(f.nans or "-"),
                str(f.infs or "-"),
                "zero" if f.is_zero else "one value" if f.is_constant else "-",
            )
            for f in result.findings[:_SHOWN]
        ]
        table(("tensor", "NaN", "infinite", "all the same"), seen, right=(1, 2), whole=(0,))
        _more(len(result.findings))
    if result.problems and result.num_entries:
        print(
            f"  {result.num_entries - len(result.lost)} of {count(result.num_entries, 'entry')} can"
            " still be read: ckpt salvage"
        )
    if result.unknown:
        why = "which --quick does not read" if quick else "of which there is no checksum"
        print(f"  not compared: the bytes of {count(len(result.unknown), 'file')}, {why}")
    if result.unread:
        some = ", ".join(
            f"{printable(name)} ({printable(kind)})"
            for name, kind in list(result.unread.items())[:4]
        )
        print(
            f"  not read: {count(len(result.unread), 'tensor')} of kinds that ckpt does not read:"
            f" {some}"
        )
    if result.extra:
        print(
            f"  not compared: {count(len(result.extra), 'file')} that no save wrote:"
            f" {some_names(result.extra)}"
        )
    for note in result.notes:
        print(f"  note: {note}")
    print(f"{style(printable(result.path), BOLD)}: {_verdict(result)}")


def _verdict(result: VerifyResult) -> str:
    compared = ", ".join(
        (count(result.num_files, "file"), format_size(result.nbytes), f"{result.seconds:.2f} s")
    )
    if result.problems:
        return f"{style('damaged', RED)}: {count(len(result.problems), 'problem')} ({compared})"
    if result.is_sealed and result.unknown:
        return f"files and sizes are as the manifest says; not all bytes were compared ({compared})"
    if result.is_sealed:
        return f"{style('whole', GREEN)}: as its manifest says ({compared})"
    if result.unknown:
        return f"sound in structure, as far as that can be told without a manifest ({compared})"
    return (
        f"{style('whole', GREEN)}: sound in structure, and every CRC-32 is right; it has no"
        f" manifest ({compared})"
    )


# ---- diff ----------------------------------------------------------------------------------------


def show_diff(result: DiffResult) -> None:
    """Prints how two checkpoints differ: names, then shapes and types, then values by module."""
    for names, path in ((result.only_a, result.a), (result.only_b, result.b)):
        if names:
            print(f"  only in {printable(path)}: {count(len(names), 'entry')}")
            grouped = Counter(map(_module, names))
            _some(
                printable(name) + (f"  ({number:,})" if number > 1 else "")
                for name, number in grouped.items()
            )
    if result.changes:
        kinds = Counter(
            (_module(c.fqn), _kind(c.a_shape, c.a_dtype), _kind(c.b_shape, c.b_dtype))
            for c in result.changes
        )
        changed = [
            (printable(name), f"{number:,}", a, b)
            for (name, a, b), number in list(kinds.items())[:_SHOWN]
        ]
        table(("shape or type", "entries", "a", "b"), changed, right=(1,))
        _more(len(kinds))
    groups = _by_module(result.differences)
    if groups:
        of_groups = [_group_row(name, found) for name, found in list(groups.items())[:_SHOWN]]
        head = ("entry", "differ", "rel norm", "max |a-b|", "cosine", "first")
        table(head, of_groups, right=(1, 2, 3, 4))
        _more(len(groups))
    for note in result.notes:
        print(f"  note: {note}")
    print(_summary(result))


def _some(names: Iterable[str]) -> None:
    names = list(names)
    for name in names[:_SHOWN]:
        print(f"    {name}")
    _more(len(names))


def _more(number: int) -> None:
    if number > _SHOWN:
        print(f"  … and {number - _SHOWN:,} more; --json has them all")


def _kind(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype} {list(shape)}"


def _module(fqn: str) -> str:
    """Returns a name with `*` for each number, such as that of a layer."""
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


def _by_module(differences: Sequence[Difference]) -> dict[str, list[Difference]]:
    """Groups differences by name without layer numbers.

    Groups of weights come before those of optimizers, and the worst is the first of each.
    """
    groups: dict[str, list[Difference]] = {}
    for found in differences:
        groups.setdefault(_module(found.fqn), []).append(found)
    order = {
        name: (is_optimizer_state(found[0].fqn), -max(one.size for one in found))
        for name, found in groups.items()
    }
    return {name: groups[name] for name in sorted(groups, key=order.__getitem__)}


def _group_row(name: str, found: Sequence[Difference]) -> tuple[str, ...]:
    worst = max(found, key=lambda one: one.size)
    shown = printable(name) + (f" ({len(found):,})" if len(found) > 1 else "")
    different = sum(f.num_different for f in found)
    if worst.is_object or worst.is_code:
        return shown, f"{different:,} B" if worst.is_object else f"{different:,}", *"---", ""
    cosines = [f.cosine for f in found if f.cosine is not None]
    numbers = [part for part in worst.fqn.split(".") if part.isdigit()]
    which = f"*={','.join(numbers)} " if len(found) > 1 else ""
    return (
        shown,
        _part(different, sum(f.numel for f in found)),
        "-" if worst.rel_norm is None else f"{worst.rel_norm:.3g}",
        f"{max(f.max_abs for f in found):.3g}",
        f"{min(cosines):.6f}" if cosines else "-",
        f"{which}{list(worst.first)}",
    )


def _part(number: int, numel: int) -> str:
    """Returns how many elements differ: a number if they are few, else a share."""
    share = number / max(1, numel)
    return f"{share:.1%}" if number >= 1000 and share >= 0.001 else f"{number:,}"


def _summary(result: DiffResult) -> str:
    how = (
        f", {result.num_by_fingerprint:,} of them by fingerprint"
        if result.num_by_fingerprint
        else ""
    )
    read = f"{format_size(result.compared_nbytes)} compared, {result.seconds:.2f} s"
    if result.is_same:
        return f"{style('the same', GREEN)}: {count(result.num_equal, 'entry')}{how} ({read})"
    parts = [
        f"{len(result.differences):,} differ" if result.differences else "",
        f"{len(result.changes):,} of another shape or type" if result.changes else "",
        f"{len(result.only_a):,} only in a" if result.only_a else "",
        f"{len(result.only_b):,} only in b" if result.only_b else "",
    ]
    return (
        f"{style('different', RED)}: {', '.join(filter(None, parts))}; {result.num_equal:,}"
        f" equal{how} ({read})"
    )


# ---- seal and salvage ----------------------------------------------------------------------------


def show_seal(result: SealResult) -> None:
    """Prints the result of a seal."""
    nbytes = format_size(sum(result.files.values()))
    print(
        f"sealed {style(printable(result.path), BOLD)}: {count(len(result.files), 'file')},"
        f" {nbytes}, {count(result.num_tensors, 'tensor')}"
    )
    if result.unknown:
        print(
            "  sealed without a check, since they had no checksums:"
            f" {count(len(result.unknown), 'file')}"
        )


def show_salvage(result: SalvageResult) -> None:
    """Prints the written and the lost entries."""
    show_transfer(result.written)
    if result.lost:
        print(f"  {style('lost', RED)}: {count(len(result.lost), 'entry')}")
        _some(printable(name) for name in result.lost)
    else:
        print("  nothing was lost")
