"""The main job from end to end, in a folder of its own: `make demo`, or `python -m training.demo DIR`.

Trains on 8 ranks, looks inside, reshards to 4, goes on training on 4, merges, and proves that one plain process computes the
very logits that the 4 ranks did.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from training.sample import generate, load_model
from training.train import PROMPT, logits_for

_BOLD, _PLAIN = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def show(title: str, shown: str, *command: str) -> None:
    """Prints a command as a user would type it, and runs it."""
    print(f"\n{_BOLD}{title}{_PLAIN}\n$ {shown}", flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    subprocess.run(command, check=True, env=environment)


def train(title: str, num_ranks: int, arguments: str) -> None:
    shown = f"torchrun --standalone --nproc-per-node {num_ranks} -m training {arguments}"
    show(title, shown, *_TORCHRUN, str(num_ranks), "-m", "training", *shlex.split(arguments))


def ckpt(title: str, arguments: str) -> None:
    show(title, f"ckpt {arguments}", sys.executable, "-m", "ckpt_tools", *shlex.split(arguments))


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    if root.exists():
        shutil.rmtree(root)
    root.mkdir(parents=True)
    train("1. Train on 8 ranks", 8, f"--dir {root}/run8 --steps 100")
    ckpt("2. Look inside", f"inspect {root}/run8/step-00000100 --tree")
    ckpt("3. Reshard from 8 ranks to 4", f"reshard {root}/run8/step-00000100 {root}/run4/step-00000100 --from 8 --to 4")
    train("4. Go on training on 4 ranks", 4, f"--dir {root}/run4 --steps 140 --logits {root}/logits.pt")
    ckpt("5. Merge for inference", f"merge {root}/run4/step-00000140 {root}/model.safetensors")

    print(f"\n{_BOLD}6. Load the merged file in one plain process{_PLAIN}", flush=True)
    torch.set_num_threads(1)
    model = load_model(root / "model.safetensors", root / "run4" / "model.json")
    trained, merged = torch.load(root / "logits.pt", weights_only=True), logits_for(model, torch.device("cpu"))
    if not torch.equal(trained, merged):
        raise SystemExit(f"logits differ by up to {(trained - merged).abs().max().item()}")
    print(f"logits of 4 ranks and of the merged file: {list(merged.shape)}, all {merged.numel():,} bit-equal")
    print("sample:\n  " + generate(model, PROMPT, 200, 0.7, 0).decode("utf-8", "replace").replace("\n", "\n  "))

    print(f"\n{_BOLD}Made in {root}{_PLAIN}")
    for path in sorted([*root.glob("run*/step-*"), root / "model.safetensors"]):
        nbytes = sum(f.stat().st_size for f in path.rglob("*")) if path.is_dir() else path.stat().st_size
        print(f"  {nbytes / 1e6:7.1f} MB  {path}")
    print("\nTry next:")
    print(f"  ckpt inspect {root}/run4/step-00000140 --ranks")
    print(f"  ckpt merge {root}/run4/step-00000140 {root}/bf16.safetensors --dtype bf16 --dry-run")
    print(f"  ckpt reshard {root}/run4/step-00000140 {root}/run16/step-00000140 --to 16")
    print(f"  python -m training.sample {root}/model.safetensors --config {root}/run4/model.json --prompt 'import '")


if __name__ == "__main__":
    main()
