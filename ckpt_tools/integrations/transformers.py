"""Checkpoints of transformers' `Trainer`: `class MyTrainer(CheckpointMixin, Trainer)`, or
`install(trainer)`.

`checkpoint-N` is a step of this tool then: it appears when it is complete, and a save holds
training only for a copy in memory. Written against transformers 5.24. DeepSpeed is refused.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.logs import log
from ckpt_tools.core.naming import strip_wrappers
from ckpt_tools.errors import NotACheckpointError, PlanError
from ckpt_tools.integrations.accelerate import fill_optimizers
from ckpt_tools.integrations.common import (
    Watch,
    choose_newest,
    contents,
    load_keys,
    local_copy,
    move_foreign,
    note_host_files,
    options_of,
    ours,
    put_model,
    refuse_release,
)
from ckpt_tools.loop.manager import CheckpointManager
from ckpt_tools.loop.state.state_dict import RngState
from ckpt_tools.publish.step_names import number_in

_RELEASES = ("4.57", "6")  # from the first to below the last; the tests run 4.57.3 and 5.24
_PREFIX, _STATE = "checkpoint-", "trainer_state.json"
_Trainer: Any = Any if TYPE_CHECKING else object


def install(trainer: Any, root: str | os.PathLike[str] | None = None, **options: Any) -> None:
    """Gives an existing `Trainer` our saves and resumes.

    Args:
        trainer: of transformers, or of a library that builds on it.
        root: where the steps go, a path or a URL such as `s3://bucket/run`. If None: `output_dir`.
        **options: of `CheckpointManager`, such as `mirror` or `storage_options`.
    """
    kind = type(trainer)
    if not issubclass(kind, CheckpointMixin):
        trainer.__class__ = type(kind.__name__, (CheckpointMixin, kind), {})
    trainer.checkpoint_root, trainer.checkpoint_options = root, options


class CheckpointMixin(_Trainer):  # type: ignore[misc]
    """Put it before `Trainer`: it replaces the methods that save and load checkpoints.

    The options of the Trainer keep their meaning. With PEFT, only what trains is saved. SIGTERM
    saves and ends the job with 143.

    Attributes:
        checkpoint_root: where the steps go, a path or a URL; `output_dir` if None.
        checkpoint_options: more options of `CheckpointManager`.
        checkpoints: the manager, while `train` runs.
    """

    checkpoint_root: str | os.PathLike[str] | None = None
    checkpoint_options: Mapping[str, Any] = {}
    checkpoints: Any = None
    _watch: Any = None
    _numbers: set[int]  # of the steps that were found at the start, or saved since

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains. `resume_from_checkpoint=True` takes the newest sound checkpoint, and passes over
        damaged ones. A checkpoint that the Trainer itself has written is read as the Trainer does.
        """
        refuse_release("transformers", _RELEASES)
        if self.is_deepspeed_enabled:
            raise PlanError("DeepSpeed saves its own checkpoints", hint="use the Trainer as it is")
        _warn_of_bypassed(type(self))
        root, limit = self.checkpoint_root or self.args.output_dir, self.args.save_total_limit
        kept = limit if limit and limit > 0 else None
        names = f"{_PREFIX}{{}}"
        options = options_of(self.checkpoint_options, keep_last=kept, names=names)
        with (
            tempfile.TemporaryDirectory() as small,
            CheckpointManager(root, **options) as manager,
        ):
            self.checkpoints, self._watch = manager, Watch(manager)
            callback = _callback(self._watch)
            self.add_callback(callback)
            try:
                chosen = resume_from_checkpoint or None
                if chosen is True:
                    chosen = self._choose_newest()
                number = None if chosen is None else number_in(Path(str(chosen)).name)
                if chosen is None or number is not None:
                    manager.branch_from(number)
                # the same on all ranks, since no save has begun
                there = [s.number for s in manager.steps() if not s.problem]
                self._numbers = {n for n in there if number is not None and n <= number}
                if chosen is not None:
                    chosen = local_copy(manager, os.fspath(chosen), small, [_STATE])
                return super().train(chosen, *args, **kwargs)
            finally:
                self.remove_callback(callback)
                self.checkpoints = None

    def _choose_newest(self) -> str:
        try:
            return choose_newest(self.checkpoints, self.args.output_dir, _PREFIX, _STATE)
        except NotACheckpointError as error:
            raise ValueError(str(error)) from error  # as the Trainer does

    # ---- saving ----------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.checkpoints is None or trial is not None:
            super()._save_checkpoint(model, trial)
            return
        self.store_flos()
        step, manager = self.state.global_step, self.checkpoints
        self._protect_best(step)
        state = {"model": self.model, "rng": RngState()}
        if not self.args.save_only_model:
            state |= self._training_state()
        manager.save(step, state, overwrite=True, only=self._only(), files=self._files)
        self._watch.is_pending = False
        if any(map(_may_read_checkpoints, self.callback_handler.callbacks)):
            manager.wait(removals=True)  # they look at all steps, while a callback may write
            self._watch.shown = step
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            manager.wait()
            self._push(os.path.join(manager.root, f"{_PREFIX}{step}"))

    def _protect_best(self, step: int) -> None:
        """Counts the best step within `save_total_limit`, as the Trainer does."""
        best, limit = self.state.best_global_step, self.args.save_total_limit
        manager = self.checkpoints
        self._numbers.add(step)
        numbers = sorted(self._numbers)
        if best in numbers:  # an evaluation may have been the best one without a save
            self.state.best_model_checkpoint = os.path.join(manager.root, f"{_PREFIX}{best}")
        kept = number_in(Path(self.state.best_model_checkpoint or "").name)
        manager.protected_steps.clear()
        if kept is not None:
            manager.protected_steps.add(kept)
            if limit and limit > 0:
                manager.keep_last = max(1, limit - (kept not in numbers[-limit:]))

    def _determine_best_metric(self, metrics: Any, trial: Any) -> bool:
        """Has a save that was asked for take place also after an evaluation."""
        is_best = bool(super()._determine_best_metric(metrics, trial))
        return is_best or (self._watch is not None and self._watch.is_pending)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Waits for the last save. The Trainer removes nothing: retention has done that."""
        if self.checkpoints is None:
            return super()._finalize_training(*args, **kwargs)
        self.checkpoints.wait()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    def _only(self) -> Any:
        """Returns what to save of the model: with PEFT, what trains and all adapters."""
        model = self._inner
        adapters = [f".{name}." for name in getattr(model, "peft_config", {})]
        left_out = {
            f"model.{strip_wrappers(name)}"
            for name, parameter in self.model.named_parameters()
            if not parameter.requires_grad and not any(a in f"{name}." for a in adapters)
        }
        return (lambda name: name not in left_out) if adapters else None

    def _training_state(self) -> dict[str, Any]:
        """Returns what a resume needs besides the model and the generators."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        scaler = getattr(self.accelerator, "scaler", None)
        state = {"optimizer": optimizer, "scheduler": self.lr_scheduler, "scaler": scaler}
        return {name: value for name, value in state.items() if value is not None}

    @property
    def _inner(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _files(self) -> dict[str, bytes]:
        """Returns the Trainer's state, and what `from_pretrained` needs besides weights."""
        from transformers.trainer_callback import ExportableState

        step = f"{_PREFIX}{self.state.global_step}"
        move_foreign(os.path.join(self.checkpoints.root, step))
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                known = self.state.stateful_callbacks.get(name)
                several = isinstance(known, list)
                self.state.stateful_callbacks[name] = [*known, state] if several else state
        with tempfile.TemporaryDirectory() as folder:
            self.state.save_to_json(os.path.join(folder, _STATE))
            return {**self._configs, **contents(folder)}

    @cached_property
    def _configs(self) -> dict[str, bytes]:
        model = self._inner
        configs = [getattr(model, name, None) for name in ("config", "generation_config")]
        known = getattr(model, "peft_config", {})
        active = getattr(model, "active_adapters", ()) if known else ()
        adapters = [known[name] for name in list(active() if callable(active) else active)[:1]]
        with tempfile.TemporaryDirectory() as folder:
            for item in (*(adapters or configs), self.processing_class):
                if hasattr(item, "save_pretrained"):
                    item.save_pretrained(folder)
            Path(folder, "training_args.json").write_text(self.args.to_json_string())
            return contents(folder)

    def _push(self, step: str) -> None:
        """Puts the model in Hugging Face's form where the Trainer's upload takes it."""
        if self.is_world_process_zero():
            kind = "peft" if hasattr(self._inner, "peft_config") else "hf"
            put_model(step, self.args.output_dir, kind)
        self._push_from_checkpoint(step)

    # ---- loading ---------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if where := ours(resume_from_checkpoint):
            load_keys(self.checkpoints, where, {"model": model or self.model}, ["model"])
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if where := ours(checkpoint):
            state = {"model": self.model, **self._training_state()}
            load_keys(self.checkpoints, where, state, list(self._training_state()))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint and self.is_fsdp_enabled:
                fill_optimizers(self.accelerator, checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not ours(checkpoint):  # ours came with the optimizer
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if where := ours(checkpoint):
            load_keys(self.checkpoints, where, {"rng": RngState()}, ["rng"])
        else:
            super()._load_rng_state(checkpoint)

    def _sorted_checkpoints(self, *args: Any, **kwargs: Any) -> list[str]:
        """Returns no checkpoint to remove at the end of a training: retention has done that.

        Releases before 5 ask for it, right after the last save.
        """
        if self.checkpoints is None:
            found: list[str] = super()._sorted_checkpoints(*args, **kwargs)
            return found
        self.checkpoints.wait()
        return []

    def _load_best_model(self) -> None:
        if self.checkpoints is not None:
            self.checkpoints.wait()  # the best step may be the one that is being written
        if where := ours(self.state.best_model_checkpoint):
            load_keys(self.checkpoints, where, {"model": self.model}, ["model"])
        else:
            super()._load_best_model()


# attributes of transformers' own trackers, and values with which they leave checkpoints alone
_SWITCHES = ("_log_model", "_log_artifacts", "_should_upload_checkpoint", "sync_checkpoints")
_OFF = (False, None, "false", "end")


def _may_read_checkpoints(callback: Any) -> bool:
    """Tells whether `on_save` of a callback may look into the checkpoint."""
    from transformers import TrainerCallback

    kind = type(callback)
    if kind.on_save is TrainerCallback.on_save:
        return False
    if kind.__module__ in ("transformers.trainer_callback", __name__):
        return False
    known = [name for name in _SWITCHES if hasattr(callback, name)]
    if kind.__module__.startswith("transformers.") and known:
        return any(getattr(callback, name) not in _OFF for name in known)
    return True


def _warn_of_bypassed(kind: type) -> None:
    """Warns of a user's methods that the mixin replaces."""
    classes = kind.__mro__
    after = classes[classes.index(CheckpointMixin) + 1 :]
    for name in ("_save_checkpoint", "save_model", "_save_optimizer_and_scheduler"):
        # a method before the mixin is called, and calls the mixin's
        among = after if name == "_save_checkpoint" else classes
        owner = next((c for c in among if name in vars(c) and c is not CheckpointMixin), None)
        if owner is not None and not owner.__module__.startswith("transformers."):
            log.warning("%s.%s is not called for checkpoints", owner.__name__, name)


def _callback(watch: Watch) -> Any:
    """Returns a callback that saves when the manager asks for it, and ends the job on SIGTERM."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_save |= watch.wants_save(state.global_step)
            return control

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # the last of the callbacks: others have written by now
            if state.is_world_process_zero and watch.shown == state.global_step:
                note_host_files(watch.manager, f"{_PREFIX}{state.global_step}")
            watch.end_if_preempted()

    return Callback()
