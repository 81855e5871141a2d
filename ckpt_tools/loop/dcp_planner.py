"""Planners for `dcp.save` and `dcp.load`: quantized weights and moments become plain tensors.

    dcp.save(state, checkpoint_id="run/step-500", planner=SavePlanner())
    dcp.load(state, checkpoint_id="run/step-500", planner=LoadPlanner())

A tensor that consists of several has one entry for each, under the names of `CheckpointManager`.
torch would pickle it. They work with torch's storage and with that of this package. Imports torch.

Source: torch 2.13 `torch/distributed/checkpoint/default_planner.py`.
"""

from __future__ import annotations

import io
import sys
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _init_state_dict

from ckpt_tools.errors import PlanError, printable
from ckpt_tools.loop.state.composite import as_composite, check_kind, part_front, refuse_names
from ckpt_tools.loop.state.few_bits import parts_of_shared_moment


class SavePlanner(DefaultSavePlanner):
    """Saves quantized weights and moments of few bits as the plain tensors that they consist of.

    A moment whose blocks are cut by the ranks is saved as float32, which is exact. Of copies, the
    lowest rank saves all, so that codes and scales are of one rank.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of torch's `DefaultSavePlanner`.

        Raises:
            ValueError: the state would not be flattened, or copies would come from several ranks.
        """
        kwargs.setdefault("dedup_save_to_lowest_rank", True)
        super().__init__(*args, **kwargs)
        if not self.dedup_save_to_lowest_rank:
            raise ValueError("dedup_save_to_lowest_rank: codes and scales must be of one rank")
        _check_flat(self.flatten_state_dict)

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Begins a save.

        Raises:
            PlanError: a tensor has parts that cannot be saved here.
        """
        super().set_up_planner(_Plain(is_load=False).of(state_dict), *args, **kwargs)


class LoadPlanner(DefaultLoadPlanner):
    """Loads what `SavePlanner` or `CheckpointManager` has saved, into the tensors of the state.

    The state must have quantized weights and moments where the checkpoint has them, of the same
    kinds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of torch's `DefaultLoadPlanner`.

        Raises:
            ValueError: the state would not be flattened.
        """
        super().__init__(*args, **kwargs)
        _check_flat(self.flatten_state_dict)

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Begins a load.

        Raises:
            PlanError: a tensor has parts that cannot be loaded here.
        """
        _init_state_dict(state_dict)  # gives memory to tensors that have none
        self._given, self._plain = state_dict, _Plain(is_load=True)
        super().set_up_planner(self._plain.of(state_dict), *args, **kwargs)

    def create_local_plan(self) -> LoadPlan:
        """Compares the parts of weights and moments with those that are stored.

        Raises:
            PlanError: they have other types, or there are more or fewer of them.
        """
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        in_order = sorted(stored)
        for front, parts in self._plain.parts.items():
            first = bisect_left(in_order, front)
            last = bisect_left(in_order, front + chr(sys.maxunicode), lo=first)
            there = set(in_order[first:last])
            if there and there != parts.keys():
                name = min(there ^ parts.keys())
                raise PlanError(
                    "parts of a quantized weight or moment are on one side alone:"
                    f" {printable(name)!r}",
                    hint="make the model and the optimizer as they were made for the save",
                )
            for name, tensor in parts.items():
                found = getattr(stored.get(name), "properties", None)
                if found is not None and found.dtype != tensor.dtype:
                    raise PlanError(
                        f"types differ: the checkpoint has {found.dtype}, the state {tensor.dtype}"
                        f" ({printable(name)!r})",
                        hint="make the model and the optimizer as they were made for the save",
                    )
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts a value into the state; compares that of a quantized weight.

        Raises:
            PlanError: the weight was saved as one of another kind.
        """
        name = read_item.dest_index.fqn
        if (mine := self._plain.described.get(name)) is None:
            super().load_bytes(read_item, value)
            path = self.mappings[name]
            set_element(self._given, path, _element(self.original_state_dict, path))
            return
        check_kind(name, torch.load(value, weights_only=True), mine)


def _check_flat(flattens: bool) -> None:
    if not flattens:
        raise ValueError("flatten_state_dict: expected True, or parts would have no names")


class _Plain:
    """Copies the containers of a state, with plain tensors in place of those of several.

    Attributes:
        described: the description of each weight that consists of several tensors, by flat name.
        parts: the parts of each weight and moment by flat name, by how their names begin.
    """

    def __init__(self, is_load: bool) -> None:
        self._is_load = is_load
        self.described: dict[str, str] = {}
        self.parts: dict[str, dict[str, torch.Tensor]] = {}

    def of(self, state: Mapping[Any, Any], path: tuple[str, ...] = ()) -> dict[Any, Any]:
        """Returns the copy of a dict at a path of keys."""
        made: dict[Any, Any] = {}
        for key, value in state.items():
            where = (*path, str(key))
            weight = as_composite(str(key), value, is_proved=self._is_load)
            if weight is None:
                made[key] = self._value(value, where)
                continue
            refuse_names(weight, state)
            made |= {**weight.parts, key: weight.described}
            name, above = ".".join(where), ".".join((*path, ""))
            self.described[name] = weight.described
            parts = {f"{above}{part}": tensor for part, tensor in weight.parts.items()}
            self.parts[part_front(name)] = parts
        return made

    def _value(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            name = ".".join(path)
            found = parts_of_shared_moment(value, name, self._is_load)
            if isinstance(found, Mapping):
                self.parts[f"{name}."] = {f"{name}.{key}": one for key, one in found.items()}
            return found
        if isinstance(value, Mapping):
            return self.of(value, path)
        if type(value) is list:
            return [self._item(one, (*path, str(n))) for n, one in enumerate(value)]
        if isinstance(value, tuple):
            _Plain(self._is_load).refuse(value, path)
        return value

    def _item(self, value: Any, path: tuple[str, ...]) -> Any:
        """Returns an item of a list, where a tensor has no room for its parts beside it."""
        if as_composite("", value) is not None:
            raise _in_a_list(path)
        return self._value(value, path)

    def refuse(self, value: tuple[Any, ...], path: tuple[str, ...]) -> None:
        """Refuses weights and moments below a tuple, whose items cannot be replaced.

        Raises:
            PlanError: there are some.
        """
        for number, one in enumerate(value):
            self._item(one, (*path, str(number)))
        if self.parts:
            raise _in_a_list(path)


def _in_a_list(path: tuple[str, ...]) -> PlanError:
    return PlanError(
        f"a quantized weight or moment is in a list or a tuple: {printable('.'.join(path))!r}",
        hint="put it into a dict",
    )


def _element(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state
