"""Formats of other packages, from the entry-point group `ckpt_tools.formats`.

`docs/how-to/add-a-format.md` shows a package that adds one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from ckpt_tools.core.logs import log
from ckpt_tools.errors import printable
from ckpt_tools.formats.base import Format, suffix_of_format

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "ckpt_tools.formats"
_NAMES = ("NAME", "LOOKS_FOR", "recognise", "read_catalog", "locate", "guess", "lay_out")


@cache
def external_formats(taken: frozenset[str]) -> tuple[Format, ...]:
    """Loads the formats of installed packages. One that cannot be used is named in the log.

    Args:
        taken: names and suffixes of other formats. A format must not take one of these.
    """
    from importlib.metadata import entry_points  # `ckpt inspect` should not wait for it

    found: list[Format] = []
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        form = _load(point)
        if form is None:
            continue
        names = {name for name in (form.NAME, suffix_of_format(form)) if name}
        if both := sorted(names & taken):
            what = printable(point.value)
            log.warning("the format %s is not used: %s is another format's", what, both[0])
            continue
        taken |= names
        found.append(form)
    return tuple(found)


def recognised(formats: Iterable[Format], files: Mapping[str, int]) -> Format | None:
    """Returns the first format that a directory has; one that fails is named in the log.

    Args:
        formats: of other packages.
        files: bytes of each file, by name.
    """
    for form in formats:
        try:
            if form.recognise(files):
                return form
        except Exception as error:  # noqa: BLE001  # the code of another package
            log.warning("the format %s failed: %r", printable(str(form.NAME)), error)
    return None


def _load(point: EntryPoint) -> Format | None:
    try:
        form = point.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the code of another package
        log.warning("the format %s cannot be loaded: %s", printable(point.value), error)
        return None
    missing = [name for name in _NAMES if not hasattr(form, name)]
    if missing:
        log.warning("the format %s lacks %s", printable(point.value), ", ".join(missing))
        return None
    return form  # type: ignore[no-any-return]
