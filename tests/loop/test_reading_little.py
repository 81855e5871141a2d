"""Rows and small parts of an opened checkpoint: the bytes that torch has, however they are stored."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import IntegrityError
from ckpt_tools.loop.loading import opened
from tests.jobs import ROOT
from tests.strategies import flip

TYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
    torch.complex64,
)
SHAPES = {
    "rows": (37, 5),
    "deep": (6, 4, 3, 2),
    "line": (19,),
    "wide": (1, 50),
    "none": (0, 3),
    "one": (),
}


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name}.{str(dtype)[6:]}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        if dtype is torch.bool
        else (torch.randn(shape, generator=generator) * 9).to(dtype)
        for name, shape in SHAPES.items()
        for dtype in TYPES
    }


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, state = tmp_path_factory.mktemp("stored"), values()
    dcp.save(state, checkpoint_id=root / "stock", no_dist=True)
    ckpt_tools.save(root / "sealed", state)
    ckpt_tools.reshard(root / "sealed", root / "three", to_ranks=3)
    save_file({n: t for n, t in state.items() if not t.is_complex()}, root / "a.safetensors")
    torch.save(state, root / "a.pt")
    torch.save({n: t.t() if t.ndim == 2 else t for n, t in state.items()}, root / "turned.pt")
    return {
        name: root / name
        for name in ("stock", "sealed", "three", "a.safetensors", "a.pt", "turned.pt")
    }


def bits(value: torch.Tensor) -> bytes:
    return torch.cat([value.flatten(), value.new_empty(0)]).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", ["stock", "sealed", "three", "a.safetensors", "a.pt", "turned.pt"])
def test_any_part_has_the_bytes_that_torch_has(name: str, stored: dict[str, Path]) -> None:
    rng, state = random.Random(1), values()
    with ckpt_tools.open(stored[name]) as opened:
        for fqn in opened:
            want = state[fqn].t() if name == "turned.pt" and state[fqn].ndim == 2 else state[fqn]
            for _ in range(6):
                key = tuple(
                    rng.randrange(size)
                    if size and rng.random() < 0.4
                    else slice(*sorted(rng.randint(0, size) for _ in "ab"))
                    for size in want.shape[: rng.randint(0, want.ndim)]
                )
                got = opened[fqn][key]
                assert got.shape == want[key].shape and bits(got) == bits(want[key]), (fqn, key)


@pytest.mark.parametrize("name", ["stock", "sealed", "three", "a.safetensors", "turned.pt"])
def test_rows_come_in_the_order_of_their_indices(name: str, stored: dict[str, Path]) -> None:
    with ckpt_tools.open(stored[name]) as opened:
        for fqn in (fqn for fqn in opened if fqn.startswith("rows.")):
            want = values()[fqn].t() if name == "turned.pt" else values()[fqn]
            size = len(want)
            rows = ([3, 1, 1, -1, 4], list(range(size)), [], [size - 1], torch.tensor([2, 0]))
            for indices in rows:
                got = opened.rows(fqn, indices)
                chosen = torch.stack([want[int(i)] for i in indices]) if len(indices) else want[:0]
                assert got.shape == chosen.shape and bits(got) == bits(chosen), (fqn, indices)
        want = values()["rows.bfloat16"]
        size = len(want) + 99
        for outside in ([size], [-size - 1]):
            with pytest.raises(IndexError):
                opened.rows("rows.bfloat16", outside)
        mask = want[:, 0] > 0
        for wrong in ([0.5], mask, mask.tolist(), slice(2, 5), 5, torch.tensor([[1, 2]])):
            with pytest.raises(TypeError, match="expected a list or a 1-d tensor of integers"):
                opened.rows("rows.bfloat16", wrong)  # type: ignore[arg-type]
        with pytest.raises(KeyError, match="nearest"):
            opened.rows("rows.bfloat", [0])
        with pytest.raises(IndexError, match="no rows"):
            opened.rows("one.float32", [0])


def test_a_handle_that_has_read_a_row_still_proves_the_whole(tmp_path: Path) -> None:
    ckpt_tools.save(tmp_path / "s", {"w": torch.arange(4000.0).reshape(1000, 4)})
    data = tmp_path / "s" / "__0_0.distcp"
    with ckpt_tools.open(tmp_path / "s") as opened:
        assert opened["w"][7].tolist() == [28, 29, 30, 31]
        flip(data, data.stat().st_size // 2, 3)
        with pytest.raises(IntegrityError):
            opened["w"].torch()
        with pytest.raises(IntegrityError):
            opened.rows("w", range(1000))


@pytest.mark.parametrize("width", [1, 300])
def test_many_scattered_rows_are_right(width: int, tmp_path: Path) -> None:
    want = torch.randn(20_000, width, generator=torch.Generator().manual_seed(0))
    ckpt_tools.save(tmp_path / "s", {"w": want})
    ckpt_tools.reshard(tmp_path / "s", tmp_path / "three", to_ranks=3)
    indices = torch.randperm(20_000, generator=torch.Generator().manual_seed(1))[:4000]
    for name in ("s", "three"):
        with ckpt_tools.open(tmp_path / name) as opened:
            assert torch.equal(opened.rows("w", indices), want[indices])


def test_a_closed_checkpoint_refuses_to_read(stored: dict[str, Path]) -> None:
    with ckpt_tools.open(stored["sealed"]) as opened:
        tensor = opened["rows.float32"]
    assert tensor.shape == (37, 5) and "rows.float32" in opened
    for read in (
        lambda: tensor[0],
        tensor.torch,
        tensor.numpy,
        lambda: opened["none.float32"][:],
        lambda: opened.rows("rows.float32", [1]),
        lambda: opened.file(".metadata"),
    ):
        with pytest.raises(ValueError, match=r"the checkpoint is closed: .*; open it again"):
            read()
    opened.close()


AGAIN = """
import os, sys, time, warnings
import torch
import ckpt_tools
from ckpt_tools.errors import CheckpointError

warnings.simplefilter("ignore")
path, opened = sys.argv[1], []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)


def first(settle: bool = True) -> tuple[float, bool]:
    "Returns a value, and whether the index was read for it."
    time.sleep(2.1 * settle)  # what has just changed is always read again
    opened.clear()
    with ckpt_tools.open(path) as found:
        return found["w"][0].item(), any(one.endswith(".metadata") for one in opened)


ckpt_tools.save(path, {"w": torch.tensor([1.0, 2.0])})
told = [first(), first(False), first(False)]
assert told == [(1.0, True), (1.0, False), (1.0, False)], told
ckpt_tools.save(path, {"w": torch.tensor([3.0, 4.0])}, overwrite=True)
told = [first(False), first(), first(False)]
assert told == [(3.0, True), (3.0, True), (3.0, False)], told
with open(os.path.join(path, ".metadata"), "r+b") as file:  # of the same length
    data = bytearray(file.read())
    data[data.index(b"__0_0")] ^= 1
    file.seek(0)
    file.write(data)
for _ in range(2):
    try:
        first()
    except CheckpointError:
        continue
    raise AssertionError("a flipped bit was not found")
ckpt_tools.save(path, {"w": torch.tensor([5.0, 6.0])}, overwrite=True)
assert first() == (5.0, True) and first(False) == (5.0, False)
os.remove(os.path.join(path, "__0_0.distcp"))
try:
    first(False)
except CheckpointError as error:
    assert "missing" in str(error), error
else:
    raise AssertionError("a missing file was not found")
"""


def test_a_checkpoint_that_has_not_changed_is_opened_again_at_once(tmp_path: Path) -> None:
    """Every change is seen: of a file, of its bytes, of their number."""
    words = [sys.executable, "-c", AGAIN, str(tmp_path / "a")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_catalogs_of_many_checkpoints_are_not_all_kept(tmp_path: Path) -> None:
    """Each has 9,000 tensors, so two fit."""
    for number in range(3):
        tensors = {f"{n}": torch.tensor(float(number)) for n in range(9000)}
        ckpt_tools.save(tmp_path / str(number), tensors)
    time.sleep(2.1)
    for _ in range(2):
        for number in range(3):
            with ckpt_tools.open(tmp_path / str(number)) as found:
                assert found["8999"].torch().item() == number
            assert 0 < sum(held for *_, held in opened._KNOWN._known.values()) <= 20_000
