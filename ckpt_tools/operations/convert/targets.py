"""The targets of `convert`, and the options that apply to each.

A new target is an entry of `TARGETS`, and a method of `layouts.TargetLayout`.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ckpt_tools.formats import torch_save
from ckpt_tools.operations.convert.training_state import NAMINGS


@dataclass(frozen=True, slots=True)
class ConvertTarget:
    """One layout that `convert` writes.

    Attributes:
        suffixes: endings of the name, if it is one file.
        is_model: only the model is written.
        is_local: it has no index, so no upload of it can appear as a whole.
        keeps_beside: the files beside the source are copied.
        options: keys of `Conversion` that apply to some targets only, and to this one.
        namings: how optimizer state may be named. The first one is the default.
        naming_problem: what to tell if another one is given.
    """

    suffixes: tuple[str, ...] = ()
    is_model: bool = False
    is_local: bool = False
    keeps_beside: bool = False
    options: Set[str] = frozenset()
    namings: tuple[str, ...] = NAMINGS
    naming_problem: str = ""


TARGETS = {
    "dcp": ConvertTarget(options={"ranks"}),
    "safetensors": ConvertTarget(suffixes=(".safetensors",), is_model=True),
    "hf": ConvertTarget(is_model=True, options={"base", "check", "max_shard_bytes", "quantize"}),
    "torch": ConvertTarget(suffixes=torch_save.SUFFIXES),
    "accelerate": ConvertTarget(
        is_local=True,
        keeps_beside=True,
        options={"ranks"},
        namings=("groups",),
        naming_problem="Accelerate names the parameters of an optimizer, in groups",
    ),
    "peft": ConvertTarget(is_model=True, options={"base"}),
    "deepspeed-universal": ConvertTarget(
        is_local=True,
        namings=(),
        naming_problem="DeepSpeed's universal checkpoints have a form of their own",
    ),
    "per-rank": ConvertTarget(
        is_local=True,
        options={"base", "mesh", "ranks"},
        namings=("ids",),
        naming_problem="verl numbers the parameters of an optimizer",
    ),
}


def targets_with(option: str) -> str:
    """Returns the names of the targets that an option applies to, as text."""
    *most, last = (name for name, target in TARGETS.items() if option in target.options)
    return f"{', '.join(most)} and {last}" if most else last
