"""Saves a sharded model as torch's HuggingFaceStorageWriter does, a safetensors file a rank:
`hf_shards.py OUT`; `whole.pt` is the whole.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.fsdp import fully_shard


def main():
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(10, 14), nn.Linear(14, 7), nn.BatchNorm1d(7)).to(torch.bfloat16)
    fully_shard(net)
    state = net.state_dict()
    writer = HuggingFaceStorageWriter(str(out / "shards"), {name: 1 for name in state}, save_distributed=True)
    dcp.save(state, storage_writer=writer)
    whole = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in state.items()}
    if dist.get_rank() == 0:
        torch.save(whole, out / "whole.pt")
    dist.barrier()  # nobody leaves while another is at it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
