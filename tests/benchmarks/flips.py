"""How many flipped bits are noticed: `PYTHONPATH=. python tests/benchmarks/flips.py DIR --flips
100000 [--seed 1]`; a table.

One random bit of a checkpoint is turned round, in every format that this tool writes and in one of
stock torch; then `verify`, a merge and a resume of ours, and `dcp.load` and `safetensors.load_file`
as they come, read it, and what they hand out is compared with what was saved. "wrong" is a value
that is not what was saved, with no word said.
"""

from __future__ import annotations

import argparse
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import CheckpointError, CheckpointManager
from tests.strategies import flip

State = dict[str, torch.Tensor]
NUMEL = 2000


def state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(NUMEL + i, generator=generator) for i in range(4)} | {
        "b": torch.randn(77, generator=generator).bfloat16()
    }


def empty() -> State:
    return {name: torch.zeros_like(value) for name, value in state().items()}


def is_right(got: Mapping[str, torch.Tensor]) -> bool:
    want = state()
    return got.keys() == want.keys() and all(
        torch.equal(got[n].view(torch.uint8), want[n].view(torch.uint8)) for n in want
    )


def verified(path: Path, scratch: Path) -> str:
    return "noticed" if ckpt_tools.verify(path).problems else "passed"


def merged(path: Path, scratch: Path) -> str:
    target = scratch / "m.safetensors"
    ckpt_tools.merge(path, target)
    got = load_file(target)
    return "passed" if is_right({n.removeprefix("model."): t for n, t in got.items()}) else "wrong"


def resumed(path: Path, scratch: Path) -> str:
    values = {"model": empty()}
    ckpt_tools.load(path, values)
    return "passed" if is_right(values["model"]) else "wrong"


def stock_loaded(path: Path, scratch: Path) -> str:
    values = {"model": empty()}
    dcp.load(values, checkpoint_id=path, no_dist=True)
    return "passed" if is_right(values["model"]) else "wrong"


def safetensors_loaded(path: Path, scratch: Path) -> str:
    got: State = {}
    for file in [path] if path.is_file() else path.glob("*.safetensors"):
        got |= load_file(file)
    return "passed" if is_right({n.removeprefix("model."): t for n, t in got.items()}) else "wrong"


def judged(reader: Callable[[Path, Path], str], path: Path, scratch: Path) -> str:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        return reader(path, scratch)
    except (KeyboardInterrupt, SystemExit):
        raise
    except CheckpointError:
        return "noticed"
    except BaseException:  # noqa: BLE001  # stock torch's own are no Exceptions
        return "noticed"


def make(root: Path) -> dict[str, tuple[Path, list[Path], list[Callable[[Path, Path], str]]]]:
    """Returns the checkpoints: path, files, readers."""
    with CheckpointManager(root / "run") as checkpoints:
        checkpoints.save(1, {"model": state()}, asynchronous=False)
    saved = root / "run" / "step-00000001"
    ckpt_tools.reshard(saved, root / "three", to_ranks=3)
    (root / "one").mkdir()
    ckpt_tools.merge(saved, root / "one" / "m.safetensors")
    ckpt_tools.merge(saved, root / "shards", max_shard_bytes=10_000)
    dcp.save({"model": state()}, checkpoint_id=root / "stock", no_dist=True)
    dcps, tensors = (
        [verified, merged, resumed, stock_loaded],
        [
            verified,
            merged,
            safetensors_loaded,
        ],
    )
    return {
        "a save": (saved, [*saved.iterdir()], dcps),
        "reshard": (root / "three", [*(root / "three").iterdir()], dcps),
        "merge, one file": (root / "one" / "m.safetensors", [*(root / "one").iterdir()], tensors),
        "merge, shards": (root / "shards", [*(root / "shards").iterdir()], tensors),
        "stock `dcp.save`, no manifest": (root / "stock", [*(root / "stock").iterdir()], dcps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument(
        "--others",
        type=int,
        default=10,
        help="of so many flips, one is also read by all but verify",
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    shutil.rmtree(args.dir, ignore_errors=True)
    args.dir.mkdir(parents=True)
    rng, made = random.Random(args.seed), make(args.dir)
    seen: dict[tuple[str, str], Counter[str]] = {}
    for number in range(args.flips):
        name = list(made)[number % len(made)]
        path, files, readers = made[name]
        file = rng.choices(files, [f.stat().st_size for f in files])[0]
        at, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        flip(file, at, bit)
        for reader in readers if number // len(made) % args.others == 0 else readers[:1]:
            seen.setdefault((name, reader.__name__), Counter())[
                judged(reader, path, args.dir / "scratch")
            ] += 1
        flip(file, at, bit)
    print(
        "| written by | read by | flips | noticed | harmless | wrong values, no word"
        " |\n|---|---|---:|---:|---:|---:|"
    )
    for (name, reader), found in seen.items():
        print(
            f"| {name} | {reader} | {found.total():,} | {found['noticed']:,} | {found['passed']:,}"
            f" | {found['wrong']:,} |"
        )


if __name__ == "__main__":
    main()
