"""verl's FSDP engines save and load with this tool if the environment has `CKPT_VERL=1`.

It is a plug-in of verl (`verl.plugins`), so nothing has to be imported. verl keeps its folders,
`global_step_N/actor`, and writes `latest_checkpointed_iteration.txt` itself. With
`CKPT_VERL_ROOT=s3://bucket/run`, the checkpoints go there, and only verl's own small files stay on
the disk.

A save blocks, because verl tells its tracker file at once that the step is complete.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.logs import log
from ckpt_tools.integrations.common import contents, ours, refuse_release
from ckpt_tools.loop.loading.load import load
from ckpt_tools.loop.saving.single_save import save
from ckpt_tools.loop.state.state_dict import Only, RngState
from ckpt_tools.run.roots import open_root
from ckpt_tools.storage import is_url

_Manager: Any = Any if TYPE_CHECKING else object
_RELEASES = ("0.9", "0.10")  # the tests run 0.9.1
_ROOT, _STEP = "CKPT_VERL_ROOT", "global_step_"


class Checkpoints(_Manager):  # type: ignore[misc]
    """Saves one checkpoint per step and role, which any number of ranks loads.

    It goes before verl's `FSDPCheckpointManager`.
    """

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Saves, and removes the oldest checkpoint after the new one is complete."""
        if local_path is None:
            return
        if self.should_save_hf_model:
            log.warning(
                "hf_model: run `ckpt convert %s OUT --to hf --base %s` instead",
                local_path,
                local_path,
            )
        path, wanted = where(local_path), self.checkpoint_save_contents
        only = Only.TRAINABLE if self.should_save_lora_only and self._has_lora() else None
        save(path, self._state(wanted), overwrite=True, only=only, files=self._files)
        self.previous_global_step = global_step
        if self.rank == 0:
            self.register_checkpoint(path, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """Loads, on any number of ranks. verl's own checkpoints are loaded as verl does."""
        if local_path is None:
            return
        if found := ours(where(local_path)):
            load(found, self._state(self.checkpoint_load_contents))
        else:
            log.warning("%s is verl's own: verl loads it", local_path)
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def remove_previous_save_local_path(self, path: Any) -> None:
        """Removes checkpoints, also those in a bucket."""
        for one in [path] if isinstance(path, str) else path:
            if is_url(one):
                root, _, name = one.rpartition("/")
                open_root(root).remove(name, "", lambda _: "")
            else:
                super().remove_previous_save_local_path(one)

    def _state(self, wanted: Any) -> dict[str, Any]:
        state = {"model": self.model} if "model" in wanted else {}
        if "optimizer" in wanted:
            state |= {"model": self.model, "optimizer": self.optimizer}
        if "extra" in wanted:
            state["rng"] = RngState()
            if self.lr_scheduler is not None:
                state["lr_scheduler"] = self.lr_scheduler
        return state

    def _files(self) -> dict[str, bytes]:
        """Returns the config, the tokenizer, and the config of an adapter."""
        model = getattr(self.model, "_fsdp_wrapped_module", self.model)
        adapters = list(getattr(model, "peft_config", {}).values())[:1]
        with tempfile.TemporaryDirectory() as folder:
            for item in (getattr(model, "config", None), self.processing_class, *adapters):
                if hasattr(item, "save_pretrained"):
                    item.save_pretrained(folder)
            return contents(folder)


def where(local_path: str) -> str:
    """Returns where the checkpoint of a local path goes: the same path, or below the bucket."""
    root = os.environ.get(_ROOT)
    if not root:
        return local_path
    _, found, rest = str(local_path).rstrip("/").rpartition(f"/{_STEP}")
    if not found:
        raise ValueError(
            f"expected a folder named {_STEP}N in {local_path!r}, since {_ROOT} is set"
        )
    return f"{root.rstrip('/')}/{_STEP}{rest}"


def take_over() -> None:
    """Puts our manager in the place of verl's, for all engines that are made after this."""
    refuse_release("verl", _RELEASES)
    from verl.utils.checkpoint import fsdp_checkpoint_manager as module

    stock = module.FSDPCheckpointManager
    if not issubclass(stock, Checkpoints):
        module.FSDPCheckpointManager = type("CkptToolsManager", (Checkpoints, stock), {})


if os.environ.get("CKPT_VERL"):  # as a plug-in of verl: its import loads this module
    take_over()
