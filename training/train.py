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
import math
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F  # noqa: N812  # torch's own name for it
from torch.utils.checkpoint import checkpoint as recompute

from ckpt_tools import CheckpointError, CheckpointManager, RngState
from ckpt_tools.core.catalog import strip_wrappers
from training import accelerate_config, changes, factory, parallel, pretrained, weights
from training import config as configuration
from training import model as models
from training.config import Config, ConfigError
from training.data import Reader, Sampler, Tokens
from training.examples import Batch, DataError, Examples
from training.factory import Rows
from training.initialize import Copied, Values, every_module
from training.loggers import open_loggers
from training.metrics import Meter, gather, loss_and_peak, plot
from training.profiling import Profiler
from training.prove import Plan, prove

PROMPT = b"def main():\n    parser = argparse"
_FAILED = "training/failed"  # key of the job's store: which rank failed first
_NOT_FINITE = 3  # exit status
_FIRST_WORD_S = 3.0
_LEAST = 1e-9  # a batch may have no target at all; its loss is 0


class LossError(Exception):
    """A loss is not finite; exit status 3."""


@dataclass(slots=True)
class Job:
    """The objects that the training loop uses."""

    config: Config
    text: str
    device: torch.device
    mesh: DeviceMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    sampler: Sampler
    reader: Reader
    tokens: Tokens | Examples | Rows
    validation: Tokens | Examples | Rows | None
    num_parameters: int
    num_trained: int
    about: dict[str, Any]  # the model's config.json
    loss: factory.Loss | None = None  # of a factory's module; None: cross-entropy of tokens
    base: str = ""  # the fingerprint of the weights below adapters
    source: str = ""  # the digest of the factory's file
    loss_note: str | None = None  # a warning on `loss`; None before its first call
    best: tuple[int, float] | None = None  # the saved step with the lowest validation loss

    @property
    def validated_on(self) -> str:
        """The fingerprint of the validation data; "" if there is none."""
        return "" if self.validation is None else str(self.validation.identity["fingerprint"])

    @property
    def saved_part(self) -> str:
        """The part of the model that is saved: with adapters, only these."""
        return "trainable" if self.config.lora.rank else ""

    def state(self, step: int) -> dict[str, Any]:
        """Returns the state that a resumed run needs, with the configuration.

        The checkpoint manager saves it.
        """
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "sampler": self.sampler,
            "rng": RngState(),
            "train_state": {
                "step": step,
                "data": self.tokens.identity,
                "model": self.about,
                "best": self.best,
                "validation": self.validated_on,
                **({"base": self.base} if self.base else {}),
                **({"source": self.source} if self.source else {}),
            },
            "config": self.text,
        }


# ---- start ---------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", help="TOML file; every key has a default")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override a key of the file; may be given several times",
    )
    parser.add_argument(
        "--accelerate-config",
        metavar="FILE",
        help="Accelerate's FSDP configuration; the file's keys override it",
    )
    parser.add_argument(
        "--print-plan", action="store_true", help="show how the model is sharded, and exit"
    )
    parser.add_argument(
        "--estimate", action="store_true", help="show the memory of each strategy, and exit"
    )
    parser.add_argument(
        "--budget", type=float, metavar="GIB", help="memory of one rank, for --estimate"
    )
    parser.add_argument(
        "--ranks",
        type=_positive,
        help="number of ranks for --print-plan and --estimate; default: this job's",
    )
    parser.add_argument(
        "--plot",
        action="store_true",
        help="draw the metrics so far to run.dir/metrics.png and .svg, and exit",
    )
    parser.add_argument(
        "--logits",
        type=Path,
        metavar="FILE",
        help="at the end, write the logits of a fixed prompt, [1, T, V]",
    )
    parser.add_argument(
        "--profile",
        type=_positive,
        default=0,
        metavar="STEPS",
        help="number of steps to trace to run.dir/profile",
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def main() -> None:
    args = parse_args()
    rank, world_size, local = (int(os.environ.get(name, default)) for name, default in _PLACE)
    try:
        base = (
            accelerate_config.read(args.accelerate_config)
            if args.accelerate_config
            else accelerate_config.Mapped()
        )
        config = configuration.resolve(args.config, args.set, base.tables)
        for note in base.notes if rank == 0 else ():
            print(f"{args.accelerate_config}: {note}", flush=True)
        if args.plot:
            print("\n".join(map(str, plot(Path(config.run.dir)))))
        elif args.print_plan or args.estimate:
            look(
                args,
                config,
                args.ranks or world_size,
                local if not args.ranks else min(args.ranks, 8),
            )
        else:
            if args.logits:
                _check_logits(args.logits, config)
            raise SystemExit(start(prove(config, world_size, local), args.profile, args.logits))
    except (ConfigError, CheckpointError, FileNotFoundError, ModuleNotFoundError) as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # torchrun ends all ranks as soon as one has ended, so rank 0 prints the error first
            time.sleep(_FIRST_WORD_S)
        # a rank that is still there has an error of its own, such as a node that lacks a file
        advice = (
            "; pip install 'ckpt-tools[train]'" if isinstance(error, ModuleNotFoundError) else ""
        )
        print(
            f"training: {f'rank {rank}: ' if rank else ''}{error}{advice}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(2) from None
    except LossError as error:
        if rank == 0:
            print(f"training: {error}", file=sys.stderr, flush=True)
        raise SystemExit(_NOT_FINITE) from None


def _check_logits(file: Path, config: Config) -> None:
    """Refuses `--logits` where they cannot be computed or written."""
    if config.model.factory:
        raise ConfigError("--logits: a fixed prompt is for language models, not model.factory")
    if config.fsdp.sequence_parallel:
        raise ConfigError("--logits: not with fsdp.sequence_parallel, which splits the prompt")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--logits {file}: there is no such directory")


_PLACE = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"))


def look(args: argparse.Namespace, config: Config, num_ranks: int, ranks_a_node: int) -> None:
    """Prints the output of `--print-plan` and `--estimate`, without training."""
    from training import estimate, plan

    if args.print_plan:
        plan.show(config, configuration.check(config, num_ranks, ranks_a_node))
    if args.estimate:
        estimate.show(config, num_ranks, ranks_a_node, args.budget)


def start(plan: Plan, profile_steps: int = 0, logits: Path | None = None) -> int:
    """Joins the job's ranks and trains; returns the exit status.

    A rank that fails reports it before any other rank can notice.
    """
    is_cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:  # one process, without torchrun
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "0",
        }
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
        is_first = _is_first(store, rank)
        # errors of this rank alone
        is_own = isinstance(error, (DataError, MemoryError, torch.OutOfMemoryError))
        if is_own or "can't allocate memory" in str(error):  # torch's words on a CPU
            print(f"training: rank {rank}: {_one_line(error)}", file=sys.stderr, flush=True)
        elif is_first:
            print(
                f"rank {rank} failed:\n{''.join(traceback.format_exception(error))}",
                file=sys.stderr,
                flush=True,
            )
            get_error_handler().record_exception(error)
        else:
            print(
                f"rank {rank} stops: rank {store.get(_FAILED).decode()} failed",
                file=sys.stderr,
                flush=True,
            )
        raise SystemExit(1) from None
    finally:
        dist.destroy_process_group()


def _one_line(error: BaseException) -> str:
    """Returns a short text for an error that a smaller job, or other data, would avoid."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    hint = (
        ""
        if isinstance(error, DataError)
        else ": out of memory; python -m training … --estimate shows what each strategy takes"
    )
    return text + hint


def _is_first(store: dist.Store, rank: int) -> bool:
    """Notes that this rank has failed, and tells whether it is the first.

    Later errors are only consequences of the first one.
    """
    is_first = store.add(f"{_FAILED}/count", 1) == 1
    if is_first:
        store.set(_FAILED, str(rank))
    return is_first


# ---- training ------------------------------------------------------------------------------------


def train(
    plan: Plan, device: torch.device, profile_steps: int = 0, logits: Path | None = None
) -> int:
    """Trains to `run.steps`, from the newest checkpoint or from the start; returns the exit status.

    The status is 0, or 128 + a signal. All ranks of an initialised process group call it.

    Raises:
        ConfigError: the model does not fit the mesh, or the device.
        CheckpointError: a save or a resume failed.
    """
    config, rank = plan.config, dist.get_rank()
    directory, checkpoint = Path(config.run.dir), config.checkpoint
    job = build(plan, device)
    loggers = open_loggers(config, directory) if rank == 0 else []
    with CheckpointManager(
        checkpoint.dir or directory,
        keep_last=checkpoint.keep_last,
        keep_every=checkpoint.keep_every or None,
        asynchronous=checkpoint.asynchronous,
        statistics=checkpoint.statistics,
        mirror=checkpoint.mirror or None,
        mirror_every=checkpoint.mirror_every or None,
        on_commit=[logger.committed for logger in loggers],
    ) as checkpoints:
        first, notes = _resume(job, checkpoints, plan.converts)
        has_weights = config.model.path and config.model.weights
        if rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "config.toml").write_text(job.text, encoding="utf-8")
        began = (
            f"resumed at step {first}"
            if first
            else f"from the weights in {config.model.path}"
            if has_weights
            else "from scratch"
        )
        meter = Meter(
            directory,
            first,
            config.run.steps,
            config.metrics.every,
            config.metrics.progress,
            loggers,
            "rows" if config.model.factory else "tokens",
        )
        is_part = job.num_trained < job.num_parameters
        trained = f", {job.num_trained:,} of them trained," * is_part
        meter.say(
            f"{job.num_parameters:,} parameters{trained} on {dist.get_world_size()} ranks"
            f" ({device.type}), {began}"
        )
        data = job.tokens.identity
        what = "rows" if config.model.factory else f"tokens ({data['tokenizer']})"
        meter.say(
            f"data: {data['name']}, {data['tokens']:,} {what}, fingerprint {data['fingerprint']}"
        )
        for note in (*plan.notes, *notes):
            meter.say(note)
        if first >= config.run.steps:
            meter.say(
                f"nothing to do: run.steps = {config.run.steps}, and the checkpoint has step"
                f" {first}"
            )
        number = _loop(job, checkpoints, meter, first, profile_steps)
        checkpoints.wait()
        meter.close()
    if checkpoints.last_save:
        meter.say(f"saved {checkpoints.last_save.path}")
    if logits and not number:
        written = logits_for(job.model, device)
        if rank == 0:
            torch.save(written, logits)
    if config.run.export and not number:
        _export(job, checkpoints, meter)
    return 128 + number if number else 0


def _resume(job: Job, checkpoints: CheckpointManager, converts: bool) -> tuple[int, list[str]]:
    """Loads the newest checkpoint, or the weights that a new run starts from.

    Returns its step, and remarks.

    Raises:
        ConfigError: the data, or a key that must not change, has changed.
    """
    config, state = job.config, job.state(0)
    has_weights, notes = config.model.path and config.model.weights, []
    if config.lora.rank:
        notes += weights.load_weights(job.model, config.model.path, converts)
    with changes.explaining_groups(job.optimizer):
        number = checkpoints.resume(state, path=changes.start_of(config, checkpoints))
    if number is None:
        if has_weights and not config.lora.rank:
            notes += weights.load_weights(job.model, config.model.path, converts)
        return 0, notes
    stored = state["train_state"]
    first = int(stored["step"])
    if job.source != stored.get("source", job.source):
        notes.append(f"the file of {config.model.factory} has changed since the checkpoint")
    notes += changes.check_base(stored.get("base", ""), job.base, config.model.may_change)
    notes += changes.check_data(stored.get("data"), job.tokens.identity, config.data.may_change)
    notes += changes.check_description(stored.get("model"), job.about, config.model.may_change)
    notes += changes.notes_on(state["config"], configuration.parse(job.text, "config"))
    if config.run.epochs and changes.batch_size(state["config"]) != config.data.batch_size:
        raise ConfigError(
            "run.epochs with another data.batch_size than the checkpoint's: the steps so far saw"
            " another number of sequences; give run.steps"
        )
    best, there = stored.get("best"), {step.number for step in checkpoints.steps()}
    # a loss on other data cannot be compared, and a step may be gone
    if best and best[0] in there and stored.get("validation") == job.validated_on:
        job.best = (int(best[0]), float(best[1]))
    if changes.tensor_parallel(state["config"]) != config.fsdp.tensor_parallel:
        _seed(config.run.seed + first, job.mesh)
        notes.append(
            "fsdp.tensor_parallel was changed: the random generators of all ranks start anew"
        )
    changes.apply_optim(config, job.optimizer, job.scheduler)
    return first, notes


def build(plan: Plan, device: torch.device) -> Job:
    """Returns model, optimizer, schedule and data, sharded over all ranks.

    It shards the plan's own model, which cannot be used again.

    Raises:
        ConfigError: the model does not fit the mesh, or the device.
    """
    config, data = plan.config, plan.config.data
    parameters, about = list(plan.model.parameters()), models.description(plan.model)
    num_parameters = sum(p.numel() for p in parameters)
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    mesh, decayed = parallel.make_mesh(plan.sizes, device), parallel.decayed_names(plan.model)
    model = parallel.shard(plan.model, config, mesh, device, *_first_values(config))
    _seed(config.run.seed, mesh)
    optimizer = _adamw(model, config, decayed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, config))
    sampler = Sampler(
        plan.tokens.windows(data.seq_len),
        config.run.seed,
        data.shuffle,
        data.drop_last,
        data.may_change,
    )
    return Job(
        config,
        plan.text,
        device,
        mesh,
        model,
        optimizer,
        scheduler,
        sampler,
        Reader(plan.tokens, sampler, data, _part_of(data.batch_size, mesh), device),
        plan.tokens,
        plan.validation,
        num_parameters,
        num_trained,
        about,
        factory.loss_of(config) if config.model.factory else None,
        weights.fingerprint(config.model.path) if config.lora.rank else "",
        factory.source_digest(config),
    )


def _first_values(config: Config) -> tuple[Values | None, Callable[[str], bool]]:
    """Returns a factory's values, and which modules get first values at all.

    Weights of `model.path` are loaded later, so only adapters on them get values.
    """
    if config.model.factory:
        made = factory.call(config)
        remedy = "draw from torch, numpy or random, which have the same seed on all ranks"
        factory.check_equal(made, "as the function has made it", remedy)
        return Copied(made), every_module
    has_weights = bool(config.model.path and config.model.weights)
    return None, lambda name: not has_weights or pretrained.is_of_adapter(name)


def _seed(seed: int, mesh: DeviceMesh) -> None:
    """Seeds the generators differently on each rank, but equally within a tensor group.

    All ranks of a tensor group hold the same activations, so they need the same dropout.
    """
    mine = (seed + parallel.data_rank(mesh)) % (1 << 32)
    torch.manual_seed(mine)
    random.seed(mine)
    np.random.seed(mine)


def _adamw(model: nn.Module, config: Config, decayed: set[str]) -> torch.optim.AdamW:
    """Returns the optimizer. Its first group decays; norms, biases and embeddings do not."""
    optim = config.optim
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if optim.decay == "all" or configuration.keeps_flat(config):
        decayed = {strip_wrappers(name) for name, _ in named}
    groups = [
        {
            "params": [p for name, p in named if (strip_wrappers(name) in decayed) == is_decayed],
            "weight_decay": optim.weight_decay if is_decayed else 0.0,
        }
        for is_decayed in (True, False)
    ]
    how = (
        {}
        if optim.implementation == "auto"
        else {k: optim.implementation == k for k in ("fused", "foreach")}
    )
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=betas,
        eps=optim.eps,
        **how,
    )


def schedule(step: int, config: Config) -> float:
    """Returns the factor of the learning rate in a step, counted from 0.

    It is a linear warm-up, then half a cosine down to `min_lr_ratio`.
    """
    optim, total = config.optim, config.run.steps
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    done = min(1.0, (step - optim.warmup_steps) / max(1, total - optim.warmup_steps))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))


def _loop(
    job: Job, checkpoints: CheckpointManager, meter: Meter, first: int, profile_steps: int
) -> int:
    """Trains the steps after `first`, with saves on the way and at the end.

    Returns the signal that ended it early, or 0.
    """
    config, checkpoint = job.config, job.config.checkpoint
    if checkpoint.keep_best and job.best is not None:
        checkpoints.protected_steps.add(job.best[0])
    with Profiler(Path(config.run.dir) / "profile", profile_steps, job.device) as profiler:
        if problem := profiler.problem(config.run.steps - first):
            meter.say(f"warning: {problem}")
        for step in range(first + 1, config.run.steps + 1):
            lr = job.scheduler.get_last_lr()[0]
            is_saved = step == config.run.steps or (
                checkpoint.every > 0 and step % checkpoint.every == 0
            )
            with profiler.measuring_memory(job.model, job.optimizer, config):
                loss, norm = take_step(job, meter, is_saved or meter.is_due(step))
            number = checkpoints.preempted()
            is_saved = is_saved or bool(number)
            everyone = loss_and_peak(loss) if is_saved or meter.is_due(step) else []
            if everyone and not (
                all(math.isfinite(of_rank[0]) for of_rank in everyone)
                and (norm is None or math.isfinite(norm.item()))
            ):
                _not_finite(config, meter, step)
            metrics = {"loss": _mean_loss(everyone)} if everyone else {}
            if job.validation and (
                step % config.metrics.validate_every == 0 or step == config.run.steps
            ):
                with meter.pausing():
                    validated = evaluate(job, job.validation)
                    meter.validation(step, validated)
                metrics["validation_loss"] = validated
                if config.checkpoint.keep_best and is_saved:
                    _note_best(job, checkpoints, step, validated)
            if job.loss_note:
                meter.say(f"warning: {job.loss_note}")
                job.loss_note = ""
            if is_saved:
                _check_buffers(job)
                with meter.timing("checkpoint_s"), profiler.range("checkpoint"):
                    checkpoints.save(
                        step,
                        job.state(step),
                        asynchronous=False if number else None,
                        only=job.saved_part,
                        metrics=metrics,
                    )
            meter.step(
                step,
                everyone,
                config.data.batch_size * config.data.seq_len,
                lr,
                norm,
                job.sampler.epoch,
            )
            profiler.step()
            if number:
                meter.say(
                    f"got {signal.Signals(number).name}: saved step {step}, start again to go on"
                )
                return number
    return 0


def _mean_loss(everyone: list[list[float]]) -> float:
    """Returns the mean over ranks of what `loss_and_peak` has gathered."""
    return sum(of_rank[0] for of_rank in everyone) / len(everyone)


def _check_buffers(job: Job) -> None:
    """Refuses to save buffers that a factory's module has changed differently on each rank.

    Only rank 0's would be saved, and a resume would go on with them.

    Raises:
        ConfigError: with the name of the first such buffer.
    """
    if job.loss is not None and dist.get_world_size() > 1:
        buffers = nn.Module()
        for name, buffer in job.model.named_buffers():
            buffers.register_buffer(name.replace(".", "/"), buffer)
        factory.check_equal(
            buffers, "after this step", "average it over the ranks in forward, or do not change it"
        )


def _note_best(job: Job, checkpoints: CheckpointManager, step: int, loss: float) -> None:
    """Keeps a step from removal if its validation loss is the lowest so far."""
    if job.best is None or loss < job.best[1]:
        job.best = step, loss
    checkpoints.protected_steps.clear()
    checkpoints.protected_steps.add(job.best[0])


def _not_finite(config: Config, meter: Meter, step: int) -> None:
    """Ends the training, or warns if `run.stop_at_nan` is false. Later steps would be useless.

    Raises:
        LossError: by default.
    """
    text = f"the loss of step {step}, or the norm of its gradients, is not finite"
    if config.run.stop_at_nan:
        raise LossError(
            f"{text}: it was not saved; start again with a lower optim.lr, or continue with"
            " run.stop_at_nan = false"
        )
    meter.say(f"warning: {text}")


def take_step(job: Job, meter: Meter, wants_norm: bool = True) -> tuple[Tensor, Tensor | None]:
    """Trains one step; returns this rank's mean loss and the norm of the gradients, both 0-d.

    The norm is None if it is neither wanted nor needed to clip, because it takes an exchange.
    """
    data, model = job.config.data, job.model
    if job.config.fsdp.unshard_ahead and isinstance(model, FSDPModule):
        model.unshard(async_op=True)
    with meter.timing("data_s"), torch.profiler.record_function("data"):
        batch = job.reader.next_batch().to(job.device)
    total = torch.zeros((), device=job.device)
    micro = list(batch.chunk(data.accumulation))
    for i, part in enumerate(micro):
        is_last = i == len(micro) - 1
        reducing = parallel.reducing(model, is_last, job.config.fsdp.reduce_every)
        with reducing, parallel.splitting_loss(job.config):
            loss = loss_of(job, part) / len(micro)
            loss.backward()
        total += parallel.local(loss.detach())
    norm, max_norm = None, job.config.optim.max_grad_norm
    if wants_norm or max_norm:
        norm = parallel.clip_gradients(model, max_norm)
    job.optimizer.step()
    job.scheduler.step()
    # offloaded gradients keep their pinned memory
    job.optimizer.zero_grad(set_to_none=not job.config.fsdp.cpu_offload)
    return total, norm


def _part_of(batch_size: int, mesh: DeviceMesh) -> slice:
    """Returns the rows of a batch that are this rank's."""
    part = batch_size // _data_ranks(mesh)
    start = parallel.data_rank(mesh) * part
    return slice(start, start + part)


def _data_ranks(mesh: DeviceMesh) -> int:
    return dist.get_world_size() // mesh["tensor"].size()


def loss_of(job: Job, batch: Batch) -> Tensor:
    """Returns the cross-entropy of predicting the targets of a micro-batch, in float32.

    The mean over ranks and micro-batches is the mean over all targets of the step. Where rows have
    different numbers of targets, each target has the same weight nevertheless.
    """
    data = job.config.data
    if job.loss is not None:
        return _loss_of_rows(job, batch, job.loss)
    with parallel.computing(job.config, job.device):
        logits = models.logits_of(job.model, batch.inputs, batch.documents, data.packing)
    if output := parallel.dtype_of(job.config.precision.output):
        logits = logits.to(output)
    logits, targets = logits.flatten(0, 1), batch.targets.flatten()
    size = job.config.compute.loss_chunk or len(targets)
    if size >= len(targets) and batch.documents is None:
        return F.cross_entropy(logits.float(), targets)
    micro_batches = _data_ranks(job.mesh) * (data.accumulation if job.model.training else 1)
    share = batch.num_targets / micro_batches if batch.documents is not None else len(targets)
    if size >= len(targets):
        return _sum_of_losses(logits, targets) / max(share, _LEAST)
    parts = zip(logits.split(size), targets.split(size), strict=True)
    # float32 logits of one chunk are computed again in the backward pass, and not kept
    sums = [recompute(_sum_of_losses, *part, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum() / max(share, _LEAST)


def _loss_of_rows(job: Job, batch: Batch, loss: factory.Loss) -> Tensor:
    """Returns the loss of a factory's module on rows."""
    inputs = batch.inputs
    if inputs.is_floating_point():
        inputs = inputs.to(getattr(torch, job.config.model.dtype))
    with parallel.computing(job.config, job.device):
        outputs = job.model(inputs)
    if isinstance(outputs, Tensor) and (
        dtype := parallel.dtype_of(job.config.precision.output or "float32")
    ):
        outputs = outputs.to(dtype)
    name, is_training = job.config.model.loss or factory.CROSS_ENTROPY, job.model.training
    if job.loss_note is None:
        job.loss_note = factory.note_on_mean(loss, outputs, batch.targets)
    return factory.checked_loss(loss(outputs, batch.targets), name, is_training)


def _sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum")


@torch.no_grad()
def logits_for(model: nn.Module, device: torch.device) -> Tensor:
    """Returns `[1, T, V]` logits for a fixed prompt."""
    model.eval()
    return parallel.local(
        models.logits_of(model, torch.tensor([list(PROMPT)], device=device))
    ).cpu()


@torch.no_grad()
def evaluate(job: Job, tokens: Tokens | Examples | Rows) -> float:
    """Returns the mean loss over the first batches of the validation data.

    It does not depend on the number of ranks.
    """
    size = job.config.data.batch_size
    batches = min(
        job.config.metrics.validate_batches, tokens.windows(job.config.data.seq_len) // size
    )
    modes = {module: module.training for module in job.model.modules()}
    job.model.eval()
    losses, weights = [], []
    with parallel.splitting_loss(job.config):
        for i in range(batches):
            numbers, mine = list(range(i * size, (i + 1) * size)), _part_of(size, job.mesh)
            batch = tokens.batch(numbers, job.config.data.seq_len, mine).to(job.device)
            losses.append(parallel.local(loss_of(job, batch)))
            weights.append(batch.num_targets)
    for module, is_training in modes.items():  # a frozen part may have been in eval mode
        module.training = is_training
    of_batch = np.mean(gather(torch.stack(losses).double()), axis=0)
    # the first batches may have no target, although others have
    return float(np.average(of_batch, weights=weights)) if sum(weights) else math.nan


def _export(job: Job, checkpoints: CheckpointManager, meter: Meter) -> None:
    """Writes the last step to `run.dir/export`, with the files that loading needs."""
    # this run's last step, which need not be the newest step of the directory
    newest = checkpoints.last_save or checkpoints.last_load
    if dist.get_rank() == 0 and newest is not None:
        directory = Path(job.config.run.dir) / "export"
        weights.export(newest.path, directory, job.config, job.model)
        meter.say(f"exported {directory}")
    dist.barrier()


if __name__ == "__main__":
    main()
