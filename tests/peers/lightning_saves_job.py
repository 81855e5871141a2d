"""PyTorch Lightning or Fabric on a CPU with our strategies: `lightning_saves_job.py OUT '{…}'`.

Every loss goes to `OUT/losses.txt` at once.
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import fully_shard

OUT, WANTED = Path(sys.argv[1]), json.loads(sys.argv[2])
STEPS, SAVE = WANTED["steps"], WANTED.get("save", 5)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))


def batches():
    return torch.randn(256, 5, generator=torch.Generator().manual_seed(1))


def note(step, loss, rank):
    with (OUT / f"losses-{rank}.txt").open("a") as file:
        file.write(f"{step} {loss.item()!r}\n")


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, _batch, _):
        # Lightning does not continue in the middle of an epoch's data
        at = (self.global_step * WANTED["ranks"] + self.global_rank) * 4 % 252
        loss = self.net(batches()[at : at + 4]).square().mean()
        note(self.global_step + 1, loss, self.global_rank)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9),
                "interval": "step",
            },
        }

    def configure_model(self):
        if WANTED.get("fsdp", 2) == 2 and not hasattr(self.net, "reshard"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def strategy(prefix=""):
    from ckpt_tools.integrations import lightning as ours

    names = {2: "ModelParallelStrategy", 1: "FSDPStrategy"}
    name = names[WANTED.get("fsdp", 2)]
    if WANTED.get("stock"):
        from lightning.fabric import strategies as of_fabric
        from lightning.pytorch import strategies as of_trainer

        kind = getattr(of_fabric if prefix else of_trainer, name)
    else:
        kind = getattr(ours, prefix + name)
    options = (
        {"data_parallel_size": WANTED["ranks"], "tensor_parallel_size": 1}
        if name == "ModelParallelStrategy"
        else {"state_dict_type": "sharded"}
    )
    if prefix:
        options["parallelize_fn"] = lambda model, mesh: fully_shard(
            model, mesh=mesh["data_parallel"]
        )
    return kind(**options)


def train():
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(batches()), batch_size=4)
    kept = ModelCheckpoint(
        OUT / "saved",
        filename="{step}",
        every_n_train_steps=SAVE,
        **WANTED.get("checkpoint", {"save_top_k": -1}),
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WANTED["ranks"],
        strategy=strategy(),
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[kept],
        default_root_dir=OUT,
        log_every_n_steps=1,
    )
    trainer.fit(Model(), data, ckpt_path=WANTED.get("resume"))


def fabric():
    job = lightning.Fabric(accelerator="cpu", devices=WANTED["ranks"], strategy=strategy("Fabric"))
    job.launch()
    model = net()
    model = job.setup_module(model)
    optimizer = job.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0, "name": "run"}
    if WANTED.get("resume"):
        job.load(WANTED["resume"], state, strict=not WANTED.get("filter"))
    data = batches()
    for step in range(state["step"] + 1, STEPS + 1):
        at = (step * job.world_size + job.global_rank) * 4 % 252
        loss = model(data[at : at + 4]).square().mean()
        job.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        note(step, loss, job.global_rank)
        state["step"] = step
        if step % SAVE == 0:
            chosen = (
                {"model": lambda name, value: name.startswith("2.")}
                if WANTED.get("filter")
                else None
            )
            job.save(OUT / "saved" / f"at={step}.ckpt", state, filter=chosen)
    if not WANTED.get("stock"):  # the stock one raises NotImplementedError
        job.strategy.teardown()


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    (fabric if WANTED.get("fabric") else train)()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
