"""What does the config beside a checkpoint tell of its codes?

It is the `config.json` of transformers, or a config of ModelOpt or AutoGPTQ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tools.errors import StorageError
from ckpt_tools.formats.registry import Source
from ckpt_tools.publish.manifest import Manifest
from ckpt_tools.publish.sealed_source import check_file
from ckpt_tools.storage import read
from ckpt_tools.storage.small_files import MAX_JSON_BYTES, parse_json

# of ModelOpt and of AutoGPTQ: a config of their own, which some loaders read
OTHER_CONFIGS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}
FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_IN_ORDER = (None, "weight", "static")  # orders in which groups are columns side by side
_SIMPLE = re.compile(r"\^?(?:[\w-]|\\\.|\.(?:\*\??)?)*\$?")  # of patterns of modules


class ToldByConfig(NamedTuple):
    """What a config tells of codes.

    Attributes:
        said: its `quantization_config`; empty if there is none.
        is_clear: it is understood, or there is none.
        blocks: rows and columns of a block of codes of 8 bits.
        bits: of a code of compressed-tensors; 0 if they are unclear.
        group_size: columns of a group of compressed-tensors; 0 if it is unclear.
        is_int8: a code of int8 is one number.
        is_symmetric: that number is just multiplied by its scale.
        is_sorted: groups are not columns side by side.
        ignored: modules of which it does not tell that.
        is_turned: codes times scales are the weights after a rotation.
    """

    said: Mapping[str, Any] = {}
    is_clear: bool = True
    blocks: tuple[int, ...] = ()
    bits: int = 0
    group_size: int = 0
    is_int8: bool = False
    is_symmetric: bool = True
    is_sorted: bool = False
    ignored: tuple[_Modules, ...] = ()
    is_turned: bool = False

    def types_of(self, codes: str) -> Sequence[str]:
        """Returns the types of codes that a scale turns into numbers, for one weight."""
        module = codes.rpartition(".")[0]
        is_left = any(modules.have(module) for modules in self.ignored)
        return (*FP8, "int8") if self.is_int8 and not is_left else FP8


def quantization_in(
    config: Mapping[str, Any], read_other: Callable[[str], bytes | None]
) -> tuple[str, Any]:
    """Returns the file that says how a model is quantized, and what it says; None for nothing.

    Args:
        config: the content of its `config.json`.
        read_other: reads a file beside it by its name; None if there is none.

    Raises:
        ValueError: another file is no JSON.
    """
    text = config.get("text_config")
    for table in (config, text if isinstance(text, Mapping) else {}):
        if (said := table.get("quantization_config")) is not None:
            return "config.json", said
    for name, method in OTHER_CONFIGS.items():
        if (data := read_other(name)) is not None:
            found = parse_json(data)
            if isinstance(found, Mapping):
                return name, {"quant_method": method, **found}
    return "config.json", None


def told_by_config(source: Source, manifest: Manifest | None) -> ToldByConfig:
    """Returns what the config beside a checkpoint tells of its codes.

    Raises:
        IntegrityError: it is not the sealed one.
    """
    files = source.folder.list_files()

    def content_of(name: str) -> bytes | None:
        if name not in files:
            return None
        if files[name] > MAX_JSON_BYTES:
            raise ValueError(f"{name} is too long")
        data = read(source.folder, name)
        check_file(manifest, name, data)
        return data

    try:
        _, said = quantization_in(parse_json(content_of("config.json") or b"{}"), content_of)
    except (StorageError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ToldByConfig(is_clear=False)
    return told_by(said)


def told_by(said: Any) -> ToldByConfig:
    """Returns what a `quantization_config` tells of codes; None is none."""
    try:
        return ToldByConfig() if said is None else _told(said)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ToldByConfig(is_clear=False)


def _told(said: Mapping[str, Any]) -> ToldByConfig:
    every = (said.get("config_groups") or {}).values()
    groups = [group for group in every if group.get("weights") is not None]
    weights = [group["weights"] for group in groups]
    is_sorted = any(one.get("actorder") not in _IN_ORDER for one in weights)
    found = [said.get("weight_block_size"), *(one.get("block_structure") for one in weights)]
    found += [(1, size) for one in weights if (size := one.get("group_size")) and not is_sorted]
    blocks = {tuple(one) for one in found if one}
    is_one = len(blocks) == 1 and all(type(n) is int and 0 < n < 1 << 40 for n in (*blocks,)[0])
    ignored = [_modules(name) for name in said.get("ignore") or ()]
    known = tuple(modules for modules in ignored if modules is not None)
    symmetric = {one.get("symmetric", True) for one in weights}
    is_int8 = said.get("quant_method") == "compressed-tensors" and all(
        (one.get("num_bits"), one.get("type")) == (8, "int") for one in weights
    )
    is_plain = not is_sorted and all(group.get("targets") == ["Linear"] for group in groups)
    return ToldByConfig(
        said,
        blocks=blocks.pop() if is_one else (),
        bits=_one_of(weights, "num_bits", 8),
        group_size=_one_of(weights, "group_size", 1 << 40),
        is_int8=bool(weights) and is_int8 and is_plain and len(known) == len(ignored),
        is_symmetric=symmetric <= {True},
        is_sorted=is_sorted,
        ignored=known,
        is_turned=bool(said.get("transform_config")),
    )


def _one_of(weights: Sequence[Mapping[str, Any]], key: str, most: int) -> int:
    """Returns the positive integer that all groups have under a key; 0 if they do not."""
    values = [one.get(key) for one in weights]
    for first in values[:1]:
        if type(first) is int and 0 < first <= most and values == [first] * len(values):
            return first
    return 0


class _Modules(NamedTuple):
    """The modules that an entry of `ignore` means: what follows each other in their names."""

    pieces: tuple[re.Pattern[str], ...]

    def have(self, name: str) -> bool:
        """Tells whether they have a module. It takes linear time, unlike `re` with many stars."""
        at = 0
        for number, piece in enumerate(self.pieces):
            found = (piece.search if number else piece.match)(name, at)
            if found is None:
                return False
            at = found.end()
        return True


def _modules(name: object) -> _Modules | None:
    """Returns the modules that an entry of `ignore` means; None for one that is not understood."""
    if not isinstance(name, str):
        return None
    if not name.startswith("re:"):
        return _Modules((re.compile(""), re.compile(rf"(?:^|\.){re.escape(name)}\Z")))
    text = name.removeprefix("re:")
    if not _SIMPLE.fullmatch(text):
        return None
    *pieces, last = re.split(r"\.\*\??", text.removeprefix("^"))
    last = last.removesuffix("$") + r"\Z" if last.endswith("$") else last
    return _Modules(tuple(map(re.compile, (*pieces, last))))
