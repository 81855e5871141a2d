"""How contenders are measured, and how their figures are shown: in turn, as medians, in one table."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Times = Mapping[str, Sequence[float]]
# A small process of its own starts a command: a child's peak of memory is at least its parent's.
_MEASURE = """
import os, subprocess, sys, time
began = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(time.perf_counter() - began, usage.ru_maxrss / 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def in_turn(contenders: Sequence[T], runs: int) -> Iterator[tuple[T, bool]]:
    """Yields the contenders one by one, round by round, each with whether the round counts.

    Another one is the first in every round, so a machine whose speed drifts is unfair to nobody.
    The first round warms up.
    """
    for number in range(runs + 1):
        turn = number % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            yield contender, number > 0


def seconds(work: Callable[[], object]) -> float:
    """Returns the seconds that a piece of work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def seconds_of_ranks(work: Callable[[], object]) -> float:
    """Returns the seconds from the first rank's beginning to the last one's end.

    With more ranks than cores, they neither begin nor end together.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()
    began = time.monotonic()
    work()
    span = torch.tensor([-began, time.monotonic()], dtype=torch.float64, device="cpu")
    dist.all_reduce(span, dist.ReduceOp.MAX)
    return span.sum().item()


def command(
    words: Sequence[object], environment: Mapping[str, str] | None = None
) -> tuple[float, float]:
    """Returns the seconds of a command, and the most memory of its largest process in MiB.

    Ends this program if the command fails.
    """
    done = subprocess.run(
        [sys.executable, "-S", "-c", _MEASURE, *map(str, words)],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{words} ended with status {done.returncode}:\n{done.stderr}")
    took, mib = map(float, done.stdout.split())
    return took, mib


def race(
    title: str,
    commands: Mapping[str, Sequence[object]],
    runs: int,
    *,
    before: Callable[[], object] = lambda: None,
    against: str = "",
    environment: Mapping[str, str] | None = None,
    in_a_row: bool = False,
) -> None:
    """Measures whole processes, and prints their table.

    `before` is called before each. They take turns, or all runs of one come in a row.
    """
    took: dict[str, list[float]] = {name: [] for name in commands}
    mib: dict[str, list[float]] = {name: [] for name in commands}
    groups = [[name] for name in commands] if in_a_row else [list(commands)]
    for name, counts in chain.from_iterable(in_turn(group, runs) for group in groups):
        before()
        figures = command(commands[name], environment)
        if counts:
            took[name].append(figures[0])
            mib[name].append(figures[1])
    show(title, took, against=against, mib=mib)


def settle(folder: Path, mib: int = 3000) -> None:
    """Fills and frees page cache, and lets the disk come to rest.

    SETTLE_MIB in the environment takes the place of `mib`. A virtual machine pays for memory that
    it gave back to its host, and so would whoever writes after a large removal.
    """
    with (folder / "settle").open("wb") as file:
        for _ in range(int(os.environ.get("SETTLE_MIB", mib))):
            file.write(bytes(1 << 20))
    (folder / "settle").unlink()
    os.sync()


def drop_caches(root: Path) -> None:
    """Makes the page cache forget a folder's files."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Returns the median of the ratios of neighbours, which share the machine's mood."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def show(
    title: str,
    times: Times,
    *,
    against: str = "",
    nbytes: float = 0,
    mib: Times | None = None,
    more: Mapping[str, Mapping[str, object]] | None = None,
) -> None:
    """Prints a table: the median, the least and the most seconds of each contender.

    All are compared with the contender `against`, or with the fastest one whose name begins so.
    `nbytes` is what each of them moves, `mib` has the peaks of their memory. `more` has further
    columns, by their title.
    """
    columns: dict[str, dict[str, str]] = {}
    medians = {name: statistics.median(found) for name, found in times.items()}
    if nbytes:
        columns["GB/s"] = {name: f"{nbytes / 1e9 / took:.2f}" for name, took in medians.items()}
    if against:
        alike = [against] if against in medians else [n for n in medians if n.startswith(against)]
        base = min(medians[name] for name in alike)
        columns[f"against {against}"] = {
            name: f"{took / base:.2f} ×" for name, took in medians.items()
        }
    if mib:
        columns["peak MiB"] = {name: f"{max(found):.0f}" for name, found in mib.items()}
    for column, values in (more or {}).items():
        columns[column] = {name: str(value) for name, value in values.items()}
    print(
        f"\n**{title}**\n\n| | median s | min – max s |",
        *(f" {column} |" for column in columns),
        sep="",
    )
    print("|---|---:|---:|", "---:|" * len(columns), sep="")
    for name, found in times.items():
        span = f"{medians[name]:.3f} | {min(found):.3f} – {max(found):.3f}"
        print(
            f"| {name} | {span} |",
            *(f" {values[name]} |" for values in columns.values()),
            sep="",
            flush=True,
        )
