"""Metadata of many chunks as jobs write it, for the tests."""

from __future__ import annotations

import pickle
from dataclasses import replace

from ckpt_tools.core.box import Box
from ckpt_tools.formats.dcp.metadata import ItemLocation, Metadata, TensorMeta


def as_torch_gathers(data: bytes) -> bytes:
    """The pickle that torch makes of what its ranks sent: places rank by rank, every text spelled
    anew in each.
    """
    theirs = pickle.loads(data)
    by_file: dict[str, list[tuple[object, object]]] = {}
    for index, info in theirs.storage_data.items():
        by_file.setdefault(info.relative_path, []).append((index, info))
    theirs.storage_data = {}
    for pairs in by_file.values():
        for index, info in pickle.loads(pickle.dumps(pairs)):
            theirs.storage_data[replace(index, fqn=(index.fqn + " ")[:-1])] = info
    return pickle.dumps(theirs)


def written(shapes: dict[str, tuple[int, ...]], ranks: int, num_objects: int = 3) -> Metadata:
    """What a job would write, tensors cut along dim 0, some ranks without any of them."""
    result = Metadata()
    for fqn, shape in shapes.items():
        boxes, step = [], -(-shape[0] // ranks) if shape else 1
        for rank in range(ranks if shape else 1):
            low, high = (
                (min(shape[0], rank * step), min(shape[0], (rank + 1) * step)) if shape else (0, 0)
            )
            box = (
                Box((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:]))
                if shape
                else Box((), ())
            )
            if box.offsets not in {b.offsets for b in boxes}:
                boxes.append(box)
                result.places[fqn, box.offsets] = ItemLocation(
                    f"__{rank}_0.distcp", len(result.places) * 70_000, 600 + box.numel
                )
        result.tensors[fqn] = TensorMeta("float32", shape, boxes)
        result.paths[fqn] = ("model", fqn)
    for number in range(num_objects):
        result.objects.append(f"o.{number}")
        result.places[f"o.{number}", None] = ItemLocation("__0_0.distcp", 5 * number, 5)
    return result
