"""Composer's Trainer with the callback of the how-to: `composer_saves_job.py OUT BATCHES`.

Every rank writes its losses to OUT/losses-RANK.txt. `recipe` is the block of the page.
"""

import sys
import warnings
from pathlib import Path

import cpu_torchvision  # noqa: F401  (before torchvision)

# isort: split
import composer.utils
import recipe
import torch
from composer import Callback, ComposerModel, Trainer
from composer.optim import LinearScheduler
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
OUT, BATCHES = Path(sys.argv[1]), int(sys.argv[2])


class Small(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop, self.out = nn.Embedding(11, 6), nn.Dropout(0.3), nn.Linear(6, 11)

    def forward(self, batch):
        return self.out(self.drop(self.embed(batch[0])))

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


class Losses(Callback):
    def batch_end(self, state, logger):
        with (OUT / f"losses-{composer.utils.dist.get_global_rank()}.txt").open("a") as file:
            file.write(f"{int(state.timestamp.batch)} {state.loss.item()!r}\n")


def main():
    data, model = TensorDataset(torch.arange(36) % 11, torch.arange(1, 37) % 11), Small()
    sampler = composer.utils.dist.get_sampler(data, shuffle=True)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=3, sampler=sampler),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        schedulers=LinearScheduler(t_max="20ba"),
        max_duration=f"{BATCHES}ba",
        device="cpu",
        parallelism_config={"fsdp": FSDP2Config()},
        progress_bar=False,
        seed=3,
        callbacks=[recipe.Checkpoints(OUT / "run", 4), Losses()],
    )
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main()
