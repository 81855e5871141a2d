"""Saves a tensor that ranks share, damages the checkpoint, and loads it again, on 2 ranks.

Every rank must raise. Run by torchrun with a directory and the damage: "none"; "flipped", a bit in
what rank 1 reads; "alone", a bit in what rank 0 reads while rank 1 does not want its half;
"swapped", the file of another step.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_tools
from ckpt_tools import CheckpointError, IntegrityError

folder, damage = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
for step in (1, 2):
    value = torch.full((8, 4096), float(step))
    ckpt_tools.save(folder / str(step), {"w": distribute_tensor(value, mesh, [Shard(0)])})
rank, file = dist.get_rank(), folder / "2" / f"__{int(damage != 'alone')}_0.distcp"
if rank == 0:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4 * (damage in ("flipped", "alone"))
    file.write_bytes(data)
    if damage == "swapped":
        shutil.copy(folder / "1" / file.name, file)
dist.barrier()
w = distribute_tensor(torch.zeros(8, 4096), mesh, [Shard(0)])
state = {} if damage == "alone" and rank else {"w": w}
try:
    report = ckpt_tools.load(folder / "2", {"own": rank, **state}, strict=False)
except CheckpointError as error:
    said = ["not what was sealed"] if damage == "swapped" else ["damaged since", f"in {file.name}"]
    assert damage != "none" and all(part in str(error) for part in said), error
    told = [None] * 2
    dist.all_gather_object(told, isinstance(error, IntegrityError))
    assert sorted(told) == [False, True], told
else:
    assert damage == "none" and report.num_proved == 1, (damage, report)
    assert torch.equal(w.full_tensor(), torch.full((8, 4096), 2.0))
dist.destroy_process_group()
