"""Adds the files that Hugging Face's loaders need beside the weights: config, tokenizer, code.

It also stores tied weights only once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_tools.core.catalog import Catalog, TensorEntry
from ckpt_tools.core.plan import plan_values
from ckpt_tools.core.quantized import described, methods_of, weights_in
from ckpt_tools.engine.execute import execute_batches
from ckpt_tools.engine.schedule import DEFAULT_MEMORY_BYTES, schedule, tile_bytes
from ckpt_tools.engine.sinks import HashSink
from ckpt_tools.errors import FormatError, IntegrityError, PlanError, StorageError, printable
from ckpt_tools.formats.base import note_of
from ckpt_tools.formats.look_alikes import other_kind
from ckpt_tools.formats.registry import Source
from ckpt_tools.operations.convert.child_process import last_line, run_python
from ckpt_tools.operations.quantization_config import OTHER_CONFIGS, quantization_in
from ckpt_tools.publish.find_manifest import find_manifest
from ckpt_tools.publish.sealed_source import check_file
from ckpt_tools.storage import LocalStore, is_url
from ckpt_tools.storage.small_files import MAX_JSON_BYTES, parse_json, read_beside

_OF_TRAINERS = ("trainer_state.json", "training_args.json")
_TEMPLATES, _MODULES = "additional_chat_templates", "modules.json"
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
    ".distcp",
    ".index.json",
)
_MAX_FILE_BYTES = 256 << 20
_MAX_TOTAL_BYTES = 1 << 30  # of all files together, because they are held in memory
_OUTPUTS = ("lm_head.weight", "embed_out.weight")
_INPUTS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "shared.weight",
)
_CHECK = """
import json, sys
import torch, transformers
from safetensors import safe_open
from pathlib import Path
folder = Path(sys.argv[1])
kind = find_class(json.loads((folder / "config.json").read_text()).get("architectures"))
model, info = kind.from_pretrained(
    folder,
    output_loading_info=True,
    dtype="auto",
    trust_remote_code=False,
    local_files_only=True,
)
wrong = [f"{k}: {sorted(map(str, v))[:3]}" for k, v in info.items() if v]
state = model.state_dict()
try:  # from release 5: memory has other tensors than files
    from transformers.core_model_loading import revert_weight_conversion
    state = revert_weight_conversion(model, state) | state
except ImportError:
    pass
for path in sorted(folder.glob("*.safetensors")):
    with safe_open(path, "pt") as file:
        for name in file.keys():
            if name not in state or not torch.equal(state[name], file.get_tensor(name)):
                wrong.append(f"another value: {name}")
print(json.dumps(wrong))
"""


def read_config(base: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the config of a model's directory.

    Raises:
        PlanError: it has none that can be read.
    """
    try:
        config = parse_json(_read_sealed(base, "config.json"))
    except (StorageError, ValueError) as error:
        cause = other_kind(LocalStore(Path(base)), "config.json")
        raise PlanError(
            f"no readable config.json in {printable(str(base))}: {printable(str(cause or error))}",
            hint=cause.hint if cause else None,
        ) from error
    if not isinstance(config, dict):
        raise PlanError(f"config.json holds no table ({printable(str(base))})")
    return config


def _read_sealed(base: str | os.PathLike[str], name: str, most: int = MAX_JSON_BYTES) -> bytes:
    """Returns a file of a model's directory, and compares it with the directory's manifest."""
    data = read_beside(base, name, most)
    store = LocalStore(Path(base))
    try:
        with suppress(FormatError):  # a malformed manifest seals nothing
            manifest = find_manifest(store)
            if manifest is not None:
                check_file(manifest, name, data)
    finally:
        store.close()
    return data


def find_base(src: str) -> str:
    """Returns the directory with a model's config in or beside a checkpoint, for messages.

    Returns "DIR" if there is none.
    """
    # verl keeps it in DIR/huggingface
    folders = () if is_url(src) else (Path(src), Path(src) / "huggingface", Path(src).parent)
    return next((printable(str(f)) for f in folders if (f / "config.json").is_file()), "DIR")


def adapter_config(base: str | os.PathLike[str], tensors: Mapping[str, TensorEntry]) -> bytes:
    """Returns the adapter_config.json of a directory unchanged.

    Args:
        base: the directory.
        tensors: of the adapter, whose ranks must be among those of the config.

    Raises:
        PlanError: it has none that can be read, or one of another rank.
    """
    try:
        data = _read_sealed(base, "adapter_config.json")
        config = parse_json(data)
        patterns = config.get("rank_pattern") or {}
        known = [config.get("r"), *patterns.values()]
    except AttributeError:
        raise PlanError(f"adapter_config.json is no object ({printable(str(base))})") from None
    except (StorageError, ValueError) as error:
        raise PlanError(
            f"no readable adapter_config.json in {printable(str(base))}: {printable(str(error))}"
        ) from error
    for fqn, entry in tensors.items():
        rank = entry.shape[0] if entry.shape and ".lora_A" in fqn else None
        if rank is not None and rank not in known:
            raise PlanError(
                f"adapter_config.json has r={printable(str(config.get('r')))}, and the"
                f" adapter has rank {rank}: {printable(fqn)!r}",
                hint="give the directory of the config that the job was made with",
            )
    return data


def head_counts(base: str | os.PathLike[str]) -> dict[str, int]:
    """Returns `heads` and `kv_heads` of a model's config, if it has them."""
    config = read_config(base)
    heads = config.get("num_attention_heads")
    found = {"heads": heads, "kv_heads": config.get("num_key_value_heads", heads)}
    return {name: number for name, number in found.items() if type(number) is int}


def base_files(
    base: str | os.PathLike[str], dtypes: Sequence[str], notes: list[str], drops_quantization: bool
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns a model's config, and the bytes of all files of its directory except the weights.

    Of its folders, those of chat templates and those that `modules.json` names go along, with their
    weights: sentence-transformers keeps its pooling and dense layers there.

    Args:
        base: the directory.
        dtypes: element types of the tensors to write. The most frequent one goes into the config.
        notes: receives a note on folders that do not go along.
        drops_quantization: the weights were quantized, and are not any more. The config loses what
            it says of that.

    Raises:
        PlanError: it is not a directory with a config.json.
    """
    folder, config = Path(base), read_config(base)
    others = _without_quantization(config) if drops_quantization else ()
    floats = [d for d in dtypes if d in ("float32", "float16", "bfloat16", "float64")]
    if floats:
        config["dtype" if "dtype" in config else "torch_dtype"] = max(set(floats), key=floats.count)
    files = {"config.json": render_config(config, base)}
    for name in _names_beside(folder, notes):
        is_top = "/" not in name
        is_other = name in _OF_TRAINERS or note_of(name) is not None or name.endswith(_WEIGHTS)
        if name == "config.json" or name.startswith(".") or (is_top and is_other) or name in others:
            continue
        try:
            left = _MAX_TOTAL_BYTES - sum(map(len, files.values()))
            files[name] = _read_sealed(folder, name, min(_MAX_FILE_BYTES, left))
        except StorageError as error:
            raise PlanError(
                f"cannot copy a model's file: {error}",
                hint="move it away, or put the file itself in its place",
            ) from error
    return config, files


def render_config(config: Mapping[str, Any], base: str | os.PathLike[str]) -> bytes:
    """Returns the text of a `config.json`.

    Args:
        config: its contents.
        base: the directory that it comes from, for messages.

    Raises:
        PlanError: it cannot be written as UTF-8.
    """
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise PlanError(
            f"config.json has half of a character that takes two ({printable(str(base))})"
        )
    return text.encode()


def _without_quantization(config: dict[str, Any]) -> Iterable[str]:
    """Removes from a config how weights are quantized; returns the files that say it, too."""
    text = config.get("text_config")
    for table in (config, text if isinstance(text, dict) else {}):
        table.pop("quantization_config", None)
    return OTHER_CONFIGS


def _names_beside(folder: Path, notes: list[str]) -> list[str]:
    """Returns the names of a model's files, with those in the folders that go along."""
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    folders = [e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name[0] != "."]
    wanted = {_TEMPLATES}
    if any(entry.name == _MODULES for entry in entries):
        try:
            modules = parse_json(_read_sealed(folder, _MODULES))
            wanted |= {str(module["path"]) for module in modules}
        except (StorageError, ValueError, TypeError, KeyError) as error:
            raise PlanError(
                f"{_MODULES} is malformed: {printable(str(error))} ({printable(str(folder))})"
            ) from error
    names, left = [entry.name for entry in entries if entry.name not in folders], list[str]()
    for name in folders:
        inner = sorted(os.scandir(folder / name), key=lambda entry: entry.name)
        if name in wanted:
            names += [f"{name}/{e.name}" for e in inner if not e.is_dir(follow_symlinks=False)]
            left += [f"{name}/{e.name}" for e in inner if e.is_dir(follow_symlinks=False)]
        else:
            left.append(name)
    if left:
        notes.append(
            f"folders in {printable(str(folder))} do not go along: {printable(', '.join(left))}"
        )
    return names


def check_quantization(
    base: str | os.PathLike[str], config: Mapping[str, Any], tensors: Iterable[TensorEntry]
) -> None:
    """Makes sure that a config says how the weights are quantized, and that they are.

    transformers loads a model whose config and weights disagree with scales of its own.

    Raises:
        PlanError: they disagree.
    """
    chosen = list(tensors)
    held, weights = {tensor.stored_name for tensor in chosen}, weights_in(chosen)
    name, said = quantization_of(base, config)
    method = str(said.get("quant_method", "")) if isinstance(said, Mapping) else ""
    where = f"{name} of {printable(str(base))}"
    if said is not None and not weights:
        raise PlanError(
            f"the {where} says that the weights are quantized ({printable(method) or 'no method'}),"
            " and they are not",
            hint="give the directory of the model that is not quantized; or take"
            " quantization_config out of its config.json",
        )
    if weights and said is None:
        raise PlanError(
            f"the weights are quantized ({described(weights)}), and the {where} does not say so",
            hint="give the directory of the quantized model: its config.json has a"
            " quantization_config",
        )
    wrong = [w for w in weights if method not in methods_of(w.scheme)]
    if wrong:
        raise PlanError(
            f"the {where} names the method {printable(method)!r}, and"
            f" {printable(wrong[0].codes)!r} is quantized otherwise: {wrong[0].scheme}",
            hint="give the directory of the model with these weights",
        )
    told = _bits_in(said) if isinstance(said, Mapping) else None
    other = [w for w in weights if None not in (told, w.bits) and w.bits != told]
    if other:
        raise PlanError(
            f"the {where} says {told} bits, and {printable(other[0].codes)!r} has {other[0].bits}",
            hint="give the directory of the model with these weights",
        )
    lost = [part for w in weights for part in w.parts if part not in held]
    if lost:
        raise PlanError(
            f"a part of a quantized weight would be left out: {printable(lost[0])!r}",
            hint="select all of its tensors, or none",
        )


def quantization_of(
    base: str | os.PathLike[str], config: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any] | object]:
    """Returns the file in `base` that says how a model is quantized, and what it says, or None."""

    def sealed_content(name: str) -> bytes | None:
        with suppress(StorageError):
            return _read_sealed(base, name)
        return None

    with suppress(ValueError):
        return quantization_in(config, sealed_content)
    return "config.json", None


def _bits_in(said: Mapping[str, Any]) -> int | None:
    """Returns the bits of a number by a quantization config; None if it does not tell."""
    for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if said.get(key) is True:
            return bits
    bits = said.get("bits", said.get("w_bit"))
    return bits if type(bits) is int else None


def untie(source: Source, catalog: Catalog, config: Mapping[str, Any], notes: list[str]) -> Catalog:
    """Returns the catalog without the output weight, if the config ties it to the input embedding.

    Raises:
        PlanError: the two hold different values. A loader that ties them would lose one.
    """
    text = config.get("text_config")
    is_tied = config.get(
        "tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None
    )
    outputs = [fqn for fqn in catalog.tensors if fqn.endswith(_OUTPUTS)]
    inputs = [fqn for fqn in catalog.tensors if fqn.endswith(_INPUTS)]
    if not is_tied or not outputs or not inputs:
        return catalog
    gone = outputs[0]
    same = [
        fqn for fqn in inputs if _are_equal(source, catalog.tensors[fqn], catalog.tensors[gone])
    ]
    if not same:
        raise PlanError(
            f"the config ties {printable(gone)!r} to {printable(inputs[0])!r}, but they hold"
            " different values",
            hint=(
                "set tie_word_embeddings to false in the config, or find out which job untied them"
            ),
        )
    notes.append(f"{gone} is tied to {same[0]} and stored once")
    return replace(catalog, tensors={fqn: t for fqn, t in catalog.tensors.items() if fqn != gone})


def _are_equal(source: Source, a: TensorEntry, b: TensorEntry) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a.chunks == b.chunks:
        return True
    both, sink = [replace(a, fqn="a"), replace(b, fqn="b")], HashSink()
    execute_batches(
        schedule(
            plan_values(both),
            source.format.locate(source.store, both),
            *tile_bytes(DEFAULT_MEMORY_BYTES, 2),
        ),
        source.store,
        sink,
        2,
    )
    fingerprints = sink.fingerprints.join()
    return fingerprints["a"] == fingerprints["b"]


def check_loads(folder: str) -> None:
    """Loads a directory with transformers in a separate process.

    Raises:
        PlanError: transformers is not installed, or cannot load it.
        IntegrityError: names are missing or unexpected, or a tensor differs from the files.
    """
    nbytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    done = run_python(_CHECK, folder, nbytes)
    if done.returncode:
        last = last_line(done)
        is_missing = last.startswith("ModuleNotFoundError")
        hint = (
            "pip install transformers"
            if is_missing
            else "nothing was published; without --check the result is written as it is"
        )
        raise PlanError(f"transformers does not load the result: {printable(last)}", hint=hint)
    wrong = json.loads(done.stdout.strip().splitlines()[-1])
    if wrong:
        raise IntegrityError(
            f"transformers loads something else: {printable('; '.join(wrong[:5]))}",
            hint="nothing was published; without --check the result is written as it is",
        )
