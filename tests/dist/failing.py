"""Trains, and on rank 1 the third batch cannot be read: run by torchrun with a configuration's
overrides.
"""

from __future__ import annotations

import os
import sys

import torch

from training import config as configuration
from training.command import start
from training.data import Tokens
from training.prove import prove

calls = []
real = Tokens.batch


def batch(self, numbers, mine):  # the machine of rank 1 loses its disk
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 3:
        raise OSError(5, "Input/output error", "tokens.npy")
    return real(self, numbers, mine)


Tokens.batch = batch
torch.set_num_threads(1)
place = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
raise SystemExit(start(prove(configuration.resolve(None, sys.argv[1:]), *place)))
