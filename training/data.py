"""Tokens on disk, and the global order in which a run sees its rows on any number of ranks.

    python -m training.data prepare corpus/ --out tokens.npy                 # bytes
    python -m training.data prepare corpus/ --out tokens.npy --tokenizer llama/

A token file is a NumPy array on disk, which is mapped and never loaded. `tokens.npy.json` beside it
describes its ids. `training.extras.prepare` writes both; `training.extras.examples` has prompts and
answers.
"""

from __future__ import annotations

import copy
import json
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.batch import Batch, DataError, DataSet, fingerprint
from training.config import ConfigError
from training.extras.examples import Examples, open_examples
from training.extras.local_models import tokenizer_fingerprint


@dataclass(frozen=True)
class Tokens:
    """A token file: mapped ids `[n]`, and the size of their vocabulary."""

    ids: np.ndarray[Any, Any]
    seq_len: int
    vocab_size: int
    name: str
    tokenizer: str = "bytes"
    tokenizer_fingerprint: str = ""
    digest: str = ""  # of all ids, computed when the file was prepared

    @cached_property
    def identity(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "tokens": len(self.ids),
            "fingerprint": fingerprint(self.ids, self.digest),
            "tokenizer": self.tokenizer,
        }

    def __len__(self) -> int:
        """Returns the number of sequences: `seq_len` inputs each, and targets shifted by one."""
        return max(0, (len(self.ids) - 1) // self.seq_len)

    def batch(self, numbers: Sequence[int], mine: slice) -> Batch:
        size = self.seq_len
        rows = np.stack([self.ids[n * size : (n + 1) * size + 1] for n in numbers[mine]])
        tokens = torch.from_numpy(rows.astype(np.int64))
        if (worst := int(tokens.max())) >= self.vocab_size:
            raise DataError(
                f"{self.name} holds the id {worst:,} in sequences {min(numbers)} to {max(numbers)},"
                f" and promises {self.vocab_size:,}"
            )
        return Batch(tokens[:, :-1], tokens[:, 1:], None, len(numbers) * size)


def open_tokens(
    path: str,
    seq_len: int,
    batch_size: int,
    vocab_size: int,
    key: str = "data.train",
    packs: bool = False,
) -> Tokens | Examples:
    """Maps a token file, or the files of examples.

    An empty path means the sources of Python's standard library, as bytes.

    Raises:
        ConfigError: the file is not a token file, is truncated, is too short for one batch, or has
            a larger vocabulary than the model.
    """
    about = _about(path, key) if path else {}
    tokens: Tokens | Examples
    if "examples" in about:
        tokens = open_examples(path, about, seq_len, packs)
    else:
        tokens = _map(path, about, seq_len, key) if path else _standard_library(seq_len)
    if tokens.vocab_size > vocab_size:
        raise ConfigError(
            f"{key}: {tokens.name} has a vocabulary of {tokens.vocab_size:,} ids, the model one of"
            f" {vocab_size:,}"
        )
    if len(tokens) < batch_size:
        raise ConfigError(
            f"{key}: {tokens.name} is too short: {len(tokens.ids):,} tokens are {len(tokens):,}"
            f" sequences of {seq_len}, and one batch takes {batch_size:,}"
        )
    return tokens


def _about(path: str, key: str) -> dict[str, Any]:
    """Returns the description beside a token file."""
    try:
        Path(path).open("rb").close()
        about = json.loads(Path(f"{path}.json").read_text())
    except OSError as error:
        is_raw = isinstance(error, FileNotFoundError) and Path(path).exists()
        remedy = ": make it with `python -m training.data prepare`" * is_raw
        raise ConfigError(
            f"{key}: cannot open {error.filename or path}: {error.strerror or error}{remedy}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{key}: {path}.json is no JSON: {error}") from error
    if not isinstance(about, dict):
        raise ConfigError(f"{key}: {path}.json was not made by `python -m training.data prepare`")
    return about


def _map(path: str, about: Mapping[str, Any], seq_len: int, key: str) -> Tokens:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        vocab_size, expected = int(about["vocab_size"]), int(about["tokens"])
        if not isinstance(ids, np.ndarray) or vocab_size < 1:
            raise ValueError("no array, or no vocabulary")
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot open {error.filename or path}: {error.strerror or error}"
        ) from error
    except (ValueError, KeyError, TypeError, EOFError, OverflowError) as error:
        raise ConfigError(
            f"{key}: {path} is truncated, or was not made by `python -m training.data prepare`:"
            f" {error}"
        ) from error
    if ids.ndim != 1 or ids.dtype.kind != "u" or len(ids) != expected:
        raise ConfigError(
            f"{key}: {path} holds {ids.dtype} {list(ids.shape)}, and {path}.json promises"
            f" {expected:,} tokens"
        )
    notes = (str(about.get(name, "")) for name in ("tokenizer", "tokenizer_fingerprint", "digest"))
    return Tokens(ids, seq_len, vocab_size, path, *notes)


def _standard_library(seq_len: int) -> Tokens:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    ids = np.frombuffer(text, np.uint8)
    return Tokens(ids, seq_len, 256, "the standard library's sources")


def check_tokenizer(tokens: Tokens | Examples, model: Path, key: str = "data.train") -> None:
    """Refuses tokens of another tokenizer than the one beside a model's weights.

    Raises:
        ConfigError: the tokenizers differ.
    """
    mine = tokenizer_fingerprint(model)
    if mine and tokens.tokenizer_fingerprint != mine:
        is_known = tokens.tokenizer_fingerprint or tokens.tokenizer == "bytes"
        made_by = (
            tokens.tokenizer
            if is_known
            else f"{tokens.tokenizer or 'unknown'}, without a fingerprint"
        )
        raise ConfigError(
            f"{key}: the tokens of {tokens.name} are of another tokenizer ({made_by}) than the"
            f" model's, in {model}: python -m training.data prepare --tokenizer {model}; or set"
            " data.check_tokenizer = false"
        )


# ---- order ---------------------------------------------------------------------------------------


def shuffled(index: int, size: int, seed: int, epoch: int) -> int:
    """Returns the element at a position of a random order of `range(size)`.

    The order is a bijection that is computed, not stored. It has four rounds of a Feistel network
    over a power of four that is at least `size`. Results outside of the range are put through the
    network again.
    """
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_ in range(4):
            left, right = right, left ^ (_mix(right, seed, epoch, round_) & mask)
        index = (left << half) | right
        if index < size:
            return index


def _mix(value: int, seed: int, epoch: int, round_: int) -> int:
    """Returns 64 well-mixed bits of the four arguments (SplitMix64's finalizer)."""
    word = (
        value + 0x9E3779B97F4A7C15 * (1 + round_ + 4 * epoch) + 0xD1B54A32D192ED03 * (seed + 1)
    ) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)


class Sampler:
    """A sampler of sequence numbers, the same on all ranks; each rank takes its part of a batch.

    Its state is a position in one global order: the epoch, and the number of its sequences already
    used. The state does not depend on ranks or batches. A run can therefore resume with other
    numbers of both, and neither repeats nor skips a sequence.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = True,
        may_change: bool = False,
    ) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.drop_last, self.may_change = drop_last, may_change
        self.epoch = self.index = 0

    def next_batch(self, batch_size: int) -> list[int]:
        """Returns the next `batch_size` numbers of the global order.

        If the rest of an epoch is too small for a batch, it is dropped, or completed from the next
        epoch.
        """
        if batch_size > self.size:
            raise ValueError(f"a batch of {batch_size} from {self.size} sequences")
        if self.drop_last and self.size - self.index < batch_size:
            self._turn()
        batch: list[int] = []
        while len(batch) < batch_size:
            if self.index == self.size:
                self._turn()
            at = self.index
            batch.append(shuffled(at, self.size, self.seed, self.epoch) if self.shuffle else at)
            self.index += 1
        return batch

    def _turn(self) -> None:
        self.epoch, self.index = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index, "size": self.size, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Sets the position. If other data is allowed and given, the next epoch begins.

        Raises:
            ConfigError: the position belongs to another order: other data, or another sequence
                length or seed.
        """
        if self.may_change and state["size"] != self.size and state["seed"] == self.seed:
            self.epoch, self.index = state["epoch"] + 1, 0
            return
        where = "set it back, or train in another run.dir"
        if state["size"] != self.size:
            raise ConfigError(
                f"the data has {self.size:,} sequences, and the checkpoint was trained on"
                f" {state['size']:,}: data.train or data.seq_len was changed; {where}"
            )
        if state["seed"] != self.seed:
            raise ConfigError(
                f"run.seed = {self.seed:,}, and the checkpoint has the order of run.seed ="
                f" {state['seed']:,}: {where}"
            )
        self.epoch, self.index = state["epoch"], state["index"]


class Reader:
    """Reads one batch ahead, in a thread, while the step before it runs.

    The position in the data is the sampler's. A batch that is only read ahead does not count.

    Args:
        rows: the data.
        sampler: of the numbers of rows.
        size: rows of a batch, over all ranks.
        mine: this rank's rows of a batch.
        device: on a GPU, batches are copied to pinned memory first.
    """

    def __init__(
        self, rows: DataSet, sampler: Sampler, size: int, mine: slice, device: torch.device
    ) -> None:
        self.rows, self.sampler, self.size, self.mine = rows, sampler, size, mine
        self.is_pinned = device.type == "cuda"
        self.thread = ThreadPoolExecutor(1, "reader")
        self.ahead: Future[tuple[list[int], Batch]] | None = None

    def next_batch(self) -> Batch:
        """Returns this rank's part of the next batch, and begins to read the one after it."""
        numbers = self.sampler.next_batch(self.size)
        read, batch = self.ahead.result() if self.ahead else self._read(numbers)
        if read != numbers:  # the sampler was set to another position
            _, batch = self._read(numbers)
        following = copy.copy(self.sampler)
        self.ahead = self.thread.submit(lambda: self._read(following.next_batch(self.size)))
        return batch

    def _read(self, numbers: list[int]) -> tuple[list[int], Batch]:
        batch = self.rows.batch(numbers, self.mine)
        return numbers, batch.pinned() if self.is_pinned else batch


if __name__ == "__main__":
    from training.extras.prepare import main

    main()
