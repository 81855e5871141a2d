"""What only a GPU can show: pinned memory, copies that are on their way, random numbers; `make
test-cuda` runs real jobs there as well.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager, PerRank, RngState, Writing
from ckpt_tools.loop.state.device_statistics import measure_on_device
from ckpt_tools.loop.state.staging import Stager, _pinned
from tests.jobs import ROOT, torchrun_command
from tests.training.runs import QUIET, TINY, losses, sets

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),  # torch's own on CUDA
]
DTYPES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 uint16"
    " uint32 uint64 float8_e4m3fn float8_e5m2".split()
)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    a, b = (t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (got, want))
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(a, b)


def stock(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    return state


def resident_mib(key: str = "VmRSS") -> float:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) / 1024


# ---- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_gpu_measures_what_the_host_measures(asynchronous: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    on_host = {name: torch.randn(1000, 33) for name in ("a", "b")}
    on_host["b"][3, 3] = float("nan")  # the engine measures this one
    found = []
    for name, device in (("host", "cpu"), ("device", "cuda")):
        state = {key: value.to(device) for key, value in on_host.items()}
        with CheckpointManager(tmp_path / name, statistics=True) as checkpoints:
            checkpoints.save(1, {"model": state}, asynchronous=asynchronous)
        manifest = ckpt_tools.steps(tmp_path / name)[0].manifest
        assert manifest is not None
        found.append(
            {n: t.statistics and t.statistics.packed() for n, t in manifest.tensors.items()}
        )
    assert found[0] == found[1] and len(found[0]) == 2


def test_the_host_does_not_wait_for_a_gpu_that_measures() -> None:
    tensors = [torch.randn(100, 7, device="cuda"), torch.ones(3, device="cuda", dtype=torch.int32)]
    tensors.append(torch.ones(5, device="cuda", dtype=torch.bfloat16))
    found = measure_on_device(tensors)  # allocates pinned memory
    assert found is not None
    found.result()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = measure_on_device(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found is not None
    assert [found.result()[n].numel for n in range(3)] == [700, 3, 5]


# ---- values --------------------------------------------------------------------------------------


def every_kind() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        raw = torch.randint(
            0,
            2 if dtype is torch.bool else 256,
            (9 * dtype.itemsize, 5),
            dtype=torch.uint8,
            device="cuda",
        )
        found[name] = raw.view(-1).view(dtype).view(9, 5)
    big = torch.randn(20, 30, device="cuda")
    found |= {
        "transposed": big.t(),
        "slice": big[3:9, 5:20],
        "row": big[4],
        "scalar": big[0, 0].clone(),
        "empty": big[:0].clone(),
    }
    found |= {
        "channels": torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last),
        "host": torch.randn(7),
    }
    return found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_type_and_stride_goes_to_disk_and_back_bit_for_bit(
    asynchronous: bool, tmp_path: Path
) -> None:
    model = every_kind()
    want = {name: value.cpu().clone() for name, value in model.items()}
    with CheckpointManager(tmp_path, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(1, {"model": model})
        checkpoints.wait()
        assert ckpt_tools.verify(checkpoints.latest().path).problems == []
        places = {name: value.data_ptr() for name, value in model.items()}
        for value in model.values():
            (
                value.view(torch.uint8).zero_()
                if value.is_contiguous() and value.dim()
                else value.zero_()
            )
        assert checkpoints.resume({"model": model}) == 1
        assert all(same_bits(model[name], want[name]) for name in want)
        assert {name: value.data_ptr() for name, value in model.items()} == places
        blank = {name: torch.zeros_like(value) for name, value in model.items()}
        got = stock(checkpoints.latest().path, {"model": blank})["model"]
        assert all(same_bits(got[name], want[name]) for name in want)


def test_what_stock_torch_saved_from_a_gpu_resumes_and_safetensors_load_straight_to_it(
    tmp_path: Path,
) -> None:
    model = every_kind()
    dcp.save({"model": model}, checkpoint_id=tmp_path / "stock")
    blank = {name: torch.zeros_like(value) for name, value in model.items()}
    ckpt_tools.load(tmp_path / "stock", {"model": blank})
    assert all(same_bits(blank[name], model[name]) for name in model)
    linear = nn.Linear(300, 200, device="cuda")
    save_file(linear.state_dict(), tmp_path / "l.safetensors")
    other = nn.Linear(300, 200, device="cuda")
    ckpt_tools.load(tmp_path / "l.safetensors", {"model": other})
    assert torch.equal(other.weight, linear.weight) and torch.equal(other.bias, linear.bias)
    half = nn.Linear(300, 200, device="cuda", dtype=torch.bfloat16)
    ckpt_tools.load(tmp_path / "l.safetensors", {"model": half}, cast=True)
    assert torch.equal(half.weight, linear.weight.to(torch.bfloat16))


def test_the_random_numbers_of_a_gpu_and_tensors_of_one_rank_go_on(tmp_path: Path) -> None:
    mine = PerRank(torch.arange(3, device="cuda"))
    state = {"rng": RngState(), "mine": mine}
    with CheckpointManager(tmp_path) as checkpoints:
        torch.rand(5, device="cuda")
        checkpoints.save(1, state)
        drawn = torch.rand(5, device="cuda"), nn.functional.dropout(torch.ones(50, device="cuda"))
        checkpoints.wait()
        mine.value = None
        checkpoints.resume(state)
        again = torch.rand(5, device="cuda"), nn.functional.dropout(torch.ones(50, device="cuda"))
    assert torch.equal(drawn[0], again[0]) and torch.equal(drawn[1], again[1])
    assert mine.value.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["fused", "capturable", "foreach", "offloaded"])
def test_an_optimizer_goes_on_as_if_nothing_had_been(kind: str, tmp_path: Path) -> None:
    how = {
        "fused": {"fused": True},
        "capturable": {"capturable": True},
        "foreach": {"foreach": True},
        "offloaded": {},
    }[kind]
    device = "cpu" if kind == "offloaded" else "cuda"

    def make() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.2), nn.Linear(128, 64)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **how)
        return model, optimizer, {"model": model, "optimizer": optimizer, "rng": RngState()}

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        found = []
        for _ in range(count):
            loss = model(torch.randn(16, 64, device=device)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    model, optimizer, state = make()
    with CheckpointManager(tmp_path) as checkpoints:
        steps(model, optimizer, 3)
        checkpoints.save(3, state)
        want = steps(model, optimizer, 5)  # while it is being written
        checkpoints.wait()
        model, optimizer, state = make()
        assert checkpoints.resume(state) == 3
    assert steps(model, optimizer, 5) == want
    assert all(
        s["step"].device.type == (device if kind in ("fused", "capturable") else "cpu")
        for s in optimizer.state.values()
    )


# ---- copies on their way -------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_waits_for_kernels_before_it_and_is_left_alone_by_those_behind(
    asynchronous: bool, tmp_path: Path
) -> None:
    weights = [torch.zeros(16 << 20, device="cuda") for _ in range(8)]
    side = torch.cuda.Stream()
    with CheckpointManager(tmp_path, asynchronous=asynchronous) as checkpoints:
        for step in range(1, 4):
            torch.cuda._sleep(100_000_000)  # tens of ms; what follows is queued behind it
            for number, weight in enumerate(weights):
                weight.fill_(step + number / 16)
            checkpoints.save(step, {"w": {str(i): w for i, w in enumerate(weights)}})
            # nothing orders it behind the copies, but that they are over
            with torch.cuda.stream(side):
                for weight in weights:
                    weight.fill_(-1)
            side.synchronize()
            checkpoints.wait()
            got = stock(
                checkpoints.latest().path,
                {"w": {str(i): torch.empty_like(w) for i, w in enumerate(weights)}},
            )["w"]
            assert all(bool((got[str(i)] == step + i / 16).all()) for i in range(len(weights)))


def test_a_load_is_over_when_it_returns(tmp_path: Path) -> None:
    weights = {str(i): torch.full((16 << 20,), float(i), device="cuda") for i in range(8)}
    side = torch.cuda.Stream()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": weights}, asynchronous=False)
        for weight in weights.values():
            weight.zero_()
        torch.cuda._sleep(100_000_000)
        checkpoints.resume({"w": weights})
        with torch.cuda.stream(side):
            sums = [bool((w == float(i)).all()) for i, w in weights.items()]
    assert all(sums)


# ---- copies that overlap training -----------------------------------------------------------------


def updated(name: str) -> tuple[dict[str, Any], Callable[[], object]]:
    """Returns a state of a gigabyte with an optimizer, and a function that updates it."""
    weights = nn.ParameterList(
        [nn.Parameter(torch.randn(1 << 22, device="cuda")) for _ in range(20)]
    )
    optimizer = torch.optim.AdamW(weights.parameters(), lr=0.1, **{name: True})
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return {"weights": weights, "optimizer": optimizer}, optimizer.step


def as_stored(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    weights, optimizer = state["weights"], state["optimizer"]
    found = {f"weights.{i}": w.detach().cpu() for i, w in enumerate(weights)}
    for i, w in enumerate(weights):
        for key, value in optimizer.state[w].items():
            found[f"optimizer.state.{i}.{key}"] = value.detach().cpu().clone()
    return found


def check_stored(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    got = stock(path, {name: torch.empty_like(value) for name, value in wanted.items()})
    for name, value in wanted.items():
        assert same_bits(got[name], value), name


@pytest.mark.parametrize("name", ["foreach", "fused", "capturable"])
def test_an_update_waits_on_the_device_for_the_copy(name: str, tmp_path: Path) -> None:
    state, update = updated(name)
    with CheckpointManager(
        tmp_path, keep_last=None, writing=Writing(overlap_copy=True)
    ) as checkpoints:
        for step in range(1, 6):
            wanted = as_stored(state)
            checkpoints.save(step, state)
            update()
            checkpoints.wait()
            check_stored(tmp_path / f"step-{step:08d}", wanted)


@pytest.mark.parametrize("streams", [1, 3])
def test_a_replayed_graph_and_other_streams_wait_after_before_step(
    streams: int, tmp_path: Path
) -> None:
    state, update = updated("capturable")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    others = [torch.cuda.Stream() for _ in range(streams)]
    with CheckpointManager(
        tmp_path, keep_last=None, writing=Writing(overlap_copy=True)
    ) as checkpoints:
        for step in range(1, 6):
            torch.cuda.synchronize()
            wanted = as_stored(state)
            checkpoints.save(step, state)
            with torch.cuda.stream(others[step % streams]):
                checkpoints.before_step()
                graph.replay()
            checkpoints.wait()
            check_stored(tmp_path / f"step-{step:08d}", wanted)


def test_a_compiled_update_waits_after_before_step(tmp_path: Path) -> None:
    state, update = updated("foreach")
    compiled = torch.compile(update)
    compiled()
    with CheckpointManager(
        tmp_path, keep_last=None, writing=Writing(overlap_copy=True)
    ) as checkpoints:
        for step in range(1, 4):
            wanted = as_stored(state)
            checkpoints.save(step, state)
            checkpoints.before_step()
            compiled()
            checkpoints.wait()
            check_stored(tmp_path / f"step-{step:08d}", wanted)


# ---- memory --------------------------------------------------------------------------------------


def test_pinned_memory_is_what_is_needed_and_is_given_back() -> None:
    nbytes = (1 << 30) + (64 << 20)
    before = resident_mib()
    buffer = _pinned(nbytes)
    assert buffer.is_pinned() and buffer[5:].is_pinned()
    assert resident_mib() - before < 1100
    again = buffer[100:200]
    del buffer
    gc.collect()
    assert again.is_pinned()  # for as long as anyone has a part of it
    del again
    gc.collect()
    assert resident_mib() - before < 64
    stage = Stager()
    places = {
        stage.copy([torch.ones(n << 20, device="cuda")]).wait()[0].obj.ctypes.data
        for n in (2, 1, 2)
    }
    assert len(places) == 1  # used again


def test_where_memory_cannot_be_pinned_copies_are_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = every_kind()
    want = {name: value.cpu().clone() for name, value in model.items()}
    taken = torch.empty(1 << 20, dtype=torch.uint8, device="cpu")
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(taken.data_ptr(), len(taken), 0)) == 0
    # CUDA registers nothing twice
    monkeypatch.setattr("ckpt_tools.loop.state.staging._pageable", lambda nbytes: taken[:nbytes])
    stage = Stager()
    views = stage.copy(list(model.values())).wait()
    monkeypatch.undo()
    runtime.cudaHostUnregister(taken.data_ptr())
    for view, value in zip(views, want.values(), strict=True):
        assert bytes(view) == value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    assert torch.ones(3, device="cuda").sum() == 3


LOAD = """
import sys, torch, ckpt_tools
from pathlib import Path
def mib(key):
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key)).split()[1]) / 1024
state = {"w": {str(i): torch.zeros(64 << 20, device="cuda") for i in range(16)}}
Path("/proc/self/clear_refs").write_text("5")
before = mib("VmRSS")
ckpt_tools.load(sys.argv[1], state)
assert all(bool((w == float(i) + 1).all()) for i, w in state["w"].items() for i in [int(i)])
print(mib("VmHWM") - before)
"""


def test_four_gigabytes_are_loaded_through_a_fraction_of_host_memory(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(
            1,
            {"w": {str(i): torch.full((64 << 20,), i + 1.0, device="cuda") for i in range(16)}},
            asynchronous=False,
        )
        path = checkpoints.latest().path
    torch.cuda.empty_cache()
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    # two tensors of 256 MiB, and what CUDA needs for itself
    assert float(done.stdout) < 1000, done.stdout


# ---- the training program ------------------------------------------------------------------------


def test_twenty_steps_on_a_gpu_are_ten_and_a_stop_and_ten_more(tmp_path: Path) -> None:
    options = [*TINY, "run.steps=20", "data.accumulation=2", "precision.param=bfloat16"]
    environment = os.environ | QUIET | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def run(directory: Path, *more: str) -> str:
        command = torchrun_command(
            1, "-m", "training", *sets(*options, f"run.dir={directory}", *more), is_forked=False
        )
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "(cuda)" in run(tmp_path / "whole")
    run(tmp_path / "parts", "checkpoint.every=10")
    (tmp_path / "parts" / "step-00000020").rename(tmp_path / "away")
    assert "resumed at step 10" in run(tmp_path / "parts", "checkpoint.every=10")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    report = ckpt_tools.diff(
        tmp_path / "away",
        tmp_path / "parts" / "step-00000020",
        select=["model.*", "optimizer.*", "rng.*"],
    )
    assert not report.differences, report
