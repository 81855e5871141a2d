"""What a user puts into a state, and gets back: the saved value, or an error. Nothing is kept or dropped without a word."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import io
import logging
import math
import pathlib
import random
import re
import uuid
import zoneinfo
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager, PerRank, PlanError, RngState

Path = pathlib.Path


def roundtrip(root: Path, saved: dict[str, Any], into: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Saves a state with one manager and resumes into another state with the next, as a restarted job does."""
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, saved)
    with CheckpointManager(root) as checkpoints:
        assert checkpoints.resume(into, **options) == 1
    return into


def trained(seed: int = 0) -> tuple[nn.Module, list[Any], list[Any]]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizers = [torch.optim.AdamW([model.weight]), torch.optim.SGD([model.bias], lr=0.1, momentum=0.9)]
    schedulers = [torch.optim.lr_scheduler.MultiStepLR(optimizers[0], [1, 3]), torch.optim.lr_scheduler.StepLR(optimizers[1], 2)]
    for _ in range(2 + seed):
        model(torch.ones(3)).sum().backward()
        for step in (*optimizers, *schedulers):
            step.step()
    return model, optimizers, schedulers


def test_lists_and_tuples_of_modules_optimizers_schedulers_and_generators_are_walked_like_dicts(tmp_path: Path) -> None:
    model, optimizers, schedulers = trained()
    other, others, theirs = trained(1)
    generators = [np.random.default_rng(3), torch.Generator().manual_seed(5), random.Random(7), np.random.RandomState(9)]
    want = [np.random.default_rng(3).random(), 5, random.Random(7).random(), np.random.RandomState(9).rand()]
    got = [np.random.default_rng(), torch.Generator(), random.Random(), np.random.RandomState()]
    torch.manual_seed(1)
    saved = {
        "pair": (model, optimizers), "schedulers": schedulers, "rng": [RngState()], "mixed": [PerRank({"at": np.float32(3)}), 1],
        "generators": generators,
    }  # fmt: skip
    into: dict[str, Any] = {
        "pair": (other, others), "schedulers": theirs, "rng": [RngState()], "mixed": [PerRank({"at": 0}), 2], "generators": got,
    }  # fmt: skip
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, saved, asynchronous=False)
        drawn = torch.rand(3)
        checkpoints.resume(into)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)
    assert torch.equal(others[0].state[other.weight]["exp_avg"], optimizers[0].state[model.weight]["exp_avg"])
    assert torch.equal(others[1].state[other.bias]["momentum_buffer"], optimizers[1].state[model.bias]["momentum_buffer"])
    assert [s.state_dict() for s in theirs] == [s.state_dict() for s in schedulers]
    assert [got[0].random(), got[1].initial_seed(), got[2].random(), got[3].rand()] == want
    value = into["mixed"][0].value["at"]
    assert type(value) is np.float32 and value == 3 and into["mixed"][1] == 1


def test_a_schedule_by_milestones_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its milestones are a Counter with integers as keys: as texts they would never be met again."""
    model, optimizers, schedulers = trained()
    other, others, theirs = trained(2)
    roundtrip(
        tmp_path,
        {"model": model, "optimizer": optimizers[0], "scheduler": schedulers[0]},
        {"model": other, "optimizer": others[0], "scheduler": theirs[0]},
    )
    for scheduler, optimizer in ((schedulers[0], optimizers[0]), (theirs[0], others[0])):
        optimizer.step()
        scheduler.step()
    assert schedulers[0].get_last_lr() == theirs[0].get_last_lr() and type(theirs[0].milestones) is collections.Counter


def test_integers_as_keys_that_stock_dcp_made_texts_of_are_integers_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, _, schedulers = trained()
    dcp.save({"scheduler": schedulers[0].state_dict(), "counts": {3: 5, -1: 6}}, checkpoint_id=tmp_path / "stock")
    _, _, theirs = trained(2)
    state = {"scheduler": theirs[0], "counts": {0: 0}}
    report = ckpt_tools.load(tmp_path / "stock", state)
    assert theirs[0].state_dict() == schedulers[0].state_dict() and state["counts"] == {3: 5, -1: 6}
    assert any("integers again" in note for note in report.notes)


VALUES = {
    "numpy scalar": np.float64(1.5), "numpy bool": np.bool_(True), "numpy text": np.str_("ü"), "array": np.arange(6, dtype="int16").reshape(2, 3),
    "no elements": np.empty((0, 3)), "0-d": np.array(2.5), "texts": np.array(["a", "bcd"]), "dates": np.array(["2026-01-01"], "datetime64[D]"),
    "dtype": np.dtype("float32"), "numpy state": np.random.default_rng(1).bit_generator.state, "legacy": np.random.RandomState(1).get_state(),
    "python state": random.Random(1).getstate(), "path": Path("/data/x"), "windows": pathlib.PureWindowsPath("c:\\x"),
    "datetime": dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC), "zone": dt.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    "naive": dt.datetime(2026, 1, 2, fold=1), "date": dt.date(2026, 1, 2), "time": dt.time(1, 2, 3), "timedelta": dt.timedelta(1, 2, 3),
    "deque": collections.deque([1, (2,)], 4), "counter": collections.Counter("abca"), "defaultdict": collections.defaultdict(list, {1: [2]}),
    "ordered": collections.OrderedDict(b=1, a=2), "set": {1, (2, "x")}, "frozenset": frozenset("a"), "range": range(1, 9, 2), "slice": slice(1, None),
    "decimal": decimal.Decimal("1.50"), "uuid": uuid.UUID(int=7), "bytes": b"\x00\xff", "no bytes": b"", "bytearray": bytearray(b"x"),
    "complex": 1 + 2j, "big": 1 << 200, "negative": -(1 << 70), "int keys": {1: 2, (1, 2): None}, "empty": {"a": {}, "b": [], "c": ()},
    "size": torch.Size([2, 3]), "torch dtype": torch.bfloat16, "device": torch.device("cpu"), "surrogate": "\ud800", "nan": math.nan, "inf": -math.inf,
    "tag": {"__ckpt_tools__": "dict"},
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("where", ["plain", "in a list", "per rank"])
def test_a_value_comes_back_as_it_was_with_its_type(name: str, where: str, tmp_path: Path) -> None:
    value = VALUES[name]
    if where == "per rank":
        got = roundtrip(tmp_path, {"v": PerRank(value)}, {"v": PerRank(None)})["v"].value
    elif where == "in a list":
        got = roundtrip(tmp_path, {"v": [{"x": [value]}]}, {"v": None})["v"][0]["x"][0]
    else:
        got = roundtrip(tmp_path, {"v": value}, {"v": None})["v"]
    if isinstance(value, collections.OrderedDict) and where != "per rank":
        value = dict(value)  # DCP knows one kind of dict
    assert repr(got) == repr(value) and type(got) is type(value)


@dataclasses.dataclass
class Progress:
    epoch: int = 0


class Colour(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (Progress(), "dataclasses.asdict"), (Colour.RED, "value.name"), (Point(1, 2), "_asdict"), (Text("x"), r"str\(value\)"),
        (print, "state_dict"), (object(), "state_dict"), (np.array([object()]), None), (collections.defaultdict(lambda: 0), "dict"),
        (nn.Linear(1, 1), "stands in dicts"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_could_not_be_loaded_again_is_refused_by_the_first_save_with_its_place(
    value: Any, hint: str | None, asynchronous: bool, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path, asynchronous=asynchronous) as checkpoints:
        with pytest.raises(PlanError, match=re.escape("state['data'][1]['x']")) as caught:
            checkpoints.save(1, {"data": [0, {"x": {1, 2} and collections.deque([value])}]})
        assert hint is None or re.search(hint, caught.value.hint or "")
        assert checkpoints.steps() == []
        checkpoints.save(1, {"data": 1})


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless += [endless, endless]
    deep: dict[str, Any] = {}
    deep["x"] = deep
    with CheckpointManager(tmp_path) as checkpoints:
        for value in (endless, deep):
            with pytest.raises(PlanError, match="nested more than 64 deep, or contains itself"):
                checkpoints.save(1, {"v": value})


# ---- kinds that change between save and resume ---------------------------------------------------------------------------

X = torch.arange(4.0)


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (X, None), (X, 0), (X, {}), ({"a": X}, {}), ({"a": X}, {"a": None}), ({"a": X, "b": 1}, {"a": torch.zeros(4), "c": 2}), ({}, {"a": 1}),
        ((X, 2), None), ((X, 2), (torch.zeros(4), 0)), ({0: X, 1: {"e": [X]}}, {}), ([X, {"a": X}], []), ([(X,)], []), ({"a": {}}, {"a": {"b": 1}}),
        (collections.deque([X]), 0), ({(1, 2): [X]}, {(1, 2): [torch.zeros(4)]}), (3, {"a": [1]}), ("x", []), (None, 1),
    ],
)  # fmt: skip
def test_a_plain_value_becomes_what_was_saved_whatever_it_is_now(saved: Any, now: Any, tmp_path: Path) -> None:
    got = roundtrip(tmp_path, {"v": saved}, {"v": now})["v"]
    assert repr(got) == repr(saved) and type(got) is type(saved)


def test_a_tensor_that_replaces_another_kind_is_told_and_a_tensor_stays_a_tensor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ckpt_tools"):
        roundtrip(tmp_path / "a", {"best": X}, {"best": None})
    assert "best: a tensor was stored, and replaces a value that is none" in caplog.text
    mine = torch.ones(4)
    with pytest.raises(PlanError, match=r"kinds differ: 1\n +best +state float32 \[4\], checkpoint a plain value"):
        roundtrip(tmp_path / "b", {"best": 3}, {"best": mine})
    caplog.clear()
    assert roundtrip(tmp_path / "c", {"best": 3}, {"best": mine}, strict=False)["best"] is mine
    assert "keep what they have: best" in caplog.text and torch.equal(mine, torch.ones(4))


class Tracker:
    def __init__(self) -> None:
        self.best: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


def test_a_tracker_without_a_best_gets_the_stored_one(tmp_path: Path) -> None:
    saved, now = Tracker(), Tracker()
    saved.best = X
    roundtrip(tmp_path, {"tracker": saved}, {"tracker": now})
    assert torch.equal(now.best, X)


def test_what_is_loaded_is_not_called_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    roundtrip(tmp_path, {"v": {"a": X}}, {"v": {}})
    assert "left out" not in caplog.text


def test_what_a_user_s_own_code_raises_goes_through_with_the_object_s_place(tmp_path: Path) -> None:
    class Broken(Tracker):
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("no state today")

    class Refuses(Tracker):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("size")

    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="no state today") as caught:
            checkpoints.save(1, {"data": {"tracker": Broken()}})
        assert caught.value.__notes__ == ["raised by Broken.state_dict() of state['data']['tracker']"]
        checkpoints.save(1, {"tracker": Tracker()})
        with pytest.raises(KeyError, match="size") as late:
            checkpoints.resume({"tracker": Refuses()})
        assert late.value.__notes__ == ["raised by Refuses.load_state_dict() of state['tracker']"]


def test_two_keys_that_would_be_one_name_are_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        for state in ({"a": {"b": 1}, "a.b": 2}, {"m": [PerRank(1)], "m.0": 2}):
            with pytest.raises(PlanError, match="two entries of the state have one name"):
                checkpoints.save(1, state)


# ---- modules without memory ----------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("frequencies", torch.ones(3), persistent=False)


def test_a_module_on_the_meta_device_is_refused_with_the_call_to_make(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model = Rotary()
    for call in (lambda: roundtrip(tmp_path, {"model": Rotary()}, {"model": model}), lambda: ckpt_tools.load(tmp_path, {"model": model})):
        with pytest.raises(PlanError, match="2 tensors are on the meta device and have no memory: model.linear.weight") as caught:
            call()
        assert "model.to_empty(device=…) first" in (caught.value.hint or "") and "model.frequencies" in (caught.value.hint or "")
    with CheckpointManager(tmp_path / "other") as checkpoints, pytest.raises(PlanError, match="meta device"):
        checkpoints.save(1, {"model": model})
    model.to_empty(device="cpu")
    saved = Rotary()
    with caplog.at_level(logging.WARNING, "ckpt_tools"):
        roundtrip(tmp_path / "third", {"model": saved}, {"model": model})
    assert torch.equal(model.linear.weight, saved.linear.weight)
    assert "1 buffers are not persistent, are in no checkpoint and keep what they have: model.frequencies" in caplog.text


# ---- optimizers ----------------------------------------------------------------------------------------------------------


def step(optimizer: torch.optim.Optimizer, num_steps: int = 2) -> None:
    for _ in range(num_steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()


def same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    """Compares by torch's own state dicts, whose parameters are numbered."""
    one, other = a.state_dict(), b.state_dict()
    return one["param_groups"] == other["param_groups"] and all(
        torch.equal(one["state"][n][key], other["state"][n][key]) for n in one["state"] | other["state"] for key in one["state"][n]
    )


@pytest.mark.parametrize("fresh", [False, True])
def test_a_dict_of_trainable_parameters_beside_its_optimizer(fresh: bool, tmp_path: Path) -> None:
    def make() -> tuple[dict[str, Any], torch.optim.Optimizer]:
        parameters = {"w": nn.Parameter(torch.rand(3)), "more": [torch.rand(2, requires_grad=True)]}
        optimizer = torch.optim.AdamW(
            [{"params": parameters["more"], "lr": 0.5}, {"params": [parameters["w"]], "weight_decay": 0.0}], lr=0.1
        )
        return parameters, optimizer

    (saved, optimizer), (now, other) = make(), make()
    if not fresh:
        step(other, 1)
    step(optimizer)
    held = now["w"], now["more"][0]
    for group in other.param_groups:
        group["lr"] = 9.0
    roundtrip(tmp_path, {"params": saved, "optimizer": optimizer}, {"params": now, "optimizer": other})
    assert now["w"] is held[0] and now["more"][0] is held[1] and held[1].requires_grad
    assert torch.equal(now["w"], saved["w"]) and torch.equal(now["more"][0], saved["more"][0])
    assert same_state(optimizer, other) and other.param_groups[0]["lr"] == 0.5
    step(optimizer, 1)
    step(other, 1)
    assert torch.equal(now["w"], saved["w"])


def test_one_optimizer_of_two_modules_and_a_loose_tensor(tmp_path: Path) -> None:
    def make() -> tuple[dict[str, Any], torch.optim.Optimizer]:
        parts = {"generator": nn.Linear(2, 3), "nets": [nn.Linear(3, 1)], "temperature": nn.Parameter(torch.rand(()))}
        return parts, torch.optim.Adam([*parts["nets"][0].parameters(), *parts["generator"].parameters(), parts["temperature"]])

    (saved, optimizer), (now, other) = make(), make()
    step(optimizer)
    roundtrip(tmp_path, {**saved, "optimizer": optimizer}, {**now, "optimizer": other})
    assert same_state(optimizer, other) and torch.equal(now["temperature"], saved["temperature"])


def test_an_optimizer_whose_parameters_are_nowhere_in_the_state_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(5))])
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(PlanError, match=r"nowhere in the state: its parameter 0 of 2, \[2\]"):
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
        super().load_state_dict({key: value for key, value in state.items() if key in ("state", "param_groups")})


def test_an_optimizer_keeps_the_keys_that_its_class_adds(tmp_path: Path) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    a, b = Counting(one.parameters(), lr=0.1, momentum=0.9), Counting(other.parameters(), lr=0.1, momentum=0.9)
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
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        flat = [get_optimizer_state_dict(m, o, options=options) for m, o in zip(self.models, self.optimizers, strict=True)]
        return {f"{n}.{key}": value for n, part in enumerate(flat) for key, value in part.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for n, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            part = {key.removeprefix(f"{n}."): value for key, value in state.items() if key.startswith(f"{n}.")}
            set_optimizer_state_dict(model, optimizer, part, options=options)


def test_a_wrapping_optimizer_saves_and_loads_itself(tmp_path: Path) -> None:
    (one, other), (now, then) = (nn.Linear(2, 3), nn.Linear(3, 1)), (nn.Linear(2, 3), nn.Linear(3, 1))
    a, b = Container([one, other]), Container([now, then])
    step(a)
    roundtrip(tmp_path, {"model": nn.ModuleList([one, other]), "optimizer": a}, {"model": nn.ModuleList([now, then]), "optimizer": b})
    assert all(same_state(x, y) for x, y in zip(a.optimizers, b.optimizers, strict=True))


# ---- shapes and names that have changed ----------------------------------------------------------------------------------


def embeddings(num: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(num)
    model = nn.ModuleDict({"embed": nn.Embedding(num, 3), "head": nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer)
    return model, optimizer


def test_a_larger_vocabulary_is_loaded_as_declared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (saved, a), (now, b) = embeddings(5), embeddings(7)
    before = now["embed"].weight.detach().clone()
    with pytest.raises(PlanError, match="shapes differ: 3") as caught:
        roundtrip(tmp_path, {"model": saved, "optimizer": a}, {"model": now, "optimizer": b})
    assert "on_mismatch={'model.embed.weight': 'grow' or 'skip'}" in (caught.value.hint or "")
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume({"model": now, "optimizer": b}, on_mismatch={"*embed*": "grow"})
    assert torch.equal(now["embed"].weight[:5], saved["embed"].weight) and torch.equal(now["embed"].weight[5:], before[5:])
    assert torch.equal(now["head"].weight, saved["head"].weight)
    moments = b.state[now["embed"].weight]["exp_avg"]
    assert torch.equal(moments[:5], a.state[saved["embed"].weight]["exp_avg"]) and moments.shape == (7, 3)
    assert "model.embed.weight: the checkpoint has [5, 3], the state [7, 3]: its elements are loaded" in caplog.text


def test_a_changed_shape_is_skipped_or_made_by_a_function_and_nothing_else(tmp_path: Path) -> None:
    (saved, _), (now, _) = embeddings(5), embeddings(4)
    before = now["embed"].weight.detach().clone()
    roundtrip(tmp_path, {"model": saved}, {"model": now}, on_mismatch={"model.embed*": "skip"})
    assert torch.equal(now["embed"].weight, before) and torch.equal(now["head"].weight, saved["head"].weight)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume({"model": now}, on_mismatch={"model.embed*": lambda stored, shape: stored[: shape[0]] * 2})
        assert torch.equal(now["embed"].weight, saved["embed"].weight[:4] * 2)
        for how, message in (("grow", "cannot grow 'model.embed.weight'"), (lambda stored, shape: stored, r"returned \[5, 3\]")):
            with pytest.raises(PlanError, match=message):
                checkpoints.resume({"model": now}, on_mismatch={"model.embed*": how})
        with pytest.raises(ValueError, match="expected 'grow', 'skip' or a function, got 'grwo'"):
            checkpoints.resume({"model": now}, on_mismatch={"model.embed*": "grwo"})


def test_names_that_changed_are_mapped_on_load(tmp_path: Path) -> None:
    (saved, a), (now, b) = embeddings(5), embeddings(6)
    now = nn.ModuleDict({"tokens": nn.Embedding(5, 3), "head": nn.Linear(3, 2)})
    b = torch.optim.AdamW(now.parameters(), lr=7.0)
    roundtrip(tmp_path, {"model": saved, "optimizer": a}, {"model": now, "optimizer": b}, rename={r"embed\.": "tokens."})
    assert torch.equal(now["tokens"].weight, saved["embed"].weight) and same_state(a, b)


def test_a_glob_or_a_name_that_matches_nothing_is_an_error_with_the_nearest_names(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = {"model": model, "rng": RngState()}
    roundtrip(tmp_path, dict(state), dict(state))
    with CheckpointManager(tmp_path) as checkpoints:
        for options, message in (
            ({"select": ["model.*", "modle.weight"]}, "select matches none of 3 names: 'modle.weight'"),
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


# ---- anything at all -----------------------------------------------------------------------------------------------------

scalars = (
    st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats() | st.text(max_size=5) | st.binary(max_size=4)
    | st.complex_numbers() | st.dates() | st.timedeltas() | st.decimals() | st.uuids()
    | st.sampled_from([np.float32(1.5), np.int64(-3), Path("a/b"), torch.float16, range(3), np.dtype("i4"), torch.Size([1])])
)  # fmt: skip
leaves = scalars | st.builds(lambda n: torch.arange(n, dtype=torch.float32), st.integers(0, 4)) | st.builds(np.arange, st.integers(0, 4))
keys = st.text("abc._1", min_size=1, max_size=3)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.integers(-3, 3) | st.booleans() | keys, inner, max_size=3)
        | st.lists(inner, max_size=3).map(collections.deque) | st.dictionaries(keys, inner, max_size=2).map(collections.OrderedDict)
        | st.dictionaries(st.integers(0, 3), inner, max_size=2).map(lambda d: collections.defaultdict(list, d))
    ),
    max_leaves=8,
)  # fmt: skip
EXAMPLES = 3000 if __import__("os").environ.get("CKPT_LONG") else 150


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(saved=st.dictionaries(keys, values, max_size=4), now=st.dictionaries(keys, values, max_size=4), data=st.data())
def test_a_resume_gives_the_saved_value_or_an_error(
    saved: dict[str, Any], now: dict[str, Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is in a state when it is saved, and whatever is in its place when it is resumed."""
    now |= {key: data.draw(values) for key in saved if data.draw(st.booleans())}
    root = tmp_path_factory.mktemp("run")
    with CheckpointManager(root) as checkpoints:
        try:
            checkpoints.save(1, saved, asynchronous=False)
        except PlanError:  # two keys that make one name
            return
    state = dict(now)
    with CheckpointManager(root) as checkpoints:
        try:
            checkpoints.resume(state)
        except PlanError:  # a tensor is not replaced by something else, nor by one of another shape or type
            return
    for key, value in state.items():
        want = saved[key] if key in saved else now[key]
        assert looks(value) == looks(want), (key, value, want)


def looks(value: Any) -> str:
    """Returns a value's whole text with types; an ordered dict is a dict to DCP."""
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {value.tolist()}"
    if isinstance(value, dict):
        kind = "dict" if type(value) is collections.OrderedDict else type(value).__name__
        return f"{kind}({', '.join(f'{looks(k)}: {looks(v)}' for k, v in sorted(value.items(), key=lambda item: repr(item[0])))})"
    if isinstance(value, (list, tuple, collections.deque)):
        return f"{type(value).__name__}({', '.join(map(looks, value))})"
    return f"{type(value).__name__} {value!r}"


def test_an_archive_is_read_by_stock_torch(tmp_path: Path) -> None:
    """Without this package, and without running anything: what torch knows is itself, the rest is a dict with a tag."""
    value = {"a": [1, 2.5, None, "x", (True,)], "b": {1, 2}, "c": np.float32(2)}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"v": value["a"], "np": value["c"]}, asynchronous=False)
    got: dict[str, Any] = {"v": None, "np": None}
    dcp.load(got, checkpoint_id=tmp_path / "step-00000001")
    assert got["v"] == value["a"] and got["np"]["__ckpt_tools__"] == "numpy.generic"
    buffer = io.BytesIO()
    torch.save(got, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)


def test_the_plug_in_for_dcp_refuses_at_once_what_it_could_not_load(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    from ckpt_tools.distributed import StorageReader, StorageWriter

    with pytest.raises(CheckpointException, match="cannot save 'epoch': it could not be loaded again") as caught:
        dcp.save({"epoch": np.float32(3)}, storage_writer=StorageWriter(tmp_path / "a"), no_dist=True)
    assert (
        "trust_pickle=True to the writer and to the reader" in str(caught.value.__cause__ or caught.value) or not (tmp_path / "a").exists()
    )
    assert not (tmp_path / "a").exists()
    dcp.save({"epoch": np.float32(3)}, storage_writer=StorageWriter(tmp_path / "b", trust_pickle=True), no_dist=True)
    got = {"epoch": np.float32(0)}
    dcp.load(got, storage_reader=StorageReader(tmp_path / "b", trust_pickle=True), no_dist=True)
    assert got["epoch"] == 3
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"epoch": np.float32(3), "path": Path("x")})
    plain: dict[str, Any] = {"epoch": None, "path": None}
    dcp.load(plain, storage_reader=StorageReader(tmp_path / "run" / "step-00000001"), no_dist=True)
    assert plain == {"epoch": np.float32(3), "path": Path("x")}  # the values themselves, not their encoding


def test_the_package_lists_its_names_and_a_manager_says_when_it_is_closed(tmp_path: Path) -> None:
    assert set(ckpt_tools.__all__) <= set(dir(ckpt_tools))
    checkpoints = CheckpointManager(tmp_path, keep_last=None)
    for bad, error in ((-1, ValueError), (1.5, TypeError), ("1", TypeError), (True, ValueError), (10**18, ValueError)):
        with pytest.raises(error, match="step: expected an integer"):
            checkpoints.save(bad, {"w": X})  # type: ignore[arg-type]
    for step_ in range(5):
        checkpoints.save(np.int64(step_), {"w": X})  # type: ignore[arg-type]
    checkpoints.close()
    checkpoints.close()
    for call in (lambda: checkpoints.save(9, {"w": X}), lambda: checkpoints.resume({"w": X}), checkpoints.preempted):
        with pytest.raises(ckpt_tools.CheckpointError, match="was called on a manager that is closed"):
            call()
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        assert [s.number for s in checkpoints.steps()] == [0, 1, 2, 3, 4]


# ---- what a stranger found -----------------------------------------------------------------------------------------------


def test_a_save_and_a_load_take_no_step_of_an_optimizer(tmp_path: Path) -> None:
    """A step calls hooks, here of an average, and may change parameters whatever the gradients are."""

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
    roundtrip(tmp_path, {"model": model, "opt": optimizer}, {"model": now, "opt": other}, select=["model.*"])
    assert not other.state and torch.equal(now["body"].weight, model["body"].weight)
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(PlanError, match="missing from the checkpoint"):
            checkpoints.resume({"model": now, "opt": other, "new": nn.Linear(1, 1)})
        assert not other.state
        checkpoints.resume({"model": now, "opt": other}, select=["opt.state.head*"])
    assert {id(p) for p in other.state} == {id(p) for p in now["head"].parameters()}
    assert same_state_of(other, optimizer, [(now["head"].weight, model["head"].weight)])


def same_state_of(a: torch.optim.Optimizer, b: torch.optim.Optimizer, pairs: list[tuple[Any, Any]]) -> bool:
    return all(torch.equal(a.state[x][key], b.state[y][key]) for x, y in pairs for key in b.state[y])


@pytest.mark.parametrize(
    "kind", ["SGD", "Adagrad", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adamax", "ASGD", "Rprop", "Adafactor", "LBFGS"]
)
@pytest.mark.parametrize("now", ["fresh", "with gradients", "stepped"])
def test_every_optimizer_of_torch_goes_on_bit_for_bit(kind: str, now: str, tmp_path: Path) -> None:
    inputs = torch.linspace(-1, 1, 12).view(4, 3)

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        return model, getattr(torch.optim, kind)(model.parameters(), **({"max_iter": 3} if kind == "LBFGS" else {}))

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
    roundtrip(tmp_path, {"model": model, "optimizer": optimizer}, {"model": other, "optimizer": theirs})
    train(model, optimizer, 2)
    train(other, theirs, 2)
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)


class Recipe(nn.Module):
    """A module with extra state that is empty until the first forward, as Transformer Engine's is."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(2, 2), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (torch.arange(9, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)), ({"a": 1}, None), ({"a": 1}, {"b": 2}), ({"a": X}, {}), (X, None),
        ((1, X), None), ([X], []), ({}, {"a": 1}), (None, X), (3, X),
    ],
)  # fmt: skip
def test_extra_state_of_a_module_becomes_what_was_saved_whatever_it_is_now(saved: Any, now: Any, tmp_path: Path) -> None:
    module = Recipe(now)
    roundtrip(tmp_path, {"model": nn.Sequential(Recipe(saved))}, {"model": nn.Sequential(module)})
    assert looks(module.extra) == looks(saved)


def test_one_parameter_for_which_the_checkpoint_has_two_values_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(is_tied: bool) -> Any:
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        if is_tied:
            model["b"].weight = model["a"].weight
        return model

    roundtrip(tmp_path, {"model": make(False)}, {"model": make(True)})
    assert "model.a.weight and model.b.weight are one tensor here, and two in the checkpoint" in caplog.text


def test_a_state_that_is_skipped_is_skipped_whole(tmp_path: Path) -> None:
    def make(num: int) -> tuple[Any, torch.optim.Optimizer]:
        model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, num)})
        return model, torch.optim.AdamW(model.parameters())

    (model, optimizer), (now, other) = make(2), make(3)
    step(optimizer, 5)
    roundtrip(tmp_path, {"model": model, "opt": optimizer}, {"model": now, "opt": other}, on_mismatch={"*head*": "skip"})
    assert now["head"].weight not in other.state and now["head"].bias not in other.state  # and no step of an older one
    assert same_state_of(other, optimizer, [(now["body"].weight, model["body"].weight)])


@pytest.mark.parametrize(
    "rules",
    [
        {r"^model\.embed\.": "model.tokens."},
        {r"^model\.embed\.": "model.tokens.", r"^optimizer\.state\.embed\.": "optimizer.state.tokens."},
    ],
)
def test_rules_for_names_may_be_anchored(rules: dict[str, str], tmp_path: Path) -> None:
    saved, a = embeddings(5)
    now = nn.ModuleDict({"tokens": nn.Embedding(5, 3), "head": nn.Linear(3, 2)})
    b = torch.optim.AdamW(now.parameters(), lr=7.0)
    roundtrip(tmp_path, {"model": saved, "optimizer": a}, {"model": now, "optimizer": b}, rename=rules)
    assert torch.equal(now["tokens"].weight, saved["embed"].weight) and same_state(a, b)


def test_what_could_not_be_written_into_and_other_mappings_are_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(PlanError, match=r"elements that share memory: \[4\], strides \[0\]"):
            checkpoints.save(1, {"t": torch.ones(1).expand(4)})
        for value in (collections.ChainMap({"a": 1}, {"a": 2}), collections.UserDict(a=1)):
            with pytest.raises(PlanError, match=r"cannot save state\['v'\]: values of the type collections"):
                checkpoints.save(1, {"v": value})
    (saved, _), (now, _) = embeddings(5), embeddings(4)
    with pytest.raises(PlanError, match="returned torch.float64 for 'model.embed.weight': expected torch.float32"):
        roundtrip(
            tmp_path, {"model": saved}, {"model": now}, on_mismatch={"*embed*": lambda _, shape: torch.zeros(shape, dtype=torch.float64)}
        )


@pytest.mark.parametrize("where", ["extra length", *range(24)])
def test_a_step_with_a_flipped_bit_anywhere_is_passed_over_or_loads_what_was_saved(where: str | int, tmp_path: Path) -> None:
    """In headers, names and objects, too, which fail in many other ways than by a checksum."""
    weight = torch.rand(16, 16)
    with CheckpointManager(tmp_path) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, {"w": weight * number, "x": {"n": number}, "rng": RngState()}, asynchronous=False)
    file = tmp_path / "step-00000002" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.index(b"archive/data/0") - 2 if where == "extra length" else int(where) * len(data) // 24 + 11
    data[at] ^= 4
    file.write_bytes(data)
    state: dict[str, Any] = {"w": torch.zeros(16, 16), "x": {"n": 0}, "rng": RngState()}
    with CheckpointManager(tmp_path) as checkpoints:
        number = checkpoints.resume(state)
    assert torch.equal(state["w"], weight * number) and state["x"] == {"n": number}
