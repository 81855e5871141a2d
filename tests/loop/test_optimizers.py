"""Optimizers in a state: their parameters by name, wherever these are, and the keys that a class
adds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_tools import CheckpointManager, PlanError
from tests.loop.states import roundtrip, same_state, same_state_of, step


@pytest.mark.parametrize("fresh", [False, True])
def test_a_dict_of_trainable_parameters_beside_its_optimizer(fresh: bool, tmp_path: Path) -> None:
    def make() -> tuple[dict[str, Any], torch.optim.Optimizer]:
        parameters = {"w": nn.Parameter(torch.rand(3)), "more": [torch.rand(2, requires_grad=True)]}
        optimizer = torch.optim.AdamW(
            [
                {"params": parameters["more"], "lr": 0.5},
                {"params": [parameters["w"]], "weight_decay": 0.0},
            ],
            lr=0.1,
        )
        return parameters, optimizer

    (saved, optimizer), (now, other) = make(), make()
    if not fresh:
        step(other, 1)
    step(optimizer)
    held = now["w"], now["more"][0]
    for group in other.param_groups:
        group["lr"] = 9.0
    roundtrip(
        tmp_path, {"params": saved, "optimizer": optimizer}, {"params": now, "optimizer": other}
    )
    assert now["w"] is held[0] and now["more"][0] is held[1] and held[1].requires_grad
    assert torch.equal(now["w"], saved["w"]) and torch.equal(now["more"][0], saved["more"][0])
    assert same_state(optimizer, other) and other.param_groups[0]["lr"] == 0.5
    step(optimizer, 1)
    step(other, 1)
    assert torch.equal(now["w"], saved["w"])


def test_one_optimizer_of_two_modules_and_a_loose_tensor(tmp_path: Path) -> None:
    def make() -> tuple[dict[str, Any], torch.optim.Optimizer]:
        parts = {
            "generator": nn.Linear(2, 3),
            "nets": [nn.Linear(3, 1)],
            "temperature": nn.Parameter(torch.rand(())),
        }
        return parts, torch.optim.Adam(
            [*parts["nets"][0].parameters(), *parts["generator"].parameters(), parts["temperature"]]
        )

    (saved, optimizer), (now, other) = make(), make()
    step(optimizer)
    roundtrip(tmp_path, {**saved, "optimizer": optimizer}, {**now, "optimizer": other})
    assert same_state(optimizer, other) and torch.equal(now["temperature"], saved["temperature"])


def test_an_optimizer_whose_parameters_are_nowhere_in_the_state_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(5))])
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(PlanError, match=r"nowhere in the state: its parameter 0 of 2, \[2\]"),
    ):
        checkpoints.save(1, {"optimizer": optimizer})


class Counting(torch.optim.SGD):
    """An optimizer with keys of its own in its state dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen, self.norms = 0, [torch.tensor(0.0)]

    def step(self, closure: Any = None) -> Any:
        self.seen += 1
        self.norms.append(torch.tensor(float(self.seen)))
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": self.seen, "norms": self.norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.norms = state["seen"], state["norms"]  # a KeyError where they are missing
        super().load_state_dict(
            {key: value for key, value in state.items() if key in ("state", "param_groups")}
        )


def test_an_optimizer_keeps_the_keys_that_its_class_adds(tmp_path: Path) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    a, b = (
        Counting(one.parameters(), lr=0.1, momentum=0.9),
        Counting(other.parameters(), lr=0.1, momentum=0.9),
    )
    step(a, 3)
    roundtrip(tmp_path, {"model": one, "optimizer": a}, {"model": other, "optimizer": b})
    assert b.seen == 3 and [float(n) for n in b.norms] == [0, 1, 2, 3] and same_state(a, b)


class Container(torch.optim.Optimizer):
    """As torchtitan wraps its optimizers: an Optimizer with a state dict of another form."""

    def __init__(self, models: list[nn.Module]) -> None:
        self.models, self.optimizers = models, [torch.optim.AdamW(m.parameters()) for m in models]
        super().__init__([p for m in models for p in m.parameters()], {})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        flat = [
            get_optimizer_state_dict(m, o, options=options)
            for m, o in zip(self.models, self.optimizers, strict=True)
        ]
        return {f"{n}.{key}": value for n, part in enumerate(flat) for key, value in part.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for n, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            part = {
                key.removeprefix(f"{n}."): value
                for key, value in state.items()
                if key.startswith(f"{n}.")
            }
            set_optimizer_state_dict(model, optimizer, part, options=options)


def test_a_wrapping_optimizer_saves_and_loads_itself(tmp_path: Path) -> None:
    (one, other), (now, then) = (
        (nn.Linear(2, 3), nn.Linear(3, 1)),
        (
            nn.Linear(2, 3),
            nn.Linear(3, 1),
        ),
    )
    a, b = Container([one, other]), Container([now, then])
    step(a)
    roundtrip(
        tmp_path,
        {"model": nn.ModuleList([one, other]), "optimizer": a},
        {"model": nn.ModuleList([now, then]), "optimizer": b},
    )
    assert all(same_state(x, y) for x, y in zip(a.optimizers, b.optimizers, strict=True))


def test_a_save_and_a_load_take_no_step_of_an_optimizer(tmp_path: Path) -> None:
    """A step calls hooks, here of an average, and may change parameters whatever the gradients
    are.
    """

    class Decaying(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.5)
            return super().step(closure)

    model = nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.Adam(model.parameters()),
        Decaying(model.parameters(), lr=0.1),
    ):
        calls: list[int] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append(1))
        optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        state = {"model": model, "optimizer": optimizer, "average": average}
        root = tmp_path / type(optimizer).__name__
        with CheckpointManager(root) as checkpoints:
            checkpoints.save(1, state, asynchronous=False)
            checkpoints.resume(state)
        assert not calls and int(average.n_averaged) == 0 and not optimizer.state
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_optimizer_that_is_not_loaded_stays_as_it_is(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        return model, torch.optim.AdamW(model.parameters())

    (model, optimizer), (now, other) = make(), make()
    step(optimizer)
    roundtrip(
        tmp_path,
        {"model": model, "opt": optimizer},
        {"model": now, "opt": other},
        select=["model.*"],
    )
    assert not other.state and torch.equal(now["body"].weight, model["body"].weight)
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(PlanError, match="missing from the checkpoint"):
            checkpoints.resume({"model": now, "opt": other, "new": nn.Linear(1, 1)})
        assert not other.state
        checkpoints.resume({"model": now, "opt": other}, select=["opt.state.head*"])
    assert {id(p) for p in other.state} == {id(p) for p in now["head"].parameters()}
    assert same_state_of(other, optimizer, [(now["head"].weight, model["head"].weight)])


@pytest.mark.parametrize(
    "kind",
    [
        "SGD",
        "Adagrad",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Adadelta",
        "Adamax",
        "ASGD",
        "Rprop",
        "Adafactor",
        "LBFGS",
    ],
)
@pytest.mark.parametrize("now", ["fresh", "with gradients", "stepped"])
def test_every_optimizer_of_torch_goes_on_bit_for_bit(kind: str, now: str, tmp_path: Path) -> None:
    inputs = torch.linspace(-1, 1, 12).view(4, 3)

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        return model, getattr(torch.optim, kind)(
            model.parameters(), **({"max_iter": 3} if kind == "LBFGS" else {})
        )

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(num_steps):
            optimizer.step(closure)

    (model, optimizer), (other, theirs) = make(0), make(1)
    train(model, optimizer, 3)
    if now == "with gradients":
        other(inputs).sum().backward()
    elif now == "stepped":
        train(other, theirs, 1)
    roundtrip(
        tmp_path, {"model": model, "optimizer": optimizer}, {"model": other, "optimizer": theirs}
    )
    train(model, optimizer, 2)
    train(other, theirs, 2)
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)
