"""What decides when a run saves, what a save has besides the state, and what is told of it."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager, Outages, PlanError, SaveReport, StorageError, Writing
from ckpt_tools.loop.state.pack_objects import refuse_conflicts


def adapted(seed: int = 0) -> nn.Module:
    """A frozen base and an adapter."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"base": nn.Linear(64, 64), "adapter": nn.Linear(64, 2)})
    model["base"].requires_grad_(False)
    return model


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model["adapter"](torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return optimizer


# ---- only what trains ----------------------------------------------------------------------------


def test_only_what_trains_is_saved_and_resumed_onto_a_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted()
    optimizer = stepped(model)
    want = {n: t.clone() for n, t in model.state_dict().items()}
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"model": model, "optimizer": optimizer}, only="trainable")
    names = list(ckpt_tools.open(tmp_path / "run" / "step-00000001"))
    assert {n for n in names if n.startswith("model.")} == {
        "model.adapter.weight",
        "model.adapter.bias",
    }
    other = adapted(1)
    other["base"].load_state_dict(model["base"].state_dict())  # the base comes from elsewhere
    again = stepped(other)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert checkpoints.resume({"model": other, "optimizer": again}) == 1
    assert all(torch.equal(other.state_dict()[n], t) for n, t in want.items())
    moment = optimizer.state[model["adapter"].weight]["exp_avg"]
    assert torch.equal(again.state[other["adapter"].weight]["exp_avg"], moment)
    assert (
        "2 frozen parameters keep their values: model.base.bias, model.base.weight" in (caplog.text)
        or "2 frozen parameters keep their values: model.base.weight, model.base.bias"
        in caplog.text
    )


def test_only_what_trains_is_saved_of_a_model_under_ddp(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(adapted())
        with CheckpointManager(tmp_path / "run") as checkpoints:
            checkpoints.save(1, {"model": wrapped}, asynchronous=False, only="trainable")
            names = set(ckpt_tools.open(tmp_path / "run" / "step-00000001"))
            assert names == {"model.adapter.weight", "model.adapter.bias"}
            assert checkpoints.resume({"model": wrapped}) == 1
    finally:
        torch.distributed.destroy_process_group()


def test_a_parameter_that_trains_now_is_not_taken_for_a_frozen_one(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"model": adapted()}, only="trainable")
        thawed = adapted(1)
        thawed["base"].requires_grad_(True)
        with pytest.raises(PlanError, match=r"missing from the checkpoint: 2\n.*model\.base"):
            checkpoints.resume({"model": thawed})


def test_a_full_step_that_lacks_a_frozen_parameter_is_still_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"model": {"adapter": adapted()["adapter"]}})
        with pytest.raises(PlanError, match="missing from the checkpoint"):
            checkpoints.resume({"model": adapted()})


# ---- files ---------------------------------------------------------------------------------------


def test_small_files_lie_in_the_step_and_are_sealed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", keep_last=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.ones(3)}, files={"config.json": b"{}"})
    step = tmp_path / "run" / "step-00000002"
    assert (step / "config.json").read_bytes() == b"{}"
    assert not step.with_name("step-00000001").exists()  # no foreign file keeps it
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=step, no_dist=True)
    assert torch.equal(state["w"], torch.ones(3))
    assert ckpt_tools.verify(step).problems == []
    (step / "config.json").write_bytes(b"[]")
    assert "config.json" in str(ckpt_tools.verify(step).problems)


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "__0_0.distcp", "ckpt.manifest.json"])
def test_a_file_with_a_name_that_a_step_needs_is_refused(name: str, tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path / "run") as checkpoints,
        pytest.raises(ValueError, match="cannot have a file"),
    ):
        checkpoints.save(1, {"w": torch.ones(3)}, files={name: b""})
    assert ckpt_tools.steps(tmp_path / "run") == []


# ---- when ----------------------------------------------------------------------------------------


def test_steps_and_seconds_ask_for_a_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", save_every=3, save_every_s=0.3) as checkpoints:
        assert [n for n in range(1, 7) if checkpoints.should_save(n)] == [3, 6]
        deadline = time.monotonic() + 30
        while not checkpoints.should_save(7):
            assert time.monotonic() < deadline
        assert checkpoints.should_save(7)  # until it is saved
        checkpoints.save(7, {"w": torch.ones(3)})
        assert not checkpoints.should_save(8) or time.monotonic() > deadline - 29.4


def test_a_file_and_a_signal_ask_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = signal.getsignal(signal.SIGUSR2)  # a manager of another test may still be open
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert not checkpoints.should_save(1)
        (tmp_path / "run" / ".save-now").touch()
        assert checkpoints.should_save(2) and checkpoints.should_save(3)  # until it is saved
        checkpoints.save(3, {"w": torch.ones(3)})
        assert not checkpoints.should_save(3)
        assert not (tmp_path / "run" / ".save-now").exists() and "saving now" in caplog.text
        for step in (4, 6):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert checkpoints.should_save(step)
            checkpoints.save(step, {"w": torch.ones(3)})
            assert not checkpoints.should_save(step + 1)
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_request_that_cannot_be_removed_does_not_save_at_every_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        (tmp_path / "run" / ".save-now").mkdir()
        assert not any(checkpoints.should_save(n) for n in range(5))
    assert caplog.text.count("is ignored from now on") == 1


# ---- what is told --------------------------------------------------------------------------------


def test_hooks_get_each_commit_and_each_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[SaveReport] = []
    failed: list[tuple[int, BaseException]] = []

    def broken(_: SaveReport) -> None:
        raise RuntimeError("of a user")

    with CheckpointManager(
        tmp_path / "run",
        on_commit=[broken, told.append],
        on_error=lambda step, error: failed.append((step, error)),
    ) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, metrics={"loss": 0.5})
        checkpoints.save(2, {"w": torch.ones(3)}, asynchronous=False)
        with pytest.raises(StorageError):
            checkpoints.save(1, {"w": torch.ones(3)}, asynchronous=False)
        (tmp_path / "run" / "step-00000003").mkdir()  # it appears while the save is under way
        (tmp_path / "run" / "step-00000003" / "x").touch()
        with pytest.raises(StorageError):
            checkpoints.save(3, {"w": torch.ones(3)}, overwrite=True, asynchronous=False)
    assert [(r.step, r.metrics) for r in told] == [(1, {"loss": 0.5}), (2, {})]
    assert all(r.stall_s > 0 and r.seconds > 0 and r.nbytes > 0 for r in told)
    for report in told:
        (manifest,) = Path(report.path).glob("ckpt.manifest.*")
        assert report.digest == f"{ckpt_tools_crc(manifest.read_bytes()):016x}"
    assert [step for step, _ in failed] == [3] and isinstance(failed[0][1], StorageError)
    assert "on_commit failed; step 1 is complete all the same" in caplog.text


def ckpt_tools_crc(data: bytes) -> int:
    """CRC-64/NVME, bit by bit."""
    crc = ~0 & (1 << 64) - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ (1 << 64) - 1


def test_a_hook_that_is_no_function_is_refused(tmp_path: Path) -> None:
    hook: Any = "log"
    with pytest.raises(TypeError, match="a hook is a function"):
        CheckpointManager(tmp_path / "run", on_commit=hook)


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["step-{}", "checkpoint-{}", "global_step_{}"])
def test_steps_have_the_names_that_a_host_expects(form: str, tmp_path: Path) -> None:
    with CheckpointManager(
        tmp_path / "run", keep_last=1, writing=Writing(names=form)
    ) as checkpoints:
        checkpoints.protected_steps.add(1)
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": torch.full((3,), float(step))})
    names = {p.name for p in (tmp_path / "run").iterdir() if not p.name.startswith(".")}
    assert names == {form.format(1), form.format(3)}
    state = {"w": torch.zeros(3)}
    with CheckpointManager(tmp_path / "run", writing=Writing(names=form)) as checkpoints:
        assert checkpoints.resume(state) == 3 and state["w"][0] == 3


def test_a_form_that_no_reader_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names: expected one of step-"):
        CheckpointManager(tmp_path / "run", writing=Writing(names="model-{}"))


# ---- names of checkpoints, and their removal -----------------------------------------------------


def test_a_named_checkpoint_is_beside_the_steps(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with CheckpointManager(root, keep_last=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.ones(3)})
        checkpoints.save(9, {"w": torch.zeros(3)}, name="best/one")
        checkpoints.wait()
        assert [s.number for s in checkpoints.steps()] == [2]
        assert ckpt_tools.verify(root / "best" / "one").problems == []
        state = {"w": torch.full((3,), 5.0)}
        assert checkpoints.resume(state) == 2
        checkpoints.remove("best/one")
    assert not (root / "best" / "one").exists() and (root / "step-00000002").exists()


@pytest.mark.parametrize("name", ["step-9", "step-9/sub", "../x", "/abs", ".h", "a//b", ""])
def test_a_name_that_is_not_below_the_root_is_refused(name: str, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        with pytest.raises(ValueError, match="name"):
            checkpoints.save(1, {"w": torch.ones(3)}, name=name)
        with pytest.raises(ValueError, match="name"):
            checkpoints.remove(name)


def test_remove_takes_nothing_but_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nothing: Any = None
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, name="a/b")
        (tmp_path / "run" / "mine").mkdir()
        (tmp_path / "run" / "mine" / "x").touch()
        checkpoints.wait()
        (tmp_path / "run" / "link").symlink_to("a/b")
        for name in ("a", "mine", "link", "no-such", "a/b/__0_0.distcp"):
            checkpoints.remove(name)
        with pytest.raises(TypeError):
            checkpoints.remove(nothing)
    assert (tmp_path / "run" / "a" / "b" / ".metadata").exists()
    assert (tmp_path / "run" / "mine" / "x").exists() and (tmp_path / "run" / "link").is_symlink()
    assert caplog.text.count("stays") == 5


def test_a_checkpoint_stays_if_the_save_after_it_fails(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "run", outages=Outages(max_failures=3))
    checkpoints.save(1, {"w": torch.ones(3)}, name="a")
    checkpoints.wait()
    (tmp_path / "run" / "b").mkdir()
    (tmp_path / "run" / "b" / "mine").touch()
    checkpoints.save(2, {"w": torch.ones(3)}, name="b", overwrite=True)
    checkpoints.wait()  # only logged
    checkpoints.remove("a")
    with pytest.raises(StorageError, match="never replaces"):  # the newest save has failed
        checkpoints.close()
    assert (tmp_path / "run" / "a" / ".metadata").exists()


def test_a_hook_that_calls_the_manager_is_told_and_nothing_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []
    with CheckpointManager(tmp_path / "run", on_commit=lambda _: calls[0]()) as checkpoints:
        for number, call in enumerate(
            (checkpoints.wait, checkpoints.close, lambda: checkpoints.should_save(1))
        ):
            calls[:] = [call]
            checkpoints.save(number, {"w": torch.ones(3)})
            checkpoints.wait()
    assert caplog.text.count("would wait for itself") == 3


def test_a_new_run_in_an_old_root_sets_the_old_steps_aside(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as checkpoints:
        for step in (5, 6):
            checkpoints.save(step, {"w": torch.zeros(3)})
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.branch_from(None)
        checkpoints.save(1, {"w": torch.ones(3)})
    state = {"w": torch.zeros(3)}
    with CheckpointManager(tmp_path / "run") as checkpoints:
        assert checkpoints.resume(state) == 1 and state["w"][0] == 1


def test_a_term_signal_is_not_lost_behind_a_request(tmp_path: Path) -> None:
    old = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with CheckpointManager(tmp_path / "run") as checkpoints:
            assert checkpoints.preempted() == 0
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert checkpoints.preempted() == signal.SIGTERM
    finally:
        signal.signal(signal.SIGUSR2, old)


@pytest.mark.parametrize(
    ("ranks", "what"),
    [
        ([{"lr": 1}, {"lr": 2}], "'lr' differs between rank 0 and rank 1"),
        ([{"x": 0}, {"x": 2}], "a tensor on one and a value on the other"),
        ([{"x.k": 1}, {"x": 2}], "'x' is a value on rank 1, and holds 'x.k' on rank 0"),
    ],
)
def test_stages_that_contradict_each_other_are_refused(ranks: Any, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        refuse_conflicts(ranks)
    refuse_conflicts([{"a": 1, "x": 0}, {"b": 2, "x": 0}])
