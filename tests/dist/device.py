"""Where real jobs compute: on the CPU, or with CKPT_DEVICE=cuda on the GPUs of the machine, ranks
going round: `make test-cuda`.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

NAME = os.environ.get("CKPT_DEVICE") or "cpu"


def is_shared(num_ranks: int) -> bool:
    """Tells whether several ranks share a GPU: by gloo then, which crashes at some of what FSDP1
    and DTensor ask of it.
    """
    return NAME != "cpu" and torch.cuda.device_count() < num_ranks


def on_cpu(value: DTensor) -> DTensor:
    """Returns a copy on the host, which gloo gathers; of a GPU's, it cannot do all that DTensor
    asks for.
    """
    if value.device_mesh.device_type == "cpu":
        return value
    mesh = DeviceMesh("cpu", value.device_mesh.mesh)
    local = value._local_tensor.detach().cpu()
    return DTensor.from_local(local, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride())


def here() -> torch.device:
    """Returns this rank's device."""
    return torch.device("cpu") if NAME == "cpu" else torch.device(NAME, torch.cuda.current_device())


def begin(is_default: bool = True) -> torch.device:
    """Joins the job and returns this rank's device, torch's default from then on: by nccl where
    each has a GPU of its own, else by gloo.
    """
    if NAME == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(NAME, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_default_device(device if is_default else "cpu")
    is_alone = int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_alone else "cpu:gloo,cuda:gloo")
    return device
