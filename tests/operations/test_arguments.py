"""The arguments of the public functions: what is misspelt or of a wrong type ends in an error, and
nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import PlanError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save({"model": {"w": torch.arange(5.0), "v": torch.ones(2)}}, tmp_path / "s.pt")
    return tmp_path / "s.pt"


@pytest.mark.parametrize(
    ("verb", "words", "given", "nearest"),
    [
        ("merge", ["m.safetensors"], {"dtyp": "bf16"}, "dtype"),
        ("merge", ["m.safetensors"], {"dryrun": True}, "dry_run"),
        ("reshard", ["out"], {"to_ranks": 2, "job": 3}, "jobs"),
        ("convert", ["out"], {"to": "dcp", "dryrun": True}, "dry_run"),
        ("convert", ["out"], {"to": "dcp", "model_olny": True}, "model_only"),
        ("copy", ["c.pt"], {"dry-run": True}, "dry_run"),
        ("salvage", ["out"], {"overwrit": True}, "overwrite"),
        ("verify", [], {"deeep": True}, "deep"),
        ("verify", [], {"overwrite": True}, ""),
        ("seal", [], {"dry_run": True}, ""),
        ("inspect", [], {"shape": "x"}, "shapes"),
        ("diff", ["s.pt"], {"tolerance": 1.0}, ""),
    ],
)
def test_a_keyword_that_is_none_is_refused(
    verb: str, words: list[str], given: Any, nearest: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(TypeError) as caught:
        getattr(ckpt_tools, verb)(source, *(tmp_path / word for word in words), **given)
    assert f"{verb}() has no argument" in str(caught.value)
    assert (
        f"did you mean {nearest!r}?" in str(caught.value)
        if nearest
        else "it has: " in str(caught.value)
    )
    assert [p.name for p in tmp_path.iterdir()] == ["s.pt"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s, d: ckpt_tools.reshard(s, d, to_ranks="4"),
            "reshard: to_ranks must be a whole number of at least 1; got '4' of type str",
        ),
        (lambda s, d: ckpt_tools.reshard(s, d, to_ranks=True), "to_ranks must be a whole number"),
        (
            lambda s, d: ckpt_tools.reshard(s, d, to_ranks=0),
            "to_ranks must be a whole number of at least 1; got 0",
        ),
        (
            lambda s, d: ckpt_tools.reshard(s, d, to_ranks=2, from_ranks=1.0),
            "from_ranks must be a whole number",
        ),
        (
            lambda s, d: ckpt_tools.merge(s, d, select="w"),
            "select must be a list of texts; got 'w' of type str",
        ),
        (lambda s, d: ckpt_tools.merge(s, d, select=[1]), "select must be a list of texts"),
        (
            lambda s, d: ckpt_tools.merge(s, d, dtype=16),
            "dtype must be bf16, fp16, fp32, fp64, or a dtype of torch; got 16",
        ),
        (
            lambda s, d: ckpt_tools.merge(s, d, overwrite="no"),
            "overwrite must be True or False; got 'no'",
        ),
        (lambda s, d: ckpt_tools.merge(s, d, jobs=0), "jobs must be a whole number of at least 1"),
        (lambda s, d: ckpt_tools.merge(s, d, jobs=-1), "jobs must be a whole number of at least 1"),
        (
            lambda s, d: ckpt_tools.merge("", d),
            "src must be a path or a URL that is not empty; got ''",
        ),
        (lambda s, d: ckpt_tools.merge(None, d), "src must be a path or a URL"),
        (lambda s, d: ckpt_tools.merge(s, ""), "dst must be a path or a URL that is not empty"),
        (lambda s, d: ckpt_tools.convert(s, d, to=None), "to must be a text"),
        (lambda s, d: ckpt_tools.convert(s, d, to="dcp", settings=[1]), "settings must be a dict"),
        (
            lambda s, d: ckpt_tools.diff(s, s, atol=float("nan")),
            "atol must be a number, at least 0 and finite; got nan",
        ),
        (lambda s, d: ckpt_tools.diff(s, s, rtol="1e-3"), "rtol must be a number"),
        (lambda s, d: ckpt_tools.verify(s, storage_options="x"), "storage_options must be a dict"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused(
    call: Callable[[Path, str], object], message: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as caught:
        call(source, str(tmp_path / "m.safetensors"))
    assert message in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["s.pt"]


def test_a_dtype_of_torch_is_one_by_name(source: Path, tmp_path: Path) -> None:
    for number, dtype in enumerate((torch.bfloat16, "bfloat16", "bf16")):
        ckpt_tools.merge(source, tmp_path / f"{number}.safetensors", dtype=dtype)
        assert load_file(tmp_path / f"{number}.safetensors")["w"].dtype == torch.bfloat16
    with pytest.raises(PlanError, match="cannot cast to 'int32'"):
        ckpt_tools.merge(source, tmp_path / "no.safetensors", dtype=torch.int32)


def test_an_empty_path_is_refused_by_the_command(
    source: Path, tmp_path: Path, ckpt: Callable[..., Any]
) -> None:
    for words in (
        ("merge", "", tmp_path / "m.safetensors"),
        ("merge", source, ""),
        ("inspect", ""),
        ("verify", ""),
        ("diff", source, ""),
    ):
        done = ckpt(*words)
        assert (
            done.returncode == PlanError.exit_code
            and "must be a path or a URL that is not empty" in done.stderr
        ), words


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda root: ckpt_tools.prune(root, keep_lst=1), "keep_last"),
        (lambda root: ckpt_tools.steps(root, storage_option={}), "storage_options"),
        (lambda root: ckpt_tools.latest(root, vrify=True), "verify"),
        (lambda root: ckpt_tools.open(root, storage_option={}), "storage_options"),
        (lambda root: ckpt_tools.save(root / "x", {}, overwrit=True), "overwrite"),
        (lambda root: ckpt_tools.load(root, {}, strct=True), "strict"),
        (lambda root: ckpt_tools.CheckpointManager(root, keep_lat=1), "keep_last"),
    ],
)
def test_a_misspelt_argument_of_the_loop_is_named_with_the_nearest(call, meant, tmp_path) -> None:
    with pytest.raises(TypeError, match=f"did you mean '{meant}'"):
        call(tmp_path)
    assert not any(tmp_path.iterdir())


def test_misspelt_arguments_of_a_manager_s_calls_are_named(tmp_path) -> None:
    state = {"step": 1}
    with ckpt_tools.CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match="did you mean 'asynchronous'"):
            checkpoints.save(1, state, asynchronus=True)
        with pytest.raises(TypeError, match="did you mean 'step'"):
            checkpoints.resume(state, stp=1)
        with pytest.raises(TypeError, match="expected an integer"):
            checkpoints.resume(state, step="3")
        with pytest.raises(PlanError, match="strict must be True or False"):
            checkpoints.resume(state, strict="no")


NO_PATHS = {
    "steps": lambda path: ckpt_tools.steps(path),
    "latest": lambda path: ckpt_tools.latest(path),
    "prune": lambda path: ckpt_tools.prune(path, 1),
    "thin": lambda path: ckpt_tools.thin(path, 1),
    "check_run": lambda path: ckpt_tools.check_run(path),
    "du": lambda path: ckpt_tools.du(path),
    "open": lambda path: ckpt_tools.open(path),
    "load": lambda path: ckpt_tools.load(path, {"a": 1}),
    "save": lambda path: ckpt_tools.save(path, {"a": 1}, overwrite=True),
    "manager": lambda path: ckpt_tools.CheckpointManager(path),
    "average": lambda path: ckpt_tools.average(path, "x.safetensors", last=2),
}


@pytest.mark.parametrize("path", ["", b"run"])
@pytest.mark.parametrize("name", NO_PATHS)
def test_an_empty_path_is_not_the_present_directory(
    name: str, path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ckpt prune "$RUN"` with an empty variable removed the steps of the present directory."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2, 3):
        ckpt_tools.save(f"step-0000000{step}", {"model": {"a": torch.ones(2)}})
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(PlanError, match="a path or a URL that is not empty"):
        NO_PATHS[name](path)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before
