"""Converting what others wrote: `python tests/benchmarks/formats.py DIR --deepspeed PYTHON [--runs
5]`; tables in Markdown.

A ZeRO-3 checkpoint of 18 matrices of 2048 x 2048, saved by two ranks of DeepSpeed: 0.9 GB with its
moments. Beside `ckpt` runs the `zero_to_fp32.py` that DeepSpeed puts into every checkpoint. PYTHON
is that of an environment with DeepSpeed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from compare import HERE, ckpt, race


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path)
    parser.add_argument("--deepspeed", required=True)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    source, out = args.dir / "zero3", args.dir / "out"
    if not source.exists():
        job = [
            args.deepspeed,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(HERE / "zero3_job.py"),
            str(source),
        ]
        subprocess.run(job, check=True, capture_output=True)
    theirs = [args.deepspeed, str(source / "zero_to_fp32.py"), str(source)]
    race(
        "The fp32 weights of a ZeRO-3 checkpoint (0.3 of 0.9 GB)",
        [
            ("`ckpt merge`", ckpt("merge", source, f"{out}.safetensors")),
            (
                "`ckpt convert --to torch --model-only`",
                ckpt("convert", source, f"{out}.pt", "--to", "torch", "--model-only"),
            ),
            (
                "`zero_to_fp32.py --safe_serialization`",
                [*theirs, str(out), "--safe_serialization"],
            ),
            ("`zero_to_fp32.py`", [*theirs, str(out)]),
        ],
        args.runs,
        out,
    )
    race(
        "All of it, weights and moments, as DCP for 4 ranks",
        [
            (
                "`ckpt convert --to dcp --ranks 4`",
                ckpt("convert", source, out, "--to", "dcp", "--ranks", "4"),
            ),
            ("`cp -r`, then `sync`", ["sh", "-c", f"cp -r {source} {out} && sync"]),
        ],
        args.runs,
        out,
    )


if __name__ == "__main__":
    main()
