"""Prints aligned tables that fit the terminal, and styled text."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TextIO

BOLD, RED, GREEN, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[0m"
_LEAST = 28  # columns that a name keeps when it is shortened
_SENTENCE, _LAST = 32, 20  # columns that a sentence keeps before names are shortened
_ANY = 1 << 30
_GAP = 2


def style(text: str, code: str, stream: TextIO | None = None) -> str:
    """Returns text in a colour or bold, if a stream is a terminal that has them.

    `NO_COLOR` turns them off.

    Args:
        text: to style.
        code: a sequence of ANSI.
        stream: where it will be printed; stdout by default.
    """
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return text if is_plain or not (stream or sys.stdout).isatty() else f"{code}{text}{_PLAIN}"


def terminal_width() -> int:
    """Returns the columns of the terminal, or of `COLUMNS`; without either there is no limit."""
    return shutil.get_terminal_size((_ANY, 24)).columns


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Collection[int] = (),
    whole: Collection[int] = (),
) -> None:
    """Prints rows under a head, within the width of the terminal.

    If they do not fit, columns without any value are left out, and texts are shortened in the
    middle. Those of the last column continue on the next line instead. Numbers are never shortened:
    columns that find no room follow in a second table. Output to a pipe or a file stays whole.

    Args:
        head: the name of each column.
        rows: one text for each column.
        right: the columns that are aligned to the right, such as numbers.
        whole: the columns whose texts continue on the next line, and are never shortened.
    """
    cells = [list(head), *map(list, rows)]
    width = terminal_width()
    columns = list(zip(*cells, strict=True))
    if _total(_sizes(columns)) > width:
        used = [n for n, column in enumerate(columns) if not n or set(column[1:]) - {"", "-"}]
        right = {used.index(number) for number in right if number in used}
        whole = {used.index(number) for number in whole if number in used}
        columns = [columns[number] for number in used]
    last = len(columns) - 1
    sizes = _sizes(columns)
    texts = [number for number in range(last) if number not in right]
    texts.sort(key=lambda number: -sizes[number])
    least = [(number, _LEAST) for number in texts]
    if last not in right:
        least = [(last, _SENTENCE), *least, (last, _LAST)]
    for number, smallest in least:
        spare = max(0, sizes[number] - smallest)
        sizes[number] -= min(spare, max(0, _total(sizes) - width))
    for number in (number for number in texts if number not in whole):
        columns[number] = tuple(_shortened(columns[number], sizes[number]))
    end = last
    while end > 1 and _total([*sizes[:end], sizes[last]]) > width:
        end -= 1
    shown = [*range(end), last] if last else [0]
    _print_columns(columns, sizes, right, shown)
    if end < last:
        moved = [0, *range(end, last)]
        others = list(zip(*(columns[number] for number in moved), strict=True))
        print()
        table(others[0], others[1:], {moved.index(n) for n in right if n in moved})


def _sizes(columns: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(_cells, column)) for column in columns]


def _total(sizes: Sequence[int]) -> int:
    return sum(sizes) + _GAP * len(sizes)


def _cells(text: str) -> int:
    """Returns the width of a string on a terminal, in columns."""
    if text.isascii():
        return len(text)
    import unicodedata  # only for signs beyond ASCII

    return sum(
        0 if unicodedata.combining(sign) else 1 + (unicodedata.east_asian_width(sign) in "WF")
        for sign in text
    )


def _shortened(texts: Sequence[str], room: int) -> list[str]:
    """Returns texts without their middle; as they are if two would become the same."""
    for start in (room // 2, room // 3, room // 6):
        end = room - 1 - start
        if end > 0:
            short = [x if len(x) <= room else f"{x[:start]}…{x[-end:]}" for x in texts]
            if len(set(short)) == len(set(texts)):
                return short
    return list(texts)


def _print_columns(
    columns: Sequence[Sequence[str]],
    sizes: Sequence[int],
    right: Collection[int],
    shown: Sequence[int],
) -> None:
    for number, row in enumerate(zip(*columns, strict=True)):
        parts = {at: _wrapped(row[at], sizes[at]) for at in shown}
        for height in range(max(map(len, parts.values()))):
            line = ""
            for at, lines in parts.items():
                text = lines[height] if height < len(lines) else ""
                space = " " * max(0, sizes[at] - _cells(text))
                line += " " * _GAP + (space + text if at in right else text + space)
            print(style(line.rstrip(), BOLD) if number == 0 else line.rstrip())


def _wrapped(text: str, size: int) -> list[str]:
    """Returns the lines of a cell, split after a space, a dot or a slash where possible."""
    lines, size = [], max(1, size)
    while len(text) > size and _cells(text) > size:  # combining signs take no column
        cut = 1 + max(text.rfind(sign, 0, size) for sign in " ./")
        if text[size] == " ":
            cut = size
        cut = cut if cut > size // 2 else size
        lines.append(text[:cut].rstrip())
        text = text[cut:].lstrip(" ")
    return [*lines, text]
