"""Training states as people write them: odd keys, odd orders, odd values. Each case was once
silently wrong, or refused without a reason.
"""

from __future__ import annotations

import argparse
import collections
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict

import ckpt_tools
from ckpt_tools import IntegrityError, PlanError

Run = Callable[..., subprocess.CompletedProcess[str]]
NAMES = ("wte", "mid", "attn")


def trained(
    names: tuple[str, ...] = NAMES, order: tuple[str, ...] = NAMES
) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    """A model of equal shapes, and its optimizer with the parameters in an order of its own."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in names})
    optimizer = torch.optim.AdamW([model[name].weight for name in order], 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        value = torch.randn(4, 8)
        for name in names:
            value = model[name](value)
        value.square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
@pytest.mark.parametrize("source", ["trainer", "dcp"])
def test_numbers_follow_the_order_of_the_optimizer_and_not_of_the_file(
    source: str, order: tuple[str, ...], tmp_path: Path
) -> None:
    model, optimizer = trained(order=order)
    state, moments = get_state_dict(model, optimizer)
    if source == "trainer":
        (tmp_path / "src").mkdir()
        save_file(state, tmp_path / "src" / "model.safetensors", metadata={"format": "pt"})
        torch.save(moments, tmp_path / "src" / "optimizer.bin")
        (tmp_path / "src" / "trainer_state.json").write_text("{}")
    else:
        dcp.save(
            {"model": dict(sorted(state.items())), "optimizer": moments},
            checkpoint_id=tmp_path / "src",
            no_dist=True,
        )
    ckpt_tools.convert(tmp_path / "src", tmp_path / "out.pt", to="torch", optimizer="ids")
    got = torch.load(tmp_path / "out.pt")["optimizer"]
    fresh = torch.optim.AdamW([model[name].weight for name in order])
    fresh.load_state_dict(got)
    for name in NAMES:
        assert torch.equal(
            fresh.state[model[name].weight]["exp_avg"],
            optimizer.state[model[name].weight]["exp_avg"],
        ), name


def test_an_optimizer_by_parameter_is_numbered_only_where_the_order_is_told(tmp_path: Path) -> None:
    model, optimizer = trained()
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=tmp_path / "src", no_dist=True)
    ckpt_tools.convert(tmp_path / "src", tmp_path / "flat", to="dcp", optimizer="flat")
    with pytest.raises(PlanError, match="nothing tells the order of its parameters") as caught:
        ckpt_tools.convert(tmp_path / "flat", tmp_path / "out.pt", to="torch", optimizer="ids")
    assert "--param-order FILE" in (caught.value.hint or "") and not (tmp_path / "out.pt").exists()
    with pytest.raises(PlanError, match="--param-order lacks 'mid.weight'"):
        ckpt_tools.convert(
            tmp_path / "flat",
            tmp_path / "out.pt",
            to="torch",
            optimizer="ids",
            param_order=["wte.weight", "attn.weight"],
        )
    names = [f"{name}.weight" for name in NAMES]
    ckpt_tools.convert(
        tmp_path / "flat", tmp_path / "out.pt", to="torch", optimizer="ids", param_order=names
    )
    got = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
    assert all(
        torch.equal(got[i]["exp_avg"], optimizer.state[model[name].weight]["exp_avg"])
        for i, name in enumerate(NAMES)
    )


KEPT = {
    "b": b"x\xff",
    "ba": bytearray(b"\x00\xfe"),
    "c": 1 - 2j,
    "s": {1, "two", None},
    "dt": torch.bfloat16,
    "dev": torch.device("cuda", 1),
    "cpu": torch.device("cpu"),
    "count": collections.Counter({3: 1, 5: 2}),
    "big": 1 << 127,
    "tuple": (1, b"y"),
}


def test_values_that_torch_loads_with_weights_only_go_along(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "more": KEPT}, tmp_path / "s.pt")
    result = ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "out.pt", to="torch")
    got = torch.load(tmp_path / "out.pt", weights_only=True)["more"]
    assert (
        got == KEPT
        and [type(v) for v in got.values()] == [type(v) for v in KEPT.values()]
        and not result.notes
    )
    ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "dcp", to="dcp")
    state: dict[str, Any] = {"more": dict.fromkeys(KEPT)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert state["more"] == KEPT


def test_tuples_and_keys_that_are_no_texts_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(2)},
        "pair": (torch.ones(1), [torch.zeros(2), ({"x": torch.ones(3)}, 5)]),
        "ema": {
            7: torch.ones(2),
            None: torch.zeros(1),
            2.5: "x",
            (1, "a"): {"deep": torch.ones(1)},
        },
    }
    torch.save(state, tmp_path / "s.pt")
    result = ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "out.pt", to="torch")
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert not result.notes and got["ema"].keys() == state["ema"].keys()
    assert (
        type(got["pair"]) is tuple
        and type(got["pair"][1]) is list
        and type(got["pair"][1][1]) is tuple
    )
    assert torch.equal(got["ema"][1, "a"]["deep"], torch.ones(1)) and got["ema"][2.5] == "x"
    # texts and lists, as DCP itself has them
    ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "dcp", to="dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert set(back["ema"]) == {"7", "None", "2.5", "(1, 'a')"} and type(back["pair"]) is list


def test_numpy_numbers_become_python_s_and_that_is_told(tmp_path: Path) -> None:
    numbers = [
        np.float64(0.1),
        np.float32(0.5),
        np.float16(2),
        np.int64(-(1 << 62)),
        np.uint8(255),
        np.bool_(True),
    ]
    torch.save(
        {"model": {"w": torch.ones(2)}, "best": numbers[0], "all": [1.0, *numbers]},
        tmp_path / "s.pt",
    )
    result = ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "out.pt", to="torch")
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (
        got["best"] == 0.1
        and got["all"] == [1.0, *(n.item() for n in numbers)]
        and type(got["all"][1]) is float
    )
    assert any("NumPy numbers: 2, read as Python's" in note for note in result.notes)


def test_a_numpy_number_of_another_order_of_bytes_is_named_and_not_misread(tmp_path: Path) -> None:
    odd = np.array([1.5], ">f8")[0]
    swapped = np.frombuffer(np.array([1.5], ">f8").tobytes(), np.dtype(">f8"))
    torch.save(
        {
            "model": {"w": torch.ones(2)},
            "odd": np.dtype(">f8").type(odd),
            "scalar": _big_endian(swapped),
        },
        tmp_path / "s.pt",
    )
    result = ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "out.pt", to="torch")
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert got["odd"] == 1.5 and "scalar" not in got
    assert any("scalar (numpy.generic)" in note for note in result.notes)


class _big_endian:
    """Pickles as a NumPy number whose dtype has the other order of bytes."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __reduce__(self) -> Any:
        return np.float64(1).__reduce__()[0], (np.dtype(">f8"), self.values.tobytes())


def test_what_stays_behind_is_named_and_leaves_a_gap_and_no_shift(
    tmp_path: Path, ckpt: Run
) -> None:
    state = {
        "model": {"w": torch.ones(2)},
        "args": argparse.Namespace(lr=1),
        "arr": np.arange(3),
        "layout": torch.strided,
        "tl": [torch.zeros(1), np.arange(2), torch.ones(1)],
        "rng": np.random.get_state(),
        "frozen": frozenset([1]),
    }
    torch.save(state, tmp_path / "s.pt")
    for words in (
        ["convert", "out.pt", "--to", "torch"],
        ["convert", "out", "--to", "dcp"],
        ["reshard", "out2", "--to", "2"],
    ):
        done = ckpt(words[0], tmp_path / "s.pt", tmp_path / words[1], *words[2:])
        assert done.returncode == 0
        for name in (
            "args (argparse.Namespace)",
            "arr (numpy.ndarray)",
            "layout (torch.layout)",
            "tl.1 (numpy.ndarray)",
            "rng.1",
            "frozen",
        ):
            assert name in done.stdout, (name, done.stdout)
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    assert [type(item) for item in got["tl"]] == [torch.Tensor, type(None), torch.Tensor] and got[
        "tl"
    ][2].item() == 1
    assert "layout" not in got and got["rng"][1] is None and got["rng"][0] == "MT19937"


def test_a_weight_that_is_no_tensor_is_named_by_each_verb(tmp_path: Path, ckpt: Run) -> None:
    torch.save(
        {"model": {"w": torch.ones(2), "b": np.arange(3.0, dtype=np.float32)}, "h": np.arange(3)},
        tmp_path / "a.pt",
    )
    torch.save(
        {"model": {"w": torch.ones(2), "b": np.arange(3.0, dtype=np.float32)}, "h": np.arange(9)},
        tmp_path / "b.pt",
    )
    done = ckpt("merge", tmp_path / "a.pt", tmp_path / "m.safetensors")
    assert "stay behind: model.b (numpy.ndarray), h (numpy.ndarray)" in done.stdout
    done = ckpt("salvage", tmp_path / "a.pt", tmp_path / "saved")
    assert "lost: 2 entries" in done.stdout and "model.b" in done.stdout
    done = ckpt("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert (
        "not compared, since their types are not known: model.b (numpy.ndarray), h (numpy.ndarray)"
        in done.stdout
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "key",
    ["opt", "optG", "g_optimizer", "adam", "muon", "solver", "optimizer_state_dict", "optim_g"],
)
@pytest.mark.parametrize("model_key", ["net", "model"])
def test_an_optimizer_is_known_by_what_it_holds_and_not_by_its_key(
    model_key: str, key: str, tmp_path: Path
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(257):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    torch.save({model_key: model.state_dict(), key: optimizer.state_dict()}, tmp_path / "s.pt")
    ckpt_tools.convert(
        tmp_path / "s.pt", tmp_path / "out.pt", to="torch", dtype="bf16", optimizer="ids"
    )
    got = torch.load(tmp_path / "out.pt")
    assert (
        got[key]["state"][0]["step"].item() == 257
        and got[key]["state"][0]["exp_avg"].dtype == torch.float32
    )
    assert got[model_key]["weight"].dtype == torch.bfloat16
    ckpt_tools.merge(tmp_path / "s.pt", tmp_path / "m.safetensors")
    assert sorted(load_file(tmp_path / "m.safetensors")) == ["bias", "weight"]


def test_two_models_and_an_optimizer_keep_their_names(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save(
        {
            "generator": model.state_dict(),
            "discriminator": model.state_dict(),
            "optG": optimizer.state_dict(),
        },
        tmp_path / "s.pt",
    )
    ckpt_tools.merge(tmp_path / "s.pt", tmp_path / "m.safetensors")
    assert sorted(load_file(tmp_path / "m.safetensors")) == [
        f"{m}.{p}" for m in ("discriminator", "generator") for p in ("bias", "weight")
    ]


def test_names_of_parameters_are_those_within_the_model_whatever_its_key(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    torch.save({"net": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "s.pt")
    ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "out.pt", to="torch")
    assert set(torch.load(tmp_path / "out.pt")["optimizer"]["state"]) == {"weight", "bias"}


def test_a_sealed_checkpoint_of_another_tool_is_still_that_tool_s(
    tmp_path: Path, ckpt: Run
) -> None:
    for step in (100, 200):
        dcp.save(
            {"w": torch.ones(3) * step}, checkpoint_id=tmp_path / f"step-{step:08d}", no_dist=True
        )
        ckpt_tools.seal(tmp_path / f"step-{step:08d}")
    done = ckpt("prune", tmp_path, "--keep-last", 1)
    assert (
        done.returncode == 0
        and "nothing to remove" in done.stdout
        and len(list(tmp_path.iterdir())) == 2
    )


@pytest.mark.parametrize(
    "name",
    [
        "q.lora_magnitude_vector",
        "lm_head.modules_to_save.default.weight",
        "e.lora_embedding_A.default",
    ],
)
def test_an_adapter_with_more_than_matrices_is_not_written_in_part(
    name: str, tmp_path: Path
) -> None:
    state = {
        "base_model.model.q.lora_A.default.weight": torch.ones(2, 4),
        "base_model.model.q.lora_B.default.weight": torch.ones(4, 2),
    }
    torch.save({"model": {**state, f"base_model.model.{name}": torch.ones(3)}}, tmp_path / "s.pt")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    with pytest.raises(PlanError, match="something else than LoRA matrices") as caught:
        ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "out", to="peft", base=tmp_path / "base")
    assert "save_pretrained" in (caught.value.hint or "") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "value",
    [
        collections.defaultdict(list, loss=[1.0]),
        collections.deque([1]),
        np.random.default_rng(1).bit_generator.state,
        nn.Linear(2, 2),
    ],
    ids=["defaultdict", "deque", "PCG64", "module"],
)
def test_values_of_other_types_are_left_and_do_not_make_a_file_malformed(
    value: Any, tmp_path: Path
) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "more": value}, tmp_path / "s.pt")
    report = ckpt_tools.inspect(tmp_path / "s.pt")
    assert report.by_key["model"].num_tensors == 1
    ckpt_tools.merge(tmp_path / "s.pt", tmp_path / "m.safetensors")
    assert load_file(tmp_path / "m.safetensors")["w"].tolist() == [1, 1]


@pytest.mark.parametrize("form", ["groups", "flat"])
def test_an_optimizer_with_one_state_for_all_goes_along_or_is_refused_and_never_renamed(
    form: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 2)) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "s.pt"
    )
    with pytest.raises(PlanError, match="the state of 'optimizer' is not by parameter"):
        ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "out", to="dcp", optimizer=form)
    ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "out.pt", to="torch")
    again = torch.optim.LBFGS(model.parameters())
    again.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"])
    mine, theirs = (o.state[o.param_groups[0]["params"][0]] for o in (optimizer, again))
    assert mine["n_iter"] == theirs["n_iter"] and torch.equal(
        torch.stack(mine["old_dirs"]), torch.stack(theirs["old_dirs"])
    )


def test_a_whole_module_is_explained(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "s.pt")
    with pytest.raises(ckpt_tools.FormatError) as caught:
        ckpt_tools.inspect(tmp_path / "s.pt")
    assert "save its state_dict()" in (caught.value.hint or "")


def test_leftovers_of_an_older_save_are_refused_by_seal(tmp_path: Path) -> None:
    values = {f"w{i}": torch.randn(3, 3) for i in range(6)}
    for state in (values, {key: values[key] for key in ("w0", "w1")}):
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(tmp_path / "s", single_file_per_rank=False),
            no_dist=True,
        )
    with pytest.raises(PlanError, match="look like parts of the checkpoint, but are not") as caught:
        ckpt_tools.seal(tmp_path / "s")
    assert (
        "move them away" in (caught.value.hint or "")
        and ckpt_tools.verify(tmp_path / "s").problems == []
    )


@pytest.mark.parametrize(
    "name",
    [
        "finetuned.safetensors",
        "notes.txt",
        "more.safetensors.index.json",
        "model.safetensors.index.json",
        "sub/deep.safetensors",
        "x.ckpt.manifest.0a1b2c3d.json",
    ],
)
@pytest.mark.parametrize("is_sealed", [True, False])
def test_overwrite_removes_nothing_but_the_checkpoint(
    name: str, is_sealed: bool, tmp_path: Path
) -> None:
    dcp.save({"w": torch.ones(30)}, checkpoint_id=tmp_path / "src", no_dist=True)
    if is_sealed:
        ckpt_tools.reshard(tmp_path / "src", tmp_path / "dst", to_ranks=3)
    else:
        dcp.save({"w": torch.ones(30)}, checkpoint_id=tmp_path / "dst", no_dist=True)
    (tmp_path / "dst" / "sub").mkdir()
    (tmp_path / "dst" / name).write_bytes(b"the only copy")
    with pytest.raises(
        ckpt_tools.StorageError, match="holds files that --overwrite never replaces"
    ):
        ckpt_tools.reshard(tmp_path / "src", tmp_path / "dst", to_ranks=2, overwrite=True)
    assert (tmp_path / "dst" / name).read_bytes() == b"the only copy"
    (tmp_path / "dst" / name).unlink()
    ckpt_tools.reshard(tmp_path / "src", tmp_path / "dst", to_ranks=2, overwrite=True)
    assert ckpt_tools.verify(tmp_path / "dst").is_sealed


def test_a_forged_manifest_does_not_have_a_user_s_files_deleted(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(30)}, checkpoint_id=tmp_path / "src", no_dist=True)
    ckpt_tools.reshard(tmp_path / "src", tmp_path / "dst", to_ranks=1)
    (tmp_path / "dst" / "thesis.docx").write_bytes(b"years of work")
    (path,) = (tmp_path / "dst").glob("*.json")
    manifest = ckpt_tools.publish.manifest.parse_manifest(path.read_bytes(), "m")
    forged = {
        **manifest.files,
        "thesis.docx": manifest.files["__0_0.distcp"]._replace(nbytes=13, ranges=()),
    }
    path.write_bytes(
        ckpt_tools.publish.manifest.Manifest(
            **{f: getattr(manifest, f) for f in manifest.__slots__} | {"files": forged}
        ).render()
    )
    with pytest.raises(ckpt_tools.StorageError, match=r"thesis\.docx"):
        ckpt_tools.reshard(tmp_path / "src", tmp_path / "dst", to_ranks=2, overwrite=True)
    assert (tmp_path / "dst" / "thesis.docx").read_bytes() == b"years of work"


def test_what_accelerate_loads_is_by_name(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
        tmp_path / "s.pt",
    )
    for form in ("ids", "flat"):
        with pytest.raises(PlanError, match="Accelerate names the parameters"):
            ckpt_tools.convert(tmp_path / "s.pt", tmp_path / "out", to="accelerate", optimizer=form)


@pytest.mark.parametrize(
    "words", [["inspect"], ["verify"], ["merge"], ["copy"], ["diff"], ["convert", "--to", "dcp"]]
)
def test_shapes_that_nothing_needs_are_refused(words: list[str], tmp_path: Path, ckpt: Run) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "s.pt")
    (tmp_path / "shapes.json").write_text('{"w": [2]}')
    places = {
        "inspect": [],
        "verify": [],
        "diff": ["s.pt"],
        "merge": ["m.safetensors"],
        "copy": ["c.pt"],
        "convert": ["out"],
    }
    done = ckpt(
        words[0], "s.pt", *places[words[0]], *words[1:], "--shapes", "shapes.json", cwd=tmp_path
    )
    assert done.returncode == 13 and "the files have the shapes of all parameters" in done.stderr, (
        done
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.pt", "shapes.json"]


def test_names_of_wrappers_go_where_names_are_all_there_is(tmp_path: Path) -> None:
    torch.save({"module.0.weight": torch.ones(1)}, tmp_path / "b.pt")
    torch.save({"_orig_mod.module.0.weight": torch.ones(1)}, tmp_path / "c.pt")
    for source, note in (("b.pt", "module. (1)"), ("c.pt", "_orig_mod.module. (1)")):
        result = ckpt_tools.convert(tmp_path / source, tmp_path / f"out{source}", to="torch")
        assert list(torch.load(tmp_path / f"out{source}")) == ["0.weight"] and any(
            f"stripped from names: {note}" in n for n in result.notes
        )
        ckpt_tools.convert(tmp_path / source, tmp_path / f"dcp-{source[0]}", to="dcp")
        assert list(
            dcp.FileSystemReader(tmp_path / f"dcp-{source[0]}").read_metadata().state_dict_metadata
        ) == ["0.weight"]
    ckpt_tools.convert(tmp_path / "b.pt", tmp_path / "kept.pt", to="torch", keep_prefix=True)
    assert ckpt_tools.diff(tmp_path / "b.pt", tmp_path / "kept.pt").is_same


def test_a_copy_has_the_suffix_by_which_its_source_is_known(tmp_path: Path, ckpt: Run) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    done = ckpt("copy", tmp_path / "x.pt", tmp_path / "name")
    assert (
        done.returncode == 13
        and "expected a name that ends in .pt" in done.stderr
        and not (tmp_path / "name").exists()
    )


def test_hostile_numbers_of_a_pickle_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "more": [1 << (8 * 80)]}, tmp_path / "s.pt")
    with pytest.raises(ckpt_tools.FormatError):
        ckpt_tools.inspect(tmp_path / "s.pt")
    with pytest.raises((IntegrityError, PlanError, ckpt_tools.CheckpointError)):
        ckpt_tools.verify(tmp_path / "s.pt", quick=True, deep=True)
