"""Real jobs that stay with `dcp.save` and `dcp.load`, on our writer and reader: `torchrun …
tests/dist/plugin.py OUT CASE …`.

Each case is saved with our writer and loaded by stock torch, saved by stock torch and loaded with
our reader, and saved in the background by a thread and by a process.
"""

import copy
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from ckpt_tools.loop.dcp_plugin import StorageReader, StorageWriter
from tests.dist import device
from tests.dist import save as cases

warnings.simplefilter("ignore")


def blank(value):
    """The same structure with other values, to be loaded into."""
    if isinstance(value, dict):
        return {k: blank(v) for k, v in value.items()}
    if isinstance(value, DTensor):
        local = torch.zeros_like(value._local_tensor)
        return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride())
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return copy.copy(value) if isinstance(value, list) else type(value)() if value is not None else None


def same(got, want, path=""):
    if isinstance(want, dict):
        assert set(got) == set(want), path
        for key in want:
            same(got[key], want[key], f"{path}.{key}")
    elif isinstance(want, torch.Tensor):
        a, b = (v._local_tensor if isinstance(v, DTensor) else v for v in (got, want))
        a, b = a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
        assert torch.equal(a, b), path
    else:
        assert got == want, (path, got, want)


def check(case, out):
    state = getattr(cases, f"case_{case}")()
    ours, stock = out / f"{case}-ours", out / f"{case}-stock"
    dcp.save(state, storage_writer=StorageWriter(ours))
    dcp.save(state, checkpoint_id=stock)
    for path, reader in ((ours, None), (stock, StorageReader()), (ours, StorageReader(ours))):
        got = blank(state)
        dcp.load(got, checkpoint_id=path, storage_reader=reader)
        same(got, state)


def background(out):
    state = cases.case_adamw()
    cases._FULL.clear()
    for kind in AsyncCheckpointerType:
        path = out / f"async-{kind.value}"
        dcp.async_save(state, storage_writer=StorageWriter(path), async_checkpointer_type=kind).result()
        got = blank(state)
        dcp.load(got, storage_reader=StorageReader(path))
        same(got, state)


def refused(out):
    """Errors reach every rank, and nothing is left."""
    state = cases.case_columns()
    writer = StorageWriter(out / "columns-ours")
    for change, text in ((lambda: None, "the destination exists"),):
        change()
        try:
            dcp.save(state, storage_writer=writer)
        except CheckpointException as error:
            assert text in str(error), error
        else:
            raise AssertionError("not refused")
    dcp.save(state, storage_writer=StorageWriter(out / "columns-ours", overwrite=True))
    half = {"model": {k: v.to(torch.float16) for k, v in state["model"].items()}}
    try:
        dcp.load(blank(half), storage_reader=StorageReader(out / "columns-ours"))
    except CheckpointException as error:
        assert "types differ" in str(error), error
    else:
        raise AssertionError("cast without being asked")
    got = blank(half)
    dcp.load(got, storage_reader=StorageReader(out / "columns-ours", cast=True))
    same(got, half)
    dist.barrier()
    assert not [p.name for p in out.iterdir() if p.name.startswith(".")], list(out.iterdir())


def main() -> None:
    out = Path(sys.argv[1])
    device.begin()
    for case in sys.argv[2:]:
        cases._FULL.clear()
        check(case, out)
    background(out)
    refused(out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
