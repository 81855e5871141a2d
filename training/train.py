"""The training loop: resumes from the newest complete step, trains, and saves."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ckpt_tools import CheckpointManager
from training import changes, factory, parallel, weights
from training import config as configuration
from training.config import Config, ConfigError
from training.job import Job, build, seed_generators
from training.loggers import open_loggers
from training.loss import evaluate, logits_for, loss_of
from training.metrics import Meter, loss_and_peak
from training.profiling import Profiler
from training.prove import Plan


class LossError(Exception):
    """A loss is not finite; exit status 3."""


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
        with parallel.computing(config, device):
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
        seed_generators(config.run.seed + first, job.mesh)
        notes.append(
            "fsdp.tensor_parallel was changed: the random generators of all ranks start anew"
        )
    changes.apply_optim(config, job.optimizer, job.scheduler)
    return first, notes


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
            # the loss of a step without any target says nothing
            metrics = {"loss": _mean_loss(everyone)} if everyone and job.num_targets else {}
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
                bool(job.num_targets),
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

    Only rank 0's would be saved, and a resume would continue from them.

    Raises:
        ConfigError: with the name of the first such buffer.
    """
    if job.loss is not None and dist.get_world_size() > 1:
        buffers = {name.removeprefix("module."): b for name, b in job.model.named_buffers()}
        remedy = "average it over the ranks in forward, or do not change it"
        factory.check_equal(buffers, "after this step", remedy)


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
            f"{text}: it was not saved; look for NaN and rows without a label in the data, start"
            " again with a lower optim.lr, or continue with run.stop_at_nan = false"
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
    total, job.num_targets = torch.zeros((), device=job.device), batch.num_targets
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
    job.optimizer.zero_grad()
    return total, norm


def _export(job: Job, checkpoints: CheckpointManager, meter: Meter) -> None:
    """Writes the last step to `run.dir/export`, with the files that loading needs."""
    # this run's last step, which need not be the newest step of the directory
    newest = checkpoints.last_save or checkpoints.last_load
    if dist.get_rank() == 0 and newest is not None:
        directory = Path(job.config.run.dir) / "export"
        weights.export(newest.path, directory, job.config, job.model)
        meter.say(f"exported {directory}")
    dist.barrier()
