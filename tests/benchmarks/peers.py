"""What people use instead, each as a whole process: `python tests/benchmarks/peers.py PEER SRC
DST`.

copy       the same bytes by `cp`'s own means, then fsync dcp        torch's dcp_to_torch_save
accelerate accelerate's merge_fsdp_weights reshard    under torchrun: dcp.load and dcp.save of every
tensor with `Shard(0)` on as many ranks as there are
"""

import os
import shutil
import sys
from pathlib import Path


def copy(src: Path, dst: Path) -> None:
    """Copies the data files one behind the other into one file, as fast as the kernel does it, and
    makes it durable.
    """
    with dst.open("wb") as out:
        for path in sorted(src.glob("*.distcp")):
            with path.open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())


def copy_tree(src: Path, dst: Path) -> None:
    dst.mkdir()
    for path in src.iterdir():
        with path.open("rb") as file, (dst / path.name).open("wb") as out:
            shutil.copyfileobj(file, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())


def dcp(src: Path, dst: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(src, dst)
    fsync(dst)


def accelerate(src: Path, dst: Path) -> None:
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(str(src), str(dst))
    fsync(next(dst.glob("*.safetensors")))


def fsync(path: Path) -> None:
    """Makes durable what the peer leaves to chance: every contender ends with its bytes on the
    disk.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())


def reshard(src: Path, dst: Path) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    metadata = checkpoint.FileSystemReader(src).read_metadata()
    state = {}
    for fqn, value in metadata.state_dict_metadata.items():
        if hasattr(value, "size"):
            whole = len(value.size) == 0
            state[fqn] = (
                torch.zeros(value.size)
                if whole
                else zeros(value.size, device_mesh=mesh, placements=[Shard(0)])
            )
        else:
            state[fqn] = None
    checkpoint.load(state, checkpoint_id=src)
    checkpoint.save(state, checkpoint_id=dst)
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
