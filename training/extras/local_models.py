"""Opens models, configurations and tokenizers of transformers from a local directory.

Nothing else in this program does. So no code from such a directory runs, and none asks whether it
may, on a terminal or on standard input.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
)


def open_local(kind: Any, directory: Path | str) -> Any:
    """Returns what a class of transformers makes of a directory.

    Args:
        kind: such as `AutoTokenizer`.
        directory: of the files; nothing is downloaded.

    Raises:
        ValueError: it needs code of its own.
    """
    return kind.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)


def model_of(config: Any, **more: Any) -> Any:
    """Returns the causal LM of a configuration, with random values.

    Raises:
        ValueError: it needs code of its own.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **more)


def tokenizer_fingerprint(directory: Path) -> str:
    """Returns 16 hex digits for the files of a tokenizer; "" if there are none."""
    files = [directory / name for name in _TOKENIZER_FILES if (directory / name).is_file()]
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest() if files else ""
