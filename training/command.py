"""Trains a causal LM with FSDP, saves checkpoints, and resumes from the newest complete step.

    torchrun --standalone --nproc-per-node 8 -m training config.toml --set run.dir=run
    # later: resumes from the newest step, here on 4 ranks
    torchrun --standalone --nproc-per-node 4 -m training config.toml --set run.dir=run

SIGTERM and SIGUSR1 end it after the current step, which is saved. The exit status is then 143 or
138, and the same command resumes from that step. It uses CUDA with nccl if there is a GPU, else the
CPU with gloo. docs/training.md has every key of the configuration.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from ckpt_tools import CheckpointError
from ckpt_tools.ranks.base import tell_launcher
from training import model as models
from training.batch import DataError
from training.checks import check
from training.config import Config, ConfigError, resolve
from training.extras import accelerate_config
from training.loss import PROMPT
from training.metrics import plot
from training.prove import Plan, make_model, open_data, prove
from training.train import LossError, train

_FAILED = "training/failed"  # key of the job's store: which rank failed first
_NOT_FINITE = 3  # exit status
_FIRST_WORD_S = 3.0
_PLACE = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("config", nargs="?", help="TOML file; every key has a default")
    text = "override a key of the file; may be given several times"
    add("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help=text)
    text = "Accelerate's FSDP configuration; the file's keys override it"
    add("--accelerate-config", metavar="FILE", help=text)
    add("--print-plan", action="store_true", help="show how the model is sharded, and exit")
    add("--estimate", action="store_true", help="show the memory of each strategy, and exit")
    add("--budget", type=float, metavar="GIB", help="memory of one rank, for --estimate")
    text = "number of ranks, 8 a node, for --print-plan and --estimate; default: this job's"
    add("--ranks", type=_positive, help=text)
    text = "draw the metrics so far to run.dir/metrics.png and .svg, and exit"
    add("--plot", action="store_true", help=text)
    text = "at the end, write the logits of a fixed prompt, [1, T, V]"
    add("--logits", type=Path, metavar="FILE", help=text)
    text = "number of steps to trace to run.dir/profile"
    add("--profile", type=_positive, default=0, metavar="STEPS", help=text)
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def main() -> None:
    args = parse_args()
    try:
        rank, world_size, local = _place()
        raise SystemExit(_run(args, rank, world_size, local))
    except (ConfigError, CheckpointError, OSError, ModuleNotFoundError) as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # torchrun ends all ranks as soon as one has ended, so rank 0 prints the error first
            time.sleep(_FIRST_WORD_S)
        # a rank that is still there has an error of its own, such as a node that lacks a file
        rank_of = os.environ.get("RANK", "0")
        who = f"rank {rank_of}: " if rank_of != "0" else ""
        is_package = isinstance(error, ModuleNotFoundError)
        advice = "; pip install 'ckpt-tools[train]'" if is_package else ""
        print(f"training: {who}{error}{advice}", file=sys.stderr, flush=True)
        tell_launcher(f"{error}{advice}")
        raise SystemExit(2) from None
    except LossError as error:
        if rank == 0:
            print(f"training: {error}", file=sys.stderr, flush=True)
        tell_launcher(str(error))
        raise SystemExit(_NOT_FINITE) from None


def _run(args: argparse.Namespace, rank: int, world_size: int, local: int) -> int:
    """Does what the command asks for; returns the exit status."""
    base = accelerate_config.Mapped()
    if args.accelerate_config:
        base = accelerate_config.read(args.accelerate_config)
    config = resolve(args.config, args.set, base.tables)
    for note in base.notes if rank == 0 else ():
        print(f"{args.accelerate_config}: {note}", flush=True)
    if args.plot:
        print("\n".join(map(str, plot(Path(config.run.dir)))))
    elif args.print_plan or args.estimate:
        look(args, config, args.ranks or world_size, min(args.ranks, 8) if args.ranks else local)
    else:
        if args.logits:
            _check_logits(args.logits, config)
        return start(prove(config, world_size, local), args.profile, args.logits)
    return 0


def _place() -> tuple[int, int, int]:
    """Returns rank, number of ranks, and number of ranks on this machine, as torchrun sets them."""
    given = [os.environ.get(name, default) for name, default in _PLACE]
    if not all(text.isdecimal() for text in given):
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_WORLD_SIZE are {given}: torchrun sets them")
    rank, world_size, local = map(int, given)
    is_alone = "RANK" not in os.environ
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if is_alone and "SLURM_PROCID" in os.environ and tasks != "1":
        raise ConfigError(
            f"srun has started {tasks} tasks, and RANK is not set: each would be a job of its own;"
            " start torchrun on each node, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,"
            " MASTER_ADDR and MASTER_PORT"
        )
    if not rank < world_size or not 1 <= local <= world_size or (is_alone and world_size > 1):
        raise ConfigError(
            f"RANK = {rank}, WORLD_SIZE = {world_size}, LOCAL_WORLD_SIZE = {local} contradict each"
            " other: start ranks with torchrun"
        )
    return rank, world_size, local


def _check_logits(file: Path, config: Config) -> None:
    """Refuses `--logits` where they cannot be computed or written."""
    if config.model.factory:
        raise ConfigError("--logits: a fixed prompt is for language models, not model.factory")
    if config.fsdp.sequence_parallel:
        raise ConfigError("--logits: not with fsdp.sequence_parallel, which splits the prompt")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--logits {file}: there is no such directory")
    if file.is_dir():
        raise ConfigError(f"--logits {file}: it is a directory")
    model = models.make(config)
    if models.vocab_size(model) <= max(PROMPT) or models.max_seq_len(model) < len(PROMPT):
        raise ConfigError(
            f"--logits: the fixed prompt has {len(PROMPT)} bytes up to {max(PROMPT)}, more than the"
            " model takes"
        )


def look(args: argparse.Namespace, config: Config, num_ranks: int, ranks_a_node: int) -> None:
    """Prints the output of `--print-plan` and `--estimate`, without training."""
    from training.extras import estimate, plan

    sizes = check(config, num_ranks, ranks_a_node) if args.print_plan else None
    model = make_model(config)
    if config.model.factory and args.estimate:
        rows = open_data(config, model, "data.train")
        print(f"data.train: {len(rows):,} rows")
    if sizes:
        plan.show(config, sizes)
    if args.estimate:
        estimate.show(config, num_ranks, ranks_a_node, args.budget)


def start(plan: Plan, profile_steps: int = 0, logits: Path | None = None) -> int:
    """Joins the job's ranks and trains; returns the exit status.

    A rank that fails reports it before any other rank can notice.
    """
    is_cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:  # one process, without torchrun
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        os.environ |= alone
    if is_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, world_size = next(iter(dist.rendezvous("env://")))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo", store=store, rank=rank, world_size=world_size
    )
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    try:
        return train(plan, device, profile_steps, logits)
    except (ConfigError, CheckpointError, LossError):
        _is_first(store, rank)  # the same on all ranks, or rank 0's alone; `main` prints it
        raise
    except Exception as error:  # noqa: BLE001  # every error is reported
        _report(error, store, rank)
        raise SystemExit(1) from None
    finally:
        dist.destroy_process_group()


def _report(error: Exception, store: dist.Store, rank: int) -> None:
    """Prints an error: in one line if it is this rank's alone, else with a trace on one rank."""
    is_first = _is_first(store, rank)
    if text := _own_error(error):
        text = f"training: rank {rank}: {text}"
    elif is_first:
        text = f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}"
    else:
        text = f"rank {rank} stops: {_first_to_fail(store)} failed"
    print(text, file=sys.stderr, flush=True)
    if is_first:
        cause = _own_error(error) or f"{type(error).__name__}: {error}; see the traceback above"
        tell_launcher(cause)


_OF_FILES = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS),
    *(errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOENT),
)


def _own_error(error: Exception) -> str:
    """Returns a short text for an error that a smaller job, other data, or a disk would avoid."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    is_of_files = isinstance(error, OSError) and error.errno in _OF_FILES
    if is_of_files or isinstance(error, DataError):
        return text
    # the second are torch's words on a CPU
    is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if is_memory or "can't allocate memory" in str(error):
        hint = "python -m training … --estimate shows what each strategy takes"
        return f"{text}: out of memory; {hint}"
    return ""


def _is_first(store: dist.Store, rank: int) -> bool:
    """Notes that this rank has failed, and tells whether it is the first.

    Later errors are only consequences of the first one.
    """
    try:
        if store.add(f"{_FAILED}/count", 1) > 1:
            return False
        store.set(_FAILED, str(rank))
    except dist.DistError:  # without torchrun, the store ends with rank 0
        return False
    return True


def _first_to_fail(store: dist.Store) -> str:
    try:
        return f"rank {store.get(_FAILED).decode()}"
    except dist.DistError:
        return "rank 0, which had the store,"
