"""Writes one `torch.save` file per rank, with DTensors inside, in verl's layout.

The files are `model_world_size_4_rank_0.pt`, `optim_…` and `extra_state_…`.

The pickle of a DTensor changes with torch, so this module asks the installed torch. It makes a
DTensor of each tensor's shape without values, takes it apart by pickle's own protocol, and writes
the parts as opcodes. It needs no process group. This file imports torch, so only the code that
writes such files imports it.

Source: torch 2.13 and 2.15 `distributed/device_mesh.py`, `distributed/tensor/_dtensor_spec.py`;
verl 0.9 `utils/checkpoint/fsdp_checkpoint_manager.py`.
"""

from __future__ import annotations

import copyreg
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ckpt_tools.core.box import row_major_strides
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.plan import Literal, Slot, Target, Trailer
from ckpt_tools.errors import PlanError
from ckpt_tools.formats.base import Request, TargetMesh, TargetTensor
from ckpt_tools.formats.pickle.write import (
    GlobalCall,
    GlobalName,
    Opcodes,
    SharedObject,
    TensorRecord,
    opcodes,
)
from ckpt_tools.formats.torch_save import nested
from ckpt_tools.formats.zip.write import TorchArchive

# placeholders for a rank's part of a tensor, and for the mesh
_PART, _MESH = GlobalName("", "part"), GlobalName("", "mesh")
_Sizes = tuple[int, ...]


def lay_out(request: Request) -> Target:
    """Lays out one file per rank and top-level key: model, optim, extra_state.

    See `Format.lay_out`. A tensor in `request.mesh.sharded` has one box per rank. Any other tensor
    has one box, and every file contains it whole.

    Raises:
        PlanError: the installed torch cannot make a mesh without a process group, or pickles it in
            an unknown way.
    """
    assert request.mesh is not None
    beside = {name: data for name, data in request.files.items() if name != request.index}
    files = {name: len(data) for name, data in beside.items()}
    slots: dict[str, list[Slot]] = {t.fqn: [] for t in request.tensors}
    literals = [Literal(name, 0, data) for name, data in beside.items()]
    trailers: list[Trailer] = []
    for rank in range(request.world_size):
        mesh, numbers = _mesh(request.mesh, request.world_size, rank)
        boxes = {
            t.fqn: box for t in request.tensors if (box := t.boxes[rank % len(t.boxes)]) is not None
        }
        held = {
            t.fqn: _held(
                t,
                TensorRecord(t.dtype, boxes[t.fqn].sizes, str(number)),
                mesh if t.fqn in request.mesh.sharded else None,
            )
            for number, t in enumerate(request.tensors)
        }
        for key, state in nested({**held, **request.values}, request.paths).items():
            name = f"{key}_world_size_{request.world_size}_rank_{rank}.pt"
            archive = TorchArchive(state)
            archive.add(f"data/{_RANKS}", numbers)
            for number, tensor in enumerate(request.tensors):
                if request.paths[tensor.fqn][0] == key:
                    box = boxes[tensor.fqn]
                    slots[tensor.fqn].append(
                        Slot(
                            box, name, archive.room(str(number), box.numel * tensor.dtype.itemsize)
                        )
                    )
            archive.finish()
            files[name] = archive.nbytes
            known, waiting = archive.around(name)
            literals += known
            trailers += waiting
    laid = {fqn: tuple(found) for fqn, found in slots.items()}
    index = Literal(request.index, 0, request.files[request.index])
    return Target(
        "per_rank", files, laid, tuple(literals), tuple(trailers), index, request.world_size
    )


_RANKS = "ranks"  # the record with the numbers of the mesh's ranks


def _mesh(of: TargetMesh, world_size: int, rank: int) -> tuple[SharedObject, bytes]:
    """Returns the mesh as a rank of the job will have it, and the bytes of its tensor.

    Its one axis is the group of all processes, which torch names "0".
    """
    try:
        names = (of.axis,) if of.axis else None
        mesh = DeviceMesh(
            of.device,
            torch.arange(world_size),
            mesh_dim_names=names,
            _init_backend=False,
            _rank=rank,
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"torch {torch.__version__} cannot make a mesh without the job's processes, and a"
            f" DTensor's pickle has one: {error}",
            hint="run ckpt beside torch 2.10 or newer, or write DCP",
        ) from error
    vars(mesh)["_dim_group_names"] = ["0"]
    numbers: list[bytes] = []

    def stored(value: Any) -> TensorRecord | None:
        if not isinstance(value, torch.Tensor):
            return None
        numbers.append(value.numpy().tobytes())
        return TensorRecord(
            BY_NAME[str(value.dtype).removeprefix("torch.")], tuple(value.shape), _RANKS
        )

    made = SharedObject(0, _taken_apart(mesh, stored))
    if len(set(numbers)) != 1:
        raise PlanError(
            f"torch {torch.__version__} keeps the ranks of a mesh in an unknown way",
            hint="write DCP",
        )
    return made, numbers[0]


def _held(
    tensor: TargetTensor, part: TensorRecord, mesh: SharedObject | None
) -> TensorRecord | Opcodes:
    """Returns a tensor's entry in a rank's pickle: a DTensor if there is a mesh."""
    if mesh is None:
        return part
    found = {opcodes(_PART): part, opcodes(_MESH): mesh}
    return Opcodes(
        tuple(
            found.get(piece, piece)
            for piece in _template(tensor.dtype.name, tensor.shape, part.sizes)
        )
    )


@functools.lru_cache(maxsize=4096)
def _template(dtype_name: str, shape: _Sizes, sizes: _Sizes) -> tuple[bytes, ...]:
    """Returns the opcodes of a DTensor of a shape, of which one rank holds `sizes`.

    `_PART` and `_MESH` are separate pieces of the result.
    """
    dtype = getattr(torch, dtype_name)
    mesh = DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)
    meta = TensorMeta(torch.Size(shape), row_major_strides(shape), dtype)
    with FakeTensorMode():
        local = torch.empty(sizes, dtype=dtype, device="cpu")
    whole = DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)  # type: ignore[no-untyped-call]
    made = opcodes(
        _taken_apart(
            whole, lambda value: _PART if value is local else _MESH if value is mesh else None
        )
    )
    return tuple(
        re.split(b"(%s|%s)" % (re.escape(opcodes(_PART)), re.escape(opcodes(_MESH))), made)
    )


def _taken_apart(value: Any, instead: Callable[[Any], Any]) -> Any:
    """Returns the values and calls by which a pickle makes an object.

    `instead` returns a replacement for some values, and None for the others.

    Raises:
        PlanError: pickle would use a way that this module cannot write.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if (other := instead(value)) is not None:
        return other
    if isinstance(value, torch.dtype):
        return GlobalName("torch", str(value).removeprefix("torch."))
    if isinstance(value, type) or hasattr(value, "__code__"):
        return GlobalName(value.__module__, value.__qualname__)
    if type(value) in (tuple, list):
        return type(value)(_taken_apart(item, instead) for item in value)
    if type(value) is dict:
        return {key: _taken_apart(item, instead) for key, item in value.items()}
    return _made_by(value, instead)


def _made_by(value: Any, instead: Callable[[Any], Any]) -> GlobalCall:
    """Returns the call by which pickle makes an object."""
    reduce = copyreg.dispatch_table.get(type(value))
    made = reduce(value) if reduce else value.__reduce_ex__(2)
    if not isinstance(made, tuple) or any(list(items) for items in made[3:5] if items is not None):
        raise PlanError(
            f"torch {torch.__version__} pickles {type(value).__name__} in a way that is not known"
            " here",
            hint="write DCP",
        )
    function, arguments, state = (*made, None)[:3]
    is_new = function is getattr(copyreg, "__newobj__")  # noqa: B009 - a name that mypy's stubs lack
    if is_new:
        function, arguments = arguments[0], arguments[1:]
    parts = tuple(_taken_apart(item, instead) for item in arguments)
    return GlobalCall(
        function.__module__, function.__qualname__, parts, _taken_apart(state, instead), is_new
    )
