"""Times saving and loading from inside a job, beside the raw limit and the peers, in turn; prints
the tables of docs/benchmarks/jobs.md.

    PYTHONPATH=. torchrun --standalone --nproc-per-node 4 tests/benchmarks/saving.py DIR --gb 1
    --runs 5 [--only sync,async,load]

The state is a decoder of float32 parameters under FSDP2, on CPU; on the machine's GPU with
CKPT_DEVICE=cuda. Every time is from the first rank's beginning to the last one's end; results are
durable unless the name says otherwise; each contender writes to a directory that does not exist
yet, and what it wrote is removed outside the time. torch_checkpointing takes part where it can be
imported.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from make_input import shapes
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt_tools import CheckpointManager, Resuming, Writing
from ckpt_tools.loop.state.shards import as_bytes
from tests.dist import device

try:
    import torch_checkpointing as tc
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # its O_DIRECT writes fail with EINVAL here: they are not aligned
    buffered = LocalFileSystemStorageConfig(use_direct_io=False)
except ImportError:
    tc = None

IS_CUDA = device.NAME == "cuda"
Times = dict[str, list[float]]


def build(gb: float, hidden: int, placement: Shard) -> nn.Module:
    """A model whose parameters are DTensors, as FSDP2 leaves them."""
    mesh = init_device_mesh(device.NAME, (dist.get_world_size(),))
    model = nn.Module()
    torch.manual_seed(0)
    for name, shape in shapes(gb, hidden).items():
        *parents, leaf = name.split(".")
        owner = model
        for part in parents:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        dim = placement.dim % len(shape)
        local = list(shape)
        step = -(-shape[dim] // mesh.size())
        local[dim] = max(0, min(step, shape[dim] - step * mesh.get_local_rank()))
        strides = torch.empty(shape, device="meta").stride()
        value = DTensor.from_local(
            torch.rand(local),
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=torch.Size(shape),
            stride=strides,
        )
        owner.register_parameter(leaf, nn.Parameter(value))
    return model


def settle(folder: Path, cold: Path | None) -> None:
    """Removes what was written, and frees as much page cache as the next one fills."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        harness.settle(folder.parent, 6000)
        folder.mkdir()
        if cold is not None:
            harness.drop_caches(cold)
    dist.barrier()


def fsync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def rounds(
    contenders: dict[str, Callable[[], float]], runs: int, folder: Path, cold: Path | None = None
) -> Times:
    times: Times = {name: [] for name in contenders}
    for name, counts in harness.in_turn(list(contenders), runs):
        settle(folder, cold)
        took = contenders[name]()
        if counts:
            times[name].append(took)
    return times


def show(title: str, times: Times, base: str, nbytes: int) -> None:
    if not dist.get_rank():
        harness.show(title, times, against=base, nbytes=nbytes)


# ---- contenders ----------------------------------------------------------------------------------


def hosts_of(model: nn.Module) -> list[torch.Tensor]:
    """Host memory for this rank's shards, pinned for those of a GPU."""
    return [
        torch.empty(p._local_tensor.shape, dtype=p.dtype, device="cpu", pin_memory=IS_CUDA)
        for p in model.parameters()
    ]


def copy_all(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
    if IS_CUDA:
        torch.cuda.synchronize()


def raw_write(folder: Path, shards: list[torch.Tensor], hosts: list[torch.Tensor]) -> float:
    def call() -> None:
        if IS_CUDA:
            copy_all(shards, hosts)
        local = [as_bytes(t) for t in (hosts if IS_CUDA else shards)]
        fd = os.open(folder / f"raw{dist.get_rank()}", os.O_WRONLY | os.O_CREAT)
        at = 0
        for view in local:
            while len(view):
                count = os.pwrite(fd, view, at)
                at, view = at + count, view[count:]
        os.fsync(fd)
        os.close(fd)

    return harness.seconds_of_ranks(call)


def peer_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in model.named_parameters()}


def sync_saves(
    model: nn.Module, folder: Path, manager: CheckpointManager
) -> dict[str, Callable[[], float]]:
    shards, hosts = (
        [p._local_tensor.detach() for p in model.parameters()],
        (hosts_of(model) if IS_CUDA else []),
    )
    number = [0]

    def ours() -> float:
        number[0] += 1
        return harness.seconds_of_ranks(
            lambda: manager.save(number[0], {"model": model}, asynchronous=False)
        )

    def stock(threads: int) -> Callable[[], float]:
        def call() -> float:
            return harness.seconds_of_ranks(
                lambda: dcp.save(
                    {"model": peer_state(model)},
                    storage_writer=FileSystemWriter(folder / "dcp", thread_count=threads),
                )
            )

        return call

    found = {
        "raw: pwrite, fsync": lambda: raw_write(folder, shards, hosts),
        "CheckpointManager": ours,
    }
    found |= {f"dcp.save, {n} thread{'s' * (n > 1)}": stock(n) for n in (1, 2, 4)}
    if tc is not None:
        saver = tc.CheckpointManager(
            tc.CheckpointManager.Config(
                save=tc.SyncCheckpointSaverConfig(), storage_config=buffered
            )
        )

        def meta() -> None:
            saver.save(str(folder / "tc"), {"model": peer_state(model)})

        def meta_durable() -> None:
            meta()
            dist.barrier()
            fsync_all(folder / "tc") if dist.get_rank() == 0 else None

        found |= {
            "torch_checkpointing, not durable": lambda: harness.seconds_of_ranks(meta),
            "torch_checkpointing, then fsync": lambda: harness.seconds_of_ranks(meta_durable),
        }
    return found


def stalls(
    model: nn.Module, folder: Path, manager: CheckpointManager, late: CheckpointManager
) -> dict[str, Callable[[], float]]:
    """How long the loop stands still; the writing itself is waited for outside the time."""
    parameters = [p._local_tensor.detach() for p in model.parameters()]
    buffers = hosts_of(model)
    number = [10_000]

    optimizer = torch.optim.SGD(model.parameters())  # only what one trains is copied late

    def ours(chosen: CheckpointManager) -> Callable[[], float]:
        def call() -> float:
            number[0] += 1
            took = harness.seconds_of_ranks(
                lambda: chosen.save(number[0], {"model": model, "optimizer": optimizer})
            )
            chosen.wait()
            return took

        return call

    # the peer's thread must not mix its collectives with those of `timed`
    group = dist.new_group(backend="gloo")

    def stock(kind: AsyncCheckpointerType, is_pinned: bool = False) -> Callable[[], float]:
        def call() -> float:
            futures, how = [], {"async_checkpointer_type": kind}
            if kind is AsyncCheckpointerType.THREAD:
                how["process_group"] = group
            if is_pinned:  # and copied before it returns; `async_save` closes it, so it serves once
                how["async_stager"] = DefaultStager(StagingOptions(True, False, False, True))
            state = {"model": peer_state(model)}
            took = harness.seconds_of_ranks(
                lambda: futures.append(dcp.async_save(state, checkpoint_id=folder / "dcp", **how))
            )
            done = futures[0]
            (done.upload_completion if hasattr(done, "upload_completion") else done).result()
            return took

        return call

    found = {
        "memory copy": lambda: harness.seconds_of_ranks(lambda: copy_all(parameters, buffers)),
        "CheckpointManager": ours(manager),
        "the same with overlap_copy": ours(late),
    }
    found |= {f"dcp.async_save, {kind.value}": stock(kind) for kind in AsyncCheckpointerType}
    if IS_CUDA:
        found["dcp.async_save, thread, pinned"] = stock(
            AsyncCheckpointerType.THREAD, is_pinned=True
        )
    if tc is not None:
        staging = CheckpointStagerConfig(
            use_pinned_memory=IS_CUDA, use_async_staging=False, use_non_blocking_copy=IS_CUDA
        )
        config = tc.CheckpointManager.Config(
            save=tc.AsyncCheckpointSaverConfig(staging_config=staging), storage_config=buffered
        )
        saver = tc.CheckpointManager(config)

        def meta() -> float:
            futures = []
            took = harness.seconds_of_ranks(
                lambda: futures.append(saver.save(str(folder / "tc"), {"model": peer_state(model)}))
            )
            futures[0].result()
            return took

        found["torch_checkpointing"] = meta
    return found


def loads(
    model: nn.Module, source: Path, manager: CheckpointManager
) -> dict[str, Callable[[], float]]:
    shards, hosts = (
        [p._local_tensor.detach() for p in model.parameters()],
        (hosts_of(model) if IS_CUDA else []),
    )
    views = [as_bytes(t) for t in hosts or shards]
    files = sorted(source.glob("*.distcp"))
    sizes = [f.stat().st_size for f in files]

    def raw() -> None:
        """As many bytes as this rank needs, from the same files, in one sweep."""
        rank, world = dist.get_rank(), dist.get_world_size()
        at, fds = sum(sizes) * rank // world, [os.open(f, os.O_RDONLY) for f in files]
        for view in views:
            while len(view):
                number, start = 0, at
                while number < len(files) - 1 and start >= sizes[number]:
                    start -= sizes[number]
                    number += 1
                count = os.preadv(fds[number], [view[: max(1, sizes[number] - start)]], start)
                if not count:
                    break
                at, view = at + count, view[count:]
        for fd in fds:
            os.close(fd)
        if IS_CUDA:
            copy_all(hosts, shards)
        assert at - sum(sizes) * rank // world >= 0.99 * sum(map(len, views)), (
            "the end of the files came too early"
        )

    def stock() -> None:
        dcp.load({"model": peer_state(model)}, checkpoint_id=source)

    return {
        "raw: preadv": lambda: harness.seconds_of_ranks(raw),
        "CheckpointManager": lambda: harness.seconds_of_ranks(
            lambda: manager.resume({"model": model}, path=source)
        ),
        "dcp.load": lambda: harness.seconds_of_ranks(stock),
    }


def interference(model: nn.Module, manager: CheckpointManager, runs: int) -> None:
    """How much the loop slows down while a save is being written, by its Python and by its
    arithmetic.
    """
    matrix = torch.rand(384, 384)

    def python() -> None:
        sum(range(2000))

    def arithmetic() -> None:
        matrix @ matrix

    def per_second(work: Callable[[], None], is_over: Callable[[], bool]) -> float:
        began, count = time.perf_counter(), 0
        while not is_over():
            for _ in range(20):
                work()
            count += 20
        return count / (time.perf_counter() - began)

    rows = []
    for name, work in (("Python", python), ("matrix products", arithmetic)):
        ratios = []
        for number in range(runs):
            end = time.monotonic() + 0.5
            alone = per_second(work, lambda end=end: time.monotonic() > end)
            manager.save(20_000 + number + 1000 * len(rows), {"model": model})
            running = manager._writer._running
            ratios.append(per_second(work, running.done) / alone)
            manager.wait()
        rows.append((name, statistics.median(ratios)))
    if dist.get_rank() == 0:
        print(
            "\nSpeed of the loop while a save is being written, of its speed alone: "
            + ", ".join(f"{n} {r:.2f}" for n, r in rows)
        )


def show_loads(
    model: nn.Module,
    source: Path,
    manager: CheckpointManager,
    runs: int,
    what: str,
    nbytes: int,
    is_warm: bool,
) -> None:
    for title, cold in (("warm page cache", None), ("cold", source))[: 1 if is_warm else 2]:
        times = rounds(loads(model, source, manager), runs, source.parent / "out", cold)
        show(f"Load, {what}, from {source.name}, {title}", times, "raw: preadv", nbytes)
    report = manager.last_load
    if dist.get_rank() == 0:
        print(
            f"\nbytes read / needed on rank 0: {report.read_nbytes / report.needed_nbytes:.4f};"
            f" chunks proved: {report.num_proved}"
        )


def replicas(root: Path, gb: float, runs: int) -> None:
    """A model that every rank holds whole, as under DDP: all read it, or one reads each part and
    sends it.
    """
    torch.manual_seed(0)
    model = nn.ParameterDict(
        {
            name.replace(".", "_"): nn.Parameter(torch.rand(shape))
            for name, shape in shapes(gb, 1024).items()
        }
    )
    with (
        CheckpointManager(root / "all") as everybody,
        CheckpointManager(root / "one", resuming=Resuming(read_once=True)) as once,
    ):
        everybody.save(1, {"model": model}, asynchronous=False)
        source = root / "all" / "step-00000001"
        for title, cold in (("warm page cache", None), ("cold", source)):
            contenders = {
                "all ranks read": lambda: harness.seconds_of_ranks(
                    lambda: everybody.resume({"model": model}, path=source)
                ),
                "read_once": lambda: harness.seconds_of_ranks(
                    lambda: once.resume({"model": model}, path=source)
                ),
            }
            times = rounds(contenders, runs, root / "out", cold)
            show(
                f"Load of {gb:g} GB that each of {dist.get_world_size()} ranks needs, one host,"
                f" {title}",
                times,
                "all ranks read",
                int(gb * 1e9),
            )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="sync,async,load", type=lambda text: text.split(","))
    parser.add_argument(
        "--skip",
        default="$^",
        metavar="REGEX",
        help="for sync and async: contenders to leave out, where memory does not hold all",
    )
    parser.add_argument("--dim", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=1024, help="the smaller, the more tensors")
    parser.add_argument("--warm", action="store_true", help="for load: not from a cold cache")
    parser.add_argument(
        "--source",
        type=Path,
        help="for load: a checkpoint, of any number of ranks, instead of one of these ranks",
    )
    return parser.parse_args()


def measure(
    args: argparse.Namespace, work: Path, manager: CheckpointManager, late: CheckpointManager
) -> None:
    """Runs the chosen rounds, and prints their tables."""
    model = build(args.gb, args.hidden, Shard(args.dim))
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    count = len(list(model.parameters()))
    what = f"{nbytes / 1e9:.1f} GB in {count} tensors on {dist.get_world_size()} ranks"

    def table(title: str, found: dict[str, Callable[[], float]], base: str) -> None:
        chosen = {n: c for n, c in found.items() if not re.search(args.skip, n)}
        show(f"{title}, {what}", rounds(chosen, args.runs, work / "out"), base, nbytes)

    if "sync" in args.only:
        table("Blocking save", sync_saves(model, work / "out", manager), "raw: pwrite, fsync")
    if "async" in args.only:
        found = stalls(model, work / "out", manager, late)
        table("Stall of a save in the background", found, "memory copy")
    if "replicas" in args.only:
        replicas(work / "replicas", args.gb, args.runs)
    if "interference" in args.only:
        interference(model, manager, args.runs)
    if "load" in args.only:
        if not args.source:
            manager.save(1_000_000, {"model": model}, asynchronous=False)
        source = args.source or work / "step-01000000"
        show_loads(model, source, manager, args.runs, what, nbytes, args.warm)


def main() -> None:
    args = parsed()
    warnings.simplefilter("ignore")
    device.begin()
    torch.set_num_threads(1)
    work = args.dir / "work"
    if dist.get_rank() == 0:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    dist.barrier()
    with (
        CheckpointManager(work, keep_last=1) as manager,
        CheckpointManager(
            work / "overlapping", keep_last=1, writing=Writing(overlap_copy=True)
        ) as late,
    ):
        measure(args, work, manager, late)
    if dist.get_rank() == 0:
        for each in (manager, late):
            if each.last_save:
                phases = {name: f"{1e3 * s:.1f} ms" for name, s in each.last_save.timing.items()}
                print("phases of the last save:", phases)
        print(
            "largest memory of rank 0:"
            f" {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"
        )
        if "load" not in args.only or args.source:
            shutil.rmtree(work)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
