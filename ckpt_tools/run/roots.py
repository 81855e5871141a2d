"""Opens the root of a run: a directory, or a prefix of an object store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_tools.publish.destinations import refuse_tilde
from ckpt_tools.run.base import RunRoot
from ckpt_tools.run.disk_root import LocalRoot
from ckpt_tools.storage import check_url, is_url, local_path


def open_root(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> RunRoot:
    """Returns the root of a run.

    Args:
        path: a path or a URL.
        options: of the object store, as fsspec takes them. A directory ignores them.

    Raises:
        StorageError: the URL has an empty segment.
        PlanError: the path begins with `~`.
    """
    where = os.fspath(path)
    refuse_tilde(where)
    if not is_url(where):
        return LocalRoot(Path(local_path(where)))
    check_url(where)
    from ckpt_tools.run.bucket_root import BucketRoot  # it imports much

    return BucketRoot(where, options)
