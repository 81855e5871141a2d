"""torchtitan's checkpoint manager: set `checkpoint=CkptToolsManager.Config(enable=True, …)`.

All options of the base keep their meaning, and folders may be remote, with Hugging Face formats,
too. A last save of only the model goes to `step-N-model`, or `step-N-hf`, beside the steps: nothing
can continue from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ckpt_tools.errors import CheckpointError, NotACheckpointError, PlanError, StorageError
from ckpt_tools.integrations.common import options_of, refuse_release
from ckpt_tools.loop.loading.load import load
from ckpt_tools.loop.manager import CheckpointManager
from ckpt_tools.loop.steps.runs import latest, steps
from ckpt_tools.operations.merge_reshard import merge
from ckpt_tools.storage import is_url

refuse_release("torchtitan", ("0.3", "0.4"))  # before its modules, which move between releases
from torchtitan.components.checkpointer.base import (  # noqa: E402
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP  # noqa: E402
from torchtitan.tools import filesystem  # noqa: E402

_SHARD_BYTES = 5 << 30  # of a Hugging Face directory
_MODES = ("disabled", "async", "async_with_pinned_mem")  # of the stock manager


class CkptToolsManager(BaseCheckpointManager):  # type: ignore[misc]
    """Saves and loads the steps of a torchtitan job with this tool."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The options of the base, and `options` of `CheckpointManager`."""

        options: dict[str, Any] = field(default_factory=dict)
        """More options of ckpt_tools.CheckpointManager, such as storage_options or mirror."""
        async_mode: str = "async"
        """As in the stock manager: "disabled" saves before training goes on."""

        def __post_init__(self: Any) -> None:
            if self.async_mode not in _MODES:
                raise ValueError(f"async_mode: expected one of {', '.join(_MODES)}")
            # The base refuses Hugging Face formats on remote paths. Ours are written there.
            save_in_hf, load_in_hf = self.last_save_in_hf, self.initial_load_in_hf
            self.last_save_in_hf &= not is_url(self.folder)
            if not self.initial_load_in_hf_quantized:
                self.initial_load_in_hf &= not is_url(self.initial_load_path)
            BaseCheckpointManager.Config.__post_init__(self)
            self.last_save_in_hf, self.initial_load_in_hf = save_in_hf, load_in_hf
            if save_in_hf and not self.last_save_model_only:
                raise ValueError("last_save_in_hf requires last_save_model_only=True.")

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: Any,
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable, self.config = config.enable, config
        self.save_future: Future[None] | None = None
        if not self.enable:
            return
        self.folder = filesystem.join(base_folder, config.folder)
        self.adapter, self.model = sd_adapter, ModelWrapper(model_parts)
        self.others = {
            **states,
            "optimizer": optimizers,
            "dataloader": dataloader,
            "lr_scheduler": lr_schedulers,
        }
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError("last_save_in_hf needs the model's state-dict adapter")
        self.storage = config.options.get("storage_options")
        self.manager: Any = None
        if not config.load_only:
            options = options_of(
                config.options,
                keep_last=config.keep_latest_k or None,
                names="step-{}",
                asynchronous=config.async_mode != "disabled",
            )
            self.manager = CheckpointManager(self.folder, **options)

    # ---- saving ----------------------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config, manager = self.config, self.manager
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if manager is None or not (last_step or is_first or curr_step % config.interval == 0):
            return False
        if last_step and config.last_save_model_only:
            self._save_model(curr_step)
            return True
        state = {**self.model.state_dict(), **_states(self.others)}
        manager.save(curr_step, state, overwrite=True, names_differ=True)
        if last_step:
            manager.wait()
        return True

    def _save_model(self, step: int) -> None:
        """Saves only the model, in the type for export; step 0 is a seed."""
        manager, dtype = self.manager, TORCH_DTYPE_MAP[self.config.export_dtype]
        model = {n: _cast(t, dtype) for n, t in self.model.state_dict().items()}
        how = {"asynchronous": False, "overwrite": True, "names_differ": True}
        if not self.config.last_save_in_hf:
            manager.save(step, model, name=f"step-{step}-model" if step else None, **how)
            return
        source = f"step-{step}-hf-source"
        manager.save(step, self.adapter.to_hf(model), name=source, **how)
        with manager.phase(f"write step-{step}-hf"):
            if manager.rank == 0:
                merge(
                    f"{self.folder}/{source}",
                    f"{self.folder}/step-{step}-hf",
                    max_shard_bytes=_SHARD_BYTES,
                    keep_prefix=True,
                    overwrite=True,
                    storage_options=self.storage,
                )
        manager.remove(source)

    # ---- loading ---------------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        found = self._find(step)
        if found is None:
            return self._load_initial()
        number, path = found
        if number == 0:  # a seed has only the model
            self._load_model(path)
            return True
        wanted = self._wanted()
        model, others = self.model.state_dict(), _states(wanted)
        state = {**model, **others}
        if self.manager is not None:
            self.manager.resume(state, number if step != -1 else None)
        else:
            load(path, state, storage_options=self.storage)
        self.model.load_state_dict(model)
        for key in others:
            wanted[key].load_state_dict(state[key])
        return True

    def _wanted(self) -> dict[str, Any]:
        """Returns the states that are not excluded from loading."""
        excluded = self.config.exclude_from_loading
        if unknown := set(excluded) - self.others.keys():
            raise ValueError(f"exclude_from_loading: no such state: {', '.join(unknown)}")
        return {key: value for key, value in self.others.items() if key not in excluded}

    def _find(self, step: int) -> tuple[int, Any] | None:
        """Returns the number and path of the step to load; None if the folder has none."""
        if step != -1:
            there = steps(self.folder, storage_options=self.storage)
            path = next((s.path for s in there if s.number == step and not s.problem), None)
            if path is None:
                raise NotACheckpointError(f"no complete step {step} in {self.folder}")
            return step, path
        if self.manager is not None:
            found: tuple[int, Any] | None = self.manager.newest_sound(verify=False)
            return found
        told: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                newest = latest(self.folder, verify=True, storage_options=self.storage)
                told = [None if newest is None else (newest.number or 0, newest.path)]
            except CheckpointError as error:  # else the others would wait
                told = [str(error)]
        dist.broadcast_object_list(told)
        found = told[0]
        if isinstance(found, str):
            raise StorageError(found)
        return found if found is None else (int(found[0]), found[1])

    def _load_initial(self) -> bool:
        config = self.config
        path = config.initial_load_path
        if config.initial_load_in_hf and path is None and self.adapter is not None:
            path = self.adapter.hf_assets_path
        if path is None:
            return False
        if not config.initial_load_model_only:
            wanted = self._wanted()
            model, others = self.model.state_dict(), _states(wanted)
            state = {**model, **others}
            load(path, state, storage_options=self.storage)
            self.model.load_state_dict(model)
            for key in others:
                wanted[key].load_state_dict(state[key])
        elif config.initial_load_in_hf_quantized:
            raise PlanError("quantized checkpoints are not read", hint="use the stock manager")
        else:
            self._load_model(path, config.initial_load_in_hf)
        return True

    def _load_model(self, path: Any, is_hf: bool = False) -> None:
        model = self.model.state_dict()
        if is_hf:
            theirs = self.adapter.to_hf(model)
            load(path, theirs, cast=True, storage_options=self.storage)
            model = self.adapter.from_hf(theirs)
        else:
            load(path, model, cast=True, storage_options=self.storage)
        self.model.load_state_dict(model)

    # ---- the rest --------------------------------------------------------------------------------

    def _maybe_wait_for_staging(self) -> None:
        """Does nothing: a save returns when the state may change."""

    def _wait_for_saving(self) -> None:
        """Does nothing: the next save waits by itself."""

    def _close(self) -> None:
        if self.manager is not None:
            self.manager.close()


def _states(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of each stateful object; torchtitan names them so that none collide."""
    return {key: value.state_dict() for key, value in objects.items() if value is not None}


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    is_number = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    return tensor.to(dtype) if is_number else tensor
