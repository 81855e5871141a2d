"""PyTorch/XLA's FSDP. Its writer needs an XLA build of another torch: the files are made here as
its source says, and joined by its own function.
"""

from __future__ import annotations

import math
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

import ckpt_tools
from ckpt_tools import FormatError
from ckpt_tools.formats.registry import open_source
from tests.peers.environments import FOLDER, JOBS

VERSION = "2.9.0"
SEPARATOR = "_FSDP_SHARD_SEPARATOR_"


@pytest.fixture(scope="module")
def utilities() -> Path:
    """The module of the real package that joins its files."""
    name, folder = "torch_xla/distributed/fsdp/state_dict_utils.py", FOLDER / f"torch_xla-{VERSION}"
    if not (folder / name).exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--dest",
            str(folder),
            f"torch_xla=={VERSION}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"torch_xla cannot be had here: {done.stderr[-200:]}")
        (wheel,) = folder.glob("*.whl")
        zipfile.ZipFile(wheel).extract(name, folder)
        wheel.unlink()
    return folder / name


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        OrderedDict(
            embed=nn.Embedding(11, 6),
            block=nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5)),
            norm=nn.BatchNorm1d(5),
        )
    )
    net.register_buffer("small", torch.randn(3).to(torch.bfloat16))
    return net


class Job:
    """What every rank of a job would save: parts of parameters, and what an optimizer keeps of
    them.
    """

    def __init__(self, net: nn.Module, size: int, dim0: bool, flatten: bool) -> None:
        self.states: list[dict[str, Any]] = [OrderedDict() for _ in range(size)]
        self.moments: list[dict[int, Any]] = [{} for _ in range(size)]
        self.size, self.dim0 = size, dim0
        self.info: dict[str, dict[str, Any]] = {}
        self.flat: dict[str, Any] = {}
        self.full_moments: dict[str, torch.Tensor] = {}
        parameters = dict(net.named_parameters())
        units = {
            "": [n for n in parameters if not n.startswith("block")],
            "block": [n for n in parameters if n.startswith("block")],
        }
        for prefix, names in units.items():
            above = f"{prefix}." if prefix else ""
            inner = [n.removeprefix(above) for n in names]
            if flatten:
                flat = torch.cat([parameters[n].detach().flatten() for n in names])
                shapes = [parameters[n].shape for n in names]
                self.flat[f"{above}_fsdp_wrapped_module.flat_param_0"] = (
                    inner,
                    shapes,
                    [math.prod(s) for s in shapes],
                )
                self.add(prefix, "_fsdp_wrapped_module.flat_param_0", flat, names, shapes)
                continue
            for name, own in zip(names, inner, strict=True):
                self.add(
                    prefix,
                    f"_fsdp_wrapped_module.{own}",
                    parameters[name].detach(),
                    [name],
                    [parameters[name].shape],
                )
        for rank, state in enumerate(self.states):
            for name, buffer in net.named_buffers():
                # each rank has seen other batches
                state[f"_fsdp_wrapped_module.{name}"] = buffer.clone() + rank

    def add(
        self, prefix: str, own: str, whole: torch.Tensor, names: list[str], shapes: list[torch.Size]
    ) -> None:
        suffix = f"_fsdp_shard.{own}".replace(".", SEPARATOR)
        self.info.setdefault(prefix, {})[suffix] = {"_orig_size": whole.shape, "_orig_name": own}
        number, moment = len(self.moments[0]), torch.randn(whole.shape)
        for rank in range(self.size):
            self.states[rank][f"{prefix}.{suffix}" if prefix else suffix] = self.shard(whole, rank)
            self.moments[rank][number] = {
                "exp_avg": self.shard(moment, rank),
                "step": torch.tensor(3.0),
            }
        pieces = moment.flatten().split([math.prod(s) for s in shapes])
        self.full_moments |= {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}

    def shard(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """As `_flatten_and_pad_to_world_size` and `_get_shard` do it."""
        tensor = tensor if self.dim0 else tensor.flatten()
        tensor = pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, -tensor.size(0) % self.size])
        return tensor.chunk(self.size)[rank].clone()

    def save(self, folder: Path) -> None:
        folder.mkdir()
        for rank in range(self.size):
            metadata = {
                "shard_info": self.info,
                "flatten_info": self.flat,
                "buffer_info": {},
                "world_size": self.size,
                "rank": rank,
            }
            groups = [{"lr": 0.1, "params": list(range(len(self.moments[rank])))}]
            state = {
                "model": self.states[rank],
                "shard_metadata": metadata,
                "optimizer": {"state": self.moments[rank], "param_groups": groups},
            }
            torch.save(state, folder / f"ckpt_rank-{rank:08d}-of-{self.size:08d}.pth")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["flattened", "alone", "dim 0"])
def test_shards_are_joined_as_its_own_tool_does(
    kind: str, size: int, utilities: Path, tmp_path: Path
) -> None:
    job = Job(model(), size, dim0=kind == "dim 0", flatten=kind == "flattened")
    job.save(tmp_path / "ckpt")
    command = [
        sys.executable,
        str(JOBS / "xla_oracle.py"),
        str(utilities),
        str(tmp_path / "ckpt" / "ckpt"),
        str(tmp_path / "want.pt"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    want = torch.load(tmp_path / "want.pt")["model"]
    ckpt_tools.convert(tmp_path / "ckpt", tmp_path / "got.pt", to="torch", optimizer="flat")
    got = torch.load(tmp_path / "got.pt")
    found = {n.removeprefix("model."): v for n, v in _leaves(got) if n.startswith("model.")}
    assert found.keys() == want.keys() == model().state_dict().keys()
    assert all(
        torch.equal(found[n], want[n]) and torch.equal(want[n], v)
        for n, v in model().state_dict().items()
    )
    moments = {
        n.removeprefix("optimizer.state.").removesuffix(".exp_avg"): v
        for n, v in _leaves(got)
        if n.endswith(".exp_avg")
    }
    assert moments.keys() == job.full_moments.keys() and all(
        torch.equal(moments[n], v) for n, v in job.full_moments.items()
    )
    assert ckpt_tools.verify(tmp_path / "ckpt").problems == []


def _leaves(value: Any, above: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(above.strip("."), value)]
    return [
        leaf
        for key, inner in (value.items() if isinstance(value, dict) else ())
        for leaf in _leaves(inner, f"{above}.{key}")
    ]


def test_metadata_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    for number, harm in enumerate(("rank", "size", "name", "short", "flat")):
        job = Job(model(), 2, dim0=False, flatten=True)
        if harm == "size":
            job.info["block"][next(iter(job.info["block"]))]["_orig_size"] = torch.Size([10_000])
        elif harm == "name":
            job.info["other"] = job.info.pop("block")
        elif harm == "short":
            job.states[1][next(iter(job.states[1]))] = torch.ones(1)
        elif harm == "flat":
            job.flat["block._fsdp_wrapped_module.flat_param_0"][1][0] = torch.Size([1])
        job.save(tmp_path / str(number))
        if harm == "rank":
            one, two = sorted((tmp_path / str(number)).iterdir())
            one.write_bytes(two.read_bytes())
        with pytest.raises(FormatError):
            open_source(tmp_path / str(number))
