"""The functions that people call without a manager: save, open, steps, latest, prune."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import (
    CheckpointManager,
    FormatError,
    IntegrityError,
    PlanError,
    StorageError,
)
from ckpt_tools.storage import LocalStore, read
from tests.conftest import torchrun
from tests.servers.servers import Server


def net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))


def test_what_save_writes_is_loaded_by_us_and_by_stock_torch(tmp_path: Path) -> None:
    model = net(1)
    report = ckpt_tools.save(tmp_path / "c", {"model": model, "n": 7})
    assert report.path == str(tmp_path / "c") and ckpt_tools.verify(tmp_path / "c").is_sealed
    other, state = net(2), {"n": 0}
    ckpt_tools.load(tmp_path / "c", state | {"model": other})
    want, got = model.state_dict(), other.state_dict()
    assert all(torch.equal(want[name], got[name]) for name in want)
    stock = {"model": {k: torch.zeros_like(v) for k, v in model.state_dict().items()}}
    dcp.load(stock, checkpoint_id=tmp_path / "c", no_dist=True)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in stock["model"].items())
    with pytest.raises(StorageError, match="exists"):
        ckpt_tools.save(tmp_path / "c", {"n": 8})
    ckpt_tools.save(tmp_path / "c", {"n": 8}, overwrite=True)
    with pytest.raises(PlanError):
        ckpt_tools.save(tmp_path / "d", {"f": lambda: 0})
    assert not (tmp_path / "d").exists()


@pytest.mark.slow
def test_save_in_a_bucket(server: Server) -> None:
    server.bucket("single")
    ckpt_tools.save("s3://single/c", {"w": torch.arange(5.0)}, storage_options=server.options)
    with ckpt_tools.open("s3://single/c", storage_options=server.options) as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), torch.arange(5.0))
        assert torch.equal(checkpoint["w"][1:3], torch.tensor([1.0, 2.0]))


def test_ranks_save_together(tmp_path: Path) -> None:
    torchrun(3, "single.py", str(tmp_path / "c"))
    want = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
    with ckpt_tools.open(tmp_path / "c") as checkpoint:
        assert checkpoint.world_size == 3 and list(checkpoint) == ["w"]
        assert torch.equal(checkpoint["w"].torch(), want)
        assert torch.equal(checkpoint["w"][2:6, 1:4], want[2:6, 1:4])


SLICES = [
    (0,),
    (-1,),
    (slice(2, 5),),
    (slice(None), 3),
    (slice(None), slice(1, -1)),
    (slice(5, 2),),
    (4, slice(None), 1),
    (),
]


@pytest.mark.parametrize("form", ["dcp", "safetensors", "pt"])
@pytest.mark.parametrize("key", SLICES, ids=str)
def test_slices_are_those_of_torch(form: str, key: tuple[int | slice, ...], tmp_path: Path) -> None:
    want = torch.arange(6 * 7 * 3, dtype=torch.bfloat16).reshape(6, 7, 3)
    path = tmp_path / ("c" if form == "dcp" else f"c.{form}")
    if form == "dcp":
        dcp.save({"w": want}, checkpoint_id=path, no_dist=True)
    else:
        save_file({"w": want}, path) if form == "safetensors" else torch.save({"w": want}, path)
    with ckpt_tools.open(path) as checkpoint:
        found = checkpoint["w"][key]
        assert found.shape == want[key].shape and torch.equal(found, want[key])


@pytest.mark.slow
def test_an_opened_checkpoint_reads_only_what_is_needed(tmp_path: Path) -> None:
    save_file({"big": torch.zeros(1 << 22), "small": torch.ones(3)}, tmp_path / "c.safetensors")
    code = (
        "import sys, resource, ckpt_tools, awscrt.checksums\n"
        "with ckpt_tools.open(sys.argv[1]) as c:\n"
        "    before = int(open('/proc/self/io').read().split()[1])\n"
        "    assert c['small'].torch().sum() == 3 and c['big'][7:9].shape == (2,)\n"
        "    read = int(open('/proc/self/io').read().split()[1]) - before\n"
        "assert read < 200_000, read"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "c.safetensors")]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0


def test_types_shapes_and_errors_of_an_opened_checkpoint(tmp_path: Path) -> None:
    values = {
        "b": torch.ones(2, 3, dtype=torch.bfloat16),
        "i": torch.arange(4),
        "s": torch.tensor(2.5),
    }
    save_file(values, tmp_path / "c.safetensors")
    with ckpt_tools.open(tmp_path / "c.safetensors") as checkpoint:
        assert len(checkpoint) == 3 and "b" in checkpoint and "x" not in checkpoint
        assert repr(checkpoint["b"]) == "StoredTensor('b', bfloat16, [2, 3])"
        assert checkpoint["b"].nbytes == 12 and str(tmp_path) in repr(checkpoint)
        assert np.array_equal(checkpoint["i"].numpy(), np.arange(4))
        assert checkpoint["s"][()] == 2.5
        with pytest.raises(PlanError, match="NumPy has no bfloat16"):
            checkpoint["b"].numpy()
        for bad in (2, (0, 3), (0, 0, 0), slice(None, None, 2)):
            with pytest.raises(IndexError):
                checkpoint["b"][bad]
        with pytest.raises(KeyError):
            checkpoint["x"]


@pytest.mark.parametrize("form", ["sealed safetensors", "dcp"])
def test_a_damaged_tensor_is_not_read(form: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    if form == "dcp":
        dcp.save({"w": torch.zeros(1000)}, checkpoint_id=path, no_dist=True)
        file = path / "__0_0.distcp"
    else:
        file = path = tmp_path / "c.safetensors"
        save_file({"w": torch.zeros(1000)}, path)
        ckpt_tools.seal(path)
    data = bytearray(file.read_bytes())
    data[2000] ^= 1
    file.write_bytes(data)
    with ckpt_tools.open(path) as checkpoint, pytest.raises(IntegrityError):
        checkpoint["w"].torch()


def test_the_steps_of_a_run(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        assert checkpoints.resume({"n": 0}) is None
        for step in (0, 10, 20):
            checkpoints.save(step, {"n": step}, asynchronous=False)
    assert [s.number for s in ckpt_tools.steps(tmp_path)] == [0, 10, 20]
    newest = ckpt_tools.latest(tmp_path, verify=True)
    assert newest is not None and newest.number == 20
    assert [s.number for s in ckpt_tools.prune(tmp_path, 1, dry_run=True).removed] == [0, 10]
    assert [s.number for s in ckpt_tools.prune(tmp_path, 2).removed] == [0]
    assert ckpt_tools.latest(tmp_path / "nothing") is None
    with pytest.raises(PlanError, match="keep_last"):
        ckpt_tools.prune(tmp_path, 0)


def test_step_0_is_a_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(0, {"n": 5}, asynchronous=False)
    state = {"n": 1}
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(state) == 0
    assert state["n"] == 5


@pytest.mark.slow
def test_every_type_that_is_returned_has_a_short_repr(tmp_path: Path) -> None:
    many = {f"layer.{n}.weight": torch.full((3,), float(n)) for n in range(500)}
    save_file(many, tmp_path / "a.safetensors")
    save_file(many | {"layer.0.weight": torch.ones(3)}, tmp_path / "b.safetensors")
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"model": many}, asynchronous=False)
        saved = checkpoints.last_save
    found = [
        saved,
        ckpt_tools.inspect(tmp_path / "a.safetensors"),
        ckpt_tools.merge(tmp_path / "run", tmp_path / "m.safetensors"),
        ckpt_tools.verify(tmp_path / "run"),
        ckpt_tools.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors"),
        ckpt_tools.seal(tmp_path / "a.safetensors"),
        ckpt_tools.copy(tmp_path / "a.safetensors", tmp_path / "c.safetensors"),
        ckpt_tools.salvage(tmp_path / "a.safetensors", tmp_path / "s"),
        ckpt_tools.load(tmp_path / "run", {"model": dict(many)}),
        ckpt_tools.latest(tmp_path / "run"),
        ckpt_tools.prune(tmp_path / "run", 1),
        ckpt_tools.latest(tmp_path / "run").manifest,  # type: ignore[union-attr]
    ]
    for value in found:
        name = type(value).__name__
        assert name in ckpt_tools.__all__ and getattr(ckpt_tools, name) is type(value)
        assert len(repr(value)) < 1500 and name in repr(value), (name, len(repr(value)))
    assert load_file(tmp_path / "c.safetensors").keys() == many.keys()


def test_an_adapter_in_a_bucket_takes_the_options_of_its_store(
    server: Server, tmp_path: Path
) -> None:
    fs = server.bucket("adapters")
    sides = {"A": torch.ones(1, 3), "B": torch.ones(4, 1)}
    save_file(
        {f"base_model.model.w.lora_{s}.weight": t for s, t in sides.items()},
        tmp_path / "adapter_model.safetensors",
    )
    config = '{"peft_type": "LORA", "r": 1, "lora_alpha": 2, "bias": "none"}'
    (tmp_path / "adapter_config.json").write_text(config)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        fs.put_file(str(tmp_path / name), f"adapters/ad/{name}")
    save_file({"w.weight": torch.zeros(4, 3)}, tmp_path / "base.safetensors")
    out = tmp_path / "out.safetensors"
    adapter = "s3://adapters/ad"
    ckpt_tools.merge(
        tmp_path / "base.safetensors", out, lora=adapter, storage_options=server.options
    )
    assert torch.equal(load_file(out)["w.weight"], torch.full((4, 3), 2.0))


@pytest.mark.parametrize("nbytes", [10**12, (1 << 62) + 5])
def test_a_read_allocates_no_more_than_its_file_has(nbytes: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    store = LocalStore(tmp_path)
    with pytest.raises(StorageError, match="ends early"):
        read(store, "x", 0, nbytes)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FormatError, match="too long"):
        read(store, "sparse")


def test_an_opened_tensor_is_an_array_and_says_what_it_takes(tmp_path: Path) -> None:
    value = torch.arange(12.0).reshape(3, 4)
    ckpt_tools.save(tmp_path / "p", {"model": {"w": value, "s": torch.tensor(2.0)}, "n": 3})
    with ckpt_tools.open(tmp_path / "p") as checkpoint:
        tensor = checkpoint["model.w"]
        assert np.array_equal(np.asarray(tensor), value.numpy())
        assert torch.equal(tensor[...], value) and torch.equal(tensor[..., 1], value[..., 1])
        assert torch.equal(tensor[1, ...], value[1]) and checkpoint["model.s"][...] == 2.0
        for wrong in (None, [0, 1], True):
            with pytest.raises(TypeError, match=r"is no index or slice: .* \.torch\(\)"):
                tensor[wrong]
        assert "model.w" in checkpoint and "model.q" not in checkpoint
        with pytest.raises(KeyError, match=r"model\.q is not in .* nearest names: model\.w"):
            checkpoint["model.q"]
        with pytest.raises(KeyError, match="n is an object"):
            checkpoint["n"]


def test_a_job_does_not_load_what_converts() -> None:
    code = """
import sys
from ckpt_tools import CheckpointManager
assert "ckpt_tools.loop.manager" in sys.modules
assert not (found := {"ckpt_tools.operations.convert.convert", "s3fs"} & {*sys.modules}), found
"""
    subprocess.run([sys.executable, "-c", code], check=True)
