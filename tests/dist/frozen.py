"""An adapter on a frozen base, saved and resumed: `frozen.py ROOT save|resume|again|change STEPS`.

`again` resumes with as many ranks as the job before. The last rank names the root by LINK to it.

The base has 1.4 MB of shards on each of three ranks. Each step's values lie in ROOT/values.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt_tools
from ckpt_tools import CheckpointManager, SaveReport

dist.init_process_group("gloo")
root, what = Path(sys.argv[1]), sys.argv[2]
if what == "again" and dist.get_rank() == dist.get_world_size() - 1:
    root = Path(sys.argv[4])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 4))
model[0].requires_grad_(False)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
fully_shard(model[1], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model[1].parameters())
state = {"model": model, "optimizer": optimizer}
linked: list[int] = []


def note(report: SaveReport) -> None:
    linked.append(report.linked_nbytes)


def values() -> dict[str, torch.Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


with CheckpointManager(root / "run", keep_last=None, on_commit=note) as checkpoints:
    if what in ("resume", "again"):
        for tensor in model.parameters():
            nn.init.zeros_(tensor)
        number = checkpoints.resume(state)
        found = values()
        if dist.get_rank() == 0:
            want = torch.load(root / "values" / f"{number}.pt")
            assert found.keys() == want.keys()
            assert all(torch.equal(found[name], want[name]) for name in want)
    else:
        number = 0
    for step in range(number + 1, number + 1 + int(sys.argv[3])):
        model(torch.randn(2, 1000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if what == "change":  # torch counts no change of a DTensor's shard
            model.load_state_dict({name: t + 1 for name, t in model.state_dict().items()})
        checkpoints.save(step, state)
        found = values()
        if dist.get_rank() == 0:
            (root / "values").mkdir(exist_ok=True)
            torch.save(found, root / "values" / f"{step}.pt")
if dist.get_rank() == 0:
    assert (linked[0] > 0) == (what == "again"), "the first save of a job knows the step it resumed"
    if what == "change":
        assert not any(linked)
        for step in range(1, 1 + int(sys.argv[3])):
            with ckpt_tools.open(root / "run" / f"step-{step:08d}") as step_there:
                for name, tensor in torch.load(root / "values" / f"{step}.pt").items():
                    assert torch.equal(torch.as_tensor(step_there[f"model.{name}"][...]), tensor)
    else:
        assert all(nbytes > 3_900_000 for nbytes in linked[1:]), linked
dist.destroy_process_group()
