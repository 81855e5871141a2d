"""Writes and reads a checkpoint of the shapes of MLPerf Storage, beside its kind of writer.

    torchrun --standalone --nproc-per-node 8 tests/benchmarks/mlperf_storage.py DIR
    --model llama3-8b [--scale 0.02] [--runs 3]

The workload is that of DLIO for `llama3-8b` (8 ranks) and `llama3-70b` (64 ranks): ZeRO stage 3, a
model in 16 bits, and three float32 values per parameter for the optimizer. Each process is one rank,
and holds random bytes of its share. `--scale` is the part of the layers, of the vocabulary and of
the widths' product that remains, so that the whole fits a small machine: 1 is the real size (112 GB
and 988 GB). The reference writer is DLIO's: every rank calls `torch.save` for its model and its
optimizer, and makes the files durable; every rank reads its own files again with `torch.load`.

Times are from the first rank's beginning to the last one's end. Writes are durable. The page cache
is warm for reads, unless --drop-caches is given to a process with the rights for it.

Sources: the shapes are those of the models' cards (Llama 3.1), the number of bytes per parameter and
of ranks those of MLPerf Storage 2.0 and 3.0.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpt_tools

# layers, hidden, feed-forward, vocabulary, width of keys and values
MODELS = {
    "llama3-8b": (32, 4096, 14336, 128256, 1024),
    "llama3-70b": (80, 8192, 28672, 128256, 1024),
}
OPTIMIZER = ("fp32", "exp_avg", "exp_avg_sq")


def shapes(model: str, scale: float) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the parameters, at a part of the real size."""
    layers, hidden, inner, vocab, keys = MODELS[model]
    width = math.sqrt(scale)  # of both sides of a matrix, so that its bytes shrink by `scale`
    hidden, inner, keys = (max(8, round(n * width / 8) * 8) for n in (hidden, inner, keys))
    vocab = max(8, round(vocab * width / 8) * 8)
    block = {
        "attention.wq": (hidden, hidden),
        "attention.wk": (keys, hidden),
        "attention.wv": (keys, hidden),
        "attention.wo": (hidden, hidden),
        "mlp.gate": (inner, hidden),
        "mlp.up": (inner, hidden),
        "mlp.down": (hidden, inner),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    ends = {"embed": (vocab, hidden), "head": (vocab, hidden), "norm": (hidden,)}
    return ends | {f"layers.{i}.{n}": s for i in range(layers) for n, s in block.items()}


def share(shape: tuple[int, ...], dtype: torch.dtype, mesh: DeviceMesh) -> DTensor:
    """Returns this rank's part of a tensor, cut along its rows."""
    rank, size = mesh.get_local_rank(), mesh.size()
    step = -(-shape[0] // size)
    rows = max(0, min(step, shape[0] - step * rank))
    local = torch.randint(-30000, 30000, (rows, *shape[1:]), dtype=torch.int16)
    values = local.to(torch.float32) if dtype == torch.float32 else local.view(dtype)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        values, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
    )


def build(model: str, scale: float, mesh: DeviceMesh) -> dict[str, dict[str, torch.Tensor]]:
    found = shapes(model, scale)
    return {
        "model": {name: share(shape, torch.bfloat16, mesh) for name, shape in found.items()},
        **{
            key: {name: share(shape, torch.float32, mesh) for name, shape in found.items()}
            for key in OPTIMIZER
        },
    }


def durable_save(value: object, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def local(state: dict[str, dict[str, torch.Tensor]], keys: tuple[str, ...]) -> object:
    return {key: {n: t.to_local() for n, t in state[key].items()} for key in keys}  # type: ignore[attr-defined]


def reference_save(state: dict[str, dict[str, torch.Tensor]], folder: Path) -> None:
    rank = dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    durable_save(local(state, ("model",)), folder / f"model_states-{rank}.pt")
    durable_save(local(state, OPTIMIZER), folder / f"optimizer-{rank}.pt")


def reference_load(state: dict[str, dict[str, torch.Tensor]], folder: Path) -> None:
    rank = dist.get_rank()
    for name, keys in (("model_states", ("model",)), ("optimizer", OPTIMIZER)):
        found = torch.load(folder / f"{name}-{rank}.pt")
        for key in keys:
            for parameter, tensor in state[key].items():
                tensor.to_local().copy_(found[key][parameter])  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--scale", type=float, default=0.02)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--drop-caches", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    state = build(args.model, args.scale, mesh)
    nbytes = sum(t.numel() * t.element_size() for part in state.values() for t in part.values())
    times: dict[str, list[float]] = {}

    def drop() -> None:
        if args.drop_caches and rank == 0:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        dist.barrier()

    for run in range(args.runs + 1):  # the first one warms up
        for name, save, load in (
            ("torch.save per rank", reference_save, reference_load),
            ("ckpt_tools", lambda s, f: ckpt_tools.save(f, s), lambda s, f: ckpt_tools.load(f, s)),
        ):
            folder = args.dir / name.replace(" ", "-")
            for what, call in (("write", save), ("read", load)):
                drop()
                seconds = harness.seconds_of_ranks(
                    lambda call=call, folder=folder: call(state, folder)
                )
                if run:
                    times.setdefault(f"{what}, {name}", []).append(seconds)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder)
    if rank == 0:
        title = f"{args.model}, scale {args.scale}: {nbytes / 1e9:.2f} GB on {mesh.size()} ranks"
        harness.show(title, dict(sorted(times.items())), nbytes=nbytes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
