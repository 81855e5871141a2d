"""False alarms: `PYTHONPATH=. python tests/benchmarks/alarms.py DIR --runs 10000 [--seed 1]`; a
table.

States of random shapes, types and bits (NaN of every kind, empty tensors, scalars) are saved by
torch, safetensors and us, resharded, merged and converted; `ckpt verify` must find nothing wrong
with any of it, and `ckpt diff` no difference to the first.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import CheckpointManager

TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.int32,
    torch.float8_e4m3fn,
)


def state(rng: random.Random) -> dict[str, torch.Tensor]:
    """Tensors of random bits."""
    found = {}
    for number in range(rng.randint(1, 6)):
        shape = [
            rng.choice([0, 1, 2, 3, 7, 16, rng.randint(1, 60)])
            for _ in range(rng.choice([0, 1, 1, 2, 2, 3]))
        ]
        dtype = rng.choice(TYPES)
        size = torch.empty(0, dtype=dtype).element_size()
        numel = torch.Size(shape).numel()
        found[f"layers.{number}.w"] = (
            torch.frombuffer(bytearray(rng.randbytes(numel * size) or b"\0" * size), dtype=dtype)[
                :numel
            ]
            .reshape(shape)
            .clone()
        )
    return found


def made(root: Path, values: dict[str, torch.Tensor], rng: random.Random) -> dict[str, Path]:
    """Returns checkpoints of one state, by what wrote them; the first is what the others are
    compared with.
    """
    with CheckpointManager(root / "run") as checkpoints:
        checkpoints.save(1, {"model": values}, asynchronous=False)
    saved = root / "run" / "step-00000001"
    dcp.save({"model": values}, checkpoint_id=root / "stock", no_dist=True)
    torch.save({"model": values}, root / "one.pt")
    save_file({f"model.{n}": t for n, t in values.items()}, root / "one.safetensors")
    ckpt_tools.reshard(saved, root / "ranks", to_ranks=rng.randint(2, 9))
    ckpt_tools.convert(root / "stock", root / "back.pt", to="torch")
    ckpt_tools.merge(root / "stock", root / "merged.safetensors", keep_prefix=True)
    return {
        "a save": saved,
        "`dcp.save`": root / "stock",
        "`torch.save`": root / "one.pt",
        "`save_file`": root / "one.safetensors",
        "reshard": root / "ranks",
        "convert --to torch": root / "back.pt",
        "merge": root / "merged.safetensors",
    }


def count(check: Callable[[], bool]) -> str:
    try:
        return "right" if check() else "alarm"
    except Exception as error:  # noqa: BLE001
        print(f"{type(error).__name__}: {error}")
        return "alarm"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path)
    parser.add_argument("--runs", type=int, default=700)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    rng, began = random.Random(args.seed), time.perf_counter()
    verified: dict[str, Counter[str]] = {}
    same: dict[str, Counter[str]] = {}
    while sum(c.total() for c in verified.values()) < args.runs:
        shutil.rmtree(args.dir, ignore_errors=True)
        args.dir.mkdir(parents=True)
        places = made(args.dir, state(rng), rng)
        first = next(iter(places.values()))
        for name, path in places.items():
            verified.setdefault(name, Counter())[
                count(lambda path=path: not ckpt_tools.verify(path).problems)
            ] += 1
            same.setdefault(name, Counter())[
                count(lambda path=path, first=first: ckpt_tools.diff(first, path).is_same)
            ] += 1
    print("| written by | verified | alarms | compared | differences |\n|---|---:|---:|---:|---:|")
    for name, found in verified.items():
        print(
            f"| {name} | {found.total():,} | {found['alarm']:,} | {same[name].total():,} |"
            f" {same[name]['alarm']:,} |"
        )
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
