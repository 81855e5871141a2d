"""Examples of prompts and answers, or of chat turns: padded, or packed several to a row.

    python -m training.data prepare chat.jsonl --tokenizer llama/ --out chat.npy

A line of the JSONL file has `prompt` and `completion`, two texts, or `messages`, a list of turns
with `role` and `content`. Only completions, or the turns of the assistant, are trained on. Beside
`chat.npy`, the ids, lie `chat.npy.mask.npy` (1: trained on) and `chat.npy.starts.npy`.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from training.config import ConfigError


class DataError(Exception):
    """A data file does not match its description. This was found during training."""


_BLOCKS = 256
IGNORED = -100  # a target that is not trained on, as `F.cross_entropy` has it
PARTS = {"mask": ".mask.npy", "starts": ".starts.npy"}


class Batch(NamedTuple):
    """Rows of tokens.

    Attributes:
        inputs, targets: `[B, T]` int64. A target of `IGNORED` is not trained on.
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
        documents = None if self.documents is None else self.documents.to(device, non_blocking=True)
        inputs, targets = (t.to(device, non_blocking=True) for t in self[:2])
        return Batch(inputs, targets, documents, self.num_targets)

    def pinned(self) -> Batch:
        """Copies it to pinned memory, from which a GPU reads while the CPU goes on."""
        documents = None if self.documents is None else self.documents.pin_memory()
        return Batch(
            self.inputs.pin_memory(), self.targets.pin_memory(), documents, self.num_targets
        )

    def chunk(self, number: int) -> Iterator[Batch]:
        """Yields micro-batches."""
        documents = [None] * number if self.documents is None else self.documents.chunk(number)
        rows = zip(self.inputs.chunk(number), self.targets.chunk(number), documents, strict=True)
        yield from (Batch(*parts, self.num_targets) for parts in rows)


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
        """The identity of these examples, and of their division into rows."""
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

    def windows(self, seq_len: int) -> int:
        """Returns the number of rows."""
        del seq_len
        return len(self.rows) - 1

    def batch(self, numbers: Sequence[int], seq_len: int, mine: slice) -> Batch:
        """Returns this rank's rows of a batch.

        Args:
            numbers: of the rows of all ranks.
            seq_len: inputs of a row.
            mine: the rows of this rank.

        Raises:
            DataError: an id is not below `vocab_size`.
        """
        shape = (len(numbers[mine]), seq_len)
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
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            torch.from_numpy(documents),
            num_targets,
        )

    def _parts(self, row: int) -> Iterator[tuple[int, int]]:
        """Yields where each example of a row begins, and its number of inputs."""
        for example in range(self.rows[row], self.rows[row + 1]):
            start, end = int(self.starts[example]), int(self.starts[example + 1])
            yield start, min(end - start - 1, self.seq_len)


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
        names = (str(about[key]) for key in ("tokenizer", "tokenizer_fingerprint", "digest"))
        tokenizer, of_tokenizer, digest = names
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"data: the files of {path} are incomplete: {error!r}") from error
    if not fits or vocab_size < 1:
        raise ConfigError(f"data: the files of {path} do not belong together: prepare them again")
    return Examples(
        ids, mask, starts, seq_len, packs, vocab_size, path, tokenizer, of_tokenizer, digest
    )


# ---- preparing -----------------------------------------------------------------------------------


def prepare_examples(sources: Sequence[Path], out: Path, encode: Any) -> dict[str, Any]:
    """Writes the files of examples; returns what describes them.

    Args:
        sources: JSONL files.
        out: the file of the ids.
        encode: the tokenizer, with `dtype` and `pair(prompt, completion)` or `chat(messages)`.

    Raises:
        ConfigError: a line is no example; the message has its file and number.
    """
    starts, digest = [0], hashlib.blake2b(digest_size=8)
    temporary = [out.with_name(f".{out.name}.{os.getpid()}.{n}") for n in ("ids", "mask")]
    try:
        with temporary[0].open("xb") as ids_file, temporary[1].open("xb") as mask_file:
            files, types = (ids_file, mask_file), (encode.dtype, np.dtype(np.uint8))
            for file, dtype in zip(files, types, strict=True):
                write_header(file, dtype, 0)
            for ids, mask in _encoded(sources, encode):
                for file, dtype, values in zip(files, types, (ids, mask), strict=True):
                    file.write(raw := np.asarray(values, dtype).tobytes())
                    digest.update(raw)
                starts.append(starts[-1] + len(ids))
            for file, dtype in zip(files, types, strict=True):
                file.seek(0)
                write_header(file, dtype, starts[-1])
        if len(starts) == 1:
            raise ConfigError(f"no examples in {', '.join(map(str, sources))}")
        np.save(f"{out}{PARTS['starts']}", np.array(starts, np.int64))
        temporary[1].replace(f"{out}{PARTS['mask']}")
        temporary[0].replace(out)
    finally:
        for file in temporary:
            file.unlink(missing_ok=True)
    digest.update(np.array(starts, np.int64).tobytes())
    return {
        "examples": len(starts) - 1,
        "documents": len(starts) - 1,
        "tokens": starts[-1],
        "digest": digest.hexdigest(),
    }


def write_header(stream: Any, dtype: np.dtype[Any], count: int) -> None:
    """Writes a header of a NumPy file, whose length does not depend on the count.

    NumPy reserves space in it for a larger count.
    """
    npy.write_array_header_1_0(
        stream, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    )


def _encoded(sources: Sequence[Path], encode: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the ids and the mask of each line."""
    for source in sources:
        with source.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if not text.strip():
                    continue
                try:
                    ids, mask = _example(json.loads(text), encode)
                except Exception as error:  # a template or a tokenizer may raise anything
                    said = " ".join(str(error).split())[:200] or type(error).__name__
                    raise ConfigError(f"{source}, line {number}: {said}") from error
                yield ids, mask


def _example(given: Any, encode: Any) -> tuple[list[int], list[int]]:
    """Returns ids and mask of a line.

    Raises:
        ConfigError: it is no example.
    """
    if isinstance(given, dict) and "messages" in given and {"prompt", "completion"} & given.keys():
        raise ConfigError("it has `messages`, and also a prompt or a completion: give one of them")
    if isinstance(given, dict) and isinstance(given.get("messages"), list):
        for turn in given["messages"]:
            if not isinstance(turn, dict) or not all(
                isinstance(turn.get(key), str) for key in ("role", "content")
            ):
                raise ConfigError("a turn needs `role` and `content`, two texts")
        ids, mask = encode.chat(given["messages"], given.get("tools"))
    elif isinstance(given, dict) and all(
        isinstance(given.get(key), str) for key in ("prompt", "completion")
    ):
        prompt, completion = encode.pair(given["prompt"], given["completion"])
        ids, mask = prompt + completion, [0] * len(prompt) + [1] * len(completion)
    else:
        raise ConfigError("expected `prompt` and `completion`, two texts, or a list `messages`")
    if len(ids) < 2 or not any(mask[1:]):  # the first id has no prediction
        raise ConfigError("nothing in it is trained on: it has no completion or assistant's turn")
    return list(ids), list(mask)


def chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
) -> tuple[list[int], list[int]]:
    """Returns the ids of a chat by the tokenizer's template, and a mask of the assistant's turns.

    Args:
        tokenizer: of transformers.
        messages: the turns.
        tools: that the assistant may call, for the template.

    Raises:
        ConfigError: the tokenizer has no template, its template rewrites earlier turns, or it
            leaves the tools out.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("the tokenizer has no chat template: give `prompt` and `completion`")

    def render(turns: Sequence[Any], is_open: bool = False) -> list[int]:
        text = tokenizer.apply_chat_template(
            turns, tools=tools, tokenize=False, add_generation_prompt=is_open
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    ids = render(messages)
    if tools and ids == chat(tokenizer, messages)[0]:
        raise ConfigError("the chat template does not write the line's `tools`: leave them out")
    mask = [0] * len(ids)
    for number, message in enumerate(messages):
        if message.get("role") == "assistant":
            before = render(messages[:number], is_open=True)
            after = render(messages[: number + 1])
            if ids[: len(before)] != before or ids[: len(after)] != after:
                raise ConfigError("the chat template writes earlier turns in another way later on")
            mask[len(before) : len(after)] = [1] * (len(after) - len(before))
    return ids, mask
