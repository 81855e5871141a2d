"""Small files that other releases of torch have written, kept: each release pickles its metadata
and its DTensors in its own way.

`tests/peers/torch_version_job.py save .` made them on two ranks;
`tests/peers/test_torch_versions.py` makes them anew, and loads what is written here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from tests.peers.torch_version_job import whole

RELEASES = sorted(
    (Path(__file__).parents[1] / "releases").iterdir(), key=lambda p: [*map(int, p.name.split("."))]
)


@pytest.mark.parametrize("folder", RELEASES, ids=lambda p: p.name)
@pytest.mark.parametrize("kind", ["dcp", "ranks"])
def test_what_another_release_saved_is_read(kind: str, folder: Path, tmp_path: Path) -> None:
    want = whole()
    assert (
        ckpt_tools.verify(folder / kind).problems == []
        and ckpt_tools.inspect(folder / kind).world_size == 2
    )
    ckpt_tools.merge(folder / kind, tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == want.keys() and all(
        torch.equal(got[name], value) for name, value in want.items()
    )
    ckpt_tools.reshard(folder / kind, tmp_path / "three", to_ranks=3)
    assert ckpt_tools.diff(folder / kind, tmp_path / "three").is_same
