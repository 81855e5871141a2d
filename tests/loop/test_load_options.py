"""What a user declares on load: other shapes, other names, a part."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import lr_scheduler

import ckpt_tools
from ckpt_tools import CheckpointManager, PlanError, RngState
from tests.jobs import open_files
from tests.loop.states import roundtrip, same_state, same_state_of, step


def embeddings(num: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(num)
    model = nn.ModuleDict({"embed": nn.Embedding(num, 3), "head": nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer)
    return model, optimizer


def test_a_larger_vocabulary_is_loaded_as_declared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (saved, a), (now, b) = embeddings(5), embeddings(7)
    before = now["embed"].weight.detach().clone()
    with pytest.raises(PlanError, match="shapes differ: 3") as caught:
        roundtrip(tmp_path, {"model": saved, "optimizer": a}, {"model": now, "optimizer": b})
    assert "on_mismatch={'model.embed.weight': 'grow' or 'skip'}" in (caught.value.hint or "")
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume({"model": now, "optimizer": b}, on_mismatch={"*embed*": "grow"})
    assert torch.equal(now["embed"].weight[:5], saved["embed"].weight) and torch.equal(
        now["embed"].weight[5:], before[5:]
    )
    assert torch.equal(now["head"].weight, saved["head"].weight)
    moments = b.state[now["embed"].weight]["exp_avg"]
    assert torch.equal(
        moments[:5], a.state[saved["embed"].weight]["exp_avg"]
    ) and moments.shape == (7, 3)
    assert (
        "model.embed.weight: the checkpoint has [5, 3], the state [7, 3]: its elements are loaded"
        in caplog.text
    )


def test_a_changed_shape_is_skipped_or_made_by_a_function_and_nothing_else(tmp_path: Path) -> None:
    (saved, _), (now, _) = embeddings(5), embeddings(4)
    before = now["embed"].weight.detach().clone()
    roundtrip(tmp_path, {"model": saved}, {"model": now}, on_mismatch={"model.embed*": "skip"})
    assert torch.equal(now["embed"].weight, before) and torch.equal(
        now["head"].weight, saved["head"].weight
    )
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(
            {"model": now},
            on_mismatch={"model.embed*": lambda stored, shape: stored[: shape[0]] * 2},
        )
        assert torch.equal(now["embed"].weight, saved["embed"].weight[:4] * 2)
        for how, message in (
            ("grow", "cannot grow 'model.embed.weight'"),
            (lambda stored, shape: stored, r"returned \[5, 3\]"),
            ("refuse", "shapes differ: 1"),
        ):
            with pytest.raises(PlanError, match=message):
                checkpoints.resume({"model": now}, on_mismatch={"model.embed*": how})
        with pytest.raises(
            ValueError, match="expected 'grow', 'skip', 'refuse' or a function, got 'grwo'"
        ):
            checkpoints.resume({"model": now}, on_mismatch={"model.embed*": "grwo"})


def test_names_that_changed_are_mapped_on_load(tmp_path: Path) -> None:
    (saved, a), (now, b) = embeddings(5), embeddings(6)
    now = nn.ModuleDict({"tokens": nn.Embedding(5, 3), "head": nn.Linear(3, 2)})
    b = torch.optim.AdamW(now.parameters(), lr=7.0)
    roundtrip(
        tmp_path,
        {"model": saved, "optimizer": a},
        {"model": now, "optimizer": b},
        rename={r"embed\.": "tokens."},
    )
    assert torch.equal(now["tokens"].weight, saved["embed"].weight) and same_state(a, b)


def test_a_glob_or_a_name_that_matches_nothing_is_an_error_with_the_nearest_names(
    tmp_path: Path,
) -> None:
    model = nn.Linear(2, 2)
    state = {"model": model, "rng": RngState()}
    roundtrip(tmp_path, dict(state), dict(state))
    with CheckpointManager(tmp_path) as checkpoints:
        for options, message in (
            (
                {"select": ["model.*", "modle.weight"]},
                "select matches none of 3 names: 'modle.weight'",
            ),
            ({"on_mismatch": {"modle*": "grow"}}, "on_mismatch matches none of 2 names: 'modle"),
            ({"rename": {"modle": "model"}}, "rename matches none of 3 names: 'modle'"),
        ):
            with pytest.raises(PlanError, match=re.escape(message)) as caught:
                checkpoints.resume(dict(state), **options)  # type: ignore[arg-type]
            assert "model." in (caught.value.hint or "")
        with pytest.raises(TypeError, match="select: expected a list of globs, got 'model"):
            checkpoints.resume(dict(state), select="model.*")
        torch.manual_seed(9)
        checkpoints.resume(state, select=["rng"])  # a value of each rank has a name, too
        assert torch.initial_seed() != 9


def test_a_state_that_is_skipped_is_skipped_whole(tmp_path: Path) -> None:
    def make(num: int) -> tuple[Any, torch.optim.Optimizer]:
        model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, num)})
        return model, torch.optim.AdamW(model.parameters())

    (model, optimizer), (now, other) = make(2), make(3)
    step(optimizer, 5)
    roundtrip(
        tmp_path,
        {"model": model, "opt": optimizer},
        {"model": now, "opt": other},
        on_mismatch={"*head*": "skip"},
    )
    # and no step of an older one
    assert now["head"].weight not in other.state and now["head"].bias not in other.state
    assert same_state_of(other, optimizer, [(now["body"].weight, model["body"].weight)])


@pytest.mark.parametrize(
    "rules",
    [
        {r"^model\.embed\.": "model.tokens."},
        {
            r"^model\.embed\.": "model.tokens.",
            r"^optimizer\.state\.embed\.": "optimizer.state.tokens.",
        },
    ],
)
def test_rules_for_names_may_be_anchored(rules: dict[str, str], tmp_path: Path) -> None:
    saved, a = embeddings(5)
    now = nn.ModuleDict({"tokens": nn.Embedding(5, 3), "head": nn.Linear(3, 2)})
    b = torch.optim.AdamW(now.parameters(), lr=7.0)
    roundtrip(
        tmp_path, {"model": saved, "optimizer": a}, {"model": now, "optimizer": b}, rename=rules
    )
    assert torch.equal(now["tokens"].weight, saved["embed"].weight) and same_state(a, b)


@pytest.mark.parametrize(
    ("pattern", "new"), [("(", "a"), ("", "a"), ("embed", r"\2"), ("em(b)ed", r"\g<")]
)
def test_a_malformed_rule_is_refused_by_name(pattern: str, new: str, tmp_path: Path) -> None:
    (saved, _), (now, _) = embeddings(5), embeddings(5)
    with pytest.raises(PlanError, match="rename .*: not a regular expression and its replacement"):
        roundtrip(tmp_path, {"model": saved}, {"model": now}, rename={pattern: new})


def test_a_function_that_makes_another_type_is_refused(tmp_path: Path) -> None:
    (saved, _), (now, _) = embeddings(5), embeddings(4)
    with pytest.raises(
        PlanError, match="returned torch.float64 for 'model.embed.weight': expected torch.float32"
    ):
        roundtrip(
            tmp_path,
            {"model": saved},
            {"model": now},
            on_mismatch={"*embed*": lambda _, shape: torch.zeros(shape, dtype=torch.float64)},
        )


def test_a_dict_of_tensors_takes_weights_that_have_another_prefix(tmp_path: Path) -> None:
    """`{"model": {"model.norm": …}}` and a file with `model.norm`: nothing is a value to replace."""
    weights = {f"model.layers.{i}.weight": torch.full((3,), float(i)) for i in range(4)}
    save_file(weights, tmp_path / "model.safetensors")
    for key in ("model", "weights"):
        mine = {name: torch.zeros(3) for name in weights}
        held = dict(mine)
        ckpt_tools.load(tmp_path / "model.safetensors", {key: mine})
        assert all(torch.equal(held[name], weights[name]) for name in weights)
        assert all(mine[name] is held[name] for name in weights)
    more = {**{name: torch.zeros(3) for name in weights}, "model.other": torch.zeros(3)}
    with pytest.raises(PlanError, match="model.model.other"):
        ckpt_tools.load(tmp_path / "model.safetensors", {"model": more})


def test_a_load_that_fails_leaves_no_file_open(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)})
    with pytest.raises(PlanError):
        ckpt_tools.load(tmp_path / "step-00000001", {"w": torch.ones(4)})
    gc.collect()  # of the exception and its frames
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("keys", [("model", "teacher"), ("net", "teacher")])
def test_a_module_that_was_not_saved_does_not_get_the_values_of_another(
    keys: tuple[str, str], tmp_path: Path
) -> None:
    """It has the same names as the saved one, but for its key."""
    saved = nn.Linear(3, 3)
    ckpt_tools.save(tmp_path / "p", {"model": saved})
    save_file(dict(saved.state_dict()), tmp_path / "w.safetensors")
    for source in ("p", "w.safetensors"):
        state = {key: nn.Linear(3, 3) for key in keys}
        before = [p.clone() for p in state["teacher"].parameters()]
        with pytest.raises(PlanError, match=r"missing from the checkpoint: [24]\n"):
            ckpt_tools.load(tmp_path / source, state)
        assert all(map(torch.equal, before, state["teacher"].parameters()))
        assert ckpt_tools.load(tmp_path / source, {keys[1]: state["teacher"]}).notes
        assert torch.equal(state["teacher"].weight, saved.weight)


def test_a_state_that_is_no_dict_is_refused_before_anything_else(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(PlanError, match="a state is a dict, got a Linear"),
    ):
        checkpoints.resume(model)  # also in a new run
    with pytest.raises(PlanError, match="a state is a dict, got a Linear"):
        ckpt_tools.load(tmp_path / "nothing", model)


def test_an_empty_state_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        with pytest.raises(PlanError, match="the state is empty"):
            checkpoints.save(1, {})
        with pytest.raises(PlanError, match="the state is empty"):
            checkpoints.resume({})
    for call in (ckpt_tools.save, ckpt_tools.load):
        with pytest.raises(PlanError, match="the state is empty"):
            call(tmp_path / "one", {})
    assert not (tmp_path / "one").exists() and not list((tmp_path / "run").glob("step-*"))


def _with_scheduler(make: Callable[[torch.optim.Optimizer], Any]) -> dict[str, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    return {"scheduler": make(optimizer)}


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 10), ""),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 99), "T_max = 10 is loaded, in place of 99"),
        (
            lambda o: lr_scheduler.StepLR(o, 3),
            "only one of the two has T_max, eta_min, gamma, step",
        ),
    ],
)
def test_a_scheduler_of_other_arguments_or_of_another_class_is_told(
    now: Callable[[torch.optim.Optimizer], Any],
    told: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`load_state_dict` takes every attribute, so a longer run would go on with the old length."""
    with CheckpointManager(tmp_path) as checkpoints:
        before = _with_scheduler(lambda o: lr_scheduler.CosineAnnealingLR(o, 10))
        checkpoints.save(1, before, asynchronous=False)
        caplog.clear()
        checkpoints.resume(_with_scheduler(now))
    notes = [r.getMessage() for r in caplog.records if "scheduler" in r.getMessage()]
    assert (told in notes[0] if told else not notes) and len(notes) == bool(told), notes


def test_a_value_per_rank_that_is_new_is_said_to_be_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"n": 1}, asynchronous=False)
        assert checkpoints.resume({"n": 0, "rng": RngState()}) == 1
    assert "rng is not in the checkpoint; reset: every rank keeps its own" in caplog.text
