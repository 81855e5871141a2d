"""Proving and comparing: `python tests/benchmarks/trust.py DIR [--gb 4] [--runs 5]`; tables in
Markdown.

A checkpoint of 8 ranks, once as stock torch wrote it and once sealed: `ckpt verify` beside reading
alone and beside a checksum of coreutils, from a warm and from a cold page cache; `ckpt diff` of it
and its reshard to 4 ranks, beside stock torch.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import harness
from compare import HERE, PYTHON, Contender, ckpt, torchrun

STOCK = """
import sys, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
def read(path):
    state = {}
    _load_state_dict(state, storage_reader=dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state
def same(a, b):
    return a.keys() == b.keys() and all(same(a[k], b[k]) if isinstance(a[k], dict) else torch.equal(a[k], b[k]) for k in a)
assert same(read(sys.argv[1]), read(sys.argv[2]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    stock, sealed, other = (args.dir / name for name in ("stock", "sealed", "other"))
    if not stock.exists():
        subprocess.run(
            torchrun(8, str(HERE / "make_input.py"), str(stock), "--gb", str(args.gb)),
            check=True,
            capture_output=True,
        )
        subprocess.run(["cp", "-r", str(stock), str(sealed)], check=True)
        subprocess.run(ckpt("seal", sealed), check=True, capture_output=True)
        subprocess.run(ckpt("reshard", sealed, other, "--to", 4), check=True, capture_output=True)
    proving = [
        ("`ckpt verify`, sealed", ckpt("verify", sealed)),
        ("`ckpt verify`, as stock torch wrote it", ckpt("verify", stock)),
        ("`cat` to `/dev/null`", ["sh", "-c", f"cat {sealed}/*.distcp > /dev/null"]),
        ("`sha256sum`", ["sh", "-c", f"sha256sum {sealed}/*.distcp"]),
    ]
    measure(f"Proving {args.gb:g} GB, warm page cache", proving, args.runs)
    measure(f"Proving {args.gb:g} GB, cold page cache", proving[:3], args.runs, args.dir)
    comparing = [
        ("`ckpt diff`, by fingerprint", ckpt("diff", sealed, other)),
        ("`ckpt diff --read-all`", ckpt("diff", sealed, other, "--read-all")),
        ("stock torch: load both, `torch.equal`", [PYTHON, "-c", STOCK, str(sealed), str(other)]),
    ]
    measure(
        f"Comparing {args.gb:g} GB of 8 ranks with its reshard to 4, warm page cache",
        comparing,
        args.runs,
    )


def measure(title: str, contenders: list[Contender], runs: int, cold: Path | None = None) -> None:
    def before() -> None:
        if cold:
            harness.drop_caches(cold)

    # in a row: nothing is written, and memory holds one input
    harness.race(title, dict(contenders), runs, before=before, in_a_row=True)


if __name__ == "__main__":
    main()
