"""Saves and resumes at the edges of what people put into a state."""

from __future__ import annotations

import logging
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt_tools
from ckpt_tools import (
    CheckpointError,
    CheckpointManager,
    Ema,
    Outages,
    PerRank,
    PlanError,
    RngState,
    StorageError,
)
from ckpt_tools.distributed import StorageWriter


def round_trip(
    path: Path, saved: dict[str, Any], into: dict[str, Any], **options: Any
) -> list[str]:
    ckpt_tools.save(path / "c", saved)
    return list(ckpt_tools.load(path / "c", into, **options).notes)


class Held:
    """An object that holds a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return dict(self.model.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


# ---- averages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_ema", [True, False])
def test_a_save_while_the_average_is_applied_is_refused(tmp_path: Path, with_ema: bool) -> None:
    model = nn.Linear(3, 3)
    ema = Ema(model, 0.5)
    with torch.no_grad():
        model.weight.add_(1)
    ema.update()
    state = {"model": model} | ({"ema": ema} if with_ema else {})
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state, asynchronous=False)
        trained = model.weight.detach().clone()
        with ema.applied():
            for act in (lambda: checkpoints.save(2, state), lambda: checkpoints.resume(state)):
                with pytest.raises(PlanError, match="values of its average"):
                    act()
            with pytest.raises(PlanError, match="cannot be nested"), ema.applied():
                pass
        assert torch.equal(model.weight, trained)
        with ema.applied():  # whatever holds the memory of the model
            for one in ({"m": model.state_dict()}, {"w": model.weight}, {"o": Held(model)}):
                with pytest.raises(PlanError, match="values of its average"):
                    ckpt_tools.save(tmp_path / "other", dict(one))
            with pytest.raises(CheckpointException) as told:
                dcp.save(model.state_dict(), storage_writer=StorageWriter(tmp_path / "other"))
            assert "values of its average" in str(told.value)
            ckpt_tools.save(tmp_path / "other", {"mine": torch.ones(3), "ema": ema})
        checkpoints.save(2, state, asynchronous=False)
        with torch.no_grad():
            model.weight.zero_()
        assert checkpoints.resume(state) == 2 and torch.equal(model.weight, trained)
        other = nn.Linear(2, 2)
        with ema.applied():  # another model is not concerned
            checkpoints.save(3, {"other": other}, asynchronous=False)


def test_an_average_of_no_module_is_refused_in_one_line() -> None:
    with pytest.raises(TypeError, match="expected a module, got a list"):
        Ema([1])  # type: ignore[arg-type]


# ---- plain values --------------------------------------------------------------------------------

LOSSES: list[tuple[Any, Any, str]] = [
    ({"epoch": 3}, {"epoch": 0, "best": 9}, "progress.best"),
    ({"a": 1}, {"b": 2}, "progress.b"),
    ({}, {"epoch": 0}, "progress.epoch"),
    (None, {"epoch": 0}, "progress.epoch"),
    ([{"a": 1}], [{"a": 0}, {"a": 0}], "progress.1.a"),
    ({"x": {"y": {"a": 1}}}, {"x": {"y": {"a": 0, "b": 0}}}, "progress.x.y.b"),
    ({"t": torch.ones(2)}, {"t": torch.zeros(2), "u": torch.zeros(2)}, "progress.u"),
]


@pytest.mark.parametrize(("saved", "mine", "missing"), LOSSES, ids=str)
def test_a_strict_load_deletes_nothing_of_the_users_own_values(
    saved: Any, mine: Any, missing: str, tmp_path: Path
) -> None:
    before = repr(mine)
    with pytest.raises(PlanError, match=f"missing from the checkpoint: 1\n    {missing}"):
        round_trip(tmp_path, {"progress": saved}, {"progress": mine})
    assert repr(mine) == before


def test_a_load_that_is_not_strict_keeps_what_was_not_stored(tmp_path: Path) -> None:
    mine = {"epoch": 0, "best": 9}
    notes = round_trip(tmp_path, {"progress": {"epoch": 3}}, {"progress": mine}, strict=False)
    assert mine == {"epoch": 3, "best": 9} and "progress.best" in " ".join(notes)


@pytest.mark.parametrize(
    ("saved", "mine"),
    [([1, 2, 3], [0]), ({"a": 1, "b": 2}, {"a": 0}), ([{"a": 5}, {"a": 6}], [{"a": 0}])],
)
def test_lists_and_dicts_are_changed_in_place(saved: Any, mine: Any, tmp_path: Path) -> None:
    into = {"history": mine}
    round_trip(tmp_path, {"history": saved}, into)
    assert into["history"] is mine and mine == saved


def test_a_value_that_takes_any_form_still_does(tmp_path: Path) -> None:
    into: dict[str, Any] = {"x": None, "y": {}}
    round_trip(tmp_path, {"x": {"epoch": 3}, "y": {"epoch": 4}}, into)
    assert into == {"x": {"epoch": 3}, "y": {"epoch": 4}}


def test_a_number_where_a_scheduler_stands_is_one_line(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(PlanError, match="is a StepLR, and the checkpoint has a int there"):
        round_trip(tmp_path, {"scheduler": 3}, {"scheduler": scheduler})


# ---- optimizers ----------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Keeps a counter of all steps in its state, as MADGRAD does."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.kind = kind

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count: Any = torch.tensor([0]) if self.kind == "tensor" else 0
        self.state["k"] = self.state.get("k", count) + 1  # type: ignore[index, call-overload]
        super().step(closure)


@pytest.mark.parametrize("kind", ["tensor", "number"])
def test_state_of_no_parameter_comes_back(kind: str, tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Counting]:
        model = nn.Linear(2, 2)
        return model, Counting(model.parameters(), kind)

    model, optimizer = made()
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    want = optimizer.state_dict()
    for steps in (0, 1):  # a fresh optimizer, and one that has a state already
        into, other = made()
        for _ in range(steps):
            into(torch.ones(1, 2)).sum().backward()
            other.step()
        path = tmp_path / str(steps)
        round_trip(
            path, {"model": model, "optimizer": optimizer}, {"model": into, "optimizer": other}
        )
        got = other.state_dict()
        assert int(got["state"]["k"]) == 3 and type(got["state"]["k"]) is type(want["state"]["k"])
        assert torch.equal(got["state"][0]["momentum_buffer"], want["state"][0]["momentum_buffer"])


# ---- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_background", [True, False])
@pytest.mark.parametrize("how", ["signal", "file", "clock"])
def test_a_request_for_a_save_holds_until_a_commit(
    how: str, is_background: bool, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    with CheckpointManager(
        root, save_every_s=1e-9 if how == "clock" else None, outages=Outages(max_failures=5)
    ) as checkpoints:
        if how == "signal":
            assert not checkpoints.should_save(0)  # a loop that asks: else the signal ends it
            os.kill(os.getpid(), signal.SIGUSR2)
        elif how == "file":
            (root / ".save-now").touch()
        assert checkpoints.should_save(1)
        (root / "step-00000001").write_text("in the way")

        def fails() -> None:
            checkpoints.save(1, {"x": 1}, asynchronous=is_background)
            checkpoints._writer.wait(is_last=True)

        with pytest.raises(ckpt_tools.StorageError):
            fails()
        (root / "step-00000001").unlink()
        assert checkpoints.should_save(2), "the save has failed"
        checkpoints.save(2, {"x": 1})
        checkpoints.wait()
        assert how == "clock" or not checkpoints.should_save(3)


# ---- data ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_saved_at_the_last_batch_of_an_epoch_is_told(workers: int, tmp_path: Path) -> None:
    def made() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(list(range(8)), batch_size=2, num_workers=workers)

    notes = {}
    for number in (2, 3):
        loader = made()
        for place, _ in enumerate(loader):
            if place == number:
                ckpt_tools.save(tmp_path / str(number), {"data": PerRank(loader)})
        into = made()
        report = ckpt_tools.load(tmp_path / str(number), {"data": PerRank(into)})
        notes[number] = " ".join(report.notes)
        assert len(list(into)) == 3 - number
    assert "next loop over it is empty" in notes[3] and "next loop" not in notes[2]


# ---- the rest ------------------------------------------------------------------------------------


def test_a_home_directory_is_not_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for act in (lambda: CheckpointManager("~/run"), lambda: ckpt_tools.save("~/one", {"x": 1})):
        with pytest.raises(PlanError, match="a shell replaces '~'"):
            act()
    assert not list(tmp_path.iterdir())


def test_objects_show_what_they_are(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(7, {"x": 1})
        assert (
            repr(checkpoints) == f"CheckpointManager({str(tmp_path / 'run')!r}, last_step=7)"
            or "last_step=None" in repr(checkpoints)
        )
    assert repr(checkpoints).endswith("last_step=7, closed)")
    assert repr(RngState()) == "RngState()"
    assert repr(PerRank({"a": 1}, "reset")) == "PerRank(dict, on_resize='reset')"
    assert repr(Ema(nn.Linear(2, 2), 0.9)) == "Ema(2 parameters, decay=0.9, updates=0)"


def test_a_run_leaves_no_lock_behind(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert (tmp_path / "run" / ".ckpt.lock").exists()
        checkpoints.save(1, {"x": 1}, asynchronous=False)
        with pytest.raises(ckpt_tools.StorageError, match="another manager open"):
            CheckpointManager(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000001"]
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert checkpoints.resume({"x": 0}) == 1


def test_many_saves_leave_one_removal_to_wait_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with CheckpointManager(tmp_path / "all", keep_last=None) as checkpoints:
        for step in range(30):
            checkpoints.save(step, {"x": step}, asynchronous=False)
        assert checkpoints._writer._retention is None, "nothing can go"
    with CheckpointManager(tmp_path / "few", keep_last=2) as checkpoints:
        for step in range(30):
            checkpoints.save(step, {"x": step}, asynchronous=False)
    assert len(list((tmp_path / "few").iterdir())) == 2


def test_containers_below_are_changed_in_place_too(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"x": 0}
    items = [0]
    into = {"p": {"a": inner, "l": [inner, items]}}
    round_trip(tmp_path, {"p": {"a": {"x": 1}, "l": [{"x": 1}, [3, 4]]}}, into)
    assert into["p"]["a"] is inner and inner == {"x": 1}
    assert into["p"]["l"] == [{"x": 1}, [3, 4]]


def test_a_value_that_became_a_container_loads_without_a_traceback(tmp_path: Path) -> None:
    into: dict[str, Any] = {"p": {"l": [5, 6]}}
    notes = round_trip(tmp_path, {"p": {"l": {"a": 1}}}, into, strict=False)
    assert into == {"p": {"l": {"a": 1}}}, notes
    kept: dict[str, Any] = {"p": {"a": 1}}
    notes = round_trip(tmp_path / "2", {"p": None}, kept, strict=False)
    assert kept == {"p": None} and "p.a" in " ".join(notes)


def test_an_average_that_is_applied_takes_no_update() -> None:
    ema = Ema(nn.Linear(2, 2))
    with ema.applied(), pytest.raises(PlanError, match="would average the average"):
        ema.update()


def test_an_optimizers_state_of_no_parameter_that_is_a_dict_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["global"] = {"t": torch.tensor(3.0)}  # type: ignore[index]
    with pytest.raises(PlanError, match="has a state of no parameter, under 'global'"):
        ckpt_tools.save(tmp_path / "c", {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_root_that_is_a_file_is_named(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=f"needs a directory, and this is none: {tmp_path}/file"):
        CheckpointManager(f"{tmp_path}/file{below}")
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(StorageError, match="File name too long"):
        CheckpointManager(tmp_path / ("x" * 300))


def test_the_failure_of_the_newest_save_ends_a_close_also_after_a_wait(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, outages=Outages(max_failures=3))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        checkpoints.save(1, {"w": torch.ones(200_000)})
        checkpoints.wait()  # one of three: a warning
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    with pytest.raises(CheckpointError, match="File too large"):
        checkpoints.close()


def test_a_failure_before_a_good_save_does_not_end_a_close(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").touch()
    with CheckpointManager(tmp_path, outages=Outages(max_failures=3)) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, name="b", overwrite=True)
        checkpoints.wait()  # logged
        checkpoints.save(2, {"w": torch.ones(3)}, asynchronous=False)


def test_a_mirror_that_cannot_be_one_is_refused_with_the_reason(tmp_path: Path) -> None:
    for mirror in ("file:///copies", str(tmp_path / "copies")):
        with pytest.raises(ValueError, match="expected the URL of an object store.* is a path"):
            CheckpointManager(tmp_path / "run", mirror=mirror)
    for odd in (5, True, [], ""):
        with pytest.raises(TypeError, match="mirror: expected a URL"):
            CheckpointManager(tmp_path / "run", mirror=odd)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only a run on a disk has a mirror"):
        CheckpointManager("s3://bucket/run", mirror="s3://bucket/mirror")
    with pytest.raises(StorageError, match="a web server is read-only"):
        CheckpointManager(tmp_path / "run", mirror="http://localhost:1/run")


def test_a_rate_that_is_a_tensor_comes_back_as_another_tensor(tmp_path: Path) -> None:
    """As torch's own load_state_dict has it; docs/saving.md says so."""
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model, "optimizer": optimizer}, asynchronous=False)
        rate.fill_(0.5)
        checkpoints.resume({"model": model, "optimizer": optimizer})
    (group,) = optimizer.param_groups
    assert group["lr"] is not rate and group["lr"].item() == 0.25


@pytest.mark.parametrize(
    ("saved", "mine"),
    [
        ({"a": {"b": 7, "t": torch.ones(2)}}, {"a.b": 0, "a.t": torch.zeros(2)}),
        ({"a.b": 7, "a.t": torch.ones(2)}, {"a": {"b": 0, "t": torch.zeros(2)}}),
        ({"a": {"b": 7}}, {"a.b": 0}),
    ],
)
def test_a_key_with_a_dot_and_two_keys_have_one_name(
    saved: dict[str, Any], mine: dict[str, Any], tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, saved, asynchronous=False)
        assert checkpoints.resume(mine) == 1
        assert checkpoints.last_load is not None and not checkpoints.last_load.notes
    inner = mine.get("a", {"b": mine.get("a.b"), "t": mine.get("a.t")})
    assert inner["b"] == 7 and (inner.get("t") is None or inner["t"].tolist() == [1, 1])


def test_a_longer_tuple_that_is_replaced_is_told(tmp_path: Path) -> None:
    ckpt_tools.save(tmp_path / "c", {"a": (torch.ones(1), torch.ones(2))})
    mine = {"a": (torch.zeros(1), torch.zeros(2), torch.zeros(3))}
    with pytest.raises(PlanError, match="missing from the checkpoint: 1"):
        ckpt_tools.load(tmp_path / "c", mine)
    notes = ckpt_tools.load(tmp_path / "c", mine, strict=False).notes
    assert len(mine["a"]) == 2 and any("replaced" in note and "a.2" in note for note in notes)
    assert not any("keep their values" in note for note in notes)


@pytest.mark.parametrize("mine", [0, "text", [1], torch.zeros(2)], ids=lambda v: type(v).__name__)
def test_a_value_of_each_rank_replaces_no_value_of_all(mine: Any, tmp_path: Path) -> None:
    """It became `{"rank_0": 5}` without a word."""
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"p": {"x": PerRank(5)}, "q": 1}, asynchronous=False)
        state: dict[str, Any] = {"p": {"x": mine}, "q": 0}
        with pytest.raises(PlanError, match=r"p\.x was saved as a PerRank: give it as PerRank"):
            checkpoints.resume(state)
        assert checkpoints.resume(state, strict=False) == 1
        assert state["p"]["x"] is mine and state["q"] == 1
        same: dict[str, Any] = {"p": {"x": PerRank(0)}, "q": 0}
        assert checkpoints.resume(same) == 1 and same["p"]["x"].value == 5
        grown: dict[str, Any] = {"q": {}}
        checkpoints.save(2, {"q": {"rank_0": 3}}, asynchronous=False)
        assert checkpoints.resume(grown) == 2 and grown["q"] == {"rank_0": 3}


@pytest.mark.parametrize(
    ("saved", "mine", "num_lost"),
    [({1: 2}, {1: 0, 3: 4}, 1), ([1], [0, 5, 6], 2), ({1: [1]}, {1: [1, 2]}, 1), ([1, 2], [0], 0)],
    ids=str,
)
def test_entries_that_a_plain_value_loses_are_told(
    saved: Any, mine: Any, num_lost: int, tmp_path: Path
) -> None:
    notes = round_trip(tmp_path, {"p": saved}, state := {"p": mine})
    assert state["p"] == saved
    told = [note for note in notes if "are not in the checkpoint, and are gone" in note]
    assert len(told) == (num_lost > 0) and all(f"['p']: {num_lost} entries" in n for n in told), (
        notes
    )
