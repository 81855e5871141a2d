"""torchtitan's containers on a CPU with our manager: `torchtitan_saves_job.py OUT '{"steps": 20}'`.

The model, its optimizers and schedulers are torchtitan's. With `"stages": 2` each half of the ranks
has one part of the model, as in a pipeline. Every loss goes to `OUT/losses-RANK.txt` at once.
"""

import json
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

OUT, WANTED = Path(sys.argv[1]), json.loads(sys.argv[2])


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(6, 6) for n in layers})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x).relu()
        return x


class Progress:
    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


class Loader:
    """As torchtitan's loader: one entry for each data-parallel rank."""

    seen = 0

    def __init__(self, rank, size):
        self.key, self.size = f"dp_rank_{rank}", size

    def state_dict(self):
        return {self.key: pickle.dumps({"seen": self.seen}), "world_size": self.size}

    def load_state_dict(self, state):
        if self.key in state:
            self.seen = pickle.loads(state[self.key])["seen"]


class Adapter:
    """Names of another framework."""

    fqn_to_index_mapping = None
    hf_assets_path = None

    def to_hf(self, state):
        return {f"model.{n}": t for n, t in state.items()}

    def from_hf(self, state):
        return {n.removeprefix("model."): t for n, t in state.items()}


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = WANTED.get("stages", 1)
    stage, width = rank * stages // size, size // stages
    torch.manual_seed(WANTED.get("seed", 0) + stage)
    model, progress = Net(range(stage * 2, stage * 2 + 2)), Progress()
    meshes = init_device_mesh("cpu", (stages, width), mesh_dim_names=("pp", "dp"))
    fully_shard(model, mesh=meshes["dp"])
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="foreach").build(
        model_parts=[model]
    )
    schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(
        optimizers=optimizers, training_steps=30
    )
    kind = CheckpointManager
    if not WANTED.get("stock"):
        from ckpt_tools.integrations.torchtitan import CkptToolsManager as kind
    loader = Loader(rank, size)
    options = {
        "folder": "run",
        "interval": WANTED.get("save", 5),
        "last_save_model_only": False,
        **WANTED.get("config", {}),
    }
    manager = kind.Config(enable=True, **options).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=Adapter(),
        base_folder="" if "://" in options["folder"] else str(OUT),
    )
    manager.load(WANTED.get("load", -1))
    if WANTED.get("seed_only"):
        manager.save(0, last_step=True)
    while progress.step < WANTED["steps"]:
        progress.step += 1
        loader.seen += 1
        data = torch.randn(
            4, 6, generator=torch.Generator().manual_seed(progress.step * 10 + rank % width)
        )
        loss = model(data).square().mean()
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        with (OUT / f"losses-{rank}.txt").open("a") as file:
            file.write(f"{progress.step} {loss.item()!r} {loader.seen}\n")
        schedulers.step()
        manager.save(progress.step, last_step=progress.step == WANTED["steps"])
        manager.maybe_wait_for_staging()
    manager.close()
    whole = {n: t.full_tensor() for n, t in model.state_dict().items()}
    if rank % width == 0:
        torch.save(whole, OUT / f"end-{stage}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    main()
