"""Every way in which stock torch reads a DCP checkpoint, as an oracle of what is written as DCP."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def assert_stock_torch_reads(checkpoint: Path) -> dict[str, Any]:
    """Reads flat, into an empty dict, and by `dcp_to_torch_save`; returns what the last one gives,
    which all must agree with.
    """
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    names = metadata.state_dict_metadata
    assert not metadata.planner_data or metadata.planner_data.keys() == names.keys()
    flat = {
        name: (
            torch.empty(about.size, dtype=about.properties.dtype)
            if isinstance(about, TensorStorageMetadata)
            else None
        )
        for name, about in names.items()
    }
    dcp.load(flat, checkpoint_id=checkpoint, no_dist=True)
    empty: dict[str, Any] = {}
    dcp.state_dict_loader._load_state_dict(
        empty,
        storage_reader=dcp.FileSystemReader(checkpoint),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, Path(folder) / "all.pt")
        whole: dict[str, Any] = torch.load(Path(folder) / "all.pt", weights_only=False)
    for name, value in flat.items():
        path = (metadata.planner_data or {}).get(name, (name,))
        for other in (empty, whole):
            found: Any = other
            for key in path:
                found = found[key]
            same = (
                torch.equal(found, value)
                if isinstance(value, torch.Tensor)
                else repr(found) == repr(value)
            )
            assert same, (name, found, value)
    return whole


def chunks(step: Path) -> dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Returns offsets and sizes of the chunks of each tensor."""
    metadata = dcp.FileSystemReader(step).read_metadata().state_dict_metadata
    return {
        name: {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks}
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
