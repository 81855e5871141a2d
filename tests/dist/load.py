"""A real job that loads a checkpoint with stock `dcp.load` and compares every value: `torchrun …
load.py CHECKPOINT ORACLE.pt`.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from save import Net, adamw, state_of, train, whole
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.fsdp import fully_shard


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(99)
    model = Net()
    for child in (model.a, model.b, model.c, model.d):
        fully_shard(child)
    fully_shard(model)
    optimizer = adamw(model)
    train(model, optimizer)
    state = state_of(model, optimizer) | {"step": 0, "note": ""}
    dcp.load(state, checkpoint_id=sys.argv[1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    got = {**state_of(model, optimizer), "step": state["step"], "note": state["note"]}
    compare(whole(got), torch.load(sys.argv[2], weights_only=False), "")
    dist.barrier()
    dist.destroy_process_group()


def compare(got, want, path):
    if isinstance(want, dict):
        assert set(got) == set(want), (path, set(got) ^ set(want))
        for key in want:
            compare(got[key], want[key], f"{path}.{key}")
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype, path
        assert torch.equal(got, want), path
    else:
        assert got == want, path


if __name__ == "__main__":
    main()
