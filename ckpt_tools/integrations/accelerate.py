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
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ckpt_tools.core.logs import log
from ckpt_tools.errors import PlanError
from ckpt_tools.integrations.common import ours
from ckpt_tools.loop.manager import CheckpointManager
from ckpt_tools.loop.state_dict import PerRank, RngState

_managers: WeakKeyDictionary[Any, dict[str, CheckpointManager]] = WeakKeyDictionary()
_epoch_starts: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()
_REFUSED = ("DEEPSPEED", "MEGATRON_LM", "XLA")


@dataclass(frozen=True, slots=True)
class Position:
    """Where a job continues.

    Attributes:
        step: number of the step that was loaded; None in a new run.
        epoch: the epoch to begin or to continue.
        batch: how many batches of that epoch are done.
        rng: states of this rank's generators, as the load has left them; None in a new run.
    """

    step: int | None = None
    epoch: int = 0
    batch: int = 0
    rng: Mapping[str, Any] | None = None

    def batches(self, accelerator: Any, loader: Any, epoch: int) -> Iterator[tuple[int, Any]]:
        """Yields the number of each batch of an epoch, and the batch, without those that are done.

        Taking the first batch draws random numbers. So the generators are restored after it.
        """
        is_first = epoch == self.epoch and self.rng is not None
        done = self.batch if is_first else 0
        if (generator := getattr(loader, "synchronized_generator", None)) is not None:
            _epoch_starts[loader] = generator.get_state()
        if done and not getattr(loader, "use_stateful_dataloader", False):
            loader = accelerator.skip_first_batches(loader, done)
        for number, batch in enumerate(loader, done):
            if self.rng is not None and is_first and number == done:
                RngState().load_state_dict(self.rng)
            yield number, batch


def manager_of(accelerator: Any, root: str | os.PathLike[str], **options: Any) -> CheckpointManager:
    """Returns the manager of a root, made at the first call.

    `accelerator.end_training()` closes it, or else the end of the process.

    Args:
        accelerator: whose ranks save together.
        root: of the run, a path or a URL.
        **options: of `CheckpointManager`, at the first call.
    """
    if accelerator.distributed_type.name in _REFUSED:
        raise PlanError(
            f"{accelerator.distributed_type.name} saves its own checkpoints",
            hint="use accelerator.save_state",
        )
    if accelerator not in _managers:
        _close_at_the_end(accelerator)
    made = _managers.setdefault(accelerator, {})
    if os.fspath(root) not in made:
        made[os.fspath(root)] = CheckpointManager(root, **options)
    return made[os.fspath(root)]


def _close_at_the_end(accelerator: Any) -> None:
    """Has `accelerator.end_training()` wait for the last save, and release the roots."""
    end_training = accelerator.end_training

    def end() -> None:
        for manager in _managers.pop(accelerator, {}).values():
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
    only: str = "",
    **options: Any,
) -> bool:
    """Saves everything that the accelerator has prepared or registered, as one step of a run.

    Args:
        accelerator: with models, optimizers, schedulers, data loaders and registered objects.
        root: of the run, a path or a URL.
        step: its number.
        epoch: the present epoch.
        batch: how many of its batches are done.
        only: `"trainable"` leaves out frozen parameters.
        **options: of `CheckpointManager`, at the first call.

    Returns:
        False if the save was skipped; see `CheckpointManager.save`.
    """
    manager = manager_of(accelerator, root, **options)
    place = {"epoch": epoch, "batch": batch, "step": accelerator.step}
    state = _state(accelerator) | {"place": place, "rng": RngState()}
    return manager.save(step, state, only=only)


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
            `Accelerator.load_state`, on the number of ranks that saved it. It does not know where
            it was: `dataclasses.replace(place, step=…, epoch=…, batch=…)` adds that.
        **options: of `CheckpointManager`, at the first call.

    Returns:
        Where to continue. Its `step` is None if the run has no step yet.
    """
    manager = manager_of(accelerator, root, **options)
    if path is not None and not ours(path):
        log.warning("%s is Accelerate's own: Accelerator.load_state loads it", path)
        accelerator.load_state(os.fspath(path))
        return Position(rng=RngState().state_dict())
    state = _state(accelerator) | {"rng": RngState(), "place": {"epoch": 0, "batch": 0, "step": 0}}
    resumed = manager.resume(state, step, path=path)
    if resumed is None:
        return Position()
    accelerator.step = state["place"].pop("step")
    for loader, stored in zip(accelerator._dataloaders, state.get("loaders", ()), strict=True):
        if isinstance(stored, Mapping):
            loader.set_epoch(stored["iteration"])
            if "generator" in stored:
                loader.synchronized_generator.set_state(stored["generator"])
    place = state["place"]
    return Position(resumed, place["epoch"], place["batch"], RngState().state_dict())


def _state(accelerator: Any) -> dict[str, Any]:
    """Returns what an accelerator knows, each with the name that `ckpt merge` and others expect."""
    optimizers = [getattr(o, "optimizer", o) for o in accelerator._optimizers]
    found = _numbered("model", accelerator._models) | _numbered("optimizer", optimizers)
    found |= _numbered("scheduler", accelerator._schedulers)
    found |= _numbered("custom", accelerator._custom_objects)
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    if accelerator._dataloaders:
        found["loaders"] = [_loader(loader) for loader in accelerator._dataloaders]
    return found


def _loader(loader: Any) -> Any:
    """Returns what reproduces the order of a data loader.

    A stateful one has a position of its own on each rank. Any other counts its epochs, and shuffles
    by a generator. The state of that generator is the one at the beginning of the epoch.
    """
    if getattr(loader, "use_stateful_dataloader", False):
        return PerRank(loader)
    generator = getattr(loader, "synchronized_generator", None)
    found = {"iteration": getattr(loader, "iteration", 0)}
    if generator is not None:
        found["generator"] = _epoch_starts.get(loader, generator.get_state())
    return found


def _numbered(name: str, values: list[Any]) -> dict[str, Any]:
    """Names the first one plainly, and the others by number, as Accelerate does."""
    return {f"{name}_{i}" if i else name: value for i, value in enumerate(values)}
