"""FSDP1 saves one file a rank, as ShardedTensors and as LOCAL_STATE_DICT: `fsdp1_local.py OUT`;
`OUT/full_….pt` has all of it by name.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

warnings.simplefilter("ignore")


class Net(nn.Module):
    """Uneven shapes; a parameter that begins on one rank and ends on another; one that a rank has
    nothing of.
    """

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3))
        self.c = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def main():
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for kind in ("orig", "flat"):
        for case in ("sharded", "local"):
            (out / f"{case}_{kind}").mkdir(exist_ok=True)
        torch.manual_seed(0)
        model = Net()
        model.a = FSDP(model.a, use_orig_params=kind == "orig", device_id=torch.device("cpu"))
        model = FSDP(model, use_orig_params=kind == "orig", device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
        configs = ShardedStateDictConfig(_use_dtensor=False), ShardedOptimStateDictConfig(_use_dtensor=False)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
            state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
            torch.save(state, out / f"sharded_{kind}" / f"ckpt_rank_{rank}.pt")
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "iteration": 1}
            torch.save(state, out / f"local_{kind}" / f"ckpt_0001.rank_{rank}.pth")
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            full = model.state_dict()
        torch.manual_seed(0)
        plain = Net()
        one = torch.optim.AdamW(plain.parameters())
        plain(torch.randn(4, 5)).sum().backward()
        one.step()
        if rank == 0:
            torch.save({"model": full, "optim": {n: one.state[p] for n, p in plain.named_parameters()}}, out / f"full_{kind}.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
