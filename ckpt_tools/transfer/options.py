"""The options that operations share, and the defaults that belong to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypedDict

from ckpt_tools.ranks.base import Group

Path_ = str | os.PathLike[str]


class TorchType(Protocol):
    """An element type of torch, such as `torch.bfloat16`, in modules that do not import torch."""

    @property
    def is_floating_point(self) -> bool:
        """Tells whether its values are floating-point numbers."""
        ...


Dtype = str | TorchType
ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


class Reading(TypedDict, total=False):
    """How to read; every operation takes these.

    Attributes:
        jobs: number of threads; see `num_threads` where absent.
        memory_bytes: budget of all buffers together; 64 MiB where absent.
        shapes: a file with the shapes of parameters, for FSDP1's flat parameters, which lack them.
        storage_options: of the source's object store, as fsspec takes them. The rest comes from its
            own configuration.
        group: the processes that share the work; this one alone where absent. All call the
            operation with the same arguments.
        progress: called with a label and a total in bytes. Returns a context with a function that
            takes the number of bytes done.
    """

    jobs: int | None
    memory_bytes: int | None
    shapes: Path_ | None
    storage_options: Mapping[str, Any] | None
    progress: ProgressBar | None
    group: Group | None


class Options(Reading, total=False):
    """How to read and write; every operation that writes a checkpoint takes these.

    Attributes:
        overwrite: replace a checkpoint at the destination, once the new one is complete.
        dry_run: only plan, and write nothing.
        resume: continue an earlier, interrupted attempt of the same operation, and keep what this
            one finishes if it is interrupted too. On a disk or in S3; `copy` always does so.
    """

    overwrite: bool
    dry_run: bool
    resume: bool


def no_bar(label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Returns a progress bar that shows nothing."""
    del label, total
    return nullcontext(lambda _: None)
