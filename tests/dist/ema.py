"""A sharded average: `ema.py FOLDER save`, or `… load` on another number of ranks."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt_tools import CheckpointManager, Ema


def main():
    folder, what = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    torch.manual_seed(0 if what == "save" else 1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    plain.load_state_dict(model.state_dict())
    fully_shard(model)
    ema, whole = Ema(model, 0.9), Ema(plain, 0.9)
    state = {"model": model, "ema": ema}
    with CheckpointManager(folder / "run") as checkpoints:
        if what == "save":
            for each, average in ((model, ema), (plain, whole)):
                optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
                for _ in range(4):
                    each(torch.ones(2, 5)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    average.update()
            for name, tensor in ema.shadow.items():
                assert torch.allclose(tensor.full_tensor(), whole.shadow[name], atol=1e-6), name
            with ema.applied():
                for name, p in model.named_parameters():
                    assert torch.equal(p.full_tensor(), ema.shadow[name].full_tensor())
            checkpoints.save(4, state)
            full = {n: t.full_tensor() for n, t in ema.shadow.items()}
            if dist.get_rank() == 0:
                torch.save(full, folder / "want.pt")
        else:
            assert checkpoints.resume(state) == 4 and ema.num_updates == 4
            want = torch.load(folder / "want.pt")
            for name, tensor in ema.shadow.items():
                assert torch.equal(tensor.full_tensor(), want[name]), name
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
