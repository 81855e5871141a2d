"""Formats of other packages, from the entry-point group `ckpt_tools.formats`.

`docs/how-to/add-a-format.md` shows a package that adds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from ckpt_tools.core.logs import log
from ckpt_tools.errors import printable
from ckpt_tools.formats.base import Format

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "ckpt_tools.formats"
_NAMES = ("NAME", "LOOKS_FOR", "recognise", "read_catalog", "locate", "guess", "lay_out")


@cache
def external_formats() -> tuple[Format, ...]:
    """Loads the formats that installed packages offer. A broken one is named in the log."""
    from importlib.metadata import entry_points  # `ckpt inspect` should not wait for it

    found = (_load(point) for point in sorted(entry_points(group=GROUP), key=lambda p: p.name))
    return tuple(form for form in found if form is not None)


def recognised(files: Mapping[str, int]) -> Format | None:
    """Returns the first of these formats that a directory has; one that fails is named in the log.

    Args:
        files: bytes of each file, by name.
    """
    for form in external_formats():
        try:
            if form.recognise(files):
                return form
        except Exception as error:  # noqa: BLE001  # the code of another package
            log.warning("the format %s failed: %r", printable(str(form.NAME)), error)
    return None


def _load(point: EntryPoint) -> Format | None:
    try:
        form = point.load()
    except Exception as error:  # noqa: BLE001  # the code of another package
        log.warning("the format %s cannot be loaded: %s", printable(point.value), error)
        return None
    missing = [name for name in _NAMES if not hasattr(form, name)]
    if missing:
        log.warning("the format %s lacks %s", printable(point.value), ", ".join(missing))
        return None
    return form  # type: ignore[no-any-return]
