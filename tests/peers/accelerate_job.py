"""A loop with Accelerate on a CPU: `accelerate_job.py OUT '{"steps": 20, "fsdp": 2, …}'`.

Every loss goes to `OUT/losses.txt` at once.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OUT, WANTED = Path(sys.argv[1]), json.loads(sys.argv[2])
os.environ["ACCELERATE_USE_CPU"] = "true"
if WANTED.get("fsdp"):
    from tests.peers import cpu_fsdp

    cpu_fsdp.allow(WANTED["fsdp"])
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin


class Counter:
    """A registered object."""

    seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def prepared():
    plugin = None
    if WANTED.get("fsdp"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=WANTED["fsdp"],
            state_dict_type="SHARDED_STATE_DICT",
            cpu_ram_efficient_loading=False,
            sync_module_states=False,
            **({"use_orig_params": True} if WANTED["fsdp"] == 1 else {}),
        )
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=WANTED.get("accumulate", 1),
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=bool(WANTED.get("seedable"))
        ),
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 4), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    data = TensorDataset(torch.randn(56, 8, generator=torch.Generator().manual_seed(2)))
    return accelerator, *accelerator.prepare(
        net, optimizer, scheduler, DataLoader(data, batch_size=4, shuffle=True)
    )


def main():
    from ckpt_tools.integrations.accelerate import Position, load_state, save_state

    OUT.mkdir(exist_ok=True)
    accelerator, net, optimizer, scheduler, loader = prepared()
    counter, root = Counter(), WANTED.get("root") or str(OUT / "run")
    accelerator.register_for_checkpointing(counter)
    torch.manual_seed(5 + accelerator.process_index)
    place, step = Position(), 0
    if WANTED.get("load"):
        place = load_state(accelerator, root, path=WANTED["load"])
        step = WANTED["at"]
        place = replace(place, step=step, epoch=WANTED["epoch"], batch=WANTED["batch"])
    elif not WANTED.get("stock"):
        place = load_state(accelerator, root)
        step = place.step or 0
    for epoch in range(place.epoch, 100):
        for number, (batch,) in place.batches(accelerator, loader, epoch):
            with accelerator.accumulate(net):
                loss = net(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.seen += 1
            with (OUT / f"losses-{accelerator.process_index}.txt").open("a") as file:
                file.write(f"{counter.seen} {loss.item()!r} {scheduler.get_last_lr()}\n")
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step % WANTED.get("save", 5) == 0:
                if WANTED.get("stock"):
                    accelerator.save_state(str(OUT / f"stock-{step}"))
                    (OUT / "at.json").write_text(json.dumps([step, epoch, number + 1]))
                else:
                    last = number + 1 == len(loader) and WANTED.get("next")
                    at = (epoch + 1, 0) if last else (epoch, number + 1)
                    save_state(accelerator, root, step, epoch=at[0], batch=at[1])
            if step == WANTED["steps"]:
                accelerator.wait_for_everyone()
                accelerator.end_training()
                return


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
