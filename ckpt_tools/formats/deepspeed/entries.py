"""The entries of DeepSpeed's files of states: weights, moments, and values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Chunk, ChunkList
from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import CatalogError
from ckpt_tools.formats.builder import CatalogBuilder, name_of
from ckpt_tools.formats.deepspeed import universal as deepspeed_universal
from ckpt_tools.formats.deepspeed.vectors import FlatVectors, one_range, several_ranges
from ckpt_tools.formats.pickle.state import (
    Malformed,
    Path,
    TensorView,
    UnreadTensor,
    is_scalar,
    is_value,
    leaves,
    most_nodes,
    shapes_of,
    want,
)
from ckpt_tools.formats.torch_save import OpenedFile
from ckpt_tools.storage import Store

_OWN_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params"
    " frozen_param_fragments ds_config ds_version universal_checkpoint_info"
    " sparse_tensor_module_names mp_world_size".split()
)
_TORCH_ADAMW = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


class EntryBuilder:
    """Adds the entries of opened files to a catalog."""

    def __init__(
        self, models: Sequence[OpenedFile], optims: Sequence[OpenedFile], found: CatalogBuilder
    ) -> None:
        self.models, self.optims, self.found = models, optims, found

    def build(self) -> None:
        first = self.models[0].root
        groups = (
            [shapes_of(shapes) for shapes in want(first, "param_shapes", list)]
            if self.optims
            else []
        )
        self.groups = groups
        self.check_ranks()
        frozen = shapes_of(first.get("frozen_param_shapes") or {})
        if not self.optims:  # only 16-bit weights
            self._module("model", lambda _: True)
            self._frozen({n: s for n, s in frozen.items() if not self._has(n)})
        else:
            self._optimizer(groups)
            self._frozen(frozen)
            self._module("model", set(want(first, "buffer_names", list)).__contains__)
        if self.optims and self.stage <= 2:
            self._module(
                "model",
                lambda name: (
                    not any(name in group for group in groups)
                    and name not in self._shared()
                    and not self._has(name)
                ),
            )
            self._module("bit16", self._has)
        self._tie()
        self._values(first)

    def _has(self, name: str) -> bool:
        return f"model.{name}" in self.found.tensors

    def build_universal(self, store: Store) -> None:
        """Adds the contents of a universal checkpoint."""
        first = self.models[0].root
        self.check_ranks()
        tables = [shapes_of(shapes) for shapes in want(first, "param_shapes", list)]
        names = [name for table in tables for name in table]
        if len(set(names)) < len(names):
            raise Malformed("two parameters have one name")
        buffers = set(want(first, "buffer_names", list))
        # ds_to_universal.py gives folders to buffers and frozen parameters, too
        copies = buffers.difference(names)
        deepspeed_universal.read_parameters(store, tables, copies, self.found)
        frozen = shapes_of(first.get("frozen_param_shapes") or {})
        self._frozen({n: s for n, s in frozen.items() if not self._has(n)})
        self._module("model", buffers.__contains__)
        self._tie()
        self._values(first)

    def check_ranks(self) -> None:
        """Refuses files of different saves.

        Raises:
            Malformed: the ranks' models have other shapes, or were saved after another step.
        """
        for key in ("param_shapes", "frozen_param_shapes"):
            shapes = [str(_plain_shapes(model.root.get(key))) for model in self.models]
            if len(set(shapes)) > 1:
                raise Malformed(f"ranks disagree about {key}")
        for key in ("global_steps", "global_samples"):
            values = {str(model.root.get(key)) for model in self.models}
            if len(values) > 1:
                raise Malformed(f"ranks disagree about {key}: {', '.join(sorted(values))}")

    def _shared(self) -> dict[str, str]:
        return {
            k: v
            for model in self.models
            for k, v in (model.root.get("shared_params") or {}).items()
            if type(k) is type(v) is str
        }

    def _module(self, key: str, wanted: Any) -> None:
        """Adds the whole tensors of `module` in the first file: buffers and 16-bit weights."""
        opened = self.models[0]
        for name, view in want(opened.root, "module", dict).items():
            if isinstance(view, UnreadTensor) and wanted(name):
                self.found.others.tensors[key, name] = view.kind
            if isinstance(view, TensorView) and wanted(name):
                self.found.whole((key, name), view, opened.extent(view, name), opened.name)

    def _frozen(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Adds frozen parameters: whole in the first file, or one fragment per rank."""
        for name, shape in shapes.items():
            numel = math.prod(shape)
            chunks: list[Chunk] = []
            dtype = None
            for rank, opened in enumerate(self.models):
                view = want(opened.root, "frozen_param_fragments", dict).get(name)
                if not isinstance(view, TensorView):
                    raise Malformed(f"{name} has no fragment")
                dtype = view.dtype
                if view.sizes == shape:
                    chunks = [Chunk(whole(shape), opened.extent(view, name))]
                    break
                flat = FlatVectors(dtype)
                share = math.prod(view.sizes)
                flat.add(rank, 0, view, opened)
                chunks += flat.chunks(
                    rank, 0, shape, min(rank * share, numel), min((rank + 1) * share, numel), name
                )
            if dtype is not None:
                self.found.tensor(("model", name), dtype, shape, ChunkList(chunks))

    def _tie(self) -> None:
        """Adds tied parameters, with the chunks of the parameters that they share."""
        shared = self._shared()
        for name in shared:
            other, chain = name, dict[str, None]()
            # a tied parameter may be tied in turn
            while not self._has(other) and other in shared and other not in chain:
                chain[other] = None
                other = shared[other]
            if not self._has(other):
                raise Malformed(f"{name} is tied to {other}, which is not there")
            stored = self.found.tensors[f"model.{other}"]
            for tied in chain:
                self.found.tensor(("model", tied), stored.dtype, stored.shape, stored.chunks)

    # ---- weights and moments ---------------------------------------------------------------------

    def _optimizer(self, groups: Sequence[dict[str, tuple[int, ...]]]) -> None:
        states = [want(opened.root, "optimizer_state_dict", dict) for opened in self.optims]
        stages = {_stage_of(state) for state in states}
        if len(stages) > 1:
            raise Malformed("files of different ZeRO stages")
        (self.stage,) = stages
        count = states[0].get("partition_count")
        expected = max(count) if isinstance(count, list) else count
        if self.stage not in (1, 2, 3):
            raise Malformed(f"ZeRO stage {self.stage}")
        if expected != len(self.optims):
            raise CatalogError(
                f"files of ranks are missing: expected {expected} *_optim_states.pt, got"
                f" {len(self.optims)}"
            )
        if self.stage == 3 and len(self.models) != len(self.optims):
            raise CatalogError(
                f"files of ranks are missing: expected {len(self.optims)} *_model_states.pt, got"
                f" {len(self.models)}"
            )
        self.found.extras["deepspeed"] = (
            f"{self.models[0].root.get('ds_version') or 'of unknown version'}, ZeRO stage"
            f" {self.stage}"
        )
        if self.stage == 3:
            self._stage3(states, groups)
        else:
            self._stage12(states, groups)

    def _stage12(
        self, states: Sequence[dict[str, Any]], groups: Sequence[dict[str, tuple[int, ...]]]
    ) -> None:
        """Adds groups that are one vector each, with their parameters in a row.

        Each rank has a contiguous range of the vector. Padding may be cut off at its end.
        """
        base = [want(state, "base_optimizer_state", dict) for state in states]
        own = want(base[0], "state", dict)
        paddings = states[0].get("param_alignment_paddings")
        for number, shapes in enumerate(groups):
            fp32 = [
                want(state, "single_partition_of_fp32_groups", list)[number] for state in states
            ]
            lean = [want(state, "group_paddings", list)[number] for state in states]
            sizes = [math.prod(view.sizes) + pad for view, pad in zip(fp32, lean, strict=True)]
            if len(set(sizes)) != 1:
                raise Malformed(f"partitions of different lengths in group {number}: {sizes}")
            moments = self._moments(base, own.get(number) or {}, number)
            quantities = {
                "": one_range(fp32, self.optims, sizes[0]),
                **{k: one_range(v, self.optims, sizes[0]) for k, v in moments.items()},
            }
            pads = paddings[number] if isinstance(paddings, list) else [0] * len(shapes)
            if not all(type(pad) is int and pad >= 0 for pad in pads):
                raise Malformed(f"paddings of group {number} are no numbers of elements")
            at = 0
            for (name, shape), pad in zip(shapes.items(), pads, strict=True):
                numel = math.prod(shape)
                for key, flat in quantities.items():
                    chunks: list[Chunk] = []
                    for rank in range(len(states)):
                        low, high = max(at, rank * sizes[0]), min(at + numel, (rank + 1) * sizes[0])
                        if low < high:
                            chunks += flat.chunks(rank, low, shape, low - at, high - at, name)
                    self._quantity(name, key, flat.dtype, shape, chunks)
                at += numel + pad
            self._options(number, base, list(shapes), number)

    def _stage3(
        self, states: Sequence[dict[str, Any]], groups: Sequence[dict[str, tuple[int, ...]]]
    ) -> None:
        """Adds parameters that are cut into equal shares, one per rank.

        The shares of a rank lie in a row, cut into subgroups.
        """
        base = [want(state, "optimizer_state_dict", dict) for state in states]
        own = want(base[0], "state", dict)
        fp32 = [want(state, "fp32_flat_groups", list) for state in states]
        quantities = {"": several_ranges(fp32, self.optims)}
        keys = {
            key
            for group in own.values()
            for key, value in group.items()
            if isinstance(value, TensorView) and value.sizes
        }
        for key in sorted(keys):
            views = [
                [want(state, "state", dict)[n][key] for n in range(len(fp32[rank]))]
                for rank, state in enumerate(base)
            ]
            quantities[key] = several_ranges(views, self.optims)
        at = 0
        for shapes in groups:
            for name, shape in shapes.items():
                numel = math.prod(shape)
                share = -(-numel // len(states))
                for key, flat in quantities.items():
                    chunks = [
                        chunk
                        for rank in range(len(states))
                        for chunk in flat.chunks(
                            rank,
                            at,
                            shape,
                            min(rank * share, numel),
                            min((rank + 1) * share, numel),
                            name,
                        )
                    ]
                    self._quantity(name, key, flat.dtype, shape, chunks)
                at += share
        for number, shapes in enumerate(groups):
            first = want(base[0], "param_groups", list)[number].get("params") or [number]
            self._options(number, base, list(shapes), first[0])

    def _moments(
        self, base: Sequence[dict[str, Any]], group: Mapping[str, Any], number: int
    ) -> dict[str, list[Any]]:
        """Returns the vectors of each moment, by rank."""
        keys = [
            key for key, value in group.items() if isinstance(value, TensorView) and value.sizes
        ]
        return {key: [want(state, "state", dict)[number][key] for state in base] for key in keys}

    def _quantity(
        self, name: str, key: str, dtype: DType, shape: tuple[int, ...], chunks: Sequence[Chunk]
    ) -> None:
        path: Path = ("optimizer", "state", name, key) if key else ("model", name)
        self.found.tensor(path, dtype, shape, ChunkList(chunks))

    def _options(
        self, number: int, bases: Sequence[Mapping[str, Any]], names: list[str], state_key: Any
    ) -> None:
        """Adds a group's options, and the step of each of its parameters.

        Args:
            number: of the group.
            bases: the state of each rank's optimizer.
            names: of the group's parameters.
            state_key: of the state that has the group's step.

        Raises:
            Malformed: ranks have different options, or are at different steps.
        """
        options, state = self._of_all_ranks(bases, number, state_key)
        step = state.get("step", options.pop("step", None))
        if {"exp_avg", "exp_avg_sq"} <= state.keys():
            options = {**_TORCH_ADAMW, **options}
            # an option of DeepSpeed's own kernels; torch always corrects the bias
            options.pop("bias_correction", None)
        for key, value in options.items():
            self.found.value(("optimizer", "param_groups", number, key), value)
        self.found.value(("optimizer", "param_groups", number, "params"), names)
        for name in names:
            path: Path = ("optimizer", "state", name, "step")
            if isinstance(step, TensorView):
                steps = [want(base, "state", dict)[state_key]["step"] for base in bases]
                chunks = [  # replicas: whoever reads them compares them
                    Chunk(whole(step.sizes), opened.extent(view, name))
                    for view, opened in zip(steps, self.optims, strict=True)
                ]
                self.found.tensor(path, step.dtype, step.sizes, ChunkList(chunks))
            elif type(step) in (int, float):
                self.found.scalar(path, float(step))

    def _of_all_ranks(
        self, bases: Sequence[Mapping[str, Any]], number: int, state_key: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the options of a group and the state under a key, which all ranks have alike."""
        groups = [want(base, "param_groups", list)[number] for base in bases]
        every = [
            {k: v for k, v in group.items() if k != "params" and is_value(v)} for group in groups
        ]
        states = [want(base, "state", dict).get(state_key) or {} for base in bases]
        for name in every[0].keys() | {"step"}:
            values = [
                str(options.get(name, state.get("step") if name == "step" else None))
                for options, state in zip(every, states, strict=True)
                if not isinstance(state.get(name), TensorView)
            ]
            if len(set(values)) > 1:
                shown = ", ".join(sorted(set(values))[:4])
                raise Malformed(f"ranks disagree about {name} of group {number}: {shown}")
        return every[0], states[0]

    def _values(self, root: Mapping[str, Any]) -> None:
        """Adds the other contents of the model's states: counters, a scheduler, client state."""
        for path, value in leaves(
            {k: v for k, v in root.items() if k not in _OWN_KEYS},
            self.models[0].name,
            most_nodes(self.models[0].pickle_nbytes),
        ):
            if name_of(path) in self.found.paths:
                self.found.others.skip(("client state", *path), "its name is taken")
            elif isinstance(value, TensorView):
                extent = self.models[0].extent(value, name_of(path))
                self.found.whole(path, value, extent, self.models[0].name)
            elif isinstance(value, UnreadTensor):
                self.found.others.tensors[path] = value.kind
            elif (is_scalar(value) and value is not None) or type(value) in (list, tuple):
                self.found.value(path, value)
            elif value:  # None and an empty dict carry no information
                self.found.others[type(value).__name__] += 1


def _stage_of(state: Mapping[str, Any]) -> Any:
    """Returns the ZeRO stage of a rank's optimizer; -1 if it is not known."""
    stage = state.get("zero_stage")
    if type(stage) is int:
        return stage
    return getattr(stage, "arguments", (-1,))[0]


def _plain_shapes(value: Any) -> Any:
    """Returns the shapes of parameters, as they can be compared."""
    if isinstance(value, list):
        return [_plain_shapes(item) for item in value]
    return list(shapes_of(value).items()) if isinstance(value, dict) else None
