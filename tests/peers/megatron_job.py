"""Megatron-Core's dist_checkpointing on a CPU: `megatron_job.py OUT`, under torchrun; rank 0 also
writes `OUT/../whole.pt`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

# Megatron waits for a GPU before it writes, and counts on one afterwards; there is none
torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"


def whole():
    torch.manual_seed(3)
    return {
        # a stack of layers: the axis in front is the layer's
        "decoder.layers.weight": torch.randn(4, 6, 5),
        "embedding.weight": torch.randn(12, 5).bfloat16(),
        "final.bias": torch.randn(7),
        "optimizer.state.exp_avg.final.bias": torch.randn(7),
    }


def main():
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    full = whole()
    state = {}
    for number in range(4):  # of each layer, every rank has its rows
        piece = full["decoder.layers.weight"][number].chunk(size)[rank].clone()
        state[f"layer{number}"] = ShardedTensor.from_rank_offsets(
            "decoder.layers.weight", piece, (0, number, 4), (1, rank, size), prepend_axis_num=1
        )
    state["embedding"] = ShardedTensor.from_rank_offsets(
        "embedding.weight", full["embedding.weight"].chunk(size)[rank].clone(), (0, rank, size)
    )
    state["bias"] = ShardedTensor.from_rank_offsets(
        "final.bias", full["final.bias"].clone(), replica_id=rank
    )
    state["exp_avg"] = ShardedTensor.from_rank_offsets(
        "optimizer.state.exp_avg.final.bias",
        full["optimizer.state.exp_avg.final.bias"].clone(),
        replica_id=rank,
    )
    state["extra"] = ShardedObject("decoder.layers._extra_state", {"scale": 1.5}, (size,), (rank,))
    state |= {"iteration": 10, "args": {"lr": 0.1, "layers": 4}, "checkpoint_version": 3.0}
    if rank == 0:
        out.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(out), validate_access_integrity=False)
    if rank == 0:
        torch.save(full, out.parent / "whole.pt")
        (out.parent / "latest_checkpointed_iteration.txt").write_text("10")
    dist.barrier()


if __name__ == "__main__":
    main()
