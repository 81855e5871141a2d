"""The main job from end to end, in its own folder: `make demo`, or `python tests/demo.py DIR`.

It trains on 8 ranks, kills them in the middle, and resumes. Then it inspects the checkpoint,
reshards it to 4 ranks, and continues training on 4. Finally it merges, and proves that one plain
process computes the same logits as the 4 ranks, bit for bit.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

import torch

from training.extras.sample import generate, load_model
from training.loss import PROMPT, logits_for

_BOLD, _PLAIN = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
CONFIG = """\
[run]
dir = "{root}/run8"
steps = 100

[data]
train = "{root}/tokens.npy"

[optim]
warmup_steps = 10
max_grad_norm = 1.0

[checkpoint]
every = 20
"""
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def show(title: str, shown: str, *command: str, kill_after: Path | None = None) -> None:
    """Prints a command as a user would type it, and runs it.

    With `kill_after`, the command is killed a moment after that path appears.
    """
    print(f"\n{_BOLD}{title}{_PLAIN}\n$ {shown}", flush=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    if kill_after is not None:
        while process.poll() is None and not kill_after.exists():
            time.sleep(0.05)
        time.sleep(0.2)
        kill_all(process.pid)
        process.wait()
        print("kill -9: the launcher and all ranks", flush=True)
    elif process.wait():
        raise SystemExit(f"failed with exit status {process.returncode}: {shown}")


def kill_all(launcher: int) -> None:
    """Kills a launcher and its ranks. Each rank leads its own session."""
    ranks = [
        int(pid)
        for path in Path(f"/proc/{launcher}/task").glob("*/children")
        for pid in path.read_text().split()
    ]
    for pid in (launcher, *ranks):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def train(title: str, num_ranks: int, arguments: str, kill_after: Path | None = None) -> None:
    shown = f"torchrun --standalone --nproc-per-node {num_ranks} -m training {arguments}"
    show(
        title,
        shown,
        *_TORCHRUN,
        str(num_ranks),
        "-m",
        "training",
        *shlex.split(arguments),
        kill_after=kill_after,
    )


def ckpt(title: str, arguments: str) -> None:
    show(title, f"ckpt {arguments}", sys.executable, "-m", "ckpt_tools", *shlex.split(arguments))


def python(title: str, arguments: str) -> None:
    show(
        title, f"python -m {arguments}", "sh", "-c", f"{shlex.quote(sys.executable)} -m {arguments}"
    )


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    if root.exists():
        shutil.rmtree(root)
    root.mkdir(parents=True)
    file, run4 = root / "config.toml", f"--set run.dir={root}/run4 --set run.steps=140"
    file.write_text(CONFIG.format(root=root))
    python(
        "1. Make a token file",
        f"training.data prepare {sysconfig.get_paths()['stdlib']}/*.py --out {root}/tokens.npy",
    )
    print(f"\n{_BOLD}2. Show the sharding of {file}{_PLAIN}\n\n{file.read_text()}", flush=True)
    python("", f"training {file} --print-plan --ranks 8")
    train(
        "3. Train on 8 ranks, and kill all of them at once, in the middle",
        8,
        str(file),
        kill_after=root / "run8" / "step-00000040",
    )
    ckpt("4. List the checkpoints", f"ls {root}/run8")
    train("5. Start again: it resumes automatically", 8, str(file))
    ckpt("6. Look inside", f"inspect {root}/run8/step-00000100 --tree")
    ckpt(
        "7. Reshard from 8 ranks to 4",
        f"reshard {root}/run8/step-00000100 {root}/run4/step-00000100 --from 8 --to 4",
    )
    train(
        "8. Continue training on 4 ranks",
        4,
        f"{file} {run4} --set run.export=true --logits {root}/logits.pt",
    )
    ckpt("9. Merge for inference", f"merge {root}/run4/step-00000140 {root}/model.safetensors")

    print(f"\n{_BOLD}10. Load the merged file in one plain process{_PLAIN}", flush=True)
    torch.set_num_threads(1)
    if (root / "model.safetensors").read_bytes() != (
        root / "run4" / "export" / "model.safetensors"
    ).read_bytes():
        raise SystemExit("the merged file and the run's own export differ")
    model = load_model(root / "run4" / "export")
    trained, merged = (
        torch.load(root / "logits.pt", weights_only=True),
        logits_for(model, torch.device("cpu")),
    )
    if not torch.equal(trained, merged):
        raise SystemExit(f"logits differ by up to {(trained - merged).abs().max().item()}")
    print(
        f"logits of 4 ranks and of the merged file: {list(merged.shape)}, all {merged.numel():,}"
        " bit-equal"
    )
    print(
        "sample:\n  "
        + bytes(generate(model, list(PROMPT), 200, 0.7, 0))
        .decode("utf-8", "replace")
        .replace("\n", "\n  ")
    )

    print(f"\n{_BOLD}Created in {root}{_PLAIN}")
    for path in sorted([*root.glob("run*/step-*"), root / "model.safetensors"]):
        nbytes = (
            sum(f.stat().st_size for f in path.rglob("*")) if path.is_dir() else path.stat().st_size
        )
        print(f"  {nbytes / 1e6:7.1f} MB  {path}")
    print("\nTry next:")
    print(f"  ckpt inspect {root}/run4/step-00000140 --files")
    print(f"  ckpt merge {root}/run4/step-00000140 {root}/bf16.safetensors --dtype bf16 --dry-run")
    print(f"  ckpt reshard {root}/run4/step-00000140 {root}/run16/step-00000140 --to 16")
    print(f"  python -m training.extras.sample {root}/run4/export --prompt 'import '")
    print(f"  python -m training {file} --plot {run4}")
    print(
        f"  python -m training {file} --estimate --ranks 64 --budget 80 --set model.name=8b --set"
        " data.batch_size=64"
    )


if __name__ == "__main__":
    main()
