"""Describes what to load of a checkpoint and how, and what was loaded.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ckpt_tools.core.selection import matcher
from ckpt_tools.loop.loading.misfits import shown_names

OnMismatch = str | Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to load a checkpoint or a part of it.

    `CheckpointManager.resume` describes every field.
    """

    select: Sequence[str] = ()
    strict: bool = True
    cast: bool = False
    trust_pickle: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)
    on_mismatch: Mapping[str, OnMismatch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in (
            ("select", (list, tuple)),
            ("rename", Mapping),
            ("on_mismatch", Mapping),
        ):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"{name}: expected {'a list of globs' if name == 'select' else 'a dict'}, got"
                    f" {getattr(self, name)!r}"
                )
        for glob, how in self.on_mismatch.items():
            if how not in ("grow", "skip", "refuse") and not callable(how):
                raise ValueError(
                    f"on_mismatch[{glob!r}]: expected 'grow', 'skip', 'refuse' or a function, got"
                    f" {how!r}"
                )

    def __str__(self) -> str:
        """Returns the options that differ from a plain load, so that ranks can compare them."""
        shown = {"select": list(self.select), "rename": dict(self.rename)}
        shown["on_mismatch"] = {
            glob: how if isinstance(how, str) else "a function"
            for glob, how in self.on_mismatch.items()
        }
        words = [f"{name}={value!r}" for name, value in shown.items() if value]
        words += [
            f"{name}={getattr(self, name)}"
            for name, usual in (("strict", True), ("cast", False), ("trust_pickle", False))
            if getattr(self, name) is not usual
        ]
        return ", ".join(words)

    @property
    def wants(self) -> Callable[[str], bool]:
        """Returns a function that tells whether a name is wanted."""
        return matcher(self.select) if self.select else lambda _: True


@dataclass(slots=True)
class LoadReport:
    """The result of a load on this rank.

    Attributes:
        path: the checkpoint.
        num_tensors, num_objects: how many of the state's entries were loaded.
        read_nbytes, needed_nbytes, received_nbytes: bytes that this rank read; those of them that
            any rank needed; bytes received from other ranks.
        num_proved: chunks that were read in full and whose checksum was right.
        notes: entries that did not carry over and their fate, mapped names, and entries left out.
        left_out: top-level keys of the checkpoint that no rank's state has.
        timing: seconds of each phase: `open` the checkpoint and pair its names, `share` what
            several ranks need, `read`, and `restore` into the state.
    """

    path: str
    num_tensors: int = 0
    num_objects: int = 0
    read_nbytes: int = 0
    needed_nbytes: int = 0
    received_nbytes: int = 0
    num_proved: int = 0
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    timing: dict[str, float] = field(default_factory=dict)

    @property
    def left_out_note(self) -> str:
        """Returns the one of the notes that names `left_out`."""
        return f"the state has no such keys; left out: {shown_names(self.left_out)}"
