"""A save that reuses what it knows of the state before writes what torch's own functions export.

Each case changes a state between two saves in one way, and compares with torch's export.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.subclasses import WrapperSubclass

from ckpt_tools import CheckpointManager, Writing
from ckpt_tools.loop.state import state_dict as exporting
from ckpt_tools.loop.state.modules import module_state
from tests.loop.cached_states import Values, check, expected, made, parameter, train
from tests.states import one_step
from tests.stock import assert_stock_torch_reads


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Every module whose state dict is asked for by a save."""
    asked: list[nn.Module] = []

    def export(module: nn.Module) -> Any:
        asked.append(module)
        return module_state(module)

    monkeypatch.setattr(exporting, "module_state", export)
    return asked


def test_a_loop_that_only_trains_asks_torch_once(tmp_path: Path, calls: list[nn.Module]) -> None:
    state = made()
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step in range(1, 5):
            state["optimizer"].param_groups[0]["lr"] = 0.1 / step
            checkpoints.save(step, state)
            wanted = expected(state)
            checkpoints.wait()
            check(tmp_path / f"step-{step:08d}", wanted)
            train(state)
    assert len(calls) == 1


def replace_parameter(state: Values) -> None:
    old, new = parameter(state), nn.Parameter(torch.full((4, 4), 7.0))
    state["model"][0].first.weight = new
    group = state["optimizer"].param_groups[0]
    group["params"] = [new if p is old else p for p in group["params"]]
    state["optimizer"].state[new] = state["optimizer"].state.pop(old)


def rename_layer(state: Values) -> None:
    block = state["model"][0]
    block._modules["third"] = block._modules.pop("first")
    block.forward = lambda values: block.second(torch.relu(block.third(values)))


def swap_layers(state: Values) -> None:
    model = state["model"]
    model._modules["0"], model._modules["1"] = model._modules["1"], model._modules["0"]


def replace_buffer(state: Values) -> None:
    state["model"][0].count = torch.full((2,), 9.0)


def save_the_scratch(state: Values) -> None:
    state["model"][0]._non_persistent_buffers_set.clear()


def hook(state: Values) -> None:
    def double(module: nn.Module, found: Values, prefix: str, _: Values) -> None:
        found[f"{prefix}count"] = found[f"{prefix}count"] * 2

    state["model"][0]._register_state_dict_hook(double)


def hook_before(state: Values) -> None:
    state["model"][0].register_state_dict_pre_hook(
        lambda module, prefix, keep: module.count.fill_(5.0)
    )


def override(state: Values) -> None:
    block = state["model"][0]
    original = block.state_dict

    def state_dict(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        found[f"{kwargs.get('prefix', '')}count"] = torch.full((2,), 3.0)
        return found

    block.state_dict = state_dict


def extra_state(state: Values) -> None:
    state["model"][0].second.register_buffer("more", torch.ones(2))


class Doubled(nn.Linear):
    """Saves twice its weight."""

    def _save_to_state_dict(self, destination: Values, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"] * 2


def other_class(state: Values) -> None:
    state["model"][0].first.__class__ = Doubled


def other_memory(state: Values) -> None:
    parameter(state).data = torch.full((4, 4), 2.0)


def transposed(state: Values) -> None:
    parameter(state).data = parameter(state).data.t()


def shorter(state: Values) -> None:
    state["mean"].data = state["mean"].data[:2]


def other_type(state: Values) -> None:
    state["model"].to(torch.float64)


def tied(state: Values) -> None:
    state["model"][1].first.weight = parameter(state)
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())


def other_optimizer(state: Values) -> None:
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), momentum=0.9)


def other_model(state: Values) -> None:
    state |= made()


def other_option(state: Values) -> None:
    state["optimizer"].param_groups[0]["mine"] = "new"


def new_group(state: Values) -> None:
    state["model"][0].register_parameter("scale", nn.Parameter(torch.ones(2)))
    state["optimizer"].add_param_group({"params": [state["model"][0].scale], "lr": 0.5})


def new_key(state: Values) -> None:
    state["optimizer"].state[parameter(state)]["mine"] = torch.ones(4, 4)


def plain_key(state: Values) -> None:
    state["optimizer"].state[parameter(state)]["mine"] = 3


def plain_step(state: Values) -> None:
    for found in state["optimizer"].state.values():
        found["step"] = float(found["step"])


def other_moment(state: Values) -> None:
    state["optimizer"].state[parameter(state)]["exp_avg"] = torch.full((4, 4), 4.0)


def moved_moment(state: Values) -> None:
    found = state["optimizer"].state[parameter(state)]["exp_avg"]
    found.data = torch.full((4, 4), 4.0)


def optimizer_hook(state: Values) -> None:
    def tell(_: Any, found: Values) -> Values:
        found["param_groups"][0]["told"] = 1
        return found

    state["optimizer"].register_state_dict_post_hook(tell)


CHANGES = [
    replace_parameter,
    rename_layer,
    swap_layers,
    replace_buffer,
    save_the_scratch,
    hook,
    hook_before,
    override,
    extra_state,
    other_class,
    other_memory,
    transposed,
    shorter,
    other_type,
    tied,
    other_optimizer,
    other_model,
    other_option,
    new_group,
    new_key,
    plain_key,
    plain_step,
    other_moment,
    moved_moment,
    optimizer_hook,
]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(change.__name__))
def test_what_changes_between_two_saves_is_saved(
    change: Callable[[Values], None], tmp_path: Path
) -> None:
    state = made()
    with CheckpointManager(tmp_path, keep_last=None, asynchronous=False) as checkpoints:
        checkpoints.save(1, state)
        change(state)
        for step in (2, 3, 4):
            wanted = expected(state)
            checkpoints.save(step, state)
            check(tmp_path / f"step-{step:08d}", wanted)
            if change not in (other_type, transposed, plain_step):  # these cannot be trained on
                train(state)


class Steps(torch.optim.SGD):
    """Counts its steps in a number, as many optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
        return super().step(closure)


def test_numbers_in_the_state_of_an_optimizer_are_those_of_each_save(
    tmp_path: Path, calls: list[nn.Module]
) -> None:
    state = made()
    state["optimizer"] = Steps(state["model"].parameters(), lr=0.1, momentum=0.9)
    with CheckpointManager(tmp_path, keep_last=None, asynchronous=False) as checkpoints:
        for step in (1, 2, 3):
            train(state)
            checkpoints.save(step, state)
            found = assert_stock_torch_reads(tmp_path / f"step-{step:08d}")
            assert found["optimizer"]["state"]["0.first.weight"]["calls"] == step
    assert len(calls) == 1


class Extra(nn.Linear):
    """Has a state of its own, as the layers of some libraries have."""

    told = 0

    def get_extra_state(self) -> Any:
        self.told += 1
        return {"told": self.told}

    def set_extra_state(self, state: Any) -> None:
        self.told = state["told"]


def test_extra_state_of_a_module_is_that_of_each_save(tmp_path: Path) -> None:
    model = nn.Sequential(Extra(2, 2))
    with CheckpointManager(tmp_path, keep_last=None, asynchronous=False) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"model": model})
            found = assert_stock_torch_reads(tmp_path / f"step-{step:08d}")
            assert found["model"]["0._extra_state"]["told"] == model[0].told


def test_a_part_of_the_state_is_saved_between_whole_ones(tmp_path: Path) -> None:
    state = made()
    for p in state["model"][0].parameters():
        p.requires_grad_(False)
    with CheckpointManager(tmp_path, keep_last=None, asynchronous=False) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, state, only="trainable" if step % 2 else None)
            names = assert_stock_torch_reads(tmp_path / f"step-{step:08d}")["model"].keys()
            assert ("0.first.weight" in names) == (step % 2 == 0)


def test_memory_that_the_loop_has_freed_is_free(tmp_path: Path) -> None:
    state = made()
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
        checkpoints.wait()
        gone = [
            weakref.ref(tensor)
            for tensor in (
                state["model"][1].first.weight,
                state["optimizer"].state[parameter(state)]["exp_avg"],
                state["mean"],
            )
        ]
        state["optimizer"].state.clear()
        del state["model"][1], state["mean"]
        state["optimizer"] = None
        gc.collect()
        assert [found() for found in gone] == [None] * 3


def test_conjugated_views_and_swapped_tensors(tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(4, dtype=torch.complex64))])
    plain = torch.ones(3)
    state = {"model": model, "plain": plain}
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        model[0].data = model[0].data.conj()
        wanted = model[0].detach().resolve_conj().clone()
        torch.utils.swap_tensors(plain, torch.full((3,), 2.0))
        checkpoints.save(2, state)
        checkpoints.wait()
    found = assert_stock_torch_reads(tmp_path / "step-00000002")
    assert torch.equal(found["model"]["0"], wanted)
    assert torch.equal(found["plain"], torch.full((3,), 2.0))


class Lines:
    """Hands each line out once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def state_dict(self) -> Values:
        found, self.lines = self.lines, []
        return {"new": found}

    def load_state_dict(self, state: Values) -> None:
        pass


def test_a_save_asks_each_object_once(tmp_path: Path) -> None:
    log = Lines()
    state: Values = made() | {"log": log}
    told: list[int] = []

    def files() -> dict[str, bytes]:
        told.append(1)
        return {"x": b""}

    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step in range(1, 6):
            log.lines = [f"line {step}"]
            if step > 2:
                state[f"new {step}"] = step
            checkpoints.save(step, state, files=files)
            checkpoints.wait()
            found = assert_stock_torch_reads(tmp_path / f"step-{step:08d}")
            assert found["log"]["new"] == [f"line {step}"] and len(told) == step


def test_other_containers_of_the_same_names_are_stored_as_they_are(tmp_path: Path) -> None:
    tensors = [torch.ones(2), torch.zeros(2)]
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        checkpoints.save(1, {"x": tensors})
        checkpoints.save(2, {"x": dict(zip("01", tensors, strict=True))})
    assert type(assert_stock_torch_reads(tmp_path / "step-00000001")["x"]) is list
    assert type(assert_stock_torch_reads(tmp_path / "step-00000002")["x"]) is dict


def test_a_save_in_inference_mode_comes_before_others(tmp_path: Path) -> None:
    state = made()
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        with torch.inference_mode():
            checkpoints.save(1, state)
        checkpoints.wait()
        train(state)
        wanted = expected(state)
        checkpoints.save(2, state)
        checkpoints.wait()
        check(tmp_path / "step-00000002", wanted)


def test_a_manager_keeps_no_model_and_no_optimizer_alive(tmp_path: Path) -> None:
    state = made()
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
        checkpoints.wait()
        moment = state["optimizer"].state[parameter(state)]["exp_avg"]
        gone = [weakref.ref(x) for x in (state["model"], parameter(state), moment)]
        del moment
        state.clear()
        gc.collect()
        assert [found() for found in gone] == [None] * 3
        state |= made()
        wanted = expected(state)
        checkpoints.save(3, state)
        checkpoints.wait()
        check(tmp_path / "step-00000003", wanted)


def test_a_hidden_sparse_buffer_does_not_matter(tmp_path: Path) -> None:
    state = made()
    sparse = torch.eye(3).to_sparse()
    state["model"][0].register_buffer("graph", sparse, persistent=False)
    with CheckpointManager(tmp_path, keep_last=None, asynchronous=False) as checkpoints:
        for step in (1, 2):
            wanted = expected(state)
            checkpoints.save(step, state)
            check(tmp_path / f"step-{step:08d}", wanted)
            train(state)


def test_tensors_that_wrap_others_are_not_taken_for_tied(tmp_path: Path) -> None:
    model = nn.Module()
    for name, value in (("a", 1.0), ("b", 2.0)):
        wrapped = WrapperSubclass(torch.full((3,), value))
        model.register_parameter(name, nn.Parameter(wrapped))
    with CheckpointManager(tmp_path, keep_last=None, asynchronous=False) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"model": model})
            found = assert_stock_torch_reads(tmp_path / f"step-{step:08d}")["model"]
            assert [float(found[name][0]) for name in "ab"] == [1.0, 2.0]


def test_a_tensor_that_moves_to_an_empty_slot_has_its_new_name(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Parameter(torch.ones(2))
            self.register_parameter("right", None)

    model = Pair()
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        checkpoints.save(1, {"model": model})
        checkpoints.save(2, {"model": model})
        model._parameters.update(left=None, right=model.left)
        checkpoints.save(3, {"model": model})
    for step, name in ((2, "left"), (3, "right")):
        found = assert_stock_torch_reads(tmp_path / f"step-{step:08d}")
        assert list(found["model"]) == [name]


@pytest.mark.parametrize("overlap_copy", [False, True])
def test_a_mode_of_torch_sees_few_calls_of_a_later_save(overlap_copy: bool, tmp_path: Path) -> None:
    class Count(TorchFunctionMode):  # as `torch.set_default_device` is one
        def __init__(self) -> None:
            super().__init__()
            self.num_calls = 0

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kw: Any = None
        ) -> Any:
            self.num_calls += 1
            return function(*args, **(kw or {}))

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))
    optimizer = one_step(model, torch.ones(4))
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path, writing=Writing(overlap_copy=overlap_copy)) as checkpoints:
        checkpoints.save(1, state)
        with Count() as count:
            checkpoints.save(2, state)
    assert 0 < count.num_calls < 100  # of 800 tensors
