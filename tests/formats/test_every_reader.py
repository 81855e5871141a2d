"""The suite that every reader passes: difficult tensors, cut files, flipped bits, hostile lengths.

Each reader gets small checkpoints that the other program wrote. An external format is tested in the
same way, in test_external.py.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.errors import CheckpointError
from tests.fuzz.seeds import states
from tests.jobs import LONG
from tests.states import one_step

Values = dict[str, torch.Tensor]
NUM_TRIES = 2000 if LONG else 120
PLAIN: Values = {
    "matrix": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "scalar": torch.tensor(7.0),
    "empty": torch.zeros(0, 3),
    "whole": torch.tensor([1 << 40, -1]),
    "flags": torch.tensor([True, False, True]),
}
MORE: Values = PLAIN | {
    "brain": torch.linspace(-1, 1, 6, dtype=torch.bfloat16),
    "eight": torch.linspace(-1, 1, 6).to(torch.float8_e4m3fn),
}


def make_dcp(folder: Path) -> Mapping[str, torch.Tensor]:
    values = MORE | {"strided": torch.arange(12.0).reshape(3, 4).t()}
    dcp.save(dict(values), checkpoint_id=folder, no_dist=True)
    return values


def make_safetensors(folder: Path) -> Mapping[str, torch.Tensor]:
    save_file(MORE, folder / "model.safetensors")
    return MORE


def make_torch_save(folder: Path) -> Mapping[str, torch.Tensor]:
    values = MORE | {"strided": torch.arange(12.0).reshape(3, 4).t()}
    torch.save(dict(values), folder / "x.pt")
    return values


def make_npz(folder: Path) -> Mapping[str, torch.Tensor]:
    np.savez(folder / "x.npz", **{name: value.numpy() for name, value in PLAIN.items()})
    return PLAIN


def make_gguf(folder: Path) -> Mapping[str, torch.Tensor]:
    values = {"matrix": PLAIN["matrix"], "half": torch.linspace(-1, 1, 8).half()}
    writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
    for name, value in values.items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def make_ranks(folder: Path) -> Mapping[str, torch.Tensor]:
    for rank in range(2):
        torch.save(dict(MORE), folder / f"model_world_size_2_rank_{rank}.pt")
    return {f"model.{name}": value for name, value in MORE.items()}


def make_accelerate(folder: Path) -> Mapping[str, torch.Tensor]:
    save_file(MORE, folder / "model.safetensors")
    model = torch.nn.Linear(2, 2)
    optimizer = one_step(model, torch.ones(1, 2))
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    return {f"model.{name}": value for name, value in MORE.items()}


def make_deepspeed(folder: Path) -> Mapping[str, torch.Tensor]:
    model, two, _ = states("zero")
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    torch.save(two, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return {}


MAKERS: dict[str, Callable[[Path], Mapping[str, torch.Tensor]]] = {
    "dcp": make_dcp,
    "safetensors": make_safetensors,
    "torch_save": make_torch_save,
    "npz": make_npz,
    "gguf": make_gguf,
    "per_rank": make_ranks,
    "accelerate": make_accelerate,
    "deepspeed": make_deepspeed,
}
# A CRC-32 covers each payload, so a flip is found wherever it is. These check only when asked.
CHECKED = ("dcp", "torch_save", "npz", "per_rank")


@pytest.fixture(params=MAKERS, scope="module")
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Mapping[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, MAKERS[request.param](folder)


def where(folder: Path) -> Path:
    """The path that a user gives: the file of a format of files, else the directory."""
    files = list(folder.iterdir())
    return files[0] if len(files) == 1 and files[0].suffix in (".pt", ".npz", ".gguf") else folder


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Reads every tensor."""
    with ckpt_tools.open(where(folder)) as found:
        return {name: found[name].torch() for name in found}


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        value.dtype == right[name].dtype
        and value.shape == right[name].shape
        and bytes_of(value) == bytes_of(right[name])
        for name, value in left.items()
    )


def bytes_of(value: torch.Tensor) -> bytes:
    flat = value.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def test_difficult_tensors_are_read(made: tuple[str, Path, Mapping[str, torch.Tensor]]) -> None:
    kind, folder, values = made
    found = read_all(folder)
    assert found
    assert same({name: found[name] for name in values}, values) or kind == "gguf"
    for name, value in values.items() if kind == "gguf" else ():
        assert bytes_of(found[name]) == bytes_of(value)  # GGUF reverses shapes


def changed(folder: Path, out: Path, change: Callable[[bytes], bytes], name: str) -> Path:
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out)
    (out / name).write_bytes(change((folder / name).read_bytes()))
    return out


def outcome(folder: Path) -> dict[str, torch.Tensor] | None:
    """Reads everything; None if that is refused. Any other error fails the test."""
    try:
        return read_all(folder)
    except CheckpointError:
        return None


def places(folder: Path, seed: int) -> Iterator[tuple[str, int]]:
    """Yields files and positions in them: all in a long run, else a choice."""
    rng = random.Random(seed)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    every = [(name, at) for name, size in sizes.items() for at in range(size)]
    yield from every if len(every) <= NUM_TRIES else sorted(rng.sample(every, NUM_TRIES))


def test_a_cut_file_is_refused_or_reads_the_same(
    made: tuple[str, Path, Mapping[str, torch.Tensor]], tmp_path: Path
) -> None:
    _, folder, _ = made
    whole = read_all(folder)
    for name, at in places(folder, 1):
        found = outcome(changed(folder, tmp_path / "cut", lambda data, n=at: data[:n], name))
        assert found is None or same(found, whole), (name, at)


@pytest.mark.slow
def test_a_flipped_bit_is_refused_found_or_harmless(
    made: tuple[str, Path, Mapping[str, torch.Tensor]], tmp_path: Path
) -> None:
    kind, folder, _ = made
    whole = read_all(folder)

    def flip(data: bytes, at: int) -> bytes:
        return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]

    for name, at in places(folder, 2):
        out = changed(folder, tmp_path / "flip", lambda data, n=at: flip(data, n), name)
        found = outcome(out)
        is_checked = kind in CHECKED and name != ".metadata"  # stock torch writes none for it
        if found is None or same(found, whole) or not is_checked:
            continue
        assert ckpt_tools.verify(where(out)).problems, (name, at)


@pytest.mark.slow
def test_lengths_that_lie_are_refused(
    made: tuple[str, Path, Mapping[str, torch.Tensor]], tmp_path: Path
) -> None:
    """A length may be anywhere, so all kinds of numbers are written everywhere."""
    _, folder, _ = made
    numbers = [b"\xff" * 4, b"\xff" * 8, b"\x7f" + b"\xff" * 7, bytes(8), b"9" * 12]
    for number, (name, at) in enumerate(places(folder, 3)):
        new = numbers[number % len(numbers)]
        outcome(
            changed(
                folder,
                tmp_path / "lie",
                lambda data, n=at, v=new: data[:n] + v + data[n + len(v) :],
                name,
            )
        )
