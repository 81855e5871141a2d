"""Checkpoints of an `Accelerator`, with FSDP1, FSDP2, DDP or one process.

    place = load_state(accelerator, "run")
    for epoch in range(place.epoch, epochs):
        for number, batch in place.batches(accelerator, loader, epoch):
            …
            if accelerator.sync_gradients and (step := step + 1) % 500 == 0:
                save_state(accelerator, "run", step, epoch=epoch, batch=number + 1)
    accelerator.end_training()  # waits for the last save

Written against accelerate 1.15. DeepSpeed, Megatron-LM and XLA save their own checkpoints. Hooks of
`register_save_state_pre_hook` are not called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ckpt_tools.core.logs import log
from ckpt_tools.errors import PlanError, printable
from ckpt_tools.integrations.common import options_of, ours, refuse_release
from ckpt_tools.loop.loading.load import load
from ckpt_tools.loop.loading.reader import open_checkpoint
from ckpt_tools.loop.manager import CheckpointManager
from ckpt_tools.loop.state.state_dict import PerRank, RngState
from ckpt_tools.storage import is_url

_managers: WeakKeyDictionary[Any, dict[str, tuple[CheckpointManager, Any]]] = WeakKeyDictionary()
# of each loader: the generators of this rank, and that of the shuffle, when its epoch began
_epoch_starts: WeakKeyDictionary[Any, tuple[Any, torch.Tensor | None]] = WeakKeyDictionary()
_REFUSED = ("DEEPSPEED", "MEGATRON_LM", "XLA")
_RELEASES = ("1.6", "2")  # the tests run 1.6.0 and 1.15


@dataclass(frozen=True, slots=True)
class Position:
    """Where a job continues.

    Attributes:
        step: number of the step that was loaded; None in a new run.
        epoch: the epoch to begin or to continue.
        batch: how many batches of that epoch are done.
        rng: states of this rank's generators, as the load has left them; None in a new run.
        epoch_rng: their states when that epoch began; None if unknown.
    """

    step: int | None = None
    epoch: int = 0
    batch: int = 0
    rng: Mapping[str, Any] | None = field(default=None, repr=False)
    epoch_rng: Mapping[str, Any] | None = field(default=None, repr=False)

    def batches(self, accelerator: Any, loader: Any, epoch: int) -> Iterator[tuple[int, Any]]:
        """Yields the number of each batch of an epoch, and the batch, without those that are done.

        Beginning an epoch and taking its first batch draw random numbers. So a resumed epoch begins
        with the generators as they were at its beginning. After the skipped batches, they are set
        to their states at the save.
        """
        is_first = epoch == self.epoch and self.rng is not None
        done = self.batch if is_first else 0
        if is_first:
            _set_rng(self.epoch_rng if done else self.rng)
        _epoch_starts[loader] = RngState().state_dict(), _generator_state(loader)
        skipping, is_stateful = loader, getattr(loader, "use_stateful_dataloader", False)
        if done and is_stateful and not accelerator.use_seedable_sampler:
            log.warning(
                "if this StatefulDataLoader shuffles, it continues the epoch in another order, and"
                " some samples come twice: set use_seedable_sampler=True"
            )
        if done and not is_stateful:
            skipping = accelerator.skip_first_batches(loader, done)
        number = done - 1
        for number, batch in enumerate(skipping, done):
            if done and number == done:
                _set_rng(self.rng)
            yield number, batch
        if done and number < done:  # the epoch was complete
            _set_rng(self.rng)
            loader.iteration += 1  # an iterator that yields nothing does not count its epoch
        elif skipping is not loader:
            loader.iteration = skipping.iteration


def _set_rng(states: Mapping[str, Any] | None) -> None:
    if states is not None:
        RngState().load_state_dict(states)


def _generator_state(loader: Any) -> torch.Tensor | None:
    generator = getattr(loader, "synchronized_generator", None)
    return None if generator is None else generator.get_state()


class _EpochStart:
    """The states of this rank's generators when the present epoch began."""

    def __init__(self, states: Mapping[str, Any]) -> None:
        self.states = states

    def state_dict(self) -> dict[str, Any]:
        return dict(self.states)

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        self.states = states


def manager_of(accelerator: Any, root: str | os.PathLike[str], **options: Any) -> CheckpointManager:
    """Returns the manager of a root, made at the first call.

    `accelerator.end_training()` closes it, or else the end of the process.

    Args:
        accelerator: whose ranks save together.
        root: of the run, a path or a URL.
        **options: of `CheckpointManager`, at the first call. As in Accelerate, all steps stay but
            for `ProjectConfiguration(total_limit=…)`.

    Raises:
        ValueError: a later call has other options.
    """
    if accelerator.distributed_type.name in _REFUSED:
        raise PlanError(
            f"{accelerator.distributed_type.name} saves its own checkpoints",
            hint="use accelerator.save_state",
        )
    if accelerator not in _managers:
        refuse_release("accelerate", _RELEASES)
        _close_at_the_end(accelerator)
    made = _managers.setdefault(accelerator, {})
    key = os.fspath(root) if is_url(root) else os.path.abspath(root)
    if key not in made:
        limit = accelerator.project_configuration.total_limit
        usual = options_of(options, keep_last=limit)
        made[key] = CheckpointManager(root, **usual), options
    manager, before = made[key]
    if options and options != before:
        raise ValueError(
            f"the manager of {root} has other options: {before}; give them at the first call"
        )
    return manager


def _close_at_the_end(accelerator: Any) -> None:
    """Has `accelerator.end_training()` wait for the last save, and release the roots."""
    end_training = accelerator.end_training

    def end() -> None:
        for manager, _ in _managers.pop(accelerator, {}).values():
            manager.close()
        end_training()

    accelerator.end_training = end


def save_state(
    accelerator: Any,
    root: str | os.PathLike[str],
    step: int,
    *,
    epoch: int = 0,
    batch: int = 0,
    only: str | None = None,
    **options: Any,
) -> None:
    """Saves everything that the accelerator has prepared or registered, as one step of a run.

    Args:
        accelerator: with models, optimizers, schedulers, data loaders and registered objects.
        root: of the run, a path or a URL.
        step: its number.
        epoch: the present epoch.
        batch: how many of its batches are done.
        only: `"trainable"` leaves out frozen parameters.
        **options: of `CheckpointManager`, at the first call.
    """
    manager = manager_of(accelerator, root, **options)
    if not accelerator.sync_gradients:
        log.warning("saved in the middle of an accumulation: its gradients are not in the step")
    place = {"epoch": epoch, "batch": batch, "step": accelerator.step}
    state = _state(accelerator, batch) | {"place": place, "rng": RngState()}
    manager.save(step, state, only=only)


def load_state(
    accelerator: Any,
    root: str | os.PathLike[str],
    *,
    step: int | None = None,
    path: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Position:
    """Loads the newest sound step of a run, on any number of ranks.

    Args:
        accelerator: prepared as for the save.
        root: of the run.
        step: this one instead of the newest.
        path: this checkpoint instead. One of `Accelerator.save_state` is loaded by
            `Accelerator.load_state`, on the number of ranks that saved it. The optimizers of FSDP1,
            which that leaves empty, are loaded by this tool. It does not know where it was:
            `dataclasses.replace(place, step=…, epoch=…, batch=…)` adds that.
        **options: of `CheckpointManager`, at the first call.

    Returns:
        Where to continue. Its `step` is None if the run has no step yet.
    """
    manager = manager_of(accelerator, root, **options)
    if path is not None and not ours(path):
        log.warning("%s is Accelerate's own: Accelerator.load_state loads it", path)
        accelerator.load_state(os.fspath(path))
        fill_optimizers(accelerator, path)
        return Position(rng=RngState().state_dict())
    state = _state(accelerator) | {
        "rng": RngState(),
        "place": {"epoch": 0, "batch": 0, "step": 0},
    }
    loaders = len(accelerator._dataloaders)
    resumed = manager.resume(state, step, path=path)
    if resumed is None:
        return Position()
    accelerator.step = state["place"].pop("step")
    stored = state.get("loaders", [])
    if len(stored) != loaders:
        raise PlanError(
            f"the step has {len(stored)} data loaders, and the job has prepared {loaders}",
            hint="prepare the same loaders as the job that saved",
        )
    for loader, found in zip(accelerator._dataloaders, stored, strict=True):
        if isinstance(found, Mapping):
            loader.set_epoch(found["iteration"])
            generator = getattr(loader, "synchronized_generator", None)
            if generator is not None and "generator" in found:
                generator.set_state(found["generator"])
    start = state["epoch_start"].value.states
    place = state["place"]
    rng = RngState().state_dict()
    return Position(resumed, place["epoch"], place["batch"], rng, start)


def fill_optimizers(accelerator: Any, path: str | os.PathLike[str]) -> None:
    """Loads the optimizers that Accelerate has left empty, though the checkpoint has their state.

    Under FSDP1, it loads into what a fresh optimizer has, which is nothing.

    Args:
        accelerator: with the prepared models and optimizers.
        path: the checkpoint that Accelerate has loaded.

    Raises:
        PlanError: an optimizer is still empty.
    """
    optimizers = _numbered(
        "optimizer", [getattr(o, "optimizer", o) for o in accelerator._optimizers]
    )
    if all(optimizer.state for optimizer in optimizers.values()):
        return
    with open_checkpoint(path) as checkpoint:
        stored = checkpoint.names()

    def lacking() -> list[str]:
        return [
            name
            for name, optimizer in optimizers.items()
            if not optimizer.state and any(n.startswith(f"{name}.state.") for n in stored)
        ]

    if empty := lacking():
        log.warning("Accelerate has loaded no state into %s: it is loaded now", ", ".join(empty))
        state = _numbered("model", accelerator._models) | {name: optimizers[name] for name in empty}
        load(path, state, select=[f"{name}.*" for name in empty])
    if empty := lacking():
        raise PlanError(
            f"the checkpoint has the state of {', '.join(empty)}, and it was not loaded"
            f" ({printable(str(path))})",
            hint="prepare the models and optimizers as the job that saved it",
        )


def _state(accelerator: Any, batch: int = 1) -> dict[str, Any]:
    """Returns what an accelerator knows, each with the name that `ckpt merge` and others expect.

    Args:
        accelerator: whose state it is.
        batch: how many batches of the epoch are done; 0 if it has not begun.
    """
    optimizers = [getattr(o, "optimizer", o) for o in accelerator._optimizers]
    found = _numbered("model", accelerator._models) | _numbered("optimizer", optimizers)
    found |= _numbered("scheduler", accelerator._schedulers)
    found |= _numbered("custom", accelerator._custom_objects)
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    if accelerator._dataloaders:
        found["loaders"] = [_loader(loader, batch) for loader in accelerator._dataloaders]
    known = [_epoch_starts[x][0] for x in accelerator._dataloaders if x in _epoch_starts]
    start = known[-1] if known and batch else RngState().state_dict()
    return {**found, "epoch_start": PerRank(_EpochStart(start), on_resize="reset")}


def _loader(loader: Any, batch: int) -> Any:
    """Returns what reproduces the order of a data loader.

    A stateful one has a position of its own on each rank. Any other counts its epochs, and shuffles
    by a generator. The state of that generator is the one at the beginning of the epoch.
    """
    found: dict[str, Any] = {"iteration": getattr(loader, "iteration", 0)}
    if getattr(loader, "use_stateful_dataloader", False):
        found["position"] = PerRank(loader)
    generator = _generator_state(loader)
    if batch and loader in _epoch_starts:
        generator = _epoch_starts[loader][1]
    return found if generator is None else {**found, "generator": generator}


def _numbered(name: str, values: list[Any]) -> dict[str, Any]:
    """Names the first one plainly, and the others by number, as Accelerate does."""
    return {f"{name}_{i}" if i else name: value for i, value in enumerate(values)}
