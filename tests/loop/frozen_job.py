"""Saves an adapter on a frozen base four times, and prints what was linked: `frozen_job.py ROOT`.

With `late`, the frozen values change right after the saves from the third on.
"""

import sys

from torch import nn

from ckpt_tools import CheckpointManager

model = nn.Sequential(nn.Linear(600, 600).requires_grad_(False), nn.Linear(600, 4))
with CheckpointManager(sys.argv[1], on_commit=lambda r: print(r.linked_nbytes)) as checkpoints:
    for step in range(1, 5):
        checkpoints.save(step, {"model": model})
        if step > 2 and "late" in sys.argv:  # by now, the values are copied at the save
            model[0].weight.data.add_(1)
        checkpoints.wait()
