"""Strategies for PyTorch Lightning and Fabric whose checkpoints are ours.

    Trainer(strategy=ModelParallelStrategy(), …)         # FSDP2; or FSDPStrategy()
    Fabric(strategy=FabricModelParallelStrategy(…), …)   # or FabricFSDPStrategy()

At the end of a job with Fabric, call `fabric.strategy.teardown()`: it waits for the last save.
`ModelCheckpoint` decides when, and which stay. A save holds training only for a copy in memory. A
checkpoint has the names of Lightning's own, and `meta.pt`, so stock Lightning loads it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ckpt_tools.core.logs import log
from ckpt_tools.errors import PlanError, UnsafePickleError, printable
from ckpt_tools.integrations.common import options_of, ours, refuse_release
from ckpt_tools.loop.loading.load import load
from ckpt_tools.loop.loading.reader import open_checkpoint
from ckpt_tools.loop.manager import CheckpointManager
from ckpt_tools.loop.saving.single_save import save
from ckpt_tools.publish.step_names import number_in
from ckpt_tools.storage import is_url

_META = "meta.pt"
_RELEASES = ("2.4", "3")  # the tests run 2.4.0 and 2.6.6
_Strategy: Any = Any if TYPE_CHECKING else object


class _Checkpoints(_Strategy):  # type: ignore[misc]
    """Has a manager for each folder with checkpoints. All strategies share it.

    Attributes:
        checkpoint_options: of `CheckpointManager`, such as `storage_options`.
    """

    checkpoint_options: Mapping[str, Any] = {}
    _has_ended = False

    def _save(
        self,
        path: Any,
        state: dict[str, Any],
        rest: Mapping[str, Any],
        step: int,
        only: Callable[[str], bool] | str | None = None,
        blocks: bool = False,
    ) -> None:
        path = str(self.broadcast(path)).rstrip("/")
        path = path if is_url(path) else os.path.abspath(path)
        folder, name = os.path.split(path)
        files, problem = None, ""
        if self.is_global_zero:
            try:
                files = {_META: _packed(rest, name)}
            except Exception as error:  # noqa: BLE001  of an object of the user
                problem = f"{type(error).__name__}: {error}"
        if problem := self.broadcast(problem):  # else the other ranks would wait
            raise PlanError(f"{_META} cannot be written: {printable(problem)} ({printable(name)})")
        options = options_of(self.checkpoint_options, keep_last=None)
        if self._has_ended or blocks or number_in(name) is not None or name.startswith("."):
            self.wait_for_checkpoints()
            store = options.get("storage_options")
            save(path, state, overwrite=True, files=files, only=only, storage_options=store)
            return
        managers = self.__dict__.setdefault("_checkpoint_managers", {})
        if folder not in managers:
            managers[folder] = CheckpointManager(folder, **options)
        managers[folder].save(step, state, name=name, overwrite=True, files=files, only=only)

    def _load(
        self, path: str, state: dict[str, Any], strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        """Loads modules and optimizers in place, and returns all other values."""
        options = self.checkpoint_options.get("storage_options")
        load(path, state, strict=strict, storage_options=options)
        with open_checkpoint(path, storage_options=options) as checkpoint:
            return _unpacked(checkpoint.file(_META), path, weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint after the save that is under way; see `CheckpointManager.remove`."""
        path = str(filepath)
        path = path if is_url(path) else os.path.abspath(path)
        folder, name = os.path.split(path)
        manager = self.__dict__.get("_checkpoint_managers", {}).get(folder)
        if os.path.islink(path):
            if self.is_global_zero:
                os.unlink(path)
        elif manager is not None and number_in(name) is None and not name.startswith("."):
            manager.remove(name)
        elif self.is_global_zero:
            super().remove_checkpoint(filepath)

    def wait_for_checkpoints(self) -> None:
        """Waits until the saves in the background are committed."""
        for manager in self.__dict__.get("_checkpoint_managers", {}).values():
            manager.wait()

    def teardown(self) -> None:
        """Waits for the last save, and releases the folders. Later saves block."""
        self._has_ended = True
        for manager in self.__dict__.pop("_checkpoint_managers", {}).values():
            manager.close()
        with suppress(NotImplementedError):  # Fabric's sharded strategies have no CheckpointIO
            super().teardown()


class _TrainerCheckpoints(_Checkpoints):
    """The checkpoints of a `Trainer`. Subclasses name the model as stock Lightning does."""

    _model_key = "state_dict"

    def setup(self, trainer: Any) -> None:
        self._has_ended = False
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the live tensors. A hook may leave some out, and the save copies the rest."""
        self._exported = get_model_state_dict(self.model)
        return dict(self._exported)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns nothing, since the save takes the optimizer itself."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("storage_options: set them in `checkpoint_options` of the strategy")
        key, chosen = self._model_key, checkpoint.pop("state_dict")
        for name, tensor in chosen.items():
            if self._exported.get(name) is not tensor:
                raise PlanError(
                    f"a hook has changed the tensor {printable(name)!r} of the state dict",
                    hint="a hook may leave tensors out; save others as attributes of the module",
                )
        accepted = {f"{key}.{name}" for name in chosen}
        only: Any = accepted.__contains__ if len(chosen) < len(self._exported) else None
        state = {key: self.model}
        if checkpoint.pop("optimizer_states", None) is not None:
            state |= self._numbered_optimizers()
        # Lightning sets the link to the new checkpoint at once
        callbacks = self.lightning_module.trainer.checkpoint_callbacks
        blocks = any(getattr(c, "save_last", None) == "link" for c in callbacks)
        self._save(filepath, state, checkpoint, checkpoint["global_step"], only, blocks)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self.wait_for_checkpoints()
        if not (where := ours(str(self.broadcast(checkpoint_path)))):
            return dict(super().load_checkpoint(checkpoint_path, weights_only))
        state = {self._model_key: self.model, **self._numbered_optimizers()}
        return self._load(where, state, self.lightning_module.strict_loading, weights_only)

    def _numbered_optimizers(self) -> dict[str, Any]:
        return {f"optimizer_{number}": value for number, value in enumerate(self.optimizers)}


class _FabricCheckpoints(_Checkpoints):
    """The checkpoints of Fabric. A filter chooses entries of modules and dicts by name."""

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if storage_options is not None:
            raise TypeError("storage_options: set them in `checkpoint_options` of the strategy")
        if unknown := set(filter or {}) - state.keys():
            raise KeyError(f"filter: the state has no {', '.join(sorted(unknown))}")
        live, rest = _split(state)
        accepted, filtered = set[str](), False
        for key, value in state.items():
            accepts = (filter or {}).get(key, _everything)
            if isinstance(value, torch.nn.Module):
                names = [n for n, t in get_model_state_dict(value).items() if accepts(n, t)]
                accepted |= {f"{key}.{name}" for name in names}
                filtered |= accepts is not _everything
            elif key in (filter or {}) and not isinstance(value, Mapping):
                raise TypeError(f"filter: {key!r} is no module and no dict")
            elif key in (filter or {}):
                rest[key] = {name: item for name, item in value.items() if accepts(name, item)}
        step = rest.get("step", rest.get("iteration", 0))
        step = step if type(step) is int and step >= 0 else 0
        self._save(path, live, rest, step, accepted.__contains__ if filtered else None)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        self.wait_for_checkpoints()
        where = ours(str(self.broadcast(path)))
        if not where or not isinstance(state, dict):
            return dict(super().load_checkpoint(path, state, strict, weights_only))
        live, rest = _split(state)
        found = self._load(where, live, strict, weights_only)
        if strict and (missing := rest.keys() - found.keys()):
            raise KeyError(f"the checkpoint has no {', '.join(sorted(missing))} ({where})")
        for key in rest.keys() & found.keys():
            if _has_state(state[key]):
                state[key].load_state_dict(found.pop(key))
            else:
                state[key] = found.pop(key)
        return found


def _everything(name: str, value: Any) -> bool:
    del name, value
    return True


def _split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the modules and optimizers of a state, and the values of everything else."""
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    live = {key: value for key, value in state.items() if isinstance(value, kinds)}
    rest = {key: value for key, value in state.items() if key not in live}
    return live, {k: v.state_dict() if _has_state(v) else v for k, v in rest.items()}


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _packed(rest: Mapping[str, Any], name: str) -> bytes:
    """Returns `meta.pt`, and warns if a load will need `weights_only=False`."""
    data = io.BytesIO()
    torch.save(dict(rest), data)
    try:
        _unpacked(data.getvalue(), name, weights_only=True)
    except UnsafePickleError as error:
        log.warning("%s; only a load with weights_only=False will accept it", error)
    return data.getvalue()


def _unpacked(data: bytes, where: str, weights_only: bool | None) -> dict[str, Any]:
    """Returns the values of `meta.pt`. Code in it runs only with `weights_only=False`."""
    try:
        found = torch.load(io.BytesIO(data), weights_only=weights_only is not False)
    except Exception as error:
        raise UnsafePickleError(
            f"{_META} holds more than plain values: {printable(str(error)[:200])}"
            f" ({printable(str(where))})",
            hint="torch.serialization.add_safe_globals allows its types; or weights_only=False",
        ) from error
    return dict(found)


@cache
def __getattr__(name: str) -> Any:
    """Makes a strategy when it is imported, so that Lightning is imported then."""
    fabric = name.startswith("Fabric")
    kind = name.removeprefix("Fabric")
    if kind not in ("ModelParallelStrategy", "FSDPStrategy"):
        raise AttributeError(name)
    try:
        from lightning.fabric import strategies as of_fabric
        from lightning.pytorch import strategies as of_trainer

        refuse_release("lightning", _RELEASES)
    except ImportError:
        from lightning_fabric import strategies as of_fabric
        from pytorch_lightning import strategies as of_trainer

        refuse_release("pytorch-lightning", _RELEASES)
    base = _FabricCheckpoints if fabric else _TrainerCheckpoints
    more = {"_model_key": "model"} if kind == "FSDPStrategy" and not fabric else {}
    return type(name, (base, getattr(of_fabric if fabric else of_trainer, kind)), more)
