"""Times the verbs beside what people use instead, and prints the tables of docs/benchmarks/commands.md.

    python tests/benchmarks/compare.py [--dir DIR] [--runs 5] [--accelerate PYTHON] [--only
    merge,reshard,…]

Makes its own input below DIR (about 13 GB, kept for the next call). Every command is a whole
process, from start to exit with its result durable; contenders run in turn, another one first in
every round, so that a machine whose speed drifts is unfair to nobody. Medians; RSS of the largest
process. Before each, the same page cache is filled and freed. `--accelerate` names a Python that
has accelerate installed.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import harness

HERE = Path(__file__).parent
PYTHON = sys.executable
INPUTS = {
    "1gb": ["--gb", "1"],
    "4gb": ["--gb", "4"],
    "3gb-adamw": ["--gb", "1", "--optimizer"],
    "wide": ["--gb", "1", "--hidden", "4096"],
    "wide-dim1": ["--gb", "1", "--hidden", "4096", "--dim", "1"],
    "tiny": ["--tiny", "20000"],
    "tiny-half": ["--tiny", "10000"],
}


# a name, and the words of its command
Contender = tuple[str, list[str]]


def torchrun(num_ranks: int, *args: str) -> list[str]:
    return [
        PYTHON,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
        *args,
    ]


def ckpt(*args: object) -> list[str]:
    return [PYTHON, "-m", "ckpt_tools", *map(str, args)]


def peer(name: str, *args: object, python: str = PYTHON) -> list[str]:
    return [python, str(HERE / "peers.py"), name, *map(str, args)]


def remove(path: Path) -> None:
    for found in path.parent.glob(path.name + "*"):
        shutil.rmtree(found) if found.is_dir() else found.unlink()


def race(
    title: str, contenders: list[Contender], runs: int, out: Path, cold: Path | None = None
) -> None:
    def before() -> None:
        remove(out)
        harness.settle(out.parent)
        if cold:
            harness.drop_caches(cold)

    harness.race(
        title,
        dict(contenders),
        runs,
        before=before,
        against=contenders[0][0],
        environment={"OMP_NUM_THREADS": "1"},
    )
    remove(out)


class Bench:
    """Inputs below one folder, and the cases that use them: one method a table."""

    def __init__(self, root: Path, runs: int, accelerate: str | None) -> None:
        self.root, self.runs, self.accelerate = root, runs, accelerate
        self.out, self.where = root / "out", ""

    def source(self, name: str) -> Path:
        path = self.root / name
        if not path.exists():
            subprocess.run(
                torchrun(8, str(HERE / "make_input.py"), str(path), *INPUTS[name]),
                check=True,
                capture_output=True,
            )
        return path

    def merge_of(self, name: str, label: str = "`ckpt merge`") -> Contender:
        return (label, ckpt("merge", self.source(name), f"{self.out}.safetensors", "-q"))

    def copy_of(self, name: str) -> Contender:
        return ("copy of the same bytes, fsync", peer("copy", self.source(name), f"{self.out}.cp"))

    def torch_of(self, name: str) -> Contender:
        return ("torch `dcp_to_torch_save`", peer("dcp", self.source(name), f"{self.out}.pt"))

    def inspect(self) -> None:
        race(
            "inspect, 8 ranks, 624 tensors",
            [("`ckpt inspect`", ckpt("inspect", self.source("3gb-adamw")))],
            self.runs,
            self.out,
        )

    def merge(self) -> None:
        contenders = [self.merge_of("1gb"), self.copy_of("1gb"), self.torch_of("1gb")]
        if self.accelerate:
            command = peer(
                "accelerate", self.source("1gb"), f"{self.out}-acc", python=self.accelerate
            )
            contenders.append(("accelerate `merge_fsdp_weights`", command))
        race(f"merge, 1 GB, 8 ranks{self.where}", contenders, self.runs, self.out)

    def large(self) -> None:
        race(
            "merge, 4 GB, 8 ranks", [self.merge_of("4gb"), self.copy_of("4gb")], self.runs, self.out
        )

    def columns(self) -> None:
        many = self.root / "wide-64way"
        if not many.exists():
            subprocess.run(
                ckpt("reshard", self.source("wide-dim1"), many, "--to", "64", "-q"), check=True
            )
        names = {"wide": "dim 0, 8-way", "wide-dim1": "dim 1, 8-way", "wide-64way": "dim 1, 64-way"}
        contenders = [
            self.merge_of(name, f"`ckpt merge`, {title}") for name, title in names.items()
        ]
        race(
            "merge, 1 GB of 4096-wide matrices, by the dim that is sharded",
            contenders,
            self.runs,
            self.out,
        )

    def many(self) -> None:
        contenders = [
            self.merge_of("tiny"),
            self.merge_of("tiny-half", "`ckpt merge`, 10,000 tensors"),
            self.torch_of("tiny"),
        ]
        race("merge, 20,000 tensors of 4 KB, 8 ranks", contenders, min(self.runs, 3), self.out)

    def cold(self) -> None:
        race(
            "merge, 1 GB, cold page cache",
            [self.merge_of("1gb"), self.copy_of("1gb")],
            self.runs,
            self.out,
            cold=self.source("1gb"),
        )

    def reshard(self, name: str = "1gb", title: str = "reshard 8 to 4, 1 GB, model only") -> None:
        src, out = self.source(name), self.out
        contenders = [
            ("`ckpt reshard`", ckpt("reshard", src, f"{out}-r", "--to", 4, "-q")),
            ("copy of the same bytes, fsync", peer("copy_tree", src, f"{out}-cp")),
            (
                "torchrun, `dcp.load`, `dcp.save`",
                torchrun(4, str(HERE / "peers.py"), "reshard", str(src), f"{out}-stock"),
            ),
        ]
        race(title, contenders, self.runs, out)

    def reshard_adamw(self) -> None:
        self.reshard("3gb-adamw", "reshard 8 to 4, 3 GB with AdamW")

    def ram(self) -> None:
        """The same with the output on a tmpfs: what is left when the disk is not the limit."""
        disk, self.out, self.where = (
            self.out,
            Path("/dev/shm/ckpt-bench/out"),
            ", output in memory (tmpfs)",
        )
        self.out.parent.mkdir(exist_ok=True)
        self.merge()
        self.reshard(title=f"reshard 8 to 4, 1 GB, model only{self.where}")
        self.reshard("3gb-adamw", f"reshard 8 to 4, 3 GB with AdamW{self.where}")
        self.out, self.where = disk, ""


CASES = ("inspect", "merge", "large", "columns", "many", "cold", "reshard", "reshard_adamw", "ram")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path("benchmarks"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--accelerate", help="a Python that has accelerate installed")
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.dir, args.runs, args.accelerate)
    for case in args.only.split(","):
        getattr(bench, case)()


if __name__ == "__main__":
    main()
