"""The training loop: resumes from the newest complete step, trains, and saves."""

from __future__ import annotations

import contextlib
import io
import math
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ckpt_tools import CheckpointManager, Mirror, Retention
from training import changes, parallel, sharding
from training.config import Config, to_toml
from training.extras import factory, weights, wrappers
from training.extras.causality import prove_causal
from training.extras.loggers import open_loggers
from training.extras.profiling import Profiler
from training.files import replace_file
from training.job import Job, build, seed_generators
from training.loss import evaluate, logits_for, loss_of
from training.metrics import Meter, loss_and_peak, mean_loss
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
    config, checkpoint, is_first = plan.config, plan.config.checkpoint, dist.get_rank() == 0
    directory, job = Path(config.run.dir), build(plan, device)
    loggers = open_loggers(config, directory) if is_first else []
    with CheckpointManager(
        checkpoint.dir or directory,
        retention=Retention(checkpoint.keep_last, checkpoint.keep_every or None),
        asynchronous=checkpoint.asynchronous,
        statistics=checkpoint.statistics,
        mirror=Mirror(checkpoint.mirror, checkpoint.mirror_every or None)
        if checkpoint.mirror
        else None,
        on_commit=[logger.committed for logger in loggers],
    ) as checkpoints:
        first, notes = _resume(job, checkpoints)
        if config.model.path:
            prove_causal(job.model, config, device)
        if is_first:
            directory.mkdir(parents=True, exist_ok=True)
            replace_file(directory / "config.toml", to_toml(plan.given))
        with contextlib.closing(Meter(config, first, loggers)) as meter:
            for text in (*_about(job, first), *plan.notes, *notes):
                meter.say(text)
            if first >= (last := config.run.steps):
                meter.say(f"nothing to do: run.steps = {last}, and the checkpoint has step {first}")
            number = _loop(job, checkpoints, meter, first, profile_steps)
            checkpoints.wait()
    if checkpoints.last_save:
        meter.say(f"saved {checkpoints.last_save.path}")
    if logits and not number:
        with sharding.computing(config, device):
            written = logits_for(job.model, device)
        if is_first:
            buffer = io.BytesIO()
            torch.save(written, buffer)
            replace_file(logits, buffer.getvalue())
    if config.run.export and not number:
        _export(job, checkpoints, meter)
    return 128 + number if number else 0


def _about(job: Job, first: int) -> Iterator[str]:
    """Yields what a start says of the model and the data."""
    model, data = job.config.model, job.plan.rows.identity
    began = f"from the weights in {model.path}" if model.path and model.weights else "from scratch"
    began = f"resumed at step {first}" if first else began
    is_part = job.num_trained < job.num_parameters
    trained = f", {job.num_trained:,} of them trained," * is_part
    ranks = f"{dist.get_world_size()} ranks ({job.device.type})"
    yield f"{job.num_parameters:,} parameters{trained} on {ranks}, {began}"
    what = "rows" if model.factory else f"tokens ({data['tokenizer']})"
    yield f"data: {data['name']}, {data['tokens']:,} {what}, fingerprint {data['fingerprint']}"


def _resume(job: Job, checkpoints: CheckpointManager) -> tuple[int, list[str]]:
    """Loads the newest checkpoint, or the weights that a new run starts from.

    Returns its step, and remarks.
    """
    config, state, notes = job.config, job.state(0), list[str]()
    model, has_adapters = config.model, bool(config.lora.rank)
    if has_adapters:
        notes += weights.load_weights(job.model, model.path, job.plan.converts)
    with changes.keeping_hyperparameters(job.optimizer, job.scheduler):
        number = checkpoints.resume(state, path=changes.start_of(config, checkpoints))
    if number is None:
        if model.path and model.weights and not has_adapters:
            notes += weights.load_weights(job.model, model.path, job.plan.converts)
        return 0, notes
    stored, before = state["train_state"], changes.config_of(state)
    changes.check_train_state(stored, number)
    notes += changes.check_same(stored, job.about, config)
    notes += changes.notes_on(before, job.plan.given)
    best, there = stored.get("best"), {step.number for step in checkpoints.steps()}
    # a loss on other data cannot be compared, and a step may be gone
    if best and best[0] in there and stored.get("validation") == job.about["validation"]:
        job.best = (int(best[0]), float(best[1]))
    if before.fsdp.tensor_parallel != config.fsdp.tensor_parallel:
        seed_generators(config.run.seed + int(stored["step"]), job.mesh)
        notes.append(
            "fsdp.tensor_parallel was changed: the random generators of all ranks start anew"
        )
    return int(stored["step"]), notes


def _loop(
    job: Job, checkpoints: CheckpointManager, meter: Meter, first: int, profile_steps: int
) -> int:
    """Trains the steps after `first`, with saves on the way and at the end.

    Returns the signal that ended it early, or 0.
    """
    config, every = job.config, job.config.checkpoint.every
    if config.checkpoint.keep_best and job.best is not None:
        checkpoints.protected_steps.add(job.best[0])
    with Profiler(Path(config.run.dir) / "profile", profile_steps, job.device) as profiler:
        if problem := profiler.problem(config.run.steps - first):
            meter.say(f"warning: {problem}")
        checkpoints.preempted()  # from now on, a signal lets the first step end, too
        for step in range(first + 1, config.run.steps + 1):
            lr = job.scheduler.get_last_lr()[0]
            is_saved = step == config.run.steps or (every > 0 and step % every == 0)
            with profiler.measuring_memory(job.model, job.optimizer, config):
                loss, norm = take_step(job, meter, is_saved or meter.is_due(step))
            number = checkpoints.preempted()
            is_saved = is_saved or bool(number)
            everyone = loss_and_peak(loss) if is_saved or meter.is_due(step) else []
            if everyone and not _are_finite(everyone, norm):
                _not_finite(config, meter, step)
            metrics = _validate(job, checkpoints, meter, step, is_saved)
            if everyone and job.num_targets:  # else the loss says nothing
                metrics["loss"] = mean_loss(everyone)
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
            meter.step(step, job, everyone, lr, norm)
            profiler.step()
            if number:
                name = signal.Signals(number).name
                meter.say(f"got {name}: saved step {step}, start again to go on")
                return number
    return 0


def _validate(
    job: Job, checkpoints: CheckpointManager, meter: Meter, step: int, is_saved: bool
) -> dict[str, float]:
    """Validates after the steps that are due, and protects the best step that is saved."""
    every, rows = job.config.metrics.validate_every, job.plan.validation
    if rows is None or (step % every and step != job.config.run.steps):
        return {}
    with meter.pausing():
        loss = evaluate(job, rows)
        meter.validation(step, loss)
    if job.config.checkpoint.keep_best and is_saved and math.isfinite(loss):
        if job.best is None or loss < job.best[1]:
            job.best = step, loss
        checkpoints.protected_steps.clear()
        checkpoints.protected_steps.add(job.best[0])
    return {"validation_loss": loss}


def _are_finite(everyone: list[list[float]], norm: Tensor | None) -> bool:
    is_finite = norm is None or math.isfinite(norm.item())
    return is_finite and all(math.isfinite(of_rank[0]) for of_rank in everyone)


def _check_buffers(job: Job) -> None:
    """Refuses to save buffers that a factory's module has changed differently on each rank.

    Only rank 0's would be saved, and a resume would continue from them.

    Raises:
        ConfigError: with the name of the first such buffer.
    """
    if job.loss is not None and dist.get_world_size() > 1:
        buffers = {
            f"{path}.{name}" if path else name: buffer
            for path, module in wrappers.unwrapped(job.model).named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }
        remedy = "average it over the ranks in forward, or do not change it"
        factory.check_equal(buffers, "after this step", remedy)


def _not_finite(config: Config, meter: Meter, step: int) -> None:
    """Ends the training, or warns if `run.stop_at_nan` is false. Later steps would be useless."""
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
        with reducing, sharding.splitting_loss(job.config):
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
        names = [name for name, _ in wrappers.unwrapped(job.model).named_parameters()]
        if all(name.startswith("module.") for name in names):
            meter.say("the names in it lack the prefix `module.`, which looks like that of DDP")
    dist.barrier()
