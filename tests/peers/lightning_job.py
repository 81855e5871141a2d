"""Lightning trains two steps on a CPU and saves: `lightning_job.py OUT {sharded|file}`, under
torchrun; `whole.pt` beside has all of it.
"""

import sys
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))

    def training_step(self, batch, _):
        return self.net(batch[0]).square().sum()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        }

    def configure_model(self):
        if sys.argv[2] == "sharded":
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main():
    out, kind = Path(sys.argv[1]), sys.argv[2]
    strategy = (
        ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        if kind == "sharded"
        else "ddp"
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(
        model,
        torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.randn(8, 5)), batch_size=2
        ),
    )
    trainer.save_checkpoint(out)
    (optimizer,) = trainer.optimizers
    whole = {
        "model": {n: full(t) for n, t in model.state_dict().items()},
        "state": {
            i: {k: full(v) for k, v in s.items()}
            for i, s in optimizer.state_dict()["state"].items()
        },
        "lr": optimizer.param_groups[0]["lr"],
    }
    if dist.get_rank() == 0:
        torch.save(whole, out.parent / "whole.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
