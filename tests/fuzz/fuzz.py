"""Hostile input by the million: `python -m tests.fuzz.fuzz TARGET --runs 1000000 [--seed 1] [--keep DIR]`.

Genuine files are mutated, and pickles are also put together from opcodes. Whatever comes, a reader may do one of two things:
read it, or raise a CheckpointError (for a configuration: its own error). Anything else ends the run and leaves the input in DIR:
another exception, a crash, more than 5 s, more than 300 MiB, a file or a process made. The last line tells what was seen.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import json
import mmap
import os
import pickle
import random
import resource
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save

from ckpt_tools.catalog import TORCH_ZIP, Extent
from ckpt_tools.dtypes import BY_NAME
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats import dcp as distributed
from ckpt_tools.formats import dcp_bulk, dcp_metadata, deepspeed, gguf, npz, per_rank, safetensors, torch_save, torch_zip, zip_check
from ckpt_tools.formats.made import Made
from ckpt_tools.manifest import parse as parse_manifest
from ckpt_tools.operations.parts import FORMS, put_together, take_apart, unpack_objects
from ckpt_tools.soundness import check
from ckpt_tools.storage import MemoryStore, Overlay, is_url
from ckpt_tools.storage.base import check_path
from tests.many_chunks import as_torch_gathers, written
from training.accelerate_config import read as read_configuration
from training.config import ConfigError

CONFIG = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}.yaml"
DATA = bytes(1 << 16)
SECONDS, MEBIBYTES, MAX_BYTES = 5.0, 300, 1 << 16
INTERESTING = [
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\x80" + b"\x00" * 7,
    b"PK\x03\x04",
    b"\x85",
    b"\x86",
    b"../",
    b"{",
    b"[",
    b'"',
    b"9" * 20,
    b"-1",
]
OPCODES = [
    b"(", b")", b"}", b"]", b"N", b"\x88", b"\x89", b"t", b"\x85", b"\x86", b"\x87", b"a", b"e", b"s", b"u", b"b", b"R", b"\x81", b"\x93", b"\x94",
    b"K\x01", b"K\x94", b"M\x85\x86", b"J\xff\xff\xff\xff", b"h\x00", b"h\x01", b"h\x02", b"h\x94", b"j\x00\x01\x00\x00", b"q\x00", b"q\x01",
    b"r\x05\x00\x00\x00", b"\x8c\x01a", b"\x8c\x02ub", b"\x8c\x04size", b"X\x01\x00\x00\x00b", b"\x8a\x01\x05", b"\x8a\x08" + b"\x7f" * 8, b"Q",
    b"ctorch\nSize\n", b"ctorch\nfloat32\n", b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n", b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
    b"ctorch.serialization\n_get_layout\n", b"cpathlib\nPosixPath\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"cos\nsystem\n",
]  # fmt: skip


_watch = [False]


def _hook(event: str, args: tuple[Any, ...]) -> None:
    """Ends the run when a reader opens a file to write, starts a process or connects."""
    if _watch[0] and (
        event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect")
        or (event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"))
    ):
        raise SystemExit(f"forbidden: {event} {args}")


@contextmanager
def _allowed() -> Iterator[None]:
    was, _watch[0] = _watch[0], False
    yield
    _watch[0] = was


def _checkpoint() -> dict[str, bytes]:
    path = Path(tempfile.mkdtemp(prefix="fuzz-"))
    state = {"m": {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2).bfloat16(), "s": torch.tensor(1)}, "step": 3}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=path, no_dist=True)
    files = {p.name: p.read_bytes() for p in path.iterdir()}
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    return files


def metadata(data: bytes) -> object:
    catalog = distributed.read_catalog(MemoryStore({".metadata": data, "__0_0.distcp": DATA}))
    check(catalog)
    return catalog


def many(data: bytes) -> object:
    """Reads as arrays what may be read so; it must be what the reader of single objects says, and nothing that this one refuses."""
    try:
        plain = dcp_metadata.parse(data, "test")
    except CheckpointError:
        assert dcp_bulk.read_bulk(data, "test") is None
        raise
    found = dcp_bulk.read_bulk(data, "test")
    if found is None:
        return plain
    metadata, chunks = found
    assert (metadata.objects, metadata.paths, list(chunks)) == (plain.objects, plain.paths, list(plain.tensors))
    for fqn, meta in plain.tensors.items():
        expected = [(box, tuple(plain.places[fqn, box.offsets])) for box in meta.boxes]
        assert [(c.box, tuple(c.extent[:3])) for c in chunks[fqn]] == expected
    return chunks


def item(data: bytes) -> object:
    store, extent = MemoryStore({"f": data}), Extent("f", 0, len(data), TORCH_ZIP)
    list(zip_check.examine(store, [extent]))
    return list(torch_zip.locate(store, [torch_zip.Item(extent, BY_NAME["float32"], (3, 4))]))


def file(data: bytes) -> object:
    store = MemoryStore({"f.pt": data})
    catalog = torch_save.read_catalog(store)
    check(catalog)
    list(zip_check.examine(store, catalog.archives))
    return catalog


def arrays(data: bytes) -> object:
    catalog = npz.read_catalog(MemoryStore({"f.npz": data}))
    check(catalog)
    list(zip_check.examine(MemoryStore({"f.npz": data}), catalog.archives))
    return catalog


def llama(data: bytes) -> object:
    catalog = gguf.read_catalog(MemoryStore({"f.gguf": data}))
    check(catalog)
    return catalog


def header(data: bytes) -> object:
    catalog = safetensors.read_catalog(MemoryStore({"model.safetensors": data}))
    check(catalog)
    return catalog


def index(data: bytes) -> object:
    files = {safetensors.INDEX: data, "a.safetensors": save({"a": torch.ones(2)}), "b.safetensors": save({"b": torch.ones(3)})}
    return safetensors.read_catalog(MemoryStore(files))


def manifest(data: bytes) -> object:
    return parse_manifest(data, "fuzz")


def url(data: bytes) -> object:
    text = data.decode("utf-8", "replace")
    return is_url(text), check_path(text, "fuzz")


def accelerate(data: bytes) -> object:
    with _allowed():
        CONFIG.write_bytes(data)
    return read_configuration(str(CONFIG))


def zero(data: bytes) -> object:
    """A file of DeepSpeed's, the model's states beside good states of the optimizer or the other way round."""
    names = {"mp_rank_00_model_states.pt": 0, "zero_pp_rank_0_mp_rank_00_optim_states.pt": 1}
    results = []
    for name, number in names.items():
        files = {n: data if n == name else ZERO[k] for n, k in names.items()}
        try:
            catalog = deepspeed.read_catalog(MemoryStore(files))
            check(catalog)
            results.append(catalog)
        except CheckpointError:
            if number:
                raise
    return results


def parts(data: bytes) -> object:
    """A training state, taken apart and put together under every naming."""
    store = MemoryStore({"f.pt": data})
    catalog = torch_save.read_catalog(store)
    check(catalog)
    overlaid = Overlay(store, catalog.made)
    for form in FORMS:
        made = Made(catalog.made)
        whole = put_together(take_apart(catalog, overlaid), form, made)
        unpack_objects(whole, Overlay(store, made.files), made)
    return catalog


def flats(data: bytes) -> object:
    """The file of a rank with parameters split in its way, beside shapes."""
    shapes = b'{"a.w": [3, 4], "b": [5]}'
    catalog = per_rank.read_catalog(MemoryStore({"x_rank_0.pt": data, "shapes.json": shapes}))
    check(catalog)
    return catalog


def _odd(value: object, rng: random.Random) -> object:
    """Returns a state in which something is replaced by what does not belong there."""
    if rng.random() < 0.04:
        return rng.choice(
            [None, -1, 1 << 70, "x", "9" * 5000, [], {}, [[]], torch.ones(2), torch.Size([3, 4]), 1.5, {"params": 3}, [{"params": [[0]]}]]
        )
    if isinstance(value, dict):
        return {k if rng.random() > 0.02 else rng.choice(["params", "state", "0", "exp_avg", 7]): _odd(v, rng) for k, v in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_odd(v, rng) for v in value)
    return value


def _states(kind: str) -> list[object]:
    flat, group = torch.arange(17.0), {"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}
    moments = {"step": torch.tensor(2.0), "exp_avg": flat.clone(), "exp_avg_sq": flat.clone()}
    if kind == "parts":
        state = {0: {"step": 3, "exp_avg": torch.ones(3, 4)}, 1: {"step": torch.tensor(1.0), "exp_avg": torch.ones(5)}}
        model = {"a.w": torch.ones(3, 4), "b": torch.ones(5)}
        by_name = {"state": {"a.w": state[0], "b": state[1]}, "param_groups": [{"lr": 1.0, "params": ["a.w", "b"]}]}
        return [
            {"model": model, "optimizer": {"state": state, "param_groups": [{"lr": 1.0, "params": [0, 1]}]}, "epoch": 1},
            {"model": model, "optimizer": by_name, "optimizer_1": {"param_groups.a.w.lr": 1.0, "state.a.w.step": 3}},
            {**model, "optimizer.state.a.w.exp_avg": torch.ones(3, 4), "optimizer.param_groups.0": 1, "param_groups": [1]},
        ]
    if kind == "flats":
        return [
            {
                "model": {"a._flat_param": torch.ones(12), "_flat_param": flat, "a.w": torch.ones(3), "b": torch.ones(5)},
                "optim": {"state": {0: moments}, "param_groups": [group]},
            }
        ]
    shapes = [OrderedDict([("a.w", torch.Size([3, 4])), ("b", torch.Size([5]))])]
    model = {"module": OrderedDict([("a.w", torch.ones(3, 4)), ("s", torch.ones(1))]), "buffer_names": ["s"], "param_shapes": shapes, "shared_params": {"c": "b"},
             "frozen_param_shapes": {"f": torch.Size([2])}, "frozen_param_fragments": {"f": torch.ones(2)}, "ds_version": "0.19", "epoch": 3}  # fmt: skip
    base = {"state": {0: moments}, "param_groups": [group]}
    two = {
        "zero_stage": 2,
        "partition_count": [1],
        "group_paddings": [0],
        "single_partition_of_fp32_groups": [flat],
        "base_optimizer_state": base,
    }
    three = {"zero_stage": 3, "partition_count": 1, "fp32_flat_groups": [flat], "optimizer_state_dict": base}
    return [model, {"optimizer_state_dict": two}, {"optimizer_state_dict": three}]


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


ZERO = [_saved(value) for value in _states("zero")]


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _whole_files(name: str) -> list[bytes]:
    if name in ("item", "file"):
        buffers = []
        for value in (
            torch.arange(12.0).reshape(3, 4),
            torch.arange(12.0).reshape(4, 3).t(),
            {"a": 1, "b": [torch.ones(3).t(), {"c": torch.zeros(0)}]},
        ):
            buffers.append(io.BytesIO())
            torch.save(value, buffers[-1])
        return [b.getvalue() for b in buffers]
    if name == "arrays":
        buffers = [io.BytesIO(), io.BytesIO()]
        np.savez(buffers[0], **{"a/b": np.ones((2, 3), "f4"), "c": np.asfortranarray(np.ones((3, 4)))})
        np.savez(buffers[1], s=np.int8(1), none=np.zeros((0, 3)))
        return [b.getvalue() for b in buffers]
    if name == "llama":
        head = struct.pack("<2I2Q", 0x46554747, 3, 2, 2) + _text("general.alignment") + struct.pack("<2I", 4, 32)
        head += _text("words") + struct.pack("<2IQ", 9, 8, 2) + _text("a") + _text("bc")
        head += _text("w") + struct.pack("<I2QIQ", 2, 4, 3, 0, 0) + _text("b") + struct.pack("<IQIQ", 1, 4, 1, 64)
        return [head + bytes(-len(head) % 32 + 96)]
    raise ValueError(name)


def seeds(name: str) -> list[bytes]:
    """Returns genuine input of a kind."""
    files = _checkpoint()
    if name in ("zero", "parts", "flats"):
        rng = random.Random(0)
        return [_saved(value) for value in _states(name)] + [_saved(_odd(value, rng)) for _ in range(300) for value in _states(name)]
    if name == "metadata":
        return [files[".metadata"], *(pickle.dumps(pickle.loads(files[".metadata"]), protocol) for protocol in (2, 3, 5))]
    if name == "many":
        shapes = {"a": (40, 3), "b": (70_000,), "s": (), "c": (9, 3, 2, 2)}
        texts = [dcp_metadata.render(written(shapes, ranks), "id") for ranks in (5, 12, 30)]
        return [*texts, *map(as_torch_gathers, texts), files[".metadata"]]
    if name in ("item", "file", "arrays", "llama"):
        return _whole_files(name)
    if name == "header":
        return [save({"a": torch.ones(2, 3), "b": torch.zeros(0), "c": torch.tensor(1)}, {"format": "pt"})]
    if name == "index":
        return [json.dumps({"metadata": {"total_size": 20}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}).encode()]
    if name == "manifest":
        from ckpt_tools.manifest import Manifest, Sealed, SealedTensor

        tensors = {"a": SealedTensor("float32", (3, 4), "0" * 16)}
        sealed = Manifest.now(
            "f" * 32, "save", "dcp", {}, world_size=2, files={"f": Sealed(3, "0" * 16)}, index=("i", Sealed(3, "1" * 16)), tensors=tensors
        )
        text = sealed.render()
        return [text, text.replace(b'"ckpt_manifest": 2', b'"ckpt_manifest": 1')]
    if name == "accelerate":
        return [
            b"distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_reshard_after_forward: true\n"
        ]
    return [b"s3://bucket/run/step-1", b"file:///tmp/x", b"a/b/c.distcp", b"../x", b"filecache::s3://x"]


TARGETS: dict[str, Callable[[bytes], object]] = {
    "zero": zero, "parts": parts, "flats": flats, "metadata": metadata, "many": many, "item": item, "file": file, "arrays": arrays, "llama": llama, "header": header, "index": index, "manifest": manifest, "url": url, "accelerate": accelerate,
}  # fmt: skip


def mutate(data: bytearray, rng: random.Random, pool: list[bytes]) -> bytearray:
    """Changes a few places: bits, bytes, numbers, pieces removed, doubled, or taken from another."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(8)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 2:
            piece = rng.choice(INTERESTING)
            data[at : at + rng.choice((0, len(piece)))] = piece
        elif kind == 3:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 4:
            data[at:at] = data[at : at + rng.randrange(1, 60)] * rng.choice((1, 1, 2, 50))
        elif kind == 5:
            other = rng.choice(pool)
            start = rng.randrange(len(other))
            data[at : at + rng.choice((0, 20))] = other[start : start + rng.randrange(1, 80)]
        elif kind == 6:
            data[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1, len(data))))[
                : rng.choice((2, 4, 8))
            ]
        else:
            del data[at:]
    return data[:MAX_BYTES]


def program(rng: random.Random) -> bytes:
    """Returns a pickle of opcodes in any order."""
    return b"\x80" + bytes([rng.choice((2, 4))]) + b"".join(rng.choices(OPCODES, k=rng.randrange(2, 60))) + b"."


def fuzz(name: str, runs: int, seed: int, keep: Path) -> Counter[str]:
    """Feeds a reader; returns how often it read and how often it refused.

    The input is in the file `last` of `keep` while it is being read, so that it survives a crash.
    """
    rng, target, pool, seen = random.Random(seed), TARGETS[name], seeds(name), Counter[str]()
    keep.mkdir(parents=True, exist_ok=True)
    last = keep / f"last-{name}"
    last.write_bytes(bytes(MAX_BYTES + 8))
    before = set(os.listdir())
    with last.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(runs):
            if name == "metadata" and rng.random() < 0.3:
                data = program(rng)[:MAX_BYTES]
            elif name in ("zero", "parts", "flats") and rng.random() < 0.5:
                data = _saved(_odd(rng.choice(_states(name)), rng))[:MAX_BYTES]
            else:
                data = bytes(mutate(bytearray(rng.choice(pool)), rng, pool))
            shared[: len(data) + 8] = struct.pack("<Q", len(data)) + data
            if number % (1 if name == "accelerate" else 64) == 0:
                faulthandler.dump_traceback_later(SECONDS, exit=True)  # as a rule 64 of them within the time of one
            try:
                _watch[0] = True
                target(data)
                seen["read"] += 1
                if len(pool) < 500 and rng.random() < 0.02:
                    pool.append(data)
            except (CheckpointError, ConfigError) as error:
                seen[type(error).__name__] += 1
            finally:
                _watch[0] = False
    faulthandler.cancel_dump_traceback_later()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) >> 10
    assert grown < MEBIBYTES, f"{grown} MiB"
    assert set(os.listdir()) == before, "files were made"
    last.unlink()
    CONFIG.unlink(missing_ok=True)
    seen["MiB"] = grown
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-found"))
    args = parser.parse_args()
    began = time.monotonic()
    sys.addaudithook(_hook)
    seen = fuzz(args.target, args.runs, args.seed, args.keep)
    print(f"{args.target}: {args.runs:,} runs, {time.monotonic() - began:.0f} s, {dict(seen)}")


if __name__ == "__main__":
    main()
