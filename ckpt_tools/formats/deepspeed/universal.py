"""DeepSpeed's universal checkpoints: one folder per parameter.

A folder has a file for the fp32 weight, for each moment and for the step. A weight is stored whole
(stages 1 and 2) or as a flat vector (stage 3). The model's states have its shape.

Source: DeepSpeed 0.19 `checkpoint/ds_to_universal.py`; confirmed on folders that it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Extent, one_chunk
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.plan import Literal, Slot, Target, Trailer
from ckpt_tools.errors import CatalogError, FormatError, PlanError, printable
from ckpt_tools.formats.base import Request, TargetTensor
from ckpt_tools.formats.builder import CatalogBuilder, UnreadValues
from ckpt_tools.formats.pickle.state import Path, TensorView, is_value
from ckpt_tools.formats.pickle.write import TensorRecord
from ckpt_tools.formats.torch_save import OpenedFile, read_leaves
from ckpt_tools.formats.zip.write import TorchArchive
from ckpt_tools.storage import Store

_WEIGHT = "fp32"


def read_parameters(
    store: Store,
    tables: Sequence[Mapping[str, tuple[int, ...]]],
    without: Container[str],
    found: CatalogBuilder,
) -> None:
    """Adds the contents of `zero/` of a directory to a catalog.

    Args:
        store: the directory.
        tables: the shapes of the parameters of each group.
        without: names whose weights are not added.
        found: the catalog.

    Raises:
        CatalogError: a parameter, its weight, or a moment that others have, is missing.
        FormatError: a file is malformed.
    """
    shapes = {name: shape for table in tables for name, shape in table.items()}
    keys: dict[str, set[str]] = {}
    zero = store.enter("zero")
    try:
        for name in zero.folders():
            inner = zero.enter(name)
            keys[name] = _read_parameter(inner, name, shapes, without, found)
            inner.close()
        expected = {_WEIGHT}.union(*(keys.get(name, ()) for name in shapes))
        for name in shapes:
            if missing := sorted(expected - keys.get(name, set())):
                raise CatalogError(
                    f"a parameter lacks {printable(missing[0])}.pt: {printable(name)!r}"
                    f" ({printable(store.url)}/zero)",
                    hint="copy the whole directory",
                )
        _read_options(zero, tables, found)
    finally:
        zero.close()


def _read_parameter(
    store: Store,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    without: Container[str],
    found: CatalogBuilder,
) -> set[str]:
    """Adds the contents of a parameter's folder, and returns its keys: `fp32`, `exp_avg`, …"""
    files = store.list_files()
    keys = {file.removesuffix(".pt") for file in files if file.endswith(".pt")}
    for key in sorted(keys):
        file, where = f"{key}.pt", f"{printable(name)!r}, {printable(key)}.pt"
        path: Path = ("model", name) if key == _WEIGHT else ("optimizer", "state", name, key)
        mine, tensors = UnreadValues(), list[tuple[DType, tuple[int, ...], Extent]]()
        for inner, value, extents in read_leaves(store, file, files[file], mine):
            if inner not in ((), ("param",)) or not isinstance(value, TensorView):
                continue  # such as cat_dim, which says how DeepSpeed cuts the tensor
            shape = value.sizes if inner or key == "step" else shapes.get(name, value.sizes)
            if math.prod(shape) != math.prod(value.sizes) or extents[0].strides:
                raise FormatError(
                    f"a parameter has another number of elements than its shape: ({where})"
                )
            extent = extents[0]._replace(file=f"zero/{name}/{extents[0].file}")
            tensors.append((value.dtype, shape, extent))
        if len(tensors) != 1 and not mine.tensors:
            raise FormatError(f"expected one tensor, got {len(tensors)} ({where})")
        for dtype, shape, extent in tensors[-1:] if key != _WEIGHT or name not in without else ():
            found.tensor(path, dtype, shape, one_chunk(whole(shape), extent), where)
        found.others.update(mine)
        found.others.tensors |= dict.fromkeys(
            [path] if mine.tensors else (), *mine.tensors.values()
        )
        found.sizes[f"zero/{name}/{file}"] = files[file]
    return keys


def _read_options(
    store: Store,
    tables: Sequence[Mapping[str, object]],
    found: CatalogBuilder,
) -> None:
    """Adds the options of the optimizer's groups, if they were stored.

    The shapes are listed by group, so they show which parameters each group has.
    """
    files = store.list_files()
    if "optimizer_state.pt" not in files:
        return
    root = OpenedFile(store, "optimizer_state.pt", files["optimizer_state.pt"], found.others).root
    groups = root.get("param_groups") if isinstance(root, dict) else None
    if (
        not isinstance(groups, list)
        or len(groups) != len(tables)
        or not all(isinstance(group, dict) for group in groups)
    ):
        kind = "options of groups that do not fit the parameters"
        found.others.skip(("optimizer", "param_groups"), kind)
        return
    for number, (group, table) in enumerate(zip(groups, tables, strict=True)):
        for key, value in {**group, "params": list(table)}.items():
            if is_value(value):
                found.value(("optimizer", "param_groups", number, str(key)), value)


# ---- writing -------------------------------------------------------------------------------------


def lay_out(request: Request) -> Target:
    """Lays out one folder per parameter, and the model's states; see `Format.lay_out`.

    The model's states have the file names that stages 1 to 3 expect. The tensors are `model.NAME`
    and `optimizer.state.NAME.KEY`. `request.values` has the groups of the optimizer, and the other
    contents of the model's states.

    Raises:
        PlanError: a name cannot be the name of a folder.
    """
    files: dict[str, int] = {}
    slots: dict[str, tuple[Slot, ...]] = {}
    literals: list[Literal] = []
    trailers: list[Trailer] = []

    def add(name: str, state: Any, tensor: TargetTensor | None = None) -> None:
        archive = TorchArchive(state)
        if tensor is not None:
            box = whole(tensor.shape)
            slots[tensor.fqn] = (
                Slot(box, name, archive.room("0", box.numel * tensor.dtype.itemsize)),
            )
        archive.finish()
        files[name] = archive.nbytes
        known, waiting = archive.around(name)
        literals.extend(known)
        trailers.extend(waiting)

    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in request.tensors:
        name, key = _place(tensor.fqn)
        stored = TensorRecord(tensor.dtype, tensor.shape, "0")
        add(
            f"zero/{name}/{key}.pt",
            stored if key == "step" else {"cat_dim": 0, "param": stored},
            tensor,
        )
        if key == "fp32":
            shapes[name] = tensor.shape
    groups = request.values["param_groups"]
    own = {
        "param_groups": groups,
        "ds_version": _VERSION,
        "overflow": False,
        "clip_grad": 0.0,
        "dynamic_loss_scale": False,
    }
    base = {
        "state": {0: {"step": request.values["step"]}},
        "param_groups": [{**g, "params": []} for g in groups],
    }
    add("zero/optimizer_state.pt", {**own, "optimizer_state_dict": base})
    listed = [
        {name: shapes[name] for name in group["params"] if name in shapes} for group in groups
    ]
    states = {
        "module": {},
        "buffer_names": [],
        "param_shapes": listed,
        "shared_params": {},
        "ds_version": _VERSION,
        **request.values["states"],
    }
    add("zero_pp_rank_0_mp_rank_00_model_states.pt", states)
    index = TorchArchive(states)
    index.finish()
    last = Literal("mp_rank_00_model_states.pt", 0, b"".join(data for _, data in index.parts))
    return Target("deepspeed", files, slots, tuple(literals), tuple(trailers), last, 1)


_VERSION = "0.19.8"  # DeepSpeed compares it with versions that had another layout


def _place(fqn: str) -> tuple[str, str]:
    """Returns the folder of a tensor and the name of its file there."""
    if fqn.startswith("model."):
        name, key = fqn.removeprefix("model."), "fp32"
    else:
        name, _, key = fqn.removeprefix("optimizer.state.").rpartition(".")
    if not name or not key or "/" in name or len(name) > 200 or name in (".", ".."):
        raise PlanError(
            "a universal checkpoint has a folder for each parameter, and this cannot be a folder's"
            f" name: {printable(name)!r}"
        )
    return name, key
