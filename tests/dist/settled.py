"""A job whose second layer gets no gradient, saved eight times: `settled.py ROOT fsdp2|fsdp1|ddp`.

In the sixth step, it gets one. Rank 0 compares all steps with the values at their saves.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import ckpt_tools
from ckpt_tools import CheckpointManager

dist.init_process_group("gloo")
root, kind = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(1000, 4), nn.Linear(1000, 2000)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        result: torch.Tensor = self.used(x).sum()
        return result + self.unused(x).sum() if both else result


model: nn.Module = Two()
if kind == "fsdp2":
    fully_shard(model.unused)
    fully_shard(model.used)
    fully_shard(model)
elif kind == "fsdp1":
    model = FullyShardedDataParallel(
        model, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
    )  # fmt: skip
else:
    model = DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
linked, wanted = list[int](), dict[int, dict[str, torch.Tensor]]()
with CheckpointManager(
    root, keep_last=None, on_commit=lambda report: linked.append(report.linked_nbytes)
) as checkpoints:
    for step in range(1, 9):
        model(torch.randn(2, 1000), step == 6).backward()
        optimizer.step()
        optimizer.zero_grad()
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        wanted[step] = {name: values.clone() for name, values in found.items()}
        checkpoints.save(step, {"model": model, "optimizer": optimizer})
        checkpoints.wait()
if dist.get_rank() == 0:
    assert [nbytes > 7_900_000 for nbytes in linked] == [n in (5, 7) for n in range(1, 9)], linked
    for step, values in wanted.items():
        path = root / f"step-{step:08d}"
        assert ckpt_tools.verify(path).problems == []
        with ckpt_tools.open(path) as there:
            for name, tensor in values.items():
                assert torch.equal(torch.as_tensor(there[f"model.{name}"][...]), tensor), step
dist.destroy_process_group()
