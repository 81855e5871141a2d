"""The metrics of a run: a progress bar, a line per step in `metrics.jsonl`, and plots.

A line has step, loss, lr, grad_norm, tokens_per_s, step_s, data_s, checkpoint_s, peak_mib and
epoch. The keys data_s and checkpoint_s are rank 0's, and parts of step_s. The list peak_mib has the
memory of each rank: of CUDA's allocator, or of the resident set on the CPU. Lines of validation
have step, validation_loss and validation_perplexity. With `model.factory`, a
row counts as a token.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from training.config import Config
from training.extras.loggers import Logger
from training.files import open_to_append, replace_file

if TYPE_CHECKING:
    from training.job import Job

FILE = "metrics.jsonl"
_MAX_EXPONENT = 700.0  # of a float


class Meter:
    """A meter of steps: it times their parts and writes the metrics on rank 0."""

    def __init__(self, config: Config, first: int, loggers: Sequence[Logger] = ()) -> None:
        self.path, self.every = Path(config.run.dir) / FILE, config.metrics.every
        self.first, self.last, self.loggers = first, config.run.steps, loggers
        self.unit = "rows" if config.model.factory else "tokens"
        self.tokens_a_step = config.data.batch_size * config.data.seq_len
        self.is_writer = dist.get_rank() == 0
        self._restart()
        is_terminal = config.metrics.progress and self.is_writer and sys.stderr.isatty()
        self.bar = tqdm(
            initial=first, total=self.last, unit="step", disable=not is_terminal, dynamic_ncols=True
        )
        self.prints, self.has_written = self.is_writer and not is_terminal, False

    def _restart(self) -> None:
        self.spent = {"data_s": 0.0, "checkpoint_s": 0.0}
        self.steps, self.began = 0, time.perf_counter()

    @contextlib.contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Adds the time of a block to `data_s` or `checkpoint_s`."""
        began = time.perf_counter()
        yield
        self.spent[what] += time.perf_counter() - began

    def is_due(self, step: int) -> bool:
        """Tells whether a line is written after a step."""
        return step % self.every == 0 or step == self.last

    def step(
        self,
        step: int,
        job: Job,
        everyone: Sequence[Sequence[float]],
        lr: float,
        norm: Tensor | None,
    ) -> None:
        """Counts a step and, if one is due, writes a line.

        Times are means over the steps since the last line. The rest is of this step.

        Args:
            step: its number.
            job: tells the epoch, and whether the step had a target at all; else its loss is null.
            everyone: loss and peak memory of every rank; needed if a line is due, as is `norm`.
            lr: the learning rate of the step.
            norm: of its gradients.
        """
        self.steps += 1
        self.bar.update()
        if not self.is_due(step):
            return
        elapsed = time.perf_counter() - self.began
        line = {
            "step": step,
            "loss": mean_loss(everyone) if job.num_targets else math.nan,
            "lr": lr,
            "grad_norm": math.nan if norm is None else norm.item(),
            "tokens_per_s": self.steps * self.tokens_a_step / elapsed,
            "step_s": elapsed / self.steps,
            **{name: seconds / self.steps for name, seconds in self.spent.items()},
            "epoch": job.sampler.epoch,
            "peak_mib": [round(rank[1], 1) for rank in everyone],
        }
        self.write(line)
        loss, speed = f"{line['loss']:.4f}", f"{line['tokens_per_s']:,.0f} {self.unit}/s"
        self.bar.set_postfix_str(f"loss {loss}, {speed}", refresh=False)
        if self.prints and (step % 10 == 0 or step == self.last):
            print(f"step {step:5d}  loss {loss}  {speed}", flush=True)
        self._restart()

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Excludes the time of a block from the next step's time."""
        began = time.perf_counter()
        yield
        self.began += time.perf_counter() - began

    def validation(self, step: int, loss: float) -> None:
        """Writes the mean loss over the validation data, and its perplexity, if it has tokens."""
        if self.unit != "tokens":
            self.write({"step": step, "validation_loss": loss})
            self.say(f"step {step:5d}  validation loss {loss:.4f}")
            return
        perplexity = math.inf if loss >= _MAX_EXPONENT else math.exp(loss)
        self.write({"step": step, "validation_loss": loss, "validation_perplexity": perplexity})
        self.say(f"step {step:5d}  validation loss {loss:.4f}, perplexity {perplexity:,.2f}")

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self.is_writer:
            self.bar.write(text) if not self.prints else print(text, flush=True)

    def write(self, line: dict[str, Any]) -> None:
        if self.is_writer:
            if not self.has_written:  # the old lines stay until there is a new one
                _forget(self.path, self.first)
            self.has_written = True
            for logger in self.loggers:
                logger.write(line)
            finite = {key: _finite(value) for key, value in line.items()}
            with open_to_append(self.path) as file:
                file.write(json.dumps(finite, allow_nan=False) + "\n")

    def close(self) -> None:
        self.bar.close()
        for logger in self.loggers:
            logger.close()


def _finite(value: Any) -> Any:
    """Returns a number for JSON: null if it is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean_loss(everyone: Sequence[Sequence[float]]) -> float:
    """Returns the mean over ranks of what `loss_and_peak` has gathered."""
    return sum(of_rank[0] for of_rank in everyone) / len(everyone)


def loss_and_peak(loss: Tensor) -> list[list[float]]:
    """Returns loss and peak memory of every rank, in order of rank. All ranks must call it."""
    return gather(torch.tensor([loss.item(), peak_mib(loss.device)], dtype=torch.float64))


def gather(mine: Tensor) -> list[list[float]]:
    """Returns every rank's numbers, in order of rank.

    It uses gloo, which the process group has on every machine.
    """
    mine = mine.cpu()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [rank.tolist() for rank in everyone]


def peak_mib(device: torch.device) -> float:
    """Returns the peak memory of this rank so far: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) / 1024


def _forget(path: Path, step: int) -> None:
    """Drops the lines of steps after the checkpoint that the run resumed from.

    These steps are repeated.
    """
    if path.exists():
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= step]
        replace_file(path, "".join(kept))


def _step_of(line: str) -> float:
    """Returns the step of a line; infinity for one that was damaged, or is not complete."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, TypeError, KeyError):
        return math.inf


# ---- plots ---------------------------------------------------------------------------------------


def plot(directory: Path) -> list[Path]:
    """Draws the metrics of a run over its steps; returns a PNG and an SVG.

    Raises:
        FileNotFoundError: the run has no metrics.
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    text = (directory / FILE).read_text(errors="replace")
    lines = [json.loads(line) for line in text.splitlines(True) if _step_of(line) < math.inf]
    steps = [line for line in lines if "loss" in line]
    checks = [line for line in lines if "validation_loss" in line]
    figure, panels = plt.subplots(5, 1, figsize=(8, 13), sharex=True, layout="constrained")
    loss, rate, norm, speed, memory = panels
    last = max((line["step"] for line in lines), default=0)
    figure.suptitle(f"{directory.absolute().name}: {len(steps):,} lines up to step {last}")
    x = [line["step"] for line in steps]
    loss.plot(x, _numbers(steps, "loss"), label="training")
    if checks:
        losses = _numbers(checks, "validation_loss")
        loss.plot([c["step"] for c in checks], losses, "o-", label="validation")
    loss.set_ylabel("loss")
    loss.legend()
    for axes, key, label in (
        (rate, "lr", "learning rate"),
        (norm, "grad_norm", "norm of the gradients"),
        (speed, "tokens_per_s", "tokens/s, all ranks"),
    ):
        axes.plot(x, _numbers(steps, key))
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    _memory(memory, x, [line["peak_mib"] for line in steps])
    memory.set_xlabel("step")
    for axes in panels:
        axes.grid(alpha=0.3)
    paths = [directory / "metrics.png", directory / "metrics.svg"]
    for path in paths:
        drawn = io.BytesIO()
        figure.savefig(drawn, format=path.suffix[1:])
        replace_file(path, drawn.getvalue())
    plt.close(figure)
    return paths


def _numbers(lines: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [math.nan if line[key] is None else line[key] for line in lines]


def _memory(axes: Any, steps: Sequence[int], peaks: Sequence[Sequence[float]]) -> None:
    """Draws the peak of every rank; for many ranks, only the minimum and the maximum."""
    axes.set_ylabel("peak memory per rank, MiB")
    if peaks and max(map(len, peaks)) <= 8 and len({len(p) for p in peaks}) == 1:
        for rank in range(len(peaks[0])):
            axes.plot(steps, [p[rank] for p in peaks], label=f"rank {rank}", lw=1)
        axes.legend(ncols=4, fontsize="small")
    elif peaks:
        axes.fill_between(steps, [min(p) for p in peaks], [max(p) for p in peaks], alpha=0.4)
    axes.set_ylim(bottom=0)
