"""DeepSpeed's universal checkpoints: one folder per parameter.

A folder has a file for the fp32 weight, for each moment and for the step. A weight is stored whole
(stages 1 and 2) or as a flat vector (stage 3). The model's states have its shape.

Source: DeepSpeed 0.19 `checkpoint/ds_to_universal.py`; confirmed on folders that it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import TORCH_ZIP, BytesEntry, Catalog, Chunk, Extent, TensorEntry
from ckpt_tools.core.plan import Literal, Slot, Target, Trailer
from ckpt_tools.errors import FormatError, PlanError, printable
from ckpt_tools.formats.base import Request, TargetTensor, below
from ckpt_tools.formats.in_memory import InMemoryFile
from ckpt_tools.formats.pickle.state import Malformed, Path, TensorView, is_value, shapes_of, want
from ckpt_tools.formats.pickle.write import TensorRecord
from ckpt_tools.formats.torch_save import (
    OpenedFile,
    UnreadValues,
    describe_unknown,
    name_of,
    read_leaves,
)
from ckpt_tools.formats.zip.write import Archive
from ckpt_tools.storage import Store

_NAMES = {"fp32": (), "step": ("step",), "exp_avg": ("exp_avg",), "exp_avg_sq": ("exp_avg_sq",)}


def read_universal(store: Store, model_states: str) -> Catalog:
    """Reads the directory that contains `zero/`; see `Format.read_catalog`.

    Args:
        store: the directory.
        model_states: the file with the shapes and buffers.
    """
    others = UnreadValues()
    opened = OpenedFile(store, model_states, store.size(model_states), others)
    try:
        tables = want(opened.root, "param_shapes", list)
        shapes = {name: shape for table in tables for name, shape in shapes_of(table).items()}
        buffers = want(opened.root, "buffer_names", list)
        module = want(opened.root, "module", dict)
    except Malformed as error:
        raise FormatError(
            f"not as DeepSpeed 0.19 writes it: {error} ({printable(model_states)})"
        ) from error
    tensors: dict[str, TensorEntry] = {}
    paths: dict[str, Path] = {}
    sizes = {model_states: store.size(model_states)}
    for name, view in module.items():
        if name in buffers and isinstance(view, TensorView):
            fqn = name_of(("model", name))
            tensors[fqn] = TensorEntry(
                fqn, view.dtype, view.sizes, (Chunk(whole(view.sizes), opened.extent(view, name)),)
            )
            paths[fqn] = ("model", name)
    zero = store.enter("zero")
    for name in zero.folders():
        inner = zero.enter(name)
        part = _read_parameter(inner, name, shapes, others)
        inner.close()
        part = below(below(part, name), "zero")
        tensors = {**part.tensors, **tensors}
        paths |= part.paths
        sizes |= part.file_sizes
    objects, made = _options(zero, tables, paths, others)
    zero.close()
    archives = tuple(Extent(name, 0, size, TORCH_ZIP) for name, size in sizes.items())
    return Catalog(
        "deepspeed",
        tensors,
        objects,
        paths,
        sizes,
        extras={"deepspeed": "universal", **describe_unknown(others)},
        archives=archives,
        made=made.files,
    )


def _read_parameter(
    store: Store, name: str, shapes: Mapping[str, tuple[int, ...]], others: UnreadValues
) -> Catalog:
    """Returns the contents of a parameter's folder."""
    files = store.list_files()
    tensors: dict[str, TensorEntry] = {}
    paths: dict[str, Path] = {}
    for stem, inner in _NAMES.items():
        if f"{stem}.pt" not in files:
            continue
        path: Path = ("optimizer", "state", name, *inner) if inner else ("model", name)
        for where, value, extents in read_leaves(store, f"{stem}.pt", files[f"{stem}.pt"], others):
            if not isinstance(value, TensorView) or where not in ((), ("param",)):
                continue
            shape = value.sizes if where or stem == "step" else shapes.get(name, value.sizes)
            if math.prod(shape) != math.prod(value.sizes) or extents[0].strides:
                raise FormatError(
                    "a parameter has another number of elements than its shape:"
                    f" {printable(name)!r} ({stem}.pt)"
                )
            fqn = name_of(path)
            tensors[fqn], paths[fqn] = (
                TensorEntry(fqn, value.dtype, shape, (Chunk(whole(shape), extents[0]),)),
                path,
            )
    return Catalog(
        "",
        tensors,
        {},
        paths,
        {n: size for n, size in files.items() if n.removesuffix(".pt") in _NAMES},
    )


def _options(
    store: Store,
    tables: Sequence[Mapping[str, object]],
    paths: dict[str, Path],
    others: UnreadValues,
) -> tuple[dict[str, BytesEntry], InMemoryFile]:
    """Returns the options of the optimizer's groups, if they were stored.

    The shapes are listed by group, so they show which parameters each group has.
    """
    made, objects = InMemoryFile(), dict[str, BytesEntry]()
    files = store.list_files()
    if "optimizer_state.pt" not in files:
        return objects, made
    root = OpenedFile(store, "optimizer_state.pt", files["optimizer_state.pt"], others).root
    groups = root.get("param_groups") if isinstance(root, dict) else None
    if (
        not isinstance(groups, list)
        or len(groups) != len(tables)
        or not all(isinstance(group, dict) for group in groups)
    ):
        return objects, made
    for number, (group, table) in enumerate(zip(groups, tables, strict=True)):
        for key, value in {**group, "params": list(table)}.items():
            path: Path = ("optimizer", "param_groups", number, str(key))
            if is_value(value):
                objects[name_of(path)], paths[name_of(path)] = (
                    made.value(name_of(path), value),
                    path,
                )
    return objects, made


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
        archive = Archive(state)
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
    index = Archive(states)
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
