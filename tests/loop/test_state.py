"""What a user puts into a state, and gets back: the saved value, or an error. Nothing is kept or
dropped without a word.
"""

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
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager, PerRank, PlanError, RngState
from tests.looks import looks
from tests.loop.states import Path, roundtrip
from tests.stock import assert_stock_torch_reads


def trained(seed: int = 0) -> tuple[nn.Module, list[Any], list[Any]]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizers = [
        torch.optim.AdamW([model.weight]),
        torch.optim.SGD([model.bias], lr=0.1, momentum=0.9),
    ]
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizers[0], [1, 3]),
        torch.optim.lr_scheduler.StepLR(optimizers[1], 2),
    ]
    for _ in range(2 + seed):
        model(torch.ones(3)).sum().backward()
        for step in (*optimizers, *schedulers):
            step.step()
    return model, optimizers, schedulers


def test_lists_and_tuples_of_modules_optimizers_schedulers_and_generators_are_walked_like_dicts(
    tmp_path: Path,
) -> None:
    model, optimizers, schedulers = trained()
    other, others, theirs = trained(1)
    generators = [
        np.random.default_rng(3),
        torch.Generator().manual_seed(5),
        random.Random(7),
        np.random.RandomState(9),
    ]
    want = [
        np.random.default_rng(3).random(),
        5,
        random.Random(7).random(),
        np.random.RandomState(9).rand(),
    ]
    got = [np.random.default_rng(), torch.Generator(), random.Random(), np.random.RandomState()]
    torch.manual_seed(1)
    saved = {
        "pair": (model, optimizers),
        "schedulers": schedulers,
        "rng": [RngState()],
        "mixed": [PerRank({"at": np.float32(3)}), 1],
        "generators": generators,
    }
    into: dict[str, Any] = {
        "pair": (other, others),
        "schedulers": theirs,
        "rng": [RngState()],
        "mixed": [PerRank({"at": 0}), 2],
        "generators": got,
    }
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, saved, asynchronous=False)
        drawn = torch.rand(3)
        checkpoints.resume(into)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)
    assert torch.equal(
        others[0].state[other.weight]["exp_avg"], optimizers[0].state[model.weight]["exp_avg"]
    )
    assert torch.equal(
        others[1].state[other.bias]["momentum_buffer"],
        optimizers[1].state[model.bias]["momentum_buffer"],
    )
    assert [s.state_dict() for s in theirs] == [s.state_dict() for s in schedulers]
    assert [got[0].random(), got[1].initial_seed(), got[2].random(), got[3].rand()] == want
    value = into["mixed"][0].value["at"]
    assert type(value) is np.float32 and value == 3 and into["mixed"][1] == 1


def test_a_schedule_by_milestones_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its milestones are a Counter with integers as keys: as texts they would never be met
    again.
    """
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
    assert (
        schedulers[0].get_last_lr() == theirs[0].get_last_lr()
        and type(theirs[0].milestones) is collections.Counter
    )


def test_integers_as_keys_that_stock_dcp_made_texts_of_are_integers_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, schedulers = trained()
    dcp.save(
        {"scheduler": schedulers[0].state_dict(), "counts": {3: 5, -1: 6}},
        checkpoint_id=tmp_path / "stock",
    )
    _, _, theirs = trained(2)
    state = {"scheduler": theirs[0], "counts": {0: 0}}
    report = ckpt_tools.load(tmp_path / "stock", state)
    assert theirs[0].state_dict() == schedulers[0].state_dict() and state["counts"] == {3: 5, -1: 6}
    assert any("integers again" in note for note in report.notes)


VALUES = {
    "numpy scalar": np.float64(1.5),
    "numpy bool": np.bool_(True),
    "numpy text": np.str_("ü"),
    "array": np.arange(6, dtype="int16").reshape(2, 3),
    "no elements": np.empty((0, 3)),
    "0-d": np.array(2.5),
    "texts": np.array(["a", "bcd"]),
    "dates": np.array(["2026-01-01"], "datetime64[D]"),
    "dtype": np.dtype("float32"),
    "numpy state": np.random.default_rng(1).bit_generator.state,
    "legacy": np.random.RandomState(1).get_state(),
    "python state": random.Random(1).getstate(),
    "path": Path("/data/x"),
    "windows": pathlib.PureWindowsPath("c:\\x"),
    "datetime": dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
    "zone": dt.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    "naive": dt.datetime(2026, 1, 2, fold=1),
    "date": dt.date(2026, 1, 2),
    "time": dt.time(1, 2, 3),
    "timedelta": dt.timedelta(1, 2, 3),
    "deque": collections.deque([1, (2,)], 4),
    "counter": collections.Counter("abca"),
    "defaultdict": collections.defaultdict(list, {1: [2]}),
    "ordered": collections.OrderedDict(b=1, a=2),
    "set": {1, (2, "x")},
    "frozenset": frozenset("a"),
    "range": range(1, 9, 2),
    "slice": slice(1, None),
    "decimal": decimal.Decimal("1.50"),
    "uuid": uuid.UUID(int=7),
    "bytes": b"\x00\xff",
    "no bytes": b"",
    "bytearray": bytearray(b"x"),
    "complex": 1 + 2j,
    "big": 1 << 200,
    "negative": -(1 << 70),
    "int keys": {1: 2, (1, 2): None},
    "empty": {"a": {}, "b": [], "c": ()},
    "size": torch.Size([2, 3]),
    "torch dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "surrogate": "\ud800",
    "nan": math.nan,
    "inf": -math.inf,
    "tag": {"__ckpt_tools__": "dict"},
}


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
        (Progress(), "dataclasses.asdict"),
        (Colour.RED, "value.name"),
        (Point(1, 2), "_asdict"),
        (Text("x"), r"str\(value\)"),
        (print, "state_dict"),
        (object(), "state_dict"),
        (np.array([object()]), None),
        (collections.defaultdict(lambda: 0), "dict"),
        (nn.Linear(1, 1), "stands in dicts"),
    ],
)
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


# ---- kinds that change between save and resume ---------------------------------------------------

X = torch.arange(4.0)


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (X, None),
        (X, 0),
        (X, {}),
        ({"a": X}, {}),
        ({"a": X}, {"a": None}),
        ({"a": X, "b": 1}, {"a": torch.zeros(4)}),
        ((X, 2), None),
        ((X, 2), (torch.zeros(4), 0)),
        ({0: X, 1: {"e": [X]}}, {}),
        ([X, {"a": X}], []),
        ([(X,)], []),
        (collections.deque([X]), 0),
        ({(1, 2): [X]}, {(1, 2): [torch.zeros(4)]}),
        (3, [1]),
        ("x", []),
        (None, 1),
    ],
)
def test_a_plain_value_becomes_what_was_saved_whatever_it_is_now(
    saved: Any, now: Any, tmp_path: Path
) -> None:
    got = roundtrip(tmp_path, {"v": saved}, {"v": now})["v"]
    assert repr(got) == repr(saved) and type(got) is type(saved)


def test_a_tensor_that_replaces_another_kind_is_told_and_a_tensor_stays_a_tensor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ckpt_tools"):
        roundtrip(tmp_path / "a", {"best": X}, {"best": None})
    assert "best: a tensor was stored, and replaces a value that is not a tensor" in caplog.text
    mine = torch.ones(4)
    with pytest.raises(
        PlanError, match=r"kinds differ: 1\n +best +state float32 \[4\], checkpoint a plain value"
    ):
        roundtrip(tmp_path / "b", {"best": 3}, {"best": mine})
    caplog.clear()
    assert roundtrip(tmp_path / "c", {"best": 3}, {"best": mine}, strict=False)["best"] is mine
    assert "keep their values: best" in caplog.text and torch.equal(mine, torch.ones(4))


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


def test_what_is_loaded_is_not_called_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
        assert caught.value.__notes__ == [
            "raised by Broken.state_dict() of state['data']['tracker']"
        ]
        checkpoints.save(1, {"tracker": Tracker()})
        with pytest.raises(KeyError, match="size") as late:
            checkpoints.resume({"tracker": Refuses()})
        assert late.value.__notes__ == ["raised by Refuses.load_state_dict() of state['tracker']"]


def test_stock_torch_reads_lists_of_empty_dicts(tmp_path: Path) -> None:
    """As LambdaLR has them for functions: a list that holds nothing to walk into is one value to
    torch.
    """
    state = {
        "a": [{}, {}],
        "b": [{}, {"c": 1}],
        "d": [[{}], 2],
        "w": torch.ones(2),
        "e": [{}, torch.ones(1)],
    }
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state, asynchronous=False)
    got = assert_stock_torch_reads(tmp_path / "step-00000001")
    assert got["a"] == [{}, {}] and got["b"] == [{}, {"c": 1}] and got["d"] == [[{}], 2]
    into: dict[str, Any] = {"a": None, "b": None, "d": [], "w": torch.zeros(2), "e": None}
    roundtrip(tmp_path / "again", state, into)
    assert {k: v for k, v in into.items() if k in "abd"} == {
        k: v for k, v in state.items() if k in "abd"
    }


class Name(str, enum.Enum):  # noqa: UP042  # its str() is not its text
    A = "a"


def test_a_key_of_a_subclass_of_str_is_its_text(tmp_path: Path) -> None:
    state = {"x": {Name.A: PerRank(3), "w": torch.ones(2)}, Name.A: torch.ones(3)}
    ckpt_tools.save(tmp_path / "s", state)
    into = {"x": {Name.A: PerRank(0), "w": torch.zeros(2)}, Name.A: torch.zeros(3)}
    ckpt_tools.load(tmp_path / "s", into)
    assert into["x"][Name.A].value == 3 and into[Name.A].tolist() == [1, 1, 1]
    paths = dcp.FileSystemReader(tmp_path / "s").read_metadata().planner_data
    assert {type(key) for path in paths.values() for key in path} == {str}


@pytest.mark.parametrize("other", [7, torch.ones(2)])
def test_the_place_of_a_value_per_rank_is_no_key(other: object, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="v.rank_0. is where the PerRank .v. of a rank is stored"):
        ckpt_tools.save(tmp_path / "s", {"v": PerRank(5), "v.rank_0": other})
    assert not (tmp_path / "s").exists()
    ckpt_tools.save(tmp_path / "s", {"v": PerRank(5), "v.rank_x": other})


def test_two_keys_that_would_be_one_name_are_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        for state in ({"a": {"b": 1}, "a.b": 2}, {"m": [PerRank(1)], "m.0": 2}):
            with pytest.raises(PlanError, match="two entries of the state have one name"):
                checkpoints.save(1, state)


# ---- modules without memory ----------------------------------------------------------------------


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("frequencies", torch.ones(3), persistent=False)


def test_a_module_on_the_meta_device_is_refused_with_the_call_to_make(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"):
        model = Rotary()
    for call in (
        lambda: roundtrip(tmp_path, {"model": Rotary()}, {"model": model}),
        lambda: ckpt_tools.load(tmp_path, {"model": model}),
    ):
        with pytest.raises(
            PlanError,
            match="2 tensors are on the meta device and have no memory: model.linear.weight",
        ) as caught:
            call()
        assert "model.to_empty(device=…) first" in (
            caught.value.hint or ""
        ) and "model.frequencies" in (caught.value.hint or "")
    with (
        CheckpointManager(tmp_path / "other") as checkpoints,
        pytest.raises(PlanError, match="meta device"),
    ):
        checkpoints.save(1, {"model": model})
    model.to_empty(device="cpu")
    saved = Rotary()
    with caplog.at_level(logging.WARNING, "ckpt_tools"):
        roundtrip(tmp_path / "third", {"model": saved}, {"model": model})
    assert torch.equal(model.linear.weight, saved.linear.weight)
    assert (
        "1 buffers are not persistent, are in no checkpoint and keep what they have:"
        " model.frequencies" in caplog.text
    )


# ---- who else reads it ---------------------------------------------------------------------------


def test_an_archive_is_read_by_stock_torch(tmp_path: Path) -> None:
    """Without this package, and without running anything: what torch knows is itself, the rest is a
    dict with a tag.
    """
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

    from ckpt_tools.loop.dcp_plugin import StorageReader, StorageWriter

    with pytest.raises(
        CheckpointException, match="cannot save 'epoch': it could not be loaded again"
    ) as caught:
        dcp.save(
            {"epoch": np.float32(3)}, storage_writer=StorageWriter(tmp_path / "a"), no_dist=True
        )
    assert (
        "trust_pickle=True to the writer and to the reader"
        in str(caught.value.__cause__ or caught.value)
        or not (tmp_path / "a").exists()
    )
    assert not (tmp_path / "a").exists()
    dcp.save(
        {"epoch": np.float32(3)},
        storage_writer=StorageWriter(tmp_path / "b", trust_pickle=True),
        no_dist=True,
    )
    got = {"epoch": np.float32(0)}
    dcp.load(got, storage_reader=StorageReader(tmp_path / "b", trust_pickle=True), no_dist=True)
    assert got["epoch"] == 3
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"epoch": np.float32(3), "path": Path("x")})
    plain: dict[str, Any] = {"epoch": None, "path": None}
    dcp.load(plain, storage_reader=StorageReader(tmp_path / "run" / "step-00000001"), no_dist=True)
    # the values themselves, not their encoding
    assert plain == {"epoch": np.float32(3), "path": Path("x")}


def test_the_package_lists_its_names_and_a_manager_says_when_it_is_closed(tmp_path: Path) -> None:
    assert set(ckpt_tools.__all__) <= set(dir(ckpt_tools))
    checkpoints = CheckpointManager(tmp_path, keep_last=None)
    for bad, error in (
        (-1, ValueError),
        (1.5, TypeError),
        ("1", TypeError),
        (True, ValueError),
        (10**18, ValueError),
    ):
        with pytest.raises(error, match="step: expected an integer"):
            checkpoints.save(bad, {"w": X})  # type: ignore[arg-type]
    for step_ in range(5):
        checkpoints.save(np.int64(step_), {"w": X})  # type: ignore[arg-type]
    checkpoints.close()
    checkpoints.close()
    for call in (
        lambda: checkpoints.save(9, {"w": X}),
        lambda: checkpoints.resume({"w": X}),
        checkpoints.preempted,
    ):
        with pytest.raises(
            ckpt_tools.CheckpointError, match="was called on a manager that is closed"
        ):
            call()
    with CheckpointManager(tmp_path, keep_last=None) as checkpoints:
        assert [s.number for s in checkpoints.steps()] == [0, 1, 2, 3, 4]


# ---- what a stranger found -----------------------------------------------------------------------


class Recipe(nn.Module):
    """A module with extra state that is empty until the first forward, as Transformer Engine's
    is.
    """

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
        (torch.arange(9, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)),
        ({"a": 1}, None),
        ({"a": 1}, {"b": 2}),
        ({"a": X}, {}),
        (X, None),
        ((1, X), None),
        ([X], []),
        ({}, {"a": 1}),
        (None, X),
        (3, X),
    ],
)
def test_extra_state_of_a_module_becomes_what_was_saved_whatever_it_is_now(
    saved: Any, now: Any, tmp_path: Path
) -> None:
    module = Recipe(now)
    roundtrip(tmp_path, {"model": nn.Sequential(Recipe(saved))}, {"model": nn.Sequential(module)})
    assert looks(module.extra) == looks(saved)


def test_one_parameter_for_which_the_checkpoint_has_two_values_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(is_tied: bool) -> Any:
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        if is_tied:
            model["b"].weight = model["a"].weight
        return model

    roundtrip(tmp_path, {"model": make(False)}, {"model": make(True)})
    assert (
        "model.a.weight and model.b.weight are one tensor here, and two in the checkpoint"
        in caplog.text
    )


def test_what_could_not_be_written_into_and_other_mappings_are_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(PlanError, match=r"elements that share memory: \[4\], strides \[0\]"):
            checkpoints.save(1, {"t": torch.ones(1).expand(4)})
        for value in (collections.ChainMap({"a": 1}, {"a": 2}), collections.UserDict(a=1)):
            with pytest.raises(
                PlanError, match=r"cannot save state\['v'\]: values of the type collections"
            ):
                checkpoints.save(1, {"v": value})


@pytest.mark.parametrize("where", ["extra length", *range(24)])
def test_a_step_with_a_flipped_bit_anywhere_is_passed_over_or_loads_what_was_saved(
    where: str | int, tmp_path: Path
) -> None:
    """In headers, names and objects, too, which fail in many other ways than by a checksum."""
    weight = torch.rand(16, 16)
    with CheckpointManager(tmp_path) as checkpoints:
        for number in (1, 2):
            checkpoints.save(
                number,
                {"w": weight * number, "x": {"n": number}, "rng": RngState()},
                asynchronous=False,
            )
    file = tmp_path / "step-00000002" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = (
        data.index(b"archive/data/0") - 2
        if where == "extra length"
        else int(where) * len(data) // 24 + 11
    )
    data[at] ^= 4
    file.write_bytes(data)
    state: dict[str, Any] = {"w": torch.zeros(16, 16), "x": {"n": 0}, "rng": RngState()}
    with CheckpointManager(tmp_path) as checkpoints:
        number = checkpoints.resume(state)
    assert torch.equal(state["w"], weight * number) and state["x"] == {"n": number}
