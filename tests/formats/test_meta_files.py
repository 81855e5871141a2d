"""Meta's files of a Llama for several GPUs. The oracle cuts a model as fairscale's layers do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import CatalogError, CheckpointError, FormatError, IntegrityError

WIDTH, HIDDEN, VOCABULARY = 16, 24, 32
BY_ROWS = ("wq.weight", "wk.weight", "wv.weight", "w1.weight", "w3.weight", "output.weight")
BY_COLUMNS = ("wo.weight", "w2.weight")
State = dict[str, torch.Tensor]


def model() -> State:
    shapes = {"tok_embeddings.weight": (VOCABULARY, WIDTH), "output.weight": (VOCABULARY, WIDTH)}
    shapes |= {"norm.weight": (WIDTH,), "rope.freqs": (4,)}
    for layer in range(2):
        front = f"layers.{layer}"
        shapes |= {f"{front}.attention.w{part}.weight": (WIDTH, WIDTH) for part in "qkvo"}
        shapes |= {f"{front}.feed_forward.w{n}.weight": (HIDDEN, WIDTH) for n in (1, 3)}
        shapes |= {f"{front}.feed_forward.w2.weight": (WIDTH, HIDDEN)}
        shapes |= {f"{front}.{part}_norm.weight": (WIDTH,) for part in ("attention", "ffn")}
    generator = torch.Generator().manual_seed(0)
    return {n: torch.rand(s, generator=generator).bfloat16() for n, s in shapes.items()}


def write(folder: Path, state: State, num_files: int, table_dim: int) -> Path:
    folder.mkdir(parents=True)
    for number in range(num_files):
        mine = {}
        for name, value in state.items():
            dim = 0 if name.endswith(BY_ROWS) else 1 if name.endswith(BY_COLUMNS) else None
            dim = table_dim if name.startswith("tok_") else dim
            part = value if dim is None else value.chunk(num_files, dim)[number]
            mine[name] = part.clone(memory_format=torch.contiguous_format)
        torch.save(mine, folder / f"consolidated.{number:02}.pth")
    (folder / "params.json").write_text("{}")
    return folder


@pytest.mark.parametrize(("num_files", "table_dim"), [(1, 0), (2, 0), (8, 1)])
def test_all_files_are_one_model(num_files: int, table_dim: int, tmp_path: Path) -> None:
    """Embeddings are cut by columns in Llama 1 and 2, and by rows in Llama 3."""
    want = model()
    folder = write(tmp_path / "meta", want, num_files, table_dim)
    ckpt_tools.merge(folder, tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], value) for name, value in want.items())
    shown = ckpt_tools.inspect(folder)
    assert shown.world_size == num_files and len(shown.catalog.tensors) == len(want)
    ckpt_tools.load(folder, state := {n: torch.zeros_like(v) for n, v in want.items()})
    assert all(torch.equal(state[name], value) for name, value in want.items())


def test_one_of_several_is_no_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "meta", model(), 2, 0)
    with pytest.raises(CatalogError, match="one of 2 files of a model") as caught:
        ckpt_tools.inspect(folder / "consolidated.00.pth")
    assert "give the directory" in str(caught.value.hint)


def change(folder: Path, number: int, how: Any) -> None:
    path = folder / f"consolidated.{number:02}.pth"
    state = torch.load(path)
    how(state)
    torch.save(state, path)


@pytest.mark.parametrize(
    ("number", "how", "kind", "words"),
    [
        (1, lambda s: s["norm.weight"].add_(1), IntegrityError, "norm.weight"),
        (1, lambda s: s.pop("output.weight"), CatalogError, "missing in file 1 of 4"),
        (2, lambda s: s.update({"output.weight": s["output.weight"][:-1]}), FormatError, "shapes"),
        (
            3,
            lambda s: s.update({"output.weight": s["output.weight"].float()}),
            FormatError,
            "kinds",
        ),
        (3, lambda s: s.update({"output.weight": "text"}), FormatError, "kinds"),
        (0, lambda s: s.update({"router.weight": torch.ones(2)}), FormatError, "is not known"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    number: int, how: Any, kind: type[CheckpointError], words: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "meta", model(), 4, 0)
    change(folder, number, how)
    if words == "is not known":
        for other in range(1, 4):
            change(folder, other, how)
    with pytest.raises(kind, match=words):
        ckpt_tools.merge(folder, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_a_missing_file_and_a_missing_norm(tmp_path: Path) -> None:
    folder = write(tmp_path / "meta", model(), 4, 1)
    shutil.copytree(folder, tmp_path / "other")
    (folder / "consolidated.02.pth").unlink()
    with pytest.raises(CatalogError, match="files of ranks are missing: 2 of 4"):
        ckpt_tools.inspect(folder)
    for number in range(4):
        change(tmp_path / "other", number, lambda s: s.pop("norm.weight"))
    with pytest.raises(FormatError, match="share 'tok_embeddings.weight' is not known"):
        ckpt_tools.inspect(tmp_path / "other")
