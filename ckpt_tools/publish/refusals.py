"""Refuses destinations, with the same words for a path and a prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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


def refuse_incomplete(
    files: Mapping[str, int], sizes_of: Callable[[Sequence[str]], Mapping[str, int]], where: str
) -> None:
    """Refuses to publish if files of the result are not there.

    A writer that made no progress for long may have been taken for dead, and its files removed.

    Args:
        files: the bytes of each file.
        sizes_of: returns the bytes of files, as far as they exist.
        where: path or URL of the result.

    Raises:
        StorageError: a file is missing, or has another size.
    """
    there = sizes_of(list(files))
    for name, nbytes in files.items():
        if there.get(name, -1 if nbytes else 0) != nbytes:
            found = f"{there[name]} bytes" if name in there else "no file"
            raise StorageError(
                f"a file is not what was written: expected {nbytes} bytes, got {found}"
                f" ({printable(name)} in {printable(where)})",
                hint="nothing was published; another program removed or changed it (`ckpt prune`"
                " does after --grace without progress)",
            )
