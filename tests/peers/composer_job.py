"""Composer's Trainer trains two batches under FSDP2 and saves: `composer_job.py OUT`; or goes on
from a checkpoint: `composer_job.py OUT FROM`.

`OUT/full.pt` is what it then has, by name.
"""

import sys
import warnings
from pathlib import Path

import cpu_torchvision  # noqa: F401  (before torchvision)

# isort: split
import composer.utils
import torch
import torch.distributed as dist
from composer import ComposerModel, Trainer
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


class Tied(ComposerModel):
    """Uneven shapes, a tied weight, a bfloat16 buffer (on a CPU Composer trains in float32
    only).
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(11, 5), nn.LayerNorm(5)
        self.body, self.out = nn.Linear(5, 5), nn.Linear(5, 11, bias=False)
        self.out.weight = self.embed.weight
        self.embed._fsdp_wrap = self.out._fsdp_wrap = False  # the two go with the whole
        self.register_buffer("scale", torch.tensor([1.5, 2.5], dtype=torch.bfloat16))

    def forward(self, batch):
        return self.out(self.body(self.norm(self.embed(batch[0])))) * self.scale[0].float()

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


def main():
    out, data, model = (
        Path(sys.argv[1]),
        TensorDataset(torch.arange(36) % 11, torch.arange(1, 37) % 11),
        Tied(),
    )
    loader = DataLoader(data, batch_size=2, sampler=composer.utils.dist.get_sampler(data))
    how = (
        {"load_path": sys.argv[2]}
        if len(sys.argv) > 2
        else {"save_folder": str(out / "run"), "save_interval": "1ba"}
    )
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        max_duration="2ba",
        device="cpu",
        parallelism_config={"fsdp": FSDP2Config()},
        progress_bar=False,
        **how,
    )
    if "load_path" not in how:
        trainer.fit()
    model, (optimizer,) = trainer.state.model, trainer.state.optimizers
    whole = {
        n: v.full_tensor() if hasattr(v, "full_tensor") else v
        for n, v in model.state_dict().items()
    }
    moments = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        torch.save(
            {
                "model": whole,
                "optim": moments["state"],
                "batch": trainer.state.timestamp.batch.value,
            },
            out / "full.pt",
        )


if __name__ == "__main__":
    main()
