"""A model of which only a part is in FSDP1, saved per rank as LOCAL_STATE_DICT: OUT flat|orig."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
        self.p = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.p(x))


def main() -> None:
    out, kind = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Half()
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.a = FullyShardedDataParallel(
        model.a, use_orig_params=kind == "orig", device_id=torch.device("cpu")
    )
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
    torch.save({"model": state}, out / f"rank_{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        shapes = {name: list(value.shape) for name, value in full.items()}
        (out / "shapes.json").write_text(json.dumps(shapes))
        torch.save(full, out.with_suffix(".full"))
    dist.barrier()
    dist.destroy_process_group()


main()
