"""Opens the destination of a path or URL, and the root of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckpt_tools.publish.base import Destination
from ckpt_tools.publish.local_destination import LocalDestination
from ckpt_tools.publish.local_root import LocalRoot
from ckpt_tools.publish.run_root import RunRoot
from ckpt_tools.storage import check_url, is_url, local_path


def open_destination(
    path: str | os.PathLike[str],
    options: Mapping[str, Any] | None = None,
    accept: Callable[[str], None] | None = None,
) -> Destination:
    """Returns the destination of a path or URL.

    Args:
        path: a path or a URL.
        options: those of the object store, as fsspec takes them.
        accept: is called with the complete staging directory, and raises to keep the result from
            being published. On a disk only.
    """
    where = os.fspath(path)
    if not is_url(where):
        return LocalDestination(Path(local_path(where)), accept)
    from ckpt_tools.publish.bucket import RemoteDestination  # it imports much

    return RemoteDestination(where, options)


def open_root(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> RunRoot:
    """Returns the root of a run.

    Args:
        path: a path or a URL.
        options: of the object store, as fsspec takes them. A directory ignores them.

    Raises:
        StorageError: the URL has an empty segment.
    """
    where = os.fspath(path)
    if not is_url(where):
        return LocalRoot(Path(local_path(where)))
    check_url(where)
    from ckpt_tools.publish.bucket_root import BucketRoot  # it imports much

    return BucketRoot(where, options)
