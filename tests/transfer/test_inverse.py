"""The proof by the inverse: a conversion makes its source again of what it has written, and its
manifest has the relations, which NumPy follows here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools.core.box import whole
from ckpt_tools.core.catalog import Catalog
from ckpt_tools.core.checksum import crc64nvme
from ckpt_tools.core.grid import GridPlace, Relation
from ckpt_tools.core.plan import Slot, Target, plan_transfer
from ckpt_tools.core.relations import assemble
from ckpt_tools.errors import IntegrityError, PlanError
from ckpt_tools.formats.registry import Source, open_source
from ckpt_tools.publish.find_manifest import manifest_of
from ckpt_tools.ranks.base import ALONE
from ckpt_tools.storage.local import LocalStore
from ckpt_tools.transfer.inverse import Inverse, _cut_further, inverse_of, prove_inverse
from tests.servers.servers import Server
from tests.transfer.groups import group

RULES = {
    "unstack": [{"match": "(.*)\\.gate_up", "into": "\\1.e.{layer}.gate_up"}],
    "split": [
        {
            "match": "(.*e\\..*)\\.gate_up",
            "into": ["\\1.gate", "\\1.up"],
            "parts": [1, 1],
            "dim": 1,
            "interleaved": True,
        },
        {
            "match": "(.*)\\.qkv",
            "into": ["\\1.q", "\\1.k", "\\1.v"],
            "parts": [2, 1, 1],
            "groups": 2,
        },
    ],
    "rope": [{"match": ".*\\.[qk]", "heads": 2, "to": "halves"}],
    "transpose": [{"match": ".*\\.(gate|up)", "dims": [0, 1]}],
    "fuse": [{"match": "(.*)\\.gate", "from": ["\\1.gate", "\\1.up"], "into": "\\1.both"}],
    "rename": [["^l\\.", "layers."]],
    "keep": ["norm"],
}


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = {
        "l.gate_up": torch.randn(3, 4, 10),
        "l.qkv": torch.randn(32, 6),
        "norm": torch.randn(5),
        "l.none": torch.zeros(0, 3),
    }
    state = {
        name: {"exp_avg": torch.randn_like(value), "step": torch.tensor(7.0)}
        for name, value in model.items()
        if value.numel()
    }
    groups = [{"lr": 0.1, "params": [*state]}]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}, "epoch": 2}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Without fingerprints."""
    torch.save(training_state(), tmp_path / "job.pt")
    (tmp_path / "map.json").write_text(json.dumps(RULES))
    return tmp_path / "job.pt"


def flat_values(path: Path, name: str) -> np.ndarray:
    """Returns a tensor of a torch file in row-major order, read by torch alone."""
    found = torch.load(path)
    if name.startswith("model."):
        return np.asarray(found["model"][name.removeprefix("model.")]).ravel()
    parameter, _, moment = name.removeprefix("optimizer.state.").rpartition(".")
    return np.asarray(found["optimizer"]["state"][parameter][moment]).ravel()


def elements(sizes: list[int], offset: int, strides: list[int]) -> np.ndarray:
    indices = np.indices(tuple(sizes)).reshape(len(sizes), -1)
    return offset + (indices * np.array(strides).reshape(-1, 1)).sum(0)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_the_relations_of_the_manifest_give_the_source_back(
    is_sealed: bool, source: Path, tmp_path: Path
) -> None:
    """Of the model and of the moments, through five kinds of rules, one after the other."""
    src = source
    if is_sealed:
        src = tmp_path / "sealed"
        ckpt_tools.convert(source, src, to="dcp", ranks=2)
    out = tmp_path / "o.pt"
    result = ckpt_tools.convert(src, out, to="torch", key_map=tmp_path / "map.json")
    before = training_state()
    # 3 tensors with elements, 3 moments, 3 steps
    assert result.num_proved == 9 and not any("proved" in note for note in result.notes)
    assert result.proved_nbytes == sum(
        value.nbytes
        for value in [
            *before["model"].values(),
            *(v for state in before["optimizer"]["state"].values() for v in state.values()),
        ]
    )
    manifest = manifest_of(open_source(out).store)
    assert manifest is not None
    proof = manifest.source["proof"]
    cut = ["l.gate_up", "l.qkv"]
    moments = [f"optimizer.state.{name}.exp_avg" for name in cut]
    assert proof["relations"].keys() == {*(f"model.{name}" for name in cut), *moments}
    for name, relations in proof["relations"].items():
        expected = flat_values(source, name)
        got = np.full(expected.shape, np.nan, np.float32)
        for written, sizes, offset, strides, own_offset, own_strides in relations:
            own = elements(sizes, own_offset, own_strides)
            assert np.isnan(got[own]).all()
            got[own] = flat_values(out, written)[elements(sizes, offset, strides)]
        assert np.array_equal(got, expected), name
    assert any("the inverse gave 9 tensors" in note for note in manifest.notes)


def test_verify_and_inspect_show_the_proof(source: Path, tmp_path: Path, ckpt: Any) -> None:
    words = ("convert", source, tmp_path / "o.pt", "--to", "torch", "--map", tmp_path / "map.json")
    done = ckpt(*words)
    assert done.returncode == 0, done.stderr
    assert "proved: the inverse gave 9 tensors of the source back" in done.stdout
    done = ckpt("verify", tmp_path / "o.pt")
    assert "the inverse gave 9 tensors of the source back" in done.stdout
    done = ckpt(*words, "--overwrite", "--no-prove")
    assert done.returncode == 0 and "proved" not in done.stdout
    assert "the inverse" not in ckpt("verify", tmp_path / "o.pt").stdout


@pytest.mark.parametrize("target", ["dcp", "accelerate", "safetensors", "deepspeed-universal"])
def test_all_targets_give_the_source_back(target: str, source: Path, tmp_path: Path) -> None:
    name = "o.safetensors" if target == "safetensors" else "o"
    how: dict[str, Any] = {"ranks": 3} if target in ("dcp", "accelerate") else {}
    result = ckpt_tools.convert(
        source, tmp_path / name, to=target, key_map=tmp_path / "map.json", **how
    )
    lacking = [note for note in result.notes if "proved" in note]
    assert result.num_proved == (3 if target == "safetensors" else 9) and not lacking


def test_values_that_change_are_named(source: Path, tmp_path: Path) -> None:
    result = ckpt_tools.convert(
        source,
        tmp_path / "o.pt",
        to="torch",
        key_map=tmp_path / "map.json",
        dtype="bf16",
        keep_dtype=["*.norm"],
    )
    (note,) = [note for note in result.notes if "proved" in note]
    assert "model.layers.e.0.both, model.layers.e.1.both" in note
    assert "(6, which are cast or computed)" in note
    assert result.num_proved == 7  # norm, moments and steps
    manifest = manifest_of(open_source(tmp_path / "o.pt").store)
    assert manifest is not None and "6 tensors are cast or computed" in " ".join(manifest.notes)


def test_a_tensor_that_is_left_out_in_part_is_named(source: Path, tmp_path: Path) -> None:
    result = ckpt_tools.convert(
        source,
        tmp_path / "o.safetensors",
        to="safetensors",
        key_map=tmp_path / "map.json",
        exclude=["*.v"],
    )
    (note,) = [note for note in result.notes if "proved" in note]
    assert "model.l.qkv (1, which are there in part)" in note


def test_ranks_share_the_proof(source: Path, tmp_path: Path) -> None:
    words = ("convert", source, tmp_path / "o", "--to", "dcp", "--map", tmp_path / "map.json")
    done = group(3, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("proved: the inverse gave 9 tensors") == 1, done.stdout
    before = training_state()
    state = {"model": {"norm": torch.zeros(5)}}
    dcp.load(state, checkpoint_id=tmp_path / "o")
    assert torch.equal(state["model"]["norm"], before["model"]["norm"])


def test_in_a_bucket_the_files_are_read_before_the_index_appears(
    server: Server, source: Path, tmp_path: Path
) -> None:
    server.bucket("inverse")
    options = {"storage_options": server.options}
    how = {"key_map": tmp_path / "map.json", **options}
    result = ckpt_tools.convert(source, "s3://inverse/o", to="dcp", **how)
    assert result.num_proved == 9 and not any("proved" in note for note in result.notes)
    result = ckpt_tools.convert(source, "s3://inverse/o.pt", to="torch", **how)
    assert not result.num_proved
    assert any("a file in an object store cannot be read before it" in n for n in result.notes)
    assert ckpt_tools.verify("s3://inverse/o", **options).problems == []


# ---- what it finds -------------------------------------------------------------------------------


class Written:
    """A conversion of two tensors to one, whose file is there: `both` has rows of a and b in turn."""

    def __init__(self, folder: Path, wrong: bool = False) -> None:
        self.a, self.b = (torch.randn(4, 3) for _ in range(2))
        torch.save({"a": self.a, "b": self.b}, folder / "s.pt")
        self.source: Source = open_source(folder / "s.pt")
        entries = self.source.catalog.tensors
        located = self.source.format.locate(self.source.store, entries.values())
        assert not located
        rows = [
            Relation((4, 3), _place("a", 0, 3), _place("both", 0, 6)),
            Relation((4, 3), _place("b", 0, 3), _place("both", 3, 6)),
        ]
        made = assemble("both", (8, 3), rows, entries)
        if wrong:
            first, second = made.relations
            swapped = (
                first._replace(left=first.left._replace(name="b")),
                second._replace(left=second.left._replace(name="a")),
            )
            made = replace(made, relations=swapped)
        self.catalog = Catalog("view", {"both": made})
        slots = {"both": (Slot(whole((8, 3)), "o.bin", 16),)}
        self.plan = plan_transfer(self.catalog, Target("raw", {"o.bin": 16 + 96}, slots))
        self.path = folder / "o.bin"
        both = torch.stack([self.a, self.b], 1).reshape(8, 3)
        self.path.write_bytes(bytes(16) + both.numpy().tobytes())

    def inverse(self) -> Inverse:
        return inverse_of(self.source, self.catalog, self.plan, {})

    def prove(self) -> int:
        store = LocalStore(self.path.parent)
        tiles = (1 << 20, 1 << 20)
        return prove_inverse(
            self.inverse(), self.source, store, {}, {}, ALONE, 1, tiles
        ).num_tensors


def _place(name: str, offset: int, stride: int, dims: int = 2) -> GridPlace:
    return GridPlace(name, offset, (stride, 1)[:dims])


def test_every_flipped_bit_in_what_was_written_is_found(tmp_path: Path) -> None:
    case = Written(tmp_path)
    assert case.prove() == 2
    good = case.path.read_bytes()
    for bit in range(16 * 8, len(good) * 8):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        case.path.write_bytes(data)
        name = "ab"[(bit // 8 - 16) // 12 % 2]
        with pytest.raises(IntegrityError, match=f"do not give the source back.*'{name}'"):
            case.prove()


def test_relations_that_are_not_those_of_the_copy_are_found(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="do not give the source back"):
        Written(tmp_path, wrong=True).prove()


def test_an_element_that_is_used_twice_is_found(tmp_path: Path) -> None:
    case = Written(tmp_path)
    made = case.catalog.tensors["both"]
    rows = [
        Relation((3, 3), _place("a", 0, 3), _place("both", 0, 6)),
        Relation((1, 3), _place("a", 0, 3), _place("both", 18, 6)),
    ]
    twice = replace(made, relations=tuple(rows))
    case.catalog = Catalog("view", {"both": twice})
    with pytest.raises(PlanError, match="an element of 'a' is used twice"):
        case.prove()


@pytest.mark.slow
def test_a_tensor_of_too_many_pieces_is_read_and_compared_with_the_seal(tmp_path: Path) -> None:
    """Its rows are in reverse order: 70,000 relations."""
    number = 70_000
    values = torch.arange(float(number))
    save_file({"a": values}, tmp_path / "s.safetensors")
    source = open_source(tmp_path / "s.safetensors")
    rows = [
        Relation((1,), _place("a", n, 1, 1), _place("r", number - 1 - n, 1, 1))
        for n in range(number)
    ]
    made = assemble("r", (number,), rows, source.catalog.tensors)
    catalog = Catalog("view", {"r": made})
    slots = {"r": (Slot(whole((number,)), "o.bin", 0),)}
    plan = plan_transfer(catalog, Target("raw", {"o.bin": 4 * number}, slots))
    (tmp_path / "o.bin").write_bytes(values.flip(0).numpy().tobytes())
    inverse, tiles = inverse_of(source, catalog, plan, {}), (1 << 20, 1 << 20)
    words = (inverse, source, LocalStore(tmp_path))
    crc = crc64nvme(values.numpy().tobytes())
    proof = prove_inverse(*words, {"a": crc}, {}, ALONE, 1, tiles)
    assert proof.num_tensors == 0 and proof.by_reading == ["a"]
    assert proof.read_nbytes == 4 * number
    with pytest.raises(IntegrityError, match="do not give the source back"):
        prove_inverse(*words, {"a": crc ^ 1}, {}, ALONE, 1, tiles)
    proof = prove_inverse(*words, {}, {}, ALONE, 1, tiles)
    assert proof.num_tensors == 0 and proof.by_reading == ["a"] and not proof.read_nbytes


def test_tied_weights_come_back_under_both_names(tmp_path: Path) -> None:
    """In DCP they are stored once. The source has no fingerprints."""
    tied = torch.randn(8, 8)
    torch.save({"model": {"in.w": tied, "out.w": tied}}, tmp_path / "t.pt")
    result = ckpt_tools.convert(tmp_path / "t.pt", tmp_path / "o", to="dcp")
    assert result.num_proved == 2 and not result.notes


def test_rules_that_keep_the_name_may_follow_each_other(tmp_path: Path) -> None:
    """The stored name, that after the first rule and that of another stored tensor are the same."""
    stored = {f"l.{n}.q": torch.randn(8, 4) for n in range(2)} | {"l.q": torch.randn(3)}
    save_file(stored, tmp_path / "m.safetensors")
    rules = {
        "transpose": [{"match": "l\\.(\\d+)\\.q", "dims": [0, 1]}],
        "stack": [{"match": "l\\.(\\d+)\\.q", "into": "l.0.q", "by": 1}],
        "keep": ["l.q"],
    }
    (tmp_path / "map.json").write_text(json.dumps(rules))
    out = tmp_path / "o.safetensors"
    how = {"to": "safetensors", "key_map": tmp_path / "map.json"}
    result = ckpt_tools.convert(tmp_path / "m.safetensors", out, **how)
    assert result.num_proved == 3 and not result.notes
    got = load_file(out)["l.0.q"]
    assert torch.equal(got, torch.stack([stored["l.0.q"].T, stored["l.1.q"].T]))


def test_interleaved_columns_are_boxes_on_the_way_back(tmp_path: Path) -> None:
    """As single columns, they would be read element by element."""
    columns = [Relation((8, 3), _place("a", 0, 3), GridPlace("g", n, (6, 2))) for n in range(2)]
    assert _cut_further((8, 6), columns) == (8, 3, 2)
    heads = Relation(
        (2, 2, 4, 3), GridPlace("q", 0, (24, 3, 6, 1)), GridPlace("q", 0, (24, 12, 3, 1))
    )
    assert _cut_further((16, 3), [heads]) == (2, 2, 4, 3)
    assert _cut_further((16, 3), [heads.inverse()]) == (2, 4, 2, 3)
    odd = Relation((2, 2), GridPlace("q", 0, (5, 1)), GridPlace("q", 0, (5, 1)))
    assert _cut_further((4, 3), [odd]) == (4, 3)
    torch.save({"g": torch.randn(4, 512, 1024)}, tmp_path / "s.pt")
    rule = {"match": "g", "into": ["a", "b"], "parts": [1, 1], "dim": 2, "interleaved": True}
    (tmp_path / "map.json").write_text(json.dumps({"split": [rule]}))
    how = {"to": "dcp", "ranks": 4, "key_map": tmp_path / "map.json"}
    result = ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "o", **how)
    assert result.num_proved == 1


def test_empty_tensors_are_not_counted(tmp_path: Path) -> None:
    torch.save(
        {"a": torch.zeros(0, 3), "b": torch.zeros(0, 3), "c": torch.ones(2)}, tmp_path / "s.pt"
    )
    rule = {"match": "a", "from": ["a", "b"], "into": "f"}
    (tmp_path / "map.json").write_text(json.dumps({"fuse": [rule], "keep": ["c"]}))
    ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "o", to="dcp", key_map=tmp_path / "map.json")
    manifest = manifest_of(open_source(tmp_path / "o").store)
    assert manifest is not None
    assert manifest.source["proof"]["num_tensors"] == 1 and not manifest.source["proof"]["renamed"]


@pytest.mark.parametrize("verb", ["convert", "merge"])
def test_a_flipped_bit_in_a_sealed_file_without_checksums_is_found_in_a_cast(
    verb: str, tmp_path: Path
) -> None:
    values = torch.randn(64, 64)
    path = tmp_path / "s.safetensors"
    save_file({"a": values, "b": values + 1}, path)
    ckpt_tools.seal(path)
    how = {"to": "safetensors"} if verb == "convert" else {}
    operation = getattr(ckpt_tools, verb)
    result = operation(path, tmp_path / "good.safetensors", dtype="bf16", **how)
    assert any("2 tensors were read twice" in note for note in result.notes)
    data = bytearray(path.read_bytes())
    data[data.index(values.numpy().tobytes()[:64]) + 43] ^= 8
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="'a'"):
        operation(path, tmp_path / "bad.safetensors", dtype="bf16", **how)
    assert not (tmp_path / "bad.safetensors").exists()


def test_a_stock_reader_has_the_same(source: Path, tmp_path: Path) -> None:
    """The map really does what the proof is about."""
    out = tmp_path / "o.safetensors"
    ckpt_tools.convert(source, out, to="safetensors", key_map=tmp_path / "map.json")
    model, got = training_state()["model"], load_file(out)
    rows = model["l.qkv"].view(2, 4, 4, 6)
    assert torch.equal(got["layers.v"], rows[:, 3].reshape(8, 6))
    gate = model["l.gate_up"][1][:, 0::2].T
    assert torch.equal(got["layers.e.1.both"][:5], gate)
