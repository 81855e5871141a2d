"""torchtitan's CheckpointManager saves step 2 of a small job: `torchtitan_job.py OUT save`; or
loads the newest step below OUT: `… OUT load`.

`OUT/save.pt` or `OUT/load.pt` is what it then has, by name.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

warnings.simplefilter("ignore")


class Net(nn.Module):
    """Uneven shapes, a tied weight, bfloat16."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(11, 5), nn.LayerNorm(5)
        self.layers = nn.ModuleDict(
            {str(n): nn.Linear(5, 5, dtype=torch.bfloat16) for n in range(2)}
        )
        self.output = nn.Linear(5, 11, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, ids):
        x = self.norm(self.tok_embeddings(ids))
        for layer in self.layers.values():
            x = layer(x.bfloat16()).float()
        return self.output(x)


class Progress(Stateful):
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def main():
    out, mode = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    torch.manual_seed(0 if mode == "save" else 1)
    model, progress = Net(), Progress()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh)
    groups = [
        ParamGroupConfig(
            pattern="norm",
            optimizer_name="AdamW",
            optimizer_kwargs={"lr": 1e-3, "weight_decay": 0.0},
        ),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}),
    ]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="foreach").build(
        model_parts=[model]
    )
    schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(
        optimizers=optimizers, training_steps=10
    )
    manager = CheckpointManager.Config(enable=True, folder="run", interval=2).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(out),
    )
    if mode == "save":
        for _ in range(2):
            model(torch.arange(8) % 11).square().sum().backward()
            optimizers.step()
            optimizers.zero_grad()
            schedulers.step()
            progress.step += 1
            manager.save(progress.step)
    else:
        assert manager.load()
    whole = {
        "model": {n: full(t) for n, t in model.state_dict().items()},
        "optim": {n: full(v) for n, v in optimizers.state_dict().items()},
        "step": progress.step,
        "scheduler": schedulers.state_dict(),
    }
    if dist.get_rank() == 0:
        torch.save(whole, out / f"{mode}.pt")
    dist.barrier()
    manager.close()


if __name__ == "__main__":
    main()
