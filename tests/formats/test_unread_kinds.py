"""Tensors of kinds that are not read: each is named, and nothing is written, compared or loaded
without it unless that is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

import ckpt_tools
from ckpt_tools import CheckpointError, PlanError

Run = Callable[..., Any]
# torch warns of prototypes, and of what it will remove
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Plain(torch.Tensor):
    """A subclass that stores what any tensor stores."""


class Packed(torch.Tensor):
    """As torchao's Int8Tensor: another type and scale within, bfloat16 to the outside."""

    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Packed:
        made: Packed = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)  # type: ignore[attr-defined]
        return made

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return False if "is_pinned" in str(function) else cls(args[0].data_, args[0].scale)


KINDS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "per tensor": (
        lambda: torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8),
        "a quantized tensor",
    ),
    "per channel": (
        lambda: torch.quantize_per_channel(
            torch.randn(4, 4), torch.ones(4), torch.zeros(4), 0, torch.qint8
        ),
        "a quantized tensor",
    ),
    "coo": (lambda: torch.eye(4).to_sparse(), "a sparse tensor"),
    "csr": (lambda: torch.eye(4).to_sparse_csr(), "a sparse tensor"),
    "strided nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "a nested tensor",
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2, 2)], layout=torch.jagged),
        "a tensor of the class torch.nested",
    ),
    "meta": (lambda: torch.ones(3, device="meta"), "a meta tensor, which has no data"),
    "conjugated": (
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
        "a conjugated or negated view",
    ),
    "negated": (
        lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
        "a conjugated or negated view",
    ),
    "wrapper": (
        lambda: Packed(torch.ones(9, 9, dtype=torch.int8), torch.ones(9)),
        "a tensor of the class tests.formats.test_unread_kinds.Packed",
    ),
}


@pytest.fixture(params=KINDS)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A file with one tensor of a kind that is not read, `model.odd`, and one of another,
    `model.w`.
    """
    make, kind = KINDS[request.param]
    torch.save({"model": {"odd": make(), "w": torch.arange(5.0)}, "step": 3}, tmp_path / "s.pt")
    return tmp_path / "s.pt", kind


def test_every_verb_names_it_and_writes_nothing_without_it(
    odd: tuple[Path, str], tmp_path: Path, ckpt: Run
) -> None:
    path, kind = odd
    for words in (
        ("merge", path, tmp_path / "m.safetensors"),
        ("reshard", path, tmp_path / "out", "--to", "2"),
        ("convert", path, tmp_path / "out", "--to", "dcp"),
        ("convert", path, tmp_path / "out", "--to", "hf"),
        ("diff", path, path),
    ):
        done = ckpt(*words)
        assert done.returncode == PlanError.exit_code, words
        assert "odd'" in done.stderr and kind in done.stderr and "--exclude" in done.stderr, (
            done.stderr
        )
    assert [p.name for p in tmp_path.iterdir()] == ["s.pt"]
    for verb in ("inspect", "verify"):
        done = ckpt(verb, path)
        assert (
            done.returncode == 0
            and "not read: " in done.stdout
            and f"model.odd ({kind}" in done.stdout
        ), done.stdout
        assert kind in json.loads(ckpt(verb, path, "--json").stdout)["unread"]["model.odd"]
    result = ckpt_tools.salvage(path, tmp_path / "saved")
    assert result.lost == ["model.odd"] and kind in result.problems[0].what


def test_excluded_it_is_left_out(odd: tuple[Path, str], tmp_path: Path, ckpt: Run) -> None:
    path, _ = odd
    for glob in ("odd", "model.odd", "*.odd"):
        if glob != "*.odd":
            assert (
                ckpt(
                    "merge", path, tmp_path / "m.safetensors", "--exclude", glob, "--overwrite"
                ).returncode
                == 0
            )
            assert list(load_file(tmp_path / "m.safetensors")) == ["w"]
        if glob != "odd":
            assert (
                ckpt(
                    "convert",
                    path,
                    tmp_path / "c.pt",
                    "--to",
                    "torch",
                    "--exclude",
                    glob,
                    "--overwrite",
                ).returncode
                == 0
            )
            assert torch.load(tmp_path / "c.pt")["model"].keys() == {"w"}
            assert ckpt("diff", path, tmp_path / "c.pt", "--exclude", glob).returncode == 0


def test_a_target_of_the_model_alone_needs_nothing_of_the_optimizer(tmp_path: Path) -> None:
    """As an 8-bit optimizer has tensors of its own classes."""
    moments = {
        "state": {0: {"exp_avg": torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.qint8)}},
        "param_groups": [{"params": [0]}],
    }
    torch.save({"model": {"w": torch.arange(5.0)}, "optimizer": moments}, tmp_path / "s.pt")
    for keep_prefix in (False, True):
        ckpt_tools.convert(
            tmp_path / "s.pt",
            tmp_path / "m.safetensors",
            to="safetensors",
            keep_prefix=keep_prefix,
            overwrite=True,
        )
        ckpt_tools.merge(tmp_path / "s.pt", tmp_path / "n.safetensors", overwrite=True)
        assert (
            len(load_file(tmp_path / "m.safetensors"))
            == len(load_file(tmp_path / "n.safetensors"))
            == 1
        )
    with pytest.raises(PlanError, match="optimizer.state.0.exp_avg"):
        ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "no", to="dcp")


def test_a_load_refuses_to_leave_it_out(odd: tuple[Path, str]) -> None:
    path, kind = odd
    state: dict[str, Any] = {"model": {"w": torch.zeros(5)}}
    with pytest.raises(PlanError) as caught:
        ckpt_tools.load(path, state)
    assert kind in str(caught.value) and "strict=False" in (caught.value.hint or "")
    report = ckpt_tools.load(path, state, select=["model.w"])
    assert torch.equal(state["model"]["w"], torch.arange(5.0))
    assert any("model.odd" in note for note in report.notes)


def test_a_subclass_with_an_ordinary_storage_is_read(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5.0).as_subclass(Plain)}, tmp_path / "s.pt")
    ckpt_tools.merge(tmp_path / "s.pt", tmp_path / "m.safetensors")
    assert torch.equal(load_file(tmp_path / "m.safetensors")["w"], torch.arange(5.0))


def test_the_files_of_ranks_name_it_too(tmp_path: Path) -> None:
    for rank in range(2):
        odd = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
        torch.save({"w": torch.ones(2), "odd": odd}, tmp_path / f"model_rank_{rank}.pt")
    assert ckpt_tools.inspect(tmp_path).catalog.unread == {"model.odd": "a quantized tensor"}
    with pytest.raises(PlanError, match="'model.odd'"):
        ckpt_tools.convert(tmp_path, tmp_path / "out", to="dcp")


# ---- DCP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (
            lambda: torch.quantize_per_tensor(torch.randn(40, 40), 0.1, 0, torch.qint8),
            "a quantized tensor, qint8",
        ),
        (
            lambda: Packed(torch.ones(200, 200, dtype=torch.int8), torch.ones(200)),
            "a tensor of the class tests.formats.test_unread_kinds.Packed",
        ),
    ],
)
def test_dcp_with_it_is_no_false_alarm(
    make: Callable[[], torch.Tensor], kind: str, tmp_path: Path, ckpt: Run
) -> None:
    dcp.save(
        {"model": {"odd": make(), "w": torch.arange(5.0)}},
        checkpoint_id=tmp_path / "c",
        no_dist=True,
    )
    report = ckpt_tools.verify(tmp_path / "c")
    assert report.problems == [] and report.unread == {"model.odd": kind}
    with pytest.raises(PlanError, match="'odd'"):
        ckpt_tools.merge(tmp_path / "c", tmp_path / "m.safetensors")
    ckpt_tools.merge(tmp_path / "c", tmp_path / "m.safetensors", exclude=["odd"])
    assert torch.equal(load_file(tmp_path / "m.safetensors")["w"], torch.arange(5.0))
    file = tmp_path / "c" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    (place,) = [n for n in range(len(data) - 64) if data[n : n + 64] == b"\1" * 64][:1] or [1000]
    data[place] ^= 4
    file.write_bytes(data)
    assert ckpt_tools.verify(tmp_path / "c").problems, "its bytes are compared all the same"


def test_dcp_with_something_else_in_an_archive_of_the_usual_length_names_it(
    tmp_path: Path,
) -> None:
    tensor = TwoTensor(torch.ones(9, 9), torch.ones(9, 9))
    dcp.save(
        {"model": {"odd": tensor, "w": torch.arange(5.0)}},
        checkpoint_id=tmp_path / "c",
        no_dist=True,
    )
    assert ckpt_tools.verify(tmp_path / "c").problems == []
    with pytest.raises(CheckpointError, match="'odd': ") as caught:
        ckpt_tools.merge(tmp_path / "c", tmp_path / "m.safetensors")
    assert "--exclude" in (caught.value.hint or "")
    ckpt_tools.merge(tmp_path / "c", tmp_path / "m.safetensors", exclude=["odd"])
    assert list(load_file(tmp_path / "m.safetensors")) == ["w"]


# ---- views with pending operations ---------------------------------------------------------------


def test_conjugated_views_in_dcp_are_what_stock_torch_loads(tmp_path: Path) -> None:
    base = torch.randn(3, 4, dtype=torch.complex64)
    state = {
        "plain": base,
        "view": base.conj(),
        "strided": base.conj().t(),
        "double": base.to(torch.complex128).conj(),
        "empty": base[:0].conj(),
        "negative": base.conj().imag,
    }
    dcp.save(dict(state), checkpoint_id=tmp_path / "c", no_dist=True)
    want = {name: torch.empty_like(value.resolve_conj()) for name, value in state.items()}
    dcp.load(want, checkpoint_id=tmp_path / "c", no_dist=True)
    assert ckpt_tools.verify(tmp_path / "c").problems == []
    ckpt_tools.reshard(tmp_path / "c", tmp_path / "r", to_ranks=2)
    ckpt_tools.convert(tmp_path / "c", tmp_path / "m.pt", to="torch")
    ckpt_tools.seal(tmp_path / "c")
    assert ckpt_tools.diff(tmp_path / "c", tmp_path / "r").is_same
    for path in ("c", "r", "m.pt"):
        found = {name: torch.zeros_like(value) for name, value in want.items()}
        ckpt_tools.load(tmp_path / path, found)
        assert [name for name in want if not torch.equal(found[name], want[name])] == [], path


def test_damage_in_a_conjugated_view_is_found(tmp_path: Path) -> None:
    base = torch.randn(3, 4, dtype=torch.complex64)
    dcp.save({"x": base.conj()}, checkpoint_id=tmp_path / "c", no_dist=True)
    path = tmp_path / "c/__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[bytes(data).index(base.numpy().tobytes()[:16]) + 3] ^= 1
    path.write_bytes(data)
    assert ckpt_tools.verify(tmp_path / "c").problems
    with pytest.raises(CheckpointError):
        ckpt_tools.merge(tmp_path / "c", tmp_path / "m.safetensors")


# ---- --exclude -----------------------------------------------------------------------------------


def test_exclude_goes_with_select_and_must_match(tmp_path: Path) -> None:
    torch.save(
        {"model": {"a.w": torch.ones(1), "a.b": torch.ones(2), "c": torch.ones(3)}},
        tmp_path / "s.pt",
    )
    ckpt_tools.merge(tmp_path / "s.pt", tmp_path / "m.safetensors", select=["a.*"], exclude=["*.b"])
    assert list(load_file(tmp_path / "m.safetensors")) == ["a.w"]
    for call in (
        lambda: ckpt_tools.merge(tmp_path / "s.pt", tmp_path / "no.safetensors", exclude=["zz"]),
        lambda: ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "no", to="dcp", exclude=["zz"]),
        lambda: ckpt_tools.diff(tmp_path / "s.pt", tmp_path / "s.pt", exclude=["zz"]),
    ):
        with pytest.raises(PlanError, match=r"--exclude matches none of \d names: 'zz'"):
            call()
    for call in (
        lambda: ckpt_tools.merge(tmp_path / "s.pt", tmp_path / "no.safetensors", exclude=["*"]),
        lambda: ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "no", to="dcp", exclude=["*"]),
    ):
        with pytest.raises(PlanError, match="no tensor.* left of 3"):
            call()
