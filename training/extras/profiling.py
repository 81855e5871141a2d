"""Shows where the time and the memory of a step go: a Chrome trace and summaries per rank.

They come from PyTorch's own profiler, its tracker of FSDP's memory, and CUDA's allocator.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from training.config import Config
from training.files import replace_file

_SKIPPED = 2  # the first step warms up caches, the second warms up the profiler


class Profiler:
    """A profiler that traces some steps to `rank0.trace.json` and `rank0.txt`, and so on.

    The text file is a summary. `rank0.memory.txt` has what was held at the peak of one step before
    them, and `rank0.memory.pickle` the history of CUDA's allocator, for pytorch.org/memory_viz. For
    0 steps it does nothing.
    """

    def __init__(self, directory: Path, steps: int, device: torch.device) -> None:
        self.directory, self.steps, self.done = directory, steps, 0
        self.is_cuda = device.type == "cuda"
        self.trace: torch.profiler.profile | None = None
        if steps:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
            order = torch.profiler.schedule(wait=_SKIPPED - 1, warmup=1, active=steps, repeat=1)
            self.trace = torch.profiler.profile(
                activities=activities,
                schedule=order,
                on_trace_ready=self._write,
                record_shapes=True,
            )

    def __enter__(self) -> Profiler:
        if self.trace:
            self.trace.__enter__()
            if self.is_cuda:
                torch.cuda.memory._record_memory_history()
        return self

    @contextlib.contextmanager
    def measuring_memory(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config
    ) -> Iterator[None]:
        """Writes what a step holds at its peak, for the last step before the traced ones.

        The first step makes the optimizer's state. The tracker sees the operations of one step, so
        that step is slow. It takes one forward pass of FSDP2, without a compiler.
        """
        if not self.trace or self.done != _SKIPPED - 1:
            yield
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self.directory / f"rank{dist.get_rank()}.memory.txt"
        is_one = config.data.accumulation == 1 and not config.compute.compile
        if not is_one or not isinstance(model, FSDPModule):
            replace_file(
                file,
                "not measured: torch's tracker takes FSDP2, one micro-batch, and no compiler\n",
            )
            yield
            return
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        tracker = memory_tracker(model, optimizer)
        with tracker:
            yield
        text = memory_summary(tracker.get_tracker_snapshot("peak"))
        if self.is_cuda:
            peak = torch.cuda.max_memory_allocated()
            text += f"{'CUDA allocator':24}{peak / 2**20:12,.2f}\n"
        replace_file(file, text)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.trace:
            self.trace.__exit__(kind, error, trace)

    def range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Names the work of a block of the step."""
        return torch.profiler.record_function(name) if self.trace else contextlib.nullcontext()

    def problem(self, steps_left: int) -> str:
        """Returns why the trace would be empty or short; "" if it would not."""
        if not self.steps or steps_left >= self.steps + _SKIPPED:
            return ""
        return (
            f"--profile {self.steps} takes {self.steps + _SKIPPED} steps, {_SKIPPED} of them to"
            f" warm up, and {steps_left} are left"
        )

    def step(self) -> None:
        """Tells the profiler that a step is over."""
        self.done += 1
        if self.trace:
            self.trace.step()

    def _write(self, trace: torch.profiler.profile) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"rank{dist.get_rank()}.trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        replace_file(self.directory / f"rank{dist.get_rank()}.txt", summary(events))
        if self.is_cuda:
            file = self.directory / f"rank{dist.get_rank()}.memory.pickle"
            torch.cuda.memory._dump_snapshot(str(file))
            torch.cuda.memory._record_memory_history(None)


class _HookHandles(WeakIdKeyDictionary):
    """The tracker's hooks on parameters, in which frozen ones seem to have theirs.

    The tracker asks each parameter for its hooks, and one that takes no gradient has none.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key, default) if key.requires_grad else ()


def memory_tracker(model: nn.Module, optimizer: torch.optim.Optimizer) -> MemTracker:
    """Returns torch's tracker of memory for a model, with FSDP2 or unsharded."""
    is_sharded = isinstance(model, FSDPModule)
    tracker = FSDPMemTracker(model, optimizer) if is_sharded else MemTracker()
    tracker._param_to_grad_hook_handles = _HookHandles()
    if not is_sharded:
        tracker.track_external(model, optimizer)
    return tracker


def memory_summary(peak: Mapping[torch.device, Mapping[Any, int]]) -> str:
    """Returns a table of what was held at the peak of a step, in MiB, from torch's tracker.

    "Temp" are the gradients of activations, and "Unsharded Param" what units have gathered.
    """
    lines = [f"{'held at the peak':24}{'MiB':>12}"]
    for device, kinds in peak.items():
        lines += [
            f"{getattr(kind, 'value', kind):24}{nbytes / 2**20:12,.2f}"
            for kind, nbytes in kinds.items()
            if nbytes and device.type != "meta"
        ]
    return "\n".join(lines) + "\n"


def summary(events: Sequence[dict[str, Any]]) -> str:
    """Returns a table of where the time of the traced steps went, from a Chrome trace's events.

    A category's time is the union of its events' intervals, so nested and parallel events count
    once. Categories may overlap: on CUDA, communication runs beside compute. "other" is the time
    that no category covers.
    """
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    notes = [event for event in spans if event.get("cat") == "user_annotation"]
    steps = [_interval(e) for e in notes if e["name"].startswith("ProfilerStep#")]
    number, wall = max(1, len(steps)), max(1.0, _covered(steps))
    kinds: dict[str, list[Interval]] = {}
    unsharding = [_interval(e) for e in spans if e["name"].startswith(_UNSHARDING)]
    has_kernels = any(e.get("cat") == "kernel" for e in spans)
    for event in spans:
        if (kind := _kind(event, has_kernels)) is not None:
            kinds.setdefault(kind, []).append(_interval(event))
    every = [interval for intervals in kinds.values() for interval in intervals]
    table = {kind: _covered(kinds.get(kind, [])) for kind in _KINDS}
    table["other"] = max(0.0, wall - _covered(_clip(every, steps)))
    table["(unsharding)"] = _covered(unsharding)
    lines = [f"{len(steps)} steps, {wall / 1e3:,.1f} ms", ""]
    lines += [f"{'':16}{'ms per step':>12}{'share':>9}"]
    lines += [f"{kind:16}{t / 1e3 / number:12,.2f}{t / wall:9.1%}" for kind, t in table.items()]
    return "\n".join([*lines, "", *_collectives(spans, has_kernels)]) + "\n"


def _collectives(spans: Sequence[dict[str, Any]], has_kernels: bool) -> list[str]:
    """Returns a table of the collectives: calls, bytes, and the time in which data moves."""
    counts, nbytes = Counter[str](), Counter[str]()
    moving: dict[str, list[Interval]] = {}
    calls = deque[dict[str, Any]]()
    for event in sorted(spans, key=_interval):
        kind = _collective(event["name"])
        if event["name"].startswith("c10d::") and event.get("cat") == "cpu_op":
            counts[kind] += 1
            nbytes[kind] += _nbytes(event["args"])
            calls.append(event)
        if _is_transfer(event, has_kernels):
            # gloo makes a reduce-scatter of an all-reduce, and works in the order of the calls
            if calls and not has_kernels:
                kind = _collective(calls.popleft()["name"])
            moving.setdefault(kind, []).append(_interval(event))
    lines = [f"{'collective':28}{'calls':>8}{'MiB':>12}{'ms':>12}"]
    for kind in sorted({*counts, *moving}):
        time = f"{_covered(moving[kind]) / 1e3:12,.2f}" if kind in moving else f"{'-':>12}"
        lines.append(f"{kind:28}{counts[kind]:8,}{nbytes[kind] / 2**20:12,.2f}{time}")
    return lines


Interval = tuple[float, float]  # microseconds
_KINDS = ("compute", "communication", "memcpy", "data", "checkpoint")
_UNSHARDING = (
    "FSDP::all_gather",
    "FullyShardedDataParallel._pre_forward",
    "FullyShardedDataParallel._pre_backward",
)
_COLLECTIVES = ("allgather", "reducescatter", "allreduce", "alltoall", "broadcast", "barrier")


def _collective(name: str) -> str:
    """Returns the kind of a collective, which c10d, gloo and nccl write in different ways."""
    letters = "".join(c for c in name.lower() if c.isalpha())
    return next((kind for kind in _COLLECTIVES if kind in letters), name.rpartition(":")[2])


def _is_transfer(event: dict[str, Any], has_kernels: bool) -> bool:
    """Tells whether an event is the time in which a collective moves data, not that of its call."""
    name = event["name"].lower()
    if has_kernels:
        return event.get("cat") == "kernel" and "nccl" in name
    return name.startswith("gloo:")


# other types count as one byte
_ITEMSIZE = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2}


def _nbytes(args: dict[str, Any]) -> int:
    """Returns the bytes of a collective's larger side.

    That is the output of an all-gather, or the input of a reduce-scatter.
    """
    sizes = [0]
    for shape, kind in zip(args.get("Input Dims", []), args.get("Input type", []), strict=False):
        # a list of tensors, or a single one
        shapes = shape if shape and isinstance(shape[0], list) else [shape]
        if shape:
            sizes.append(sum(math.prod(dims) for dims in shapes) * _ITEMSIZE.get(kind, 1))
    return max(sizes)


def _kind(event: dict[str, Any], has_kernels: bool) -> str | None:
    """Returns the category of an event: only GPU work if there is any, else the CPU's work."""
    name, category = event["name"].lower(), event.get("cat", "")
    if category == "user_annotation" and name in ("data", "checkpoint"):
        return name
    if has_kernels:
        if category == "kernel":
            return "communication" if "nccl" in name else "compute"
        return "memcpy" if category in ("gpu_memcpy", "gpu_memset") else None
    if name.startswith(("gloo:", "nccl:", "c10d::", "record_param_comms")):
        return "communication"
    if category != "cpu_op":
        return None
    if name in ("aten::copy_", "aten::_to_copy") or name.startswith("fsdp::"):
        return "memcpy"
    return "compute" if name.startswith("aten::") else None


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _covered(intervals: Iterable[Interval]) -> float:
    """Returns the length of a union of intervals, in their unit (microseconds)."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def _clip(intervals: Iterable[Interval], within: Sequence[Interval]) -> list[Interval]:
    return [
        (max(a, c), min(b, d)) for a, b in intervals for c, d in within if max(a, c) < min(b, d)
    ]
