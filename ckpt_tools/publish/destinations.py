"""Opens the destination of a path or URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckpt_tools.errors import PlanError, printable
from ckpt_tools.publish.base import Destination
from ckpt_tools.publish.disk.destination import LocalDestination, foreign_files
from ckpt_tools.storage import is_url, local_path


def refuse_tilde(path: str | os.PathLike[str]) -> None:
    """Refuses a path such as `~/run`, which would make a directory called `~`.

    Raises:
        PlanError: it begins so.
    """
    where = os.fspath(path)
    if isinstance(where, str) and where.startswith("~"):
        raise PlanError(
            f"a shell replaces '~', and Python does not: {printable(where)}",
            hint=f"pass os.path.expanduser({where!r}); a name that begins so is written './~…'",
        )


def open_destination(
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    accept: Callable[[str], None] | None = None,
    find_foreign: Callable[[Path], list[str]] = foreign_files,
) -> Destination:
    """Returns the destination of a path or URL.

    Args:
        path: a path or a URL.
        options: those of the object store, as fsspec takes them.
        accept: is called with the complete staging directory, and raises to keep the result from
            being published. On a disk only.
        find_foreign: returns the files of an existing result that must not be replaced. On a disk
            only.

    Raises:
        PlanError: the path begins with `~`.
    """
    where = os.fspath(path)
    refuse_tilde(where)
    if not is_url(where):
        return LocalDestination(Path(local_path(where)), accept, find_foreign)
    from ckpt_tools.publish.bucket.destination import RemoteDestination  # it imports much

    return RemoteDestination(where, options)
