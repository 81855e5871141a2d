"""Refuses destinations, with the same words for a path and a prefix."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.errors import StorageError, printable

_SHOWN = 5


def refuse_existing(where: str, can_be_replaced: bool) -> StorageError:
    """Returns the error for a destination that exists, if no `--overwrite` was given."""
    hint = "choose another, or replace it with --overwrite" if can_be_replaced else "choose another"
    return StorageError(f"the destination exists: {printable(where)}", hint=hint)


def refuse_foreign(where: str, foreign: Sequence[str]) -> StorageError:
    """Returns the error for a destination that holds files of no checkpoint."""
    return StorageError(
        "the destination holds files that --overwrite never replaces:"
        f" {printable(', '.join(foreign[:_SHOWN]))} ({printable(where)})",
        hint="move them away, or choose another destination; --overwrite replaces checkpoints only",
    )
