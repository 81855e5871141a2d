"""Makes a checkpoint of Llama-like shapes with stock torch, for the benchmarks.

    torchrun --standalone --nproc-per-node 8 tests/benchmarks/make_input.py DIR --gb 1 [--optimizer]
    [--dim 1] [--hidden 4096] [--tiny 20000]

`--gb` is the size of the model in 10^9 bytes of float32; AdamW states come on top. `--dim 1` shards
matrices by column; `--tiny N` makes N tensors of 4 KB instead.
"""

import argparse
import math

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def shapes(gb: float, hidden: int) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of a decoder whose float32 bytes are close to `gb` * 10^9."""
    inner, vocab = hidden * 8 // 3 // 64 * 64, 16_000_000 // hidden
    block = {
        "attention_norm.weight": (hidden,),
        "attention.wq.weight": (hidden, hidden),
        "attention.wk.weight": (hidden, hidden),
        "attention.wv.weight": (hidden, hidden),
        "attention.wo.weight": (hidden, hidden),
        "ffn_norm.weight": (hidden,),
        "feed_forward.w1.weight": (inner, hidden),
        "feed_forward.w2.weight": (hidden, inner),
        "feed_forward.w3.weight": (inner, hidden),
    }
    ends = {
        "tok_embeddings.weight": (vocab, hidden),
        "output.weight": (vocab, hidden),
        "norm.weight": (hidden,),
    }
    size = sum(map(math.prod, block.values()))
    layers = max(1, round((gb * 1e9 / 4 - sum(map(math.prod, ends.values()))) / size))
    return ends | {
        f"layers.{i}.{name}": shape for i in range(layers) for name, shape in block.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--dim", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tiny", type=int, default=0)
    parser.add_argument("--optimizer", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    torch.manual_seed(dist.get_rank())

    def make(shape: tuple[int, ...]) -> DTensor:
        dim = args.dim if len(shape) > args.dim else 0
        step = -(-shape[dim] // mesh.size())
        size = max(0, min(step, shape[dim] - step * dist.get_rank()))
        local = torch.empty((*shape[:dim], size, *shape[dim + 1 :]))
        torch.rand(local.shape, out=local)
        return DTensor.from_local(
            local,
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )

    names = (
        {f"t{i:05d}": (32, 32) for i in range(args.tiny)}
        if args.tiny
        else shapes(args.gb, args.hidden)
    )
    state: dict[str, object] = {"model": {name: make(shape) for name, shape in names.items()}}
    if args.optimizer:
        state["step"] = 500
        moments = {
            n: {"step": torch.tensor(500.0), "exp_avg": make(s), "exp_avg_sq": make(s)}
            for n, s in names.items()
        }
        state["optimizer"] = {
            "state": moments,
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(names)}],
        }
    dcp.save(state, checkpoint_id=args.dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
