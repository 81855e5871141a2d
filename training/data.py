"""Tokens on disk, and the global order in which a run sees them, whatever the number of ranks.

    # bytes
    python -m training.data prepare corpus/*.txt --out tokens.npy
    # ids of a local tokenizer
    python -m training.data prepare corpus --out tokens.npy --tokenizer llama/

A token file is a NumPy array on disk, which is mapped and never loaded. `tokens.npy.json` beside it
describes its ids. JSONL files are examples of prompts and answers; see `training.examples`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from training.config import ConfigError, Data
from training.examples import (
    Batch,
    DataError,
    Examples,
    chat,
    fingerprint,
    open_examples,
    prepare_examples,
    write_header,
)

_READ = 4 << 20  # bytes of text to read, and tokenize, at once
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
)


@dataclass(frozen=True)
class Tokens:
    """A token file: mapped ids `[n]`, and the size of their vocabulary."""

    ids: np.ndarray[Any, Any]
    vocab_size: int
    name: str
    tokenizer: str = "bytes"
    tokenizer_fingerprint: str = ""
    digest: str = ""  # of all ids, computed when the file was prepared

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The identity of these tokens: name, number and fingerprint, and the tokenizer."""
        return {
            "name": self.name,
            "tokens": len(self.ids),
            "fingerprint": fingerprint(self.ids, self.digest),
            "tokenizer": self.tokenizer,
        }

    def windows(self, seq_len: int) -> int:
        """Returns the number of sequences: `seq_len` inputs each, and targets shifted by one."""
        return max(0, (len(self.ids) - 1) // seq_len)

    def sequences(self, numbers: Sequence[int], seq_len: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, `[len(numbers), seq_len]` int64 each."""
        rows = np.stack([self.ids[n * seq_len : (n + 1) * seq_len + 1] for n in numbers])
        tokens = torch.from_numpy(rows.astype(np.int64))
        if int(tokens.max()) >= self.vocab_size:
            worst = int(tokens.max())
            raise DataError(
                f"{self.name} holds the id {worst:,} in sequences {min(numbers)} to {max(numbers)},"
                f" and promises {self.vocab_size:,}"
            )
        return tokens[:, :-1], tokens[:, 1:]

    def batch(self, numbers: Sequence[int], seq_len: int, mine: slice) -> Batch:
        """Returns this rank's part of a batch of sequences."""
        inputs, targets = self.sequences(numbers[mine], seq_len)
        return Batch(inputs, targets, None, len(numbers) * seq_len)


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
        tokens = _map(path, about, key) if path else _standard_library()
    if tokens.vocab_size > vocab_size:
        raise ConfigError(
            f"{key}: {tokens.name} has a vocabulary of {tokens.vocab_size:,} ids, the model one of"
            f" {vocab_size:,}"
        )
    if tokens.windows(seq_len) < batch_size:
        raise ConfigError(
            f"{key}: {tokens.name} is too short: {len(tokens.ids):,} tokens are"
            f" {tokens.windows(seq_len):,} sequences of {seq_len}, and one batch takes"
            f" {batch_size:,}"
        )
    return tokens


def _about(path: str, key: str) -> dict[str, Any]:
    """Returns the description beside a token file."""
    try:
        Path(path).open("rb").close()
        about = json.loads(Path(f"{path}.json").read_text())
    except OSError as error:
        remedy = (
            ": make it with `python -m training.data prepare`"
            if isinstance(error, FileNotFoundError) and Path(path).exists()
            else ""
        )
        raise ConfigError(
            f"{key}: cannot open {error.filename or path}: {error.strerror or error}{remedy}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{key}: {path}.json is no JSON: {error}") from error
    if not isinstance(about, dict):
        raise ConfigError(f"{key}: {path}.json was not made by `python -m training.data prepare`")
    return about


def _map(path: str, about: Mapping[str, Any], key: str) -> Tokens:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
        vocab_size = int(about["vocab_size"])
        expected = int(about["tokens"])
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot open {error.filename or path}: {error.strerror or error}"
        ) from error
    except (ValueError, KeyError, TypeError, EOFError, OverflowError) as error:
        raise ConfigError(
            f"{key}: {path} is truncated, or was not made by `python -m training.data prepare`:"
            f" {error}"
        ) from error
    if not isinstance(ids, np.ndarray) or vocab_size < 1:
        raise ConfigError(f"{key}: {path} was not made by `python -m training.data prepare`")
    if ids.ndim != 1 or ids.dtype.kind != "u" or len(ids) != expected:
        raise ConfigError(
            f"{key}: {path} holds {ids.dtype} {list(ids.shape)}, and {path}.json promises"
            f" {expected:,} tokens"
        )
    return Tokens(
        ids,
        vocab_size,
        path,
        str(about.get("tokenizer", "")),
        str(about.get("tokenizer_fingerprint", "")),
        str(about.get("digest", "")),
    )


def _standard_library() -> Tokens:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return Tokens(np.frombuffer(text, np.uint8), 256, "the standard library's sources")


def tokenizer_fingerprint(directory: Path) -> str:
    """Returns 16 hex digits for the files of a tokenizer; "" if there are none."""
    files = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest() if files else ""


def check_tokenizer(tokens: Tokens, model: Path, key: str = "data.train") -> None:
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
        self.size, self.seed, self.shuffle, self.drop_last, self.may_change = (
            size,
            seed,
            shuffle,
            drop_last,
            may_change,
        )
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
            batch.append(
                shuffled(self.index, self.size, self.seed, self.epoch)
                if self.shuffle
                else self.index
            )
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
        tokens: the data.
        sampler: of the numbers of sequences.
        data: the configuration of batches.
        mine: this rank's rows of a batch.
        device: on a GPU, batches are copied to pinned memory first.
    """

    def __init__(
        self, tokens: Any, sampler: Sampler, data: Data, mine: slice, device: torch.device
    ) -> None:
        self.tokens, self.sampler, self.data, self.mine = tokens, sampler, data, mine
        self.is_pinned = device.type == "cuda"
        self.thread = ThreadPoolExecutor(1, "reader")
        self.ahead: tuple[list[int], Future[Batch]] | None = None

    def next_batch(self) -> Batch:
        """Returns this rank's part of the next batch, and begins to read the one after it."""
        numbers, ahead = self.sampler.next_batch(self.data.batch_size), self.ahead
        is_there = ahead is not None and ahead[0] == numbers
        batch = ahead[1].result() if is_there else self._read(numbers)
        following = copy.copy(self.sampler).next_batch(self.data.batch_size)
        self.ahead = following, self.thread.submit(self._read, following)
        return batch

    def _read(self, numbers: list[int]) -> Batch:
        batch: Batch = self.tokens.batch(numbers, self.data.seq_len, self.mine)
        return batch.pinned() if self.is_pinned else batch


# ---- preparing -----------------------------------------------------------------------------------


def prepare(
    sources: Sequence[Path], out: Path, tokenizer: Path | None = None, progress: bool = True
) -> dict[str, Any]:
    """Writes a token file from text files, in constant memory, and returns its description.

    Args:
        sources: text files, or folders whose files are all taken, in order of their names.
        out: the file to write. It is replaced as a whole, at the end.
        tokenizer: directory of a `transformers` tokenizer; None for bytes. Documents end in its
            end-of-sequence id, or in a line feed.

    Raises:
        ConfigError: there is no text, or the tokenizer cannot be loaded.
    """
    files = [
        f
        for s in sources
        for f in (sorted(p for p in s.rglob("*") if p.is_file()) if s.is_dir() else [s])
    ]
    if missing := [f for f in files if not f.is_file()]:
        raise ConfigError(f"no such file: {missing[0]}")
    if out.is_dir():
        raise ConfigError(f"--out {out} is a directory: name a file in it")
    for file in files:
        _refuse_examples_as_text(file)
    encode = _Bytes() if tokenizer is None else _Tokenizer(tokenizer)
    num_examples = sum(file.suffix == ".jsonl" for file in files)
    if num_examples:
        if num_examples < len(files):
            other = next(file for file in files if file.suffix != ".jsonl")
            raise ConfigError(f"JSONL files of examples and texts cannot be mixed: {other}")
        about = prepare_examples(files, out, encode)
        return _describe(about, out, tokenizer, encode)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    count, digest = 0, hashlib.blake2b(digest_size=8)
    try:
        with temporary.open("xb") as stream:
            write_header(stream, encode.dtype, 0)
            bar = tqdm(
                total=sum(f.stat().st_size for f in files),
                unit="B",
                unit_scale=True,
                disable=not progress,
                desc="prepare",
            )
            with bar:
                for path in files:
                    for ids in encode.document(path, bar.update):
                        stream.write(raw := ids.tobytes())
                        digest.update(raw)
                        count += len(ids)
            stream.seek(0)
            write_header(stream, encode.dtype, count)
        if not count:
            raise ConfigError(f"no text in {', '.join(map(str, sources))}")
        about = {"documents": len(files), "tokens": count, "digest": digest.hexdigest()}
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return _describe(about, out, tokenizer, encode)


def _refuse_examples_as_text(file: Path) -> None:
    """Refuses a file of examples that is not named `.jsonl`: it would be read as text.

    Raises:
        ConfigError: its first line is an example.
    """
    if file.suffix == ".jsonl":
        return
    with file.open("rb") as stream:
        line = stream.readline(_READ)
    try:
        first = json.loads(line)
    except ValueError:
        return
    if isinstance(first, dict) and {"messages", "prompt"} & first.keys():
        raise ConfigError(f"{file} looks like examples, a line each: rename it to end in .jsonl")


def _describe(
    about: Mapping[str, Any], out: Path, tokenizer: Path | None, encode: Any
) -> dict[str, Any]:
    """Writes the description beside a token file, and returns it."""
    about = {
        "tokenizer": str(tokenizer or "bytes"),
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer) if tokenizer else "",
        "vocab_size": encode.vocab_size,
        **about,
    }
    Path(f"{out}.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


class _Bytes:
    dtype, vocab_size = np.dtype(np.uint8), 256

    def pair(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """Returns the bytes of both; the completion ends in a line feed."""
        return list(prompt.encode()), list(f"{completion}\n".encode())

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        del tools
        raise ConfigError(f"{len(messages)} chat turns need --tokenizer, with a chat template")

    def document(self, path: Path, seen: Any) -> Iterator[np.ndarray[Any, Any]]:
        with path.open("rb") as file:
            while data := file.read(_READ):
                seen(len(data))
                yield np.frombuffer(data, np.uint8)
        yield np.frombuffer(b"\n", np.uint8)


class _Tokenizer:
    """A local tokenizer; it receives text in pieces that end with a line."""

    def __init__(self, directory: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                "--tokenizer needs transformers: pip install 'ckpt-tools[hf]'"
            ) from error
        if not directory.is_dir():
            raise ConfigError(f"--tokenizer {directory}: there is no such directory")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # a tokenizer's files may make it raise anything
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"cannot load a tokenizer from {directory}: {said}") from error
        self.vocab_size = len(self.tokenizer)
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def pair(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """Returns the ids of both; the first id of all begins, the last one ends a sequence."""
        encode = functools.partial(self.tokenizer, add_special_tokens=False)
        first, last = (
            [] if token is None else [token]
            for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        )
        both = encode(prompt)["input_ids"], encode(completion)["input_ids"]
        return first + both[0], both[1] + last

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Returns the ids of a chat, and which of them are the assistant's."""
        return chat(self.tokenizer, messages, tools)

    def document(self, path: Path, seen: Any) -> Iterator[np.ndarray[Any, Any]]:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            while lines := file.readlines(_READ):
                text = "".join(lines)
                seen(len(text.encode()))
                yield np.asarray(
                    self.tokenizer(text, add_special_tokens=False)["input_ids"], self.dtype
                )
        end = self.tokenizer.eos_token_id
        if end is not None:
            yield np.asarray([end], self.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="training.data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("prepare", help="make a token file from text files")
    sub.add_argument("sources", type=Path, nargs="+", help="text files, or folders of them")
    sub.add_argument("--out", type=Path, required=True, help="the token file, tokens.npy")
    sub.add_argument("--tokenizer", type=Path, help="directory of a tokenizer; bytes without it")
    args = parser.parse_args()
    try:
        about = prepare(args.sources, args.out, args.tokenizer)
    except (ConfigError, OSError) as error:
        raise SystemExit(f"training.data: {error}") from error
    print(
        f"{args.out}: {about['tokens']:,} tokens of {about['documents']:,} documents,"
        f" a vocabulary of {about['vocab_size']:,} ids"
    )


if __name__ == "__main__":
    main()
