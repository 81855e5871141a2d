"""Saves and resumes at the edges of what people put into a state."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt_tools
from ckpt_tools import CheckpointManager, Ema, PerRank, PlanError, RngState


def round_trip(
    path: Path, saved: dict[str, Any], into: dict[str, Any], **options: Any
) -> list[str]:
    ckpt_tools.save(path / "c", saved)
    return list(ckpt_tools.load(path / "c", into, **options).notes)


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
        root, save_every_s=1e-9 if how == "clock" else None, max_failures=5
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
