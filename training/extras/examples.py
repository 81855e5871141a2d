"""Examples of prompts and answers, or of chat turns: padded, or packed several to a row.

Beside `chat.npy`, the ids, lie `chat.npy.mask.npy` (1: trained on) and `chat.npy.starts.npy`.
`training.extras.prepare` writes these files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from training.batch import IGNORED, Batch, DataError
from training.config import ConfigError

PARTS = {"mask": ".mask.npy", "starts": ".starts.npy"}


@dataclass(frozen=True)
class Examples:
    """Mapped examples. A row holds one of them, or with `packs` as many as fit.

    Attributes:
        ids, mask: `[n]`; the examples one after another, and 1 where an id is trained on.
        starts: `[N + 1]`; where each example begins, and the end.
        seq_len: inputs of a row. A longer example is cut.
    """

    ids: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    seq_len: int
    packs: bool
    vocab_size: int
    name: str
    tokenizer: str
    tokenizer_fingerprint: str
    digest: str

    @cached_property
    def identity(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "tokens": len(self.ids),
            "fingerprint": f"{self.digest}-{self.seq_len}{'-packed' * self.packs}",
            "tokenizer": self.tokenizer,
        }

    @cached_property
    def rows(self) -> np.ndarray[Any, Any]:
        """The number of the first example of each row, and the end: `[rows + 1]`."""
        if not self.packs:
            return np.arange(len(self.starts))
        sizes, first, used = self._num_inputs(), [0], 0
        for number, size in enumerate(sizes.tolist()):
            if used + size > self.seq_len:
                first.append(number)
                used = 0
            used += size
        return np.array([*first, len(sizes)])

    def _num_inputs(self) -> np.ndarray[Any, Any]:
        return np.minimum(np.diff(self.starts) - 1, self.seq_len)

    @cached_property
    def num_idle(self) -> int:
        """The number of examples of which nothing is trained on, because they are cut."""
        begins = self.starts[:-1] + 1  # the first id of an example has no prediction
        bounds = np.stack((begins, begins + self._num_inputs()), axis=1).ravel()
        if bounds[-1] == len(self.mask):
            bounds = bounds[:-1]
        return int((np.add.reduceat(self.mask, bounds, dtype=np.int64)[::2] == 0).sum())

    @property
    def num_cut(self) -> int:
        """The number of examples that are longer than a row."""
        return int((np.diff(self.starts) - 1 > self.seq_len).sum())

    def __len__(self) -> int:
        return len(self.rows) - 1

    def batch(self, numbers: Sequence[int], mine: slice) -> Batch:
        shape = (len(numbers[mine]), self.seq_len)
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        documents = np.full(shape, -1, np.int64)
        for row, number in enumerate(numbers[mine]):
            at = 0
            for document, (start, size) in enumerate(self._parts(number)):
                ids = self.ids[start : start + size + 1].astype(np.int64)
                is_trained = self.mask[start + 1 : start + size + 1] == 1
                inputs[row, at : at + size] = ids[:-1]
                targets[row, at : at + size] = np.where(is_trained, ids[1:], IGNORED)
                documents[row, at : at + size] = document
                at += size
        num_targets = sum(
            int(self.mask[start + 1 : start + size + 1].sum())
            for number in numbers
            for start, size in self._parts(number)
        )
        if max(int(inputs.max()), int(targets.max())) >= self.vocab_size:
            raise DataError(f"{self.name} holds an id of {self.vocab_size:,} or more")
        return Batch(*map(torch.from_numpy, (inputs, targets, documents)), num_targets)

    def _parts(self, row: int) -> Iterator[tuple[int, int]]:
        """Yields where each example of a row begins, and its number of inputs."""
        for example in range(self.rows[row], self.rows[row + 1]):
            start, end = int(self.starts[example]), int(self.starts[example + 1])
            yield start, min(end - start - 1, self.seq_len)


def open_examples(path: str, about: Mapping[str, Any], seq_len: int, packs: bool) -> Examples:
    """Maps the files of examples.

    Raises:
        ConfigError: a file is missing, or does not fit the others.
    """
    try:
        ids, mask, starts = (
            np.load(path + suffix, mmap_mode="r", allow_pickle=False)
            for suffix in ("", *PARTS.values())
        )
        fits = (
            [array.ndim for array in (ids, mask, starts)] == [1, 1, 1]
            and ids.dtype.kind == "u"
            and mask.dtype == np.uint8
            and starts.dtype == np.int64
            and len(starts) > 1
            and len(ids) == len(mask) == int(starts[-1])
            and (np.diff(starts) > 1).all()
            and len(starts) - 1 == about["examples"]
        )
        vocab_size = int(about["vocab_size"])
        notes = [str(about[key]) for key in ("tokenizer", "tokenizer_fingerprint", "digest")]
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"data: the files of {path} are incomplete: {error!r}") from error
    if not fits or vocab_size < 1:
        raise ConfigError(f"data: the files of {path} do not belong together: prepare them again")
    return Examples(ids, mask, starts, seq_len, packs, vocab_size, path, *notes)
