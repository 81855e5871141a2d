"""Real ranks, forked from one warm process, that save until something dies: `fleet.py ROOT SCENARIO
[--runs N] [--seed S]`.

What a step must hold follows from its number by a formula, and is compared through stock torch.
Scenarios:

    kills      SIGKILL to one rank, to all, or to the one that commits, at random instants; then the
    job starts again syscalls   at every system call of a save that changes the disk: the process
    dies, or the call fails and the job goes on stops      a rank that hangs: the others name it
    limits     one rank's disk is full: all ranks say whose and why, nothing is published, and
    saving goes on once there is room unshared   one rank sees another directory under the name
    disagree   ranks have different shapes, or one of them cannot export its state
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor

from ckpt_tools import CheckpointError, CheckpointManager, RngState
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import damage
from ckpt_tools.run.steps import list_steps
from tests.dist.save import Net, fully_shard
from tests.jobs import EVERY

warnings.simplefilter("ignore")


# ---- the job -------------------------------------------------------------------------------------


def expected(step: int, name: str, shape: torch.Size) -> torch.Tensor:
    """What a tensor holds at a step: whole numbers that float32 has exactly."""
    base = (step * 7919 + sum(map(ord, name)) * 131) % 100_003
    return (torch.arange(shape.numel()) + base).view(shape)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    model = Net()
    model.big = torch.nn.Linear(500, 701, bias=False)
    if dist.is_initialized():
        for child in (model.a, model.b, model.c, model.big):
            fully_shard(child)
        fully_shard(model)
    return model


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def fill(model: torch.nn.Module, step: int) -> None:
    with torch.no_grad():
        for name, tensor in tensors(model).items():
            want = expected(step, name, tensor.shape).to(tensor.dtype)
            if isinstance(tensor, DTensor):
                rows = tensor._local_tensor.shape[0]
                per_rank = -(-tensor.shape[0] // dist.get_world_size())
                tensor._local_tensor.copy_(want[dist.get_rank() * per_rank :][:rows])
            else:
                tensor.copy_(want)


def assert_holds(model: torch.nn.Module, step: int) -> None:
    for name, tensor in tensors(model).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, expected(step, name, tensor.shape).to(tensor.dtype)), (step, name)


def loop(
    root: Path, tell: Callable[[str], None], num_steps: int = 10**9, **options: object
) -> None:
    """Resumes, proves what it got, and saves step after step: one blocking, one in the
    background.
    """
    model = build()
    state = {"model": model, "rng": RngState(), "step": 0}
    with CheckpointManager(
        root, **{"keep_last": 2, "timeout_s": 20, "handle_signals": False} | options
    ) as checkpoints:
        first = checkpoints.resume(state) or 0
        assert state["step"] == first
        if first:
            assert_holds(model, first)
        tell(f"resumed {first}")
        for step in range(first + 1, first + 1 + num_steps):
            fill(model, step)
            state["step"] = step
            checkpoints.save(step, state, asynchronous=bool(step % 2))
            tell(f"committed {step if step % 2 == 0 else step - 1}")
        checkpoints.wait()


# ---- the fleet -----------------------------------------------------------------------------------


class Fleet:
    """Forked ranks; each writes what it has to say, and its end, to a log of its own."""

    def __init__(self, num_ranks: int, work: Callable[[Callable[[str], None]], None]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fleet"))
        self.pids = [self._fork(rank, num_ranks, work) for rank in range(num_ranks)]
        self.codes: dict[int, int] = {}

    def _fork(
        self, rank: int, num_ranks: int, work: Callable[[Callable[[str], None]], None]
    ) -> int:
        pid = os.fork()
        if pid:
            return pid
        log = os.open(self.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        code = 1
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{self.folder}/store", rank=rank, world_size=num_ranks
            )
            work(lambda text: os.write(log, f"{text}\n".encode()))
            code = 0
        except CheckpointError as error:
            os.write(log, f"ended by {type(error).__name__}: {error}\n".encode())
            code = 7
        except BaseException:  # noqa: BLE001  # a forked process must never return
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def said(self, rank: int) -> str:
        return self.log(rank).read_text() if self.log(rank).exists() else ""

    def wait_for(self, text: str, rank: int, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while text not in self.said(rank):
            assert time.monotonic() < end and not self._is_over(rank), (
                f"rank {rank} never said {text!r}: {self.said(rank)}"
            )
            time.sleep(0.005)

    def _is_over(self, rank: int) -> bool:
        if rank not in self.codes:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
        return rank in self.codes

    def end(self, seconds: float = 60) -> list[int]:
        """Waits for all ranks, and returns how they ended; a rank that hangs is a failure."""
        limit = time.monotonic() + seconds
        while not all(self._is_over(rank) for rank in range(len(self.pids))):
            if time.monotonic() > limit:
                hung = [r for r in range(len(self.pids)) if r not in self.codes]
                for rank in hung:
                    os.kill(self.pids[rank], signal.SIGKILL)
                raise AssertionError(f"ranks {hung} hang: " + "\n".join(map(self.said, hung)))
            time.sleep(0.005)
        return [self.codes[r] for r in range(len(self.pids))]

    def remove(self) -> None:
        shutil.rmtree(self.folder)


def committed(text: str) -> int:
    """The newest step that the job was told is safe."""
    return max([0, *map(int, re.findall(r"(?:committed|resumed) (\d+)", text))])


def assert_sound(root: Path, at_least: int, must_verify: bool = True) -> int:
    """Every complete step is what its number says, read by stock torch; none is lost. Returns the
    newest.
    """
    steps = [s for s in list_steps(open_root(root)) if not s.problem]
    newest = steps[-1].number if steps else 0
    assert newest >= at_least, f"step {at_least} was committed, and now {newest} is the newest"
    assert not [s for s in list_steps(open_root(root)) if s.problem], (
        "an incomplete step is visible"
    )
    for step in steps if must_verify else ():
        assert damage(step) == ""
        loaded: dict[str, torch.Tensor] = {}
        _load_state_dict(
            loaded, FileSystemReader(step.path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
        names = tensors(build())
        for name, tensor in names.items():
            assert torch.equal(
                loaded["model"][name], expected(step.number, name, tensor.shape).to(tensor.dtype)
            ), (step.path, name)
    return newest


# ---- scenarios -----------------------------------------------------------------------------------


def kills(root: Path, runs: int, rng: random.Random) -> None:
    """The fleet is killed again and again on one root, and each time goes on where it was."""
    tally: dict[str, int] = {}
    safe = told = 0
    for _ in range(runs):
        num_ranks = rng.choice((1, 2, 2, 3))
        fleet = Fleet(num_ranks, lambda tell: loop(root, tell))
        # before torch's own start is over, in which a survivor would wait half an hour
        is_early = rng.random() < 0.1
        if not is_early:
            fleet.wait_for("resumed", 0)
        time.sleep(rng.random() ** 2 * 0.4)
        victims = {"one": [rng.randrange(num_ranks)], "all": list(range(num_ranks)), "writer": [0]}
        kind = "all" if is_early else rng.choice(list(victims))
        for rank in victims[kind]:
            os.kill(fleet.pids[rank], signal.SIGKILL)
        codes = fleet.end()
        for rank, code in enumerate(codes):
            assert code == (-9 if rank in victims[kind] else code), (rank, code)
            # before, it may be torch's own start that fails
            if rank not in victims[kind] and "resumed" in fleet.said(rank):
                assert code == 7 and "PeerError" in fleet.said(rank), (rank, code, fleet.said(rank))
                told += f"rank {victims[kind][0]} did not answer" in fleet.said(rank)
        safe = assert_sound(root, max(safe, *(committed(fleet.said(r)) for r in range(num_ranks))))
        tally[kind] = tally.get(kind, 0) + 1
        fleet.remove()
    fleet = Fleet(2, lambda tell: loop(root, tell, num_steps=2))
    assert fleet.end() == [0, 0], fleet.said(0) + fleet.said(1)
    assert_sound(root, safe + 1)
    left = sorted(p.name for p in root.iterdir() if not p.name.startswith("step-"))
    assert left == [], left
    print(
        f"{sum(tally.values())} kills ({', '.join(f'{k} {v}' for k, v in sorted(tally.items()))}),"
        f" {safe} steps, 0 lost; dead rank named {told} times"
    )


CALLS = (
    "mkdir",
    "ftruncate",
    "pwrite64",
    "fsync",
    "fchmod",
    "renameat2",
    "rename",
    "unlinkat",
    "rmdir",
)


def syscalls(root: Path, faults: list[str]) -> None:
    """Faults the first call of a kind within a save, then the second (or third), …, until a save
    goes through untouched.
    """
    assert Fleet(1, lambda tell: loop(root.parent / "two", tell, num_steps=2)).end() == [0]
    for fault in faults:
        hits: dict[str, int] = {}
        for call in CALLS:
            for number in range(1, 80, EVERY):
                if not _faulted(root, call, fault, number):
                    hits[call] = number - 1
                    break
        few = {
            "mkdir": 1,
            "ftruncate": 1,
            "pwrite64": 2,
            "fsync": 5,
            "fchmod": 1,
            "renameat2": 1,
            "rename": 1,
            "unlinkat": 3,
            "rmdir": 1,
        }
        assert all(hits[c] >= n for c, n in few.items()), hits
        print(f"{fault}: " + ", ".join(f"{c} {n}" for c, n in hits.items()))


def inject(pid: int, call: str, fault: str, number: int, trace: Path) -> subprocess.Popen[bytes]:
    """Has strace put a fault into the n-th system call of that name; returns once it watches the
    process.
    """
    strace = [
        "strace",
        "-f",
        "-qq",
        "-o",
        str(trace),
        "-e",
        f"trace={call}",
        "-e",
        f"inject={call}:{fault}:when={number}",
    ]
    tracer = subprocess.Popen([*strace, "-p", str(pid)])
    status = Path(f"/proc/{pid}/status")
    while "TracerPid:\t0\n" in status.read_text():
        time.sleep(0.002)
    return tracer


def _faulted(root: Path, call: str, fault: str, number: int) -> bool:
    """Runs one save with a fault in it, another one if the job survived, and tells whether the
    fault struck.
    """
    shutil.rmtree(root)
    shutil.copytree(root.parent / "two", root)
    go = root.parent / "go"
    go.unlink(missing_ok=True)
    fleet = Fleet(1, lambda tell: _save_on_signal(root, tell, go))
    fleet.wait_for("ready", 0)
    trace = root.parent / "trace"
    tracer = inject(fleet.pids[0], call, fault, number, trace)
    go.touch()
    (code,) = fleet.end()
    tracer.wait()
    said, lines = fleet.said(0), trace.read_text()
    has_struck = "INJECTED" in lines or "SIGKILL" in lines
    if fault.startswith("signal") and has_struck:
        assert code == -9, (code, said)
        assert_sound(root, 2)
    else:
        assert code == 0, said
        saved = [int(n) for n in re.findall(r"saved (\d)", said)]
        assert len(saved) + said.count("StorageError: ") == 2, said
        assert saved == [3, 4] or has_struck, said
        # one save fails, not the next; strace counts thread by thread
        assert saved or call == "pwrite64", said
        assert_sound(root, max([2, *saved]))
        left = [
            p.name
            for p in root.iterdir()
            if not p.name.startswith(("step-", ".trash.")) and p.name != ".ckpt.lock"
        ]
        # a step on its way out waits for the next start
        assert not left or call in ("unlinkat", "rmdir"), left
    fleet.remove()
    return has_struck


def _save_on_signal(root: Path, tell: Callable[[str], None], go: Path) -> None:
    model = build()
    state = {"model": model, "rng": RngState(), "step": 0}
    with CheckpointManager(root, keep_last=2, timeout_s=20, handle_signals=False) as checkpoints:
        checkpoints.resume(state)
        tell("ready")
        while not go.exists():
            time.sleep(0.002)
        for step in (3, 4):
            fill(model, step)
            state["step"] = step
            try:
                checkpoints.save(step, state, asynchronous=False)
                tell(f"saved {step}")
            except CheckpointError as error:
                tell(f"{type(error).__name__}: {error}")


def stops(root: Path) -> None:
    """A rank that hangs is named by the others within their time; when it wakes, it learns the
    same.
    """
    fleet = Fleet(3, lambda tell: loop(root, tell, timeout_s=3))
    fleet.wait_for("committed 2", 0)
    os.kill(fleet.pids[2], signal.SIGSTOP)
    for rank in (0, 1):
        fleet.wait_for("PeerError", rank, 30)
    os.kill(fleet.pids[2], signal.SIGCONT)
    assert fleet.end() == [7, 7, 7]
    said = fleet.said(0) + fleet.said(1)
    assert "rank 2 did not answer" in said, said
    assert_sound(root, 2)
    print("a hanging rank: named")


def _attempt(tell: Callable[[str], None], what: str, call: Callable[[], object]) -> None:
    try:
        call()
        tell(f"{what}: fine")
    except CheckpointError as error:
        where = "in write_part" if "write_part" in traceback.format_exc() else "elsewhere"
        tell(f"{what}: {type(error).__name__} {where}: {error}")


def limits(root: Path) -> None:
    def work(tell: Callable[[str], None]) -> None:
        model = build()
        state = {"model": model, "step": 0}
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with CheckpointManager(root, timeout_s=20) as checkpoints:
            fill(model, 1)
            _attempt(tell, "first", lambda: checkpoints.save(1, state, asynchronous=False))
            if dist.get_rank() == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
            fill(model, 2)
            _attempt(tell, "blocking", lambda: checkpoints.save(2, state, asynchronous=False))
            fill(model, 3)
            _attempt(tell, "background", lambda: checkpoints.save(3, state))
            _attempt(tell, "next call", lambda: checkpoints.save(4, state))
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            fill(model, 5)
            _attempt(tell, "again", lambda: checkpoints.save(5, state))
            _attempt(tell, "wait", checkpoints.wait)

    fleet = Fleet(3, work)
    assert fleet.end() == [0, 0, 0], fleet.said(0)
    for rank in range(3):
        said = fleet.said(rank)
        for fine in ("first", "background", "again", "wait"):
            assert f"{fine}: fine" in said, said
        for failed, step in (("blocking", 2), ("next call", 3)):
            if rank == 1:
                assert f"{failed}: StorageError in write_part: cannot make room for" in said, said
            else:
                assert (
                    f"{failed}: PeerError elsewhere: write step-0000000{step} failed on 1 of 3"
                    " ranks:\n  rank 1: StorageError:" in said
                ), said
        assert said.count("File too large") == 2, said
    assert assert_sound(root, 5) == 5
    assert sorted(p.name for p in root.iterdir()) == [
        "step-00000001",
        "step-00000005",
    ]
    print("a full disk on one rank: told by all, nothing published")


def unshared(root: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def work(tell: Callable[[str], None]) -> None:
        if dist.get_rank() == 1:  # a mount of its own, as on a node without the network filesystem
            assert libc.unshare(0x00020000) == 0, "unshare"
            assert libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None) == 0, "private"
            assert libc.mount(b"tmpfs", bytes(root), b"tmpfs", 0, b"size=1m") == 0, "tmpfs"
        _attempt(tell, "open", lambda: CheckpointManager(root, timeout_s=20))

    fleet = Fleet(2, work)
    assert fleet.end() == [0, 0], fleet.said(1)
    for rank in range(2):
        assert "rank 1 does not see rank 0's directory" in fleet.said(rank), fleet.said(rank)
    print("a directory that is not shared: told by all")


def disagree(root: Path) -> None:
    def work(tell: Callable[[str], None]) -> None:
        rank = dist.get_rank()
        with CheckpointManager(root, timeout_s=20) as checkpoints:
            _attempt(
                tell,
                "shapes",
                lambda: checkpoints.save(1, {"w": torch.ones(3 + rank)}, asynchronous=False),
            )
            _attempt(
                tell,
                "kinds",
                lambda: checkpoints.save(
                    2,
                    {"w": torch.ones(3) if rank else torch.ones(3).to_sparse()},
                    asynchronous=False,
                ),
            )
            _attempt(
                tell, "well", lambda: checkpoints.save(3, {"w": torch.ones(3)}, asynchronous=False)
            )
            _attempt(
                tell, "more", lambda: checkpoints.save(4, {"w": torch.ones(3)}, asynchronous=False)
            )
            _attempt(
                tell, "again", lambda: checkpoints.save(3, {"w": torch.ones(3)}, asynchronous=False)
            )

    fleet = Fleet(2, work)
    assert fleet.end() == [0, 0], fleet.said(1)
    for rank in range(2):
        said = fleet.said(rank)
        assert "ranks disagree about 'w': rank 0 has float32 [3], rank 1 has float32 [4]" in said, (
            said
        )
        assert "sparse" in said and "well: fine" in said and "step 3 is there already" in said, said
    assert [s.number for s in list_steps(open_root(root))] == [3, 4]
    print("ranks that disagree: told by all")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument(
        "scenario", choices=("kills", "syscalls", "stops", "limits", "unshared", "disagree")
    )
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--faults", nargs="+", default=["error=EIO", "error=ENOSPC", "signal=SIGKILL"]
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = args.root / args.scenario
    root.mkdir(parents=True)
    if args.scenario == "kills":
        kills(root, args.runs, random.Random(args.seed))
    elif args.scenario == "syscalls":
        syscalls(root, args.faults)
    else:
        {"stops": stops, "limits": limits, "unshared": unshared, "disagree": disagree}[
            args.scenario
        ](root)


if __name__ == "__main__":
    main()
