"""Makes token files from texts, and files of examples from prompts and answers or chats.

    python -m training.data prepare corpus/ --out tokens.npy --tokenizer llama/
    python -m training.data prepare chat.jsonl --out chat.npy --tokenizer llama/

A line of a JSONL file has `prompt` and `completion`, two texts, or `messages`, a list of turns with
`role` and `content`. Only completions, or the turns of the assistant, are trained on.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.lib import format as npy
from tqdm import tqdm

from training.config import ConfigError
from training.extras.examples import PARTS
from training.extras.local_models import open_local, tokenizer_fingerprint
from training.extras.templates import Renderer
from training.files import replace_file

_READ = 4 << 20  # bytes of text to read, and tokenize, at once
Masked = tuple[list[int], list[int]]  # ids, and 1 for those that are trained on


def prepare(
    sources: Sequence[Path], out: Path, tokenizer: Path | None = None, progress: bool = True
) -> dict[str, Any]:
    """Writes a token file, or the files of examples. Its memory is bounded by the longest line.

    Returns its description.

    Args:
        sources: text files, or folders whose files are all taken, in order of their names; or
            JSONL files of examples.
        out: the file to write. Each file is replaced as a whole, at the end.
        tokenizer: directory of a `transformers` tokenizer; None for bytes. Documents end in its
            end-of-sequence id, or in a line feed.
        progress: shows a bar.

    Raises:
        ConfigError: there is no text, a line is no example, or the tokenizer cannot be loaded.
    """
    files = [
        f
        for s in sources
        for f in (sorted(p for p in s.rglob("*") if p.is_file()) if s.is_dir() else [s])
    ]
    if missing := [f for f in files if not f.is_file()]:
        raise ConfigError(f"no such file: {missing[0]}")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: name a file in a directory that exists")
    made = {Path(f"{out}{suffix}").absolute() for suffix in ("", ".json", *PARTS.values())}
    if taken := [file for file in files if file.absolute() in made]:
        raise ConfigError(f"--out {out}: {taken[0]} is one of the sources: write elsewhere")
    if not sum(file.stat().st_size for file in files):
        raise ConfigError(f"no text in {', '.join(map(str, sources))}")
    texts = [file for file in files if file.suffix != ".jsonl"]
    for file in texts:
        _refuse_examples_as_text(file)
    if texts and len(texts) < len(files):
        raise ConfigError(f"JSONL files of examples and texts cannot be mixed: {texts[0]}")
    encode = _Bytes() if tokenizer is None else _Tokenizer(tokenizer)
    about = {
        "tokenizer": str(tokenizer or "bytes"),
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer) if tokenizer else "",
        "vocab_size": encode.vocab_size,
        **(_texts(files, out, encode, progress) if texts else _examples(files, out, encode)),
    }
    if not about["tokens"]:
        raise ConfigError(f"no text in {', '.join(map(str, sources))}")
    for suffix in PARTS.values() if texts else ():
        Path(f"{out}{suffix}").unlink(missing_ok=True)  # of examples that lay here before
    replace_file(Path(f"{out}.json"), json.dumps(about, indent=1) + "\n")
    return about


class _ArrayFile:
    """A NumPy file that grows. It replaces `out` if the block ends without an error."""

    def __init__(self, out: Path, dtype: Any) -> None:
        self.out, self.dtype, self.count = out, np.dtype(dtype), 0
        self.temporary = out.with_name(f".{out.name}.{os.getpid()}")

    def __enter__(self) -> _ArrayFile:
        self.stream = self.temporary.open("xb")
        self._write_header()
        return self

    def append(self, values: Any) -> bytes:
        """Writes values at the end; returns their bytes."""
        array = np.asarray(values, self.dtype)
        self.stream.write(raw := array.tobytes())
        self.count += len(array)
        return raw

    def _write_header(self) -> None:
        # NumPy reserves space in it for a larger count, so its length stays the same
        about = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False}
        npy.write_array_header_1_0(self.stream, {**about, "shape": (self.count,)})

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        try:
            with self.stream:
                self.stream.seek(0)
                self._write_header()
            if kind is None and self.count:
                self.temporary.replace(self.out)
        finally:
            self.temporary.unlink(missing_ok=True)


def _texts(files: Sequence[Path], out: Path, encode: Any, progress: bool) -> dict[str, Any]:
    digest, total = hashlib.blake2b(digest_size=8), sum(f.stat().st_size for f in files)
    bar = tqdm(total=total, unit="B", unit_scale=True, disable=not progress, desc="prepare")
    with _ArrayFile(out, encode.dtype) as ids, bar:
        for path in files:
            for part in encode.document(path, bar.update):
                digest.update(ids.append(part))
    return {"documents": len(files), "tokens": ids.count, "digest": digest.hexdigest()}


def _examples(files: Sequence[Path], out: Path, encode: Any) -> dict[str, Any]:
    digest, ends = hashlib.blake2b(digest_size=8), [0]
    with contextlib.ExitStack() as stack:
        starts = stack.enter_context(_ArrayFile(Path(f"{out}{PARTS['starts']}"), np.int64))
        mask = stack.enter_context(_ArrayFile(Path(f"{out}{PARTS['mask']}"), np.uint8))
        ids = stack.enter_context(_ArrayFile(out, encode.dtype))
        for of_example in _encoded(files, encode):
            for file, values in zip((ids, mask), of_example, strict=True):
                digest.update(file.append(values))
            ends.append(ids.count)
        if ids.count:
            digest.update(starts.append(ends))
    number = len(ends) - 1
    about = {"examples": number, "documents": number, "tokens": ids.count}
    return {**about, "digest": digest.hexdigest()}


def _refuse_examples_as_text(file: Path) -> None:
    """Refuses a file of examples that is not named `.jsonl`: it would be read as text."""
    with file.open("rb") as stream:
        line = stream.readline(_READ)
    try:
        first = json.loads(line)
    except ValueError:
        return
    first = first[0] if isinstance(first, list) and first else first
    if isinstance(first, dict) and {"messages", "prompt"} & first.keys():
        raise ConfigError(f"{file} looks like examples, a line each: rename it to end in .jsonl")


def _encoded(sources: Sequence[Path], encode: Any) -> Iterator[Masked]:
    """Yields the ids and the mask of each line."""
    for source in sources:
        with source.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if not text.strip():
                    continue
                try:
                    made = _example(json.loads(text), encode)
                except Exception as error:  # a template or a tokenizer may raise anything
                    said = " ".join(str(error).split())[:200] or type(error).__name__
                    raise ConfigError(f"{source}, line {number}: {said}") from error
                yield made


def _example(given: Any, encode: Any) -> Masked:
    """Returns ids and mask of a line."""
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
    return ids, mask


class _Bytes:
    dtype, vocab_size = np.dtype(np.uint8), 256

    def pair(self, prompt: str, completion: str) -> Masked:
        """Returns the bytes of both; the completion ends in a line feed."""
        return list(prompt.encode()), list(f"{completion}\n".encode())

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> Masked:
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
            self.tokenizer = open_local(AutoTokenizer, directory)
        except Exception as error:  # a tokenizer's files may make it raise anything
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"cannot load a tokenizer from {directory}: {said}") from error
        self._renderer = Renderer(self.tokenizer)
        self.vocab_size = len(self.tokenizer)
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def pair(self, prompt: str, completion: str) -> Masked:
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
    ) -> Masked:
        """Returns the ids of a chat by the template, and a mask of the assistant's turns.

        Args:
            messages: the turns.
            tools: that the assistant may call, for the template.

        Raises:
            ConfigError: the tokenizer has no template, its template rewrites earlier turns, or it
                leaves the tools out.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("the tokenizer has no chat template: give `prompt` and `completion`")

        def render(turns: Sequence[Any], is_open: bool = False) -> list[int]:
            text = self._renderer.render(turns, tools, is_open)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        ids = render(messages)
        if tools and ids == self.chat(messages)[0]:
            raise ConfigError("the chat template does not write the line's `tools`: leave them out")
        mask = [0] * len(ids)
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = render(messages[:number], is_open=True)
                after = render(messages[: number + 1])
                if ids[: len(before)] != before or ids[: len(after)] != after:
                    raise ConfigError("the chat template writes earlier turns in another way later")
                mask[len(before) : len(after)] = [1] * (len(after) - len(before))
        return ids, mask

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
    except KeyboardInterrupt:
        raise SystemExit("training.data: interrupted") from None
    print(
        f"{args.out}: {about['tokens']:,} tokens of {about['documents']:,} documents,"
        f" a vocabulary of {about['vocab_size']:,} ids"
    )


if __name__ == "__main__":
    main()
