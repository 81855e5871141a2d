"""Planners for `dcp.save` and `dcp.load`: quantized weights and moments become plain tensors.

    dcp.save(state, checkpoint_id="run/step-500", planner=SavePlanner())
    dcp.load(state, checkpoint_id="run/step-500", planner=LoadPlanner())

A tensor that consists of several has one entry for each, under the names of `CheckpointManager`.
torch would pickle it. They work with torch's storage and with that of this package. Imports torch.

Source: torch 2.13 `torch/distributed/checkpoint/default_planner.py`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import _init_state_dict

from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.state.composite import as_composite
from ckpt_tools.loop.state.few_bits import parts_of_shared_moment


class SavePlanner(DefaultSavePlanner):
    """Saves quantized weights and moments of few bits as the plain tensors that they consist of.

    Takes the arguments of torch's `DefaultSavePlanner`. A moment whose blocks are cut by the ranks
    is saved as float32, which is exact.
    """

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Begins a save.

        Raises:
            PlanError: a tensor has parts that cannot be saved here.
        """
        super().set_up_planner(_Plain(is_load=False).of(state_dict), *args, **kwargs)


class LoadPlanner(DefaultLoadPlanner):
    """Loads what `SavePlanner` or `CheckpointManager` has saved, into the tensors of the state.

    Takes the arguments of torch's `DefaultLoadPlanner`. The state must have quantized weights and
    moments where the checkpoint has them.
    """

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Begins a load.

        Raises:
            PlanError: a tensor has parts that cannot be loaded here.
        """
        _init_state_dict(state_dict)  # gives memory to tensors that have none
        plain = _Plain(is_load=True)
        self._given, self._described = state_dict, plain.described
        super().set_up_planner(plain.of(state_dict), *args, **kwargs)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts a value into the state; compares that of a quantized weight.

        Raises:
            PlanError: the weight was saved as one of another kind.
        """
        name = read_item.dest_index.fqn
        if (mine := self._described.get(name)) is None:
            super().load_bytes(read_item, value)
            path = self.mappings[name] if self.flatten_state_dict else (name,)
            set_element(self._given, path, _element(self.original_state_dict, path))
            return
        theirs = torch.load(value, weights_only=True)
        if theirs != mine:
            raise PlanError(
                f"a quantized weight is of another kind: {printable(name)!r} was saved as"
                f" {printable(str(theirs))}, and the state has {mine}",
                hint="quantize the model as it was quantized for the save",
            )


class _Plain:
    """Copies the containers of a state, with plain tensors in place of those of several.

    Attributes:
        described: the description of each weight that consists of several tensors, by flat name.
    """

    def __init__(self, is_load: bool) -> None:
        self._is_load = is_load
        self.described: dict[str, str] = {}

    def of(self, state: Mapping[Any, Any], path: tuple[str, ...] = ()) -> dict[Any, Any]:
        """Returns the copy of a dict at a path of keys."""
        made: dict[Any, Any] = {}
        for key, value in state.items():
            where = (*path, str(key))
            found = self._value(value, where)
            if (weight := as_composite(str(key), found)) is None:
                made[key] = found
                continue
            made |= {**weight.parts, key: weight.described}
            self.described[".".join(where)] = weight.described
        return made

    def _value(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            return parts_of_shared_moment(value, ".".join(path), self._is_load)
        if isinstance(value, Mapping):
            return self.of(value, path)
        if type(value) in (list, tuple):
            return type(value)(self._item(one, (*path, str(n))) for n, one in enumerate(value))
        return value

    def _item(self, value: Any, path: tuple[str, ...]) -> Any:
        """Returns an item of a list, where a tensor has no room for its parts beside it."""
        if as_composite("", value) is not None:
            raise PlanError(
                f"a quantized weight is an item of a list: {printable('.'.join(path))!r}",
                hint="put it into a dict",
            )
        return self._value(value, path)


def _element(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state
