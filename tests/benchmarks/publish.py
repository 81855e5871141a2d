"""Publishes and pulls a model of which a part changed, beside the same work by slime's rules.

    python tests/benchmarks/publish.py DIR [--gb 1] [--part 0.02] [--runs 5] [--receiver FILE]

The peer's encoder is written here after its description: a difference, zstd and a checksum for each
tensor, in threads, with both models in memory. FILE is slime's receiver for SGLang, taken from its
`docker/patch/latest/sglang-pull_weights.patch`; it changes a copy in place and makes nothing
durable. A copy of the model, with an fsync, stands beside the pulls.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import numpy as np
import safetensors.numpy
import torch
import xxhash
import zstandard
from safetensors.torch import load_file, save_file

import ckpt_tools

THREADS = 2


def make(folder: Path, gb: float, part: float) -> None:
    side = 4096 if gb >= 0.1 else 64
    number = max(1, round(gb * 1e9 / (2 * side * side)))
    state = {f"model.layers.{i}.w": torch.randn(side, side).bfloat16() for i in range(number)}
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text('{"architectures": ["Mine"]}')
    save_file(state, folder / "base" / "model.safetensors")
    for values in state.values():
        where = torch.randint(0, values.numel(), (round(values.numel() * part),))
        values.view(-1)[where] = torch.randn(len(where)).bfloat16()
    save_file(state, folder / "new.safetensors")


def as_bytes(path: Path) -> dict[str, np.ndarray]:
    return {n: v.view(torch.uint8).numpy().reshape(-1) for n, v in load_file(path).items()}


def encode(new: dict[str, np.ndarray], old: dict[str, np.ndarray], to: Path) -> None:
    def one(name: str) -> tuple[np.ndarray, str]:
        diff = new[name] ^ old[name]
        np.count_nonzero(diff)
        frame = zstandard.ZstdCompressor(level=1).compress(diff)
        return np.frombuffer(frame, np.uint8), xxhash.xxh3_128(new[name]).hexdigest()

    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(new, pool.map(one, new), strict=True))
    checksums = {name: checksum for name, (_, checksum) in found.items()}
    safetensors.numpy.save_file({n: frame for n, (frame, _) in found.items()}, to, checksums)


def copy(source: Path, to: Path) -> None:
    to.parent.mkdir()
    shutil.copyfile(source, to)
    with to.open("rb+") as file:
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--part", type=float, default=0.02)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--receiver", type=Path)
    args = parser.parse_args()
    root, local, folder = args.dir / "root", args.dir / "local", args.dir
    folder.mkdir(parents=True, exist_ok=True)
    make(folder, args.gb, args.part)
    old, new = as_bytes(folder / "base" / "model.safetensors"), as_bytes(folder / "new.safetensors")
    nbytes = sum(v.nbytes for v in new.values())
    receiver: Any = None
    if args.receiver:
        spec = importlib.util.spec_from_file_location("receiver", args.receiver)
        assert spec is not None and spec.loader is not None
        receiver = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(receiver)
    written: dict[str, int] = {}

    def publish(encoding: str) -> None:
        how = {"base": folder / "base", "partial": True, "jobs": THREADS}
        result = ckpt_tools.publish_version(
            folder / "new.safetensors", root, encoding=encoding, **how
        )
        written[encoding] = result.written_nbytes or 0

    work: dict[str, Callable[[], object]] = {
        "publish, overwrite": lambda: publish("overwrite"),
        "publish, xor": lambda: publish("xor"),
        "encode by slime's rules": lambda: encode(new, old, folder / "peer.safetensors"),
        "pull": lambda: ckpt_tools.pull(root, local, jobs=THREADS),
        "cp and fsync": lambda: copy(folder / "new.safetensors", folder / "copied" / "new"),
    }
    places = {name: [root] if name.startswith("publish") else [] for name in work}
    places |= {"pull": [local], "cp and fsync": [folder / "copied"]}
    if receiver is not None:
        work["slime's receiver"] = lambda: receiver.pull(
            str(folder / "peer"), str(folder / "base"), str(root), 1
        )
        places["slime's receiver"] = [folder / "peer"]
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(args.runs):  # in this order: a version must be there before it is pulled
        for name, action in work.items():
            for path in places[name]:
                shutil.rmtree(path, ignore_errors=True)
            os.sync()
            # a virtual machine gives freed memory back; then each page of a new file costs its host
            # a fault, which is no work of those that are measured here
            np.ones(int(args.gb * 3e9), np.uint8)
            seconds[name].append(harness.seconds(action))
    title = f"{nbytes / 1e9:.2f} GB, {args.part:.1%} of the elements changed"
    harness.show(title, seconds, nbytes=nbytes)
    for name, count in written.items():
        print(f"{name}: {count / 1e6:.1f} MB, {count / nbytes:.1%} of the model")


if __name__ == "__main__":
    main()
