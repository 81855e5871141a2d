"""Genuine input for the fuzzers: what each reader reads, small."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save

from ckpt_tools.engine.execute import BatchResult
from ckpt_tools.engine.fingerprints import HashedRange, HashedRanges, TensorHashes
from ckpt_tools.engine.sinks import SinkState
from ckpt_tools.formats.dcp import metadata as dcp_metadata
from ckpt_tools.publish.journal import Journal
from ckpt_tools.publish.manifest import Manifest, SealedFile, SealedRange, SealedTensor
from tests.many_chunks import as_torch_gathers, written

WORK = "0" * 64  # what the journal is of


def _checkpoint() -> dict[str, bytes]:
    state = {
        "m": {
            "a": torch.arange(12.0).reshape(3, 4),
            "b": torch.ones(2).bfloat16(),
            "s": torch.tensor(1),
        },
        "step": 3,
    }
    with tempfile.TemporaryDirectory() as path:
        with warnings.catch_warnings(action="ignore"):
            dcp.save(state, checkpoint_id=path, no_dist=True)
        return {p.name: p.read_bytes() for p in Path(path).iterdir()}


def saved(value: object) -> bytes:
    """Returns a file of torch.save's."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def odd(value: object, rng: random.Random) -> object:
    """Returns a state in which something is replaced by what does not belong there."""
    if rng.random() < 0.04:
        return rng.choice(
            [
                None,
                -1,
                1 << 70,
                "x",
                "9" * 5000,
                [],
                {},
                [[]],
                torch.ones(2),
                torch.Size([3, 4]),
                1.5,
                {"params": 3},
                [{"params": [[0]]}],
                [1] * rng.choice((65, 15_000)),  # dims
                10**4000,
                10**18,  # an index of a list
                {"(.|[^~])" * 30 + "~": 1, "(?:a|b)?.*" * 9: 2},  # patterns
            ]
        )
    if isinstance(value, dict):
        return {
            k if rng.random() > 0.02 else rng.choice(["params", "state", "0", "exp_avg", 7]): odd(
                v, rng
            )
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(odd(v, rng) for v in value)
    return value


def states(kind: str) -> list[object]:
    """Returns training states whose files the targets of that name read."""
    flat, group = torch.arange(17.0), {"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}
    moments = {"step": torch.tensor(2.0), "exp_avg": flat.clone(), "exp_avg_sq": flat.clone()}
    if kind == "parts":
        state = {
            0: {"step": 3, "exp_avg": torch.ones(3, 4)},
            1: {"step": torch.tensor(1.0), "exp_avg": torch.ones(5)},
        }
        model = {"a.w": torch.ones(3, 4), "b": torch.ones(5)}
        by_name = {
            "state": {"a.w": state[0], "b": state[1]},
            "param_groups": [{"lr": 1.0, "params": ["a.w", "b"]}],
        }
        return [
            {
                "model": model,
                "optimizer": {"state": state, "param_groups": [{"lr": 1.0, "params": [0, 1]}]},
                "epoch": 1,
            },
            {
                "model": model,
                "optimizer": by_name,
                "optimizer_1": {"param_groups.a.w.lr": 1.0, "state.a.w.step": 3},
            },
            {
                **model,
                "optimizer.state.a.w.exp_avg": torch.ones(3, 4),
                "optimizer.param_groups.0": 1,
                "param_groups": [1],
            },
        ]
    if kind == "flats":
        return [
            {
                "model": {
                    "a._flat_param": torch.ones(12),
                    "_flat_param": flat,
                    "a.w": torch.ones(3),
                    "b": torch.ones(5),
                },
                "optim": {"state": {0: moments}, "param_groups": [group]},
            },
            {
                "model": OrderedDict(
                    [
                        ("_fsdp_shard_w", flat),
                        ("u._fsdp_shard_f", flat),
                        ("_fsdp_wrapped_module.s", torch.ones(2)),
                    ]
                ),
                "optimizer": {
                    "state": {0: moments, 1: moments},
                    "param_groups": [group | {"params": [0, 1]}],
                },
                "shard_metadata": {
                    "shard_info": {
                        "": {
                            "_fsdp_shard_w": {
                                "_orig_size": torch.Size([3, 4]),
                                "_orig_name": "_fsdp_wrapped_module.w",
                            }
                        },
                        "u": {
                            "_fsdp_shard_f": {
                                "_orig_size": torch.Size([17]),
                                "_orig_name": "_fsdp_wrapped_module.flat_param_0",
                            }
                        },
                    },
                    "flatten_info": {
                        "u._fsdp_wrapped_module.flat_param_0": (
                            ["a", "b"],
                            [torch.Size([3, 4]), torch.Size([5])],
                            [12, 5],
                        )
                    },
                    "world_size": 1,
                    "rank": 0,
                },
            },
        ]
    shapes = [OrderedDict([("a.w", torch.Size([3, 4])), ("b", torch.Size([5]))])]
    model = {
        "module": OrderedDict([("a.w", torch.ones(3, 4)), ("s", torch.ones(1))]),
        "buffer_names": ["s"],
        "param_shapes": shapes,
        "shared_params": {"c": "b"},
        "frozen_param_shapes": {"f": torch.Size([2])},
        "frozen_param_fragments": {"f": torch.ones(2)},
        "ds_version": "0.19",
        "epoch": 3,
    }
    base = {"state": {0: moments}, "param_groups": [group]}
    two = {
        "zero_stage": 2,
        "partition_count": [1],
        "group_paddings": [0],
        "single_partition_of_fp32_groups": [flat],
        "base_optimizer_state": base,
    }
    three = {
        "zero_stage": 3,
        "partition_count": 1,
        "fp32_flat_groups": [flat],
        "optimizer_state_dict": base,
    }
    return [model, {"optimizer_state_dict": two}, {"optimizer_state_dict": three}]


_PLACED = [_checkpoint()[".metadata"]]
ZERO = [saved(value) for value in states("zero")]


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _metadata() -> list[bytes]:
    text = _checkpoint()[".metadata"]
    return [text, *(pickle.dumps(pickle.loads(text), protocol) for protocol in (2, 3, 5))]


def _many() -> list[bytes]:
    shapes = {"a": (40, 3), "b": (70_000,), "s": (), "c": (9, 3, 2, 2)}
    texts = [dcp_metadata.render(written(shapes, ranks), "id") for ranks in (5, 12, 30)]
    return [*texts, *map(as_torch_gathers, texts), _checkpoint()[".metadata"]]


def _files() -> list[bytes]:
    values = (
        torch.arange(12.0).reshape(3, 4),
        torch.arange(12.0).reshape(4, 3).t(),
        {"a": 1, "b": [torch.ones(3).t(), {"c": torch.zeros(0)}]},
    )
    return [saved(value) for value in values]


def _arrays() -> list[bytes]:
    buffers = [io.BytesIO(), io.BytesIO()]
    np.savez(buffers[0], **{"a/b": np.ones((2, 3), "f4"), "c": np.asfortranarray(np.ones((3, 4)))})
    np.savez(buffers[1], s=np.int8(1), none=np.zeros((0, 3)))
    return [b.getvalue() for b in buffers]


def _llama() -> list[bytes]:
    head = (
        struct.pack("<2I2Q", 0x46554747, 3, 2, 2)
        + _text("general.alignment")
        + struct.pack("<2I", 4, 32)
    )
    head += _text("words") + struct.pack("<2IQ", 9, 8, 2) + _text("a") + _text("bc")
    head += (
        _text("w")
        + struct.pack("<I2QIQ", 2, 4, 3, 0, 0)
        + _text("b")
        + struct.pack("<IQIQ", 1, 4, 1, 64)
    )
    return [head + bytes(-len(head) % 32 + 96)]


def _manifest() -> list[bytes]:
    tensors = {"a": SealedTensor("float32", (3, 4), "0" * 16)}
    files = {
        "f": SealedFile(3, "0" * 16),
        "g": SealedFile(9, "2" * 16, (SealedRange(1, 8, "3" * 16, "4" * 8),)),
    }
    sealed = Manifest.now(
        "ffffffff-ffff-4fff-8fff-ffffffffffff",
        "save",
        "dcp",
        {},
        world_size=2,
        files=files,
        index=("i", SealedFile(3, "1" * 16)),
        tensors=tensors,
    )
    return [sealed.render()]


def _journal() -> list[bytes]:
    """Returns what the lines of a journal say, without their checksums."""
    pieces = HashedRanges([HashedRange(0, 8, 3, 0), HashedRange(8, 40, 5, 7)])
    noted = TensorHashes(
        {"w": HashedRanges([HashedRange(0, 48, 11, 0)])}, {"w": HashedRanges()}, {"w": 48}
    )
    with tempfile.TemporaryDirectory() as path:
        journal = Journal(Path(path, "j"), WORK, (1 << 20, 1 << 22))
        for name in ("f", "g"):
            journal.note(
                BatchResult(48, {"w": 1}, [("src", 0, 48, 9)], SinkState({name: pieces}, noted))
            )
        journal.close()
        lines = [line.partition(b" ")[2] for line in Path(path, "j").read_bytes().splitlines()]
        inode = f'"inode":{Path(path).stat().st_ino},'.encode()
        return [b"\n".join(lines).replace(inode, b'"inode":0,')]


def strange_places(rng: random.Random) -> bytes:
    """Returns the `.metadata` of a checkpoint whose names in the state are odd."""
    found = pickle.loads(_PLACED[0])
    found.planner_data = {
        name: tuple(odd(part, rng) for part in path) if isinstance(path, tuple) else path
        for name, path in found.planner_data.items()
    } | {"m.list": ("m", "list", rng.choice((-1, 0, 1, 10**6, 10**18, 10**30, "0")))}
    with suppress(TypeError, AttributeError):
        return pickle.dumps(found, rng.choice((2, 3, 4)))
    return _PLACED[0]


def adapter_config(rng: random.Random) -> bytes:
    """Returns the config of an adapter with odd numbers and patterns."""
    alphabet = ["a", ".", "*", "+", "?", "(", ")", "|", "[^~]", "{1,9}", "\\d", "\\1", "(?=", "q"]
    patterns = {"".join(rng.choices(alphabet, k=rng.randrange(1, 40))): 4 for _ in range(3)}
    config = json.loads(ADAPTER) | {rng.choice(("rank_pattern", "alpha_pattern")): patterns}
    return json.dumps(odd(config, rng), default=str).encode()


def _broken(kind: str) -> list[bytes]:
    rng = random.Random(0)
    return [saved(value) for value in states(kind)] + [
        saved(odd(value, rng)) for _ in range(300) for value in states(kind)
    ]


ADAPTER = json.dumps(
    {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q"],
        "rank_pattern": {"a.q": 4},
        "alpha_pattern": {"(?:a)?.q": 2},
    }
)
_CONFIG = """distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
"""
SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "zero": lambda: _broken("zero"),
    "parts": lambda: _broken("parts"),
    "flats": lambda: _broken("flats"),
    "metadata": _metadata,
    "many": _many,
    "item": _files,
    "file": _files,
    "arrays": _arrays,
    "llama": _llama,
    "header": lambda: [
        save({"a": torch.ones(2, 3), "b": torch.zeros(0), "c": torch.tensor(1)}, {"format": "pt"})
    ],
    "index": lambda: [
        json.dumps(
            {
                "metadata": {"total_size": 20},
                "weight_map": {"a": "a.safetensors", "b": "b.safetensors"},
            }
        ).encode()
    ],
    "manifest": _manifest,
    "journal": _journal,
    "url": lambda: [
        b"s3://bucket/run/step-1",
        b"file:///tmp/x",
        b"a/b/c.distcp",
        b"../x",
        b"filecache::s3://x",
    ],
    "accelerate": lambda: [_CONFIG.encode()],
    "adapter": lambda: [ADAPTER.encode()],
}
