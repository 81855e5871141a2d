"""Rows of data as the loop sees them: a batch, and what every kind of data set offers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

IGNORED = -100  # a target that is not trained on, as `F.cross_entropy` has it
_BLOCKS = 256


class DataError(Exception):
    """A data file does not match its description. This was found during training."""


class Batch(NamedTuple):
    """Rows of tokens, or of a factory's inputs.

    Attributes:
        inputs, targets: `[B, T]` int64, or `[B, ...]`. A target of `IGNORED` is not trained on.
        documents: `[B, T]` int64, the number of each token's example in its row; -1 for padding.
            None if each row is one stretch of text.
        num_targets: targets that are trained on, in the rows of all ranks and micro-batches.
    """

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None
    num_targets: int

    def to(self, device: torch.device) -> Batch:
        """Copies it to a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Copies it to pinned memory, from which a GPU reads while the CPU goes on."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Any) -> Batch:
        changed = (None if tensor is None else change(tensor) for tensor in self[:3])
        return Batch(*changed, self.num_targets)

    def chunk(self, number: int) -> Iterator[Batch]:
        """Yields micro-batches."""
        parts = ([None] * number if t is None else t.chunk(number) for t in self[:3])
        yield from (Batch(*rows, self.num_targets) for rows in zip(*parts, strict=True))


class DataSet(Protocol):
    """Rows that are trained on, in a fixed order."""

    name: str

    @property
    def identity(self) -> dict[str, Any]:
        """Name, number of tokens and fingerprint, and the tokenizer: a checkpoint holds them."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def batch(self, numbers: Sequence[int], mine: slice) -> Batch:
        """Returns this rank's part of a batch.

        Args:
            numbers: of the rows of all ranks.
            mine: which of them are this rank's.

        Raises:
            DataError: the file does not match its description.
        """


def fingerprint(ids: np.ndarray[Any, Any], known: str = "") -> str:
    """Returns 16 hex digits that distinguish one array from another.

    Args:
        ids: the array. Only type, length and 256 blocks of 4 KiB are read, because a file of
            terabytes must not be read whole at every start.
        known: a digest of all ids, if `prepare` has noted one.
    """
    digest = hashlib.blake2b(f"{ids.dtype.str} {len(ids)} {known}".encode(), digest_size=8)
    block = 4096 // ids.itemsize
    starts = (
        np.linspace(0, max(0, len(ids) - block), _BLOCKS, dtype=np.int64)
        if len(ids) > block * _BLOCKS
        else range(0, len(ids), block)
    )
    for start in starts:
        digest.update(np.ascontiguousarray(ids[start : start + block]).tobytes())
    return digest.hexdigest()
