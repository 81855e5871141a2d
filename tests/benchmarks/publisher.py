"""Publishes the model of a job from the memory of its ranks, beside the way that gathers tensors.

    torchrun --nproc-per-node 2 tests/benchmarks/publisher.py FOLDER [--gb 1] [--part 0.02]
        [--dim 0] [--runs 5]

The tensors are bf16 and cut along DIM. "gather" is what other publishers do: rank 0 gets each whole
tensor, encodes it after slime's description (a difference, zstd and xxh3-128, in threads) and
writes it without an fsync. Its copy of the version before is in memory, as that of `Publisher` is.
The rounds are in turn, with the same changes; the first one is not counted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness
import numpy as np
import safetensors.numpy
import torch
import torch.distributed as dist
import xxhash
import zstandard
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckpt_tools import Publisher

State = dict[str, DTensor]


def make(folder: Path, gb: float, dim: int) -> State:
    side = 4096 if gb >= 0.1 else 64
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    number = max(1, round(gb * 1e9 / (2 * side * side)))
    whole = {f"model.layers.{i}.w": torch.randn(side, side).bfloat16() for i in range(number)}
    if dist.get_rank() == 0:
        (folder / "base").mkdir(parents=True, exist_ok=True)
        (folder / "base" / "config.json").write_text('{"architectures": ["Mine"]}')
        save_file(whole, folder / "base" / "model.safetensors")
    return {name: distribute_tensor(values, mesh, [Shard(dim)]) for name, values in whole.items()}


def change(state: State, part: float) -> None:
    for values in state.values():
        local = values.to_local()
        where = torch.rand(local.shape) < part
        local[where] = torch.randn(int(where.sum())).bfloat16()


class Gathering:
    """The way that needs each whole tensor on one rank."""

    def __init__(self, folder: Path, state: State) -> None:
        self._folder = folder
        self._old = self._gathered(state)

    def _gathered(self, state: State) -> dict[str, np.ndarray]:
        found = {}
        for name, values in state.items():
            whole = values.full_tensor()
            if dist.get_rank() == 0:
                found[name] = whole.view(torch.uint8).numpy().reshape(-1).copy()
        return found

    def publish(self, state: State) -> None:
        new = self._gathered(state)
        if dist.get_rank():
            return

        def one(name: str) -> tuple[np.ndarray, str]:
            diff = new[name] ^ self._old[name]
            np.count_nonzero(diff)
            frame = zstandard.ZstdCompressor(level=1).compress(diff)
            return np.frombuffer(frame, np.uint8), xxhash.xxh3_128(new[name]).hexdigest()

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = dict(zip(new, pool.map(one, new), strict=True))
        checksums = {name: checksum for name, (_, checksum) in found.items()}
        frames = {name: frame for name, (frame, _) in found.items()}
        safetensors.numpy.save_file(frames, self._folder / "peer.safetensors", checksums)
        self._old = new


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--part", type=float, default=0.02)
    parser.add_argument("--dim", type=int, default=0)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    is_first, root = dist.get_rank() == 0, args.dir / "versions"
    state = make(args.dir, args.gb, args.dim)
    if is_first:
        shutil.rmtree(root, ignore_errors=True)
    dist.barrier()
    seconds: dict[str, list[float]] = {"Publisher": [], "gather": []}
    stalls, nbytes, written = [], 0, 0
    with Publisher(root, base=args.dir / "base", partial=True, full_every=100) as publisher:
        gathering = Gathering(args.dir, state)
        for number in range(args.runs + 1):
            change(state, args.part)

            def publish() -> None:
                began = time.perf_counter()
                publisher.publish(state)
                stalls.append(time.perf_counter() - began)
                publisher.wait()

            took = (
                harness.seconds_of_ranks(publish),
                harness.seconds_of_ranks(lambda: gathering.publish(state)),
            )
            if number:
                for name, one in zip(seconds, took, strict=True):
                    seconds[name].append(one)
            result = publisher.last_result
            assert result is not None
            nbytes, written = result.nbytes, result.written_nbytes or 0
    if is_first:
        ranks = f"{dist.get_world_size()} ranks, dim {args.dim}, {args.part:.1%} changed"
        harness.show(f"{nbytes / 1e9:.2f} GB, {ranks}", seconds, nbytes=nbytes)
        print(f"stall {statistics.median(stalls[1:]):.3f} s; {written / nbytes:.1%} of the bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
