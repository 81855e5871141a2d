"""The manager in one process: what fits and what does not, damage, policies, and what happens in
the background.
"""

from __future__ import annotations

import copy
import logging
import pickle
import random
import re
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckpt_tools
from ckpt_tools import (
    CheckpointManager,
    IntegrityError,
    Mirror,
    NotACheckpointError,
    Outages,
    PerRank,
    PlanError,
    Resuming,
    Retention,
    RngState,
    StorageError,
    UnsafePickleError,
    Writing,
)
from ckpt_tools.integrations.common import options_of
from ckpt_tools.loop.options import GONE, RENAMED, OldOptions, grouped
from ckpt_tools.loop.state.staging import Stager
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.steps import list_steps
from ckpt_tools.version import GONE_IN
from tests.jobs import ROOT


class Mlp(nn.Module):
    def __init__(self, width: int = 8, extra: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)
        if extra:
            self.third = nn.Linear(4, 4)


def trained(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = Mlp()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(
            7,
            {"model": model, "optimizer": trained(model), "epoch": 2, "best": [0.5, None]},
            asynchronous=False,
        )
    return tmp_path


def resume(root: Path, state: dict[str, Any], **options: Any) -> CheckpointManager:
    with CheckpointManager(root) as checkpoints:
        assert checkpoints.resume(state, **options) == 7
    return checkpoints


def test_torch_s_default_device_is_nothing_to_a_save_or_a_load(tmp_path: Path) -> None:
    model = Mlp()
    state = {
        "model": model,
        "optimizer": trained(model),
        "epoch": 2,
        "rng": RngState(),
        "ema": torch.arange(5.0),
    }
    want = copy.deepcopy(model.state_dict())
    torch.set_default_device("meta")  # whatever is made without a device has no memory
    try:
        for asynchronous in (False, True):
            with CheckpointManager(
                tmp_path / str(asynchronous), asynchronous=asynchronous
            ) as checkpoints:
                checkpoints.save(7, state)
                checkpoints.wait()
                state["epoch"], state["ema"] = 0, torch.zeros(5, device="cpu")
                for parameter in model.parameters():
                    parameter.data.zero_()
                assert checkpoints.resume(state) == 7
                assert checkpoints.preempted() == 0
            assert (state["epoch"], state["ema"].tolist()) == (2, [0, 1, 2, 3, 4])
            assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())
    finally:
        torch.set_default_device(None)


def test_what_goes_through_other_memory_is_loaded_in_batches_and_proved_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a device's memory does; transposed tensors are the like of it that every machine has."""
    torch.manual_seed(0)
    whole = {f"w{i}": torch.randn(30 + i, 20) for i in range(12)} | {
        "flat": torch.randn(500),
        "none": torch.empty(0, 3),
    }
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(7, {"model": whole}, asynchronous=False)
    reports, batches, fill = [], [], Stager.fill

    def counted(
        self: Stager, tensors: list[torch.Tensor]
    ) -> AbstractContextManager[list[memoryview]]:
        batches.append(sum(t.nbytes for t in tensors if not t.is_contiguous()))
        return fill(self, tensors)

    monkeypatch.setattr(Stager, "fill", counted)
    for most_nbytes, num_batches in ((1 << 30, 1), (6000, 8), (1, 12)):
        batches.clear()
        monkeypatch.setattr("ckpt_tools.loop.loading.read_shards._BATCH_BYTES", most_nbytes)
        got = {
            name: (
                torch.zeros_like(value).mT.contiguous().mT
                if value.dim() > 1
                else torch.zeros_like(value)
            )
            for name, value in whole.items()
        }
        reports.append(ckpt_tools.load(tmp_path / "step-00000007", {"model": got}))
        assert all(torch.equal(got[name], value) for name, value in whole.items())
        assert not got["w3"].is_contiguous()
        assert len(batches) == num_batches and max(batches) <= max(most_nbytes, 41 * 20 * 4), (
            batches
        )
    assert {(r.num_tensors, r.needed_nbytes, r.num_proved) for r in reports} == {
        (14, sum(v.nbytes for v in whole.values()), 13)
    }
    data = bytearray((tmp_path / "step-00000007" / "__0_0.distcp").read_bytes())
    data[data.index(whole["w9"].numpy().tobytes()) + 17] ^= 1
    (tmp_path / "step-00000007" / "__0_0.distcp").write_bytes(data)
    with pytest.raises(IntegrityError, match="w9"):
        ckpt_tools.load(tmp_path / "step-00000007", {"model": got})


# ---- what fits -----------------------------------------------------------------------------------


def test_a_parameter_that_was_added_is_named_and_may_be_left_as_it_is(saved: Path) -> None:
    model = Mlp(extra=True)
    before = copy.deepcopy(model.third.state_dict())
    with pytest.raises(
        PlanError, match=r"missing from the checkpoint: 2\n    model.third.weight +float32 \[4, 4\]"
    ) as caught:
        resume(saved, {"model": model})
    assert "strict=False" in (caught.value.hint or "")
    assert "\nhint: pass strict=False" in "".join(traceback.format_exception(caught.value))
    loaded = resume(saved, {"model": model}, strict=False).last_load
    assert loaded is not None and any("model.third.weight" in note for note in loaded.notes)
    assert all(torch.equal(v, before[k]) for k, v in model.third.state_dict().items())


def test_a_parameter_that_was_removed_is_named_with_what_is_stored(saved: Path) -> None:
    model = Mlp()
    del model.second
    with pytest.raises(
        PlanError,
        match=(
            r"in the checkpoint, but not in the state: 2\n    model.second.weight +float32 \[4, 8\]"
        ),
    ):
        resume(saved, {"model": model})
    resume(saved, {"model": model}, strict=False)


def test_a_changed_shape_and_a_changed_type_are_one_table_and_nothing_is_loaded(
    saved: Path,
) -> None:
    model = Mlp(width=9)
    model.second.bias = nn.Parameter(model.second.bias.to(torch.bfloat16))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PlanError) as caught:
        resume(saved, {"model": model}, strict=False)
    text = str(caught.value)
    assert "strict=False" not in (caught.value.hint or "") and "on_mismatch=" in (
        caught.value.hint or ""
    )
    assert "shapes differ: 3" in text and re.search(
        r"model.first.weight +state float32 \[9, 4\], checkpoint float32 \[8, 4\]", text
    )
    assert "types differ: 1" in text and "state bfloat16 [4], checkpoint float32 [4]" in text
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_nothing_is_cast_unless_asked(saved: Path) -> None:
    model, source = Mlp().to(torch.bfloat16), Mlp()
    with pytest.raises(PlanError, match="types differ: 4") as caught:
        resume(saved, {"model": model})
    assert "cast=True" in (caught.value.hint or "")
    resume(saved, {"model": model}, cast=True)
    resume(saved, {"model": source})
    assert all(
        torch.equal(a, b.to(torch.bfloat16))
        for a, b in zip(model.parameters(), source.parameters(), strict=True)
    )


def test_a_common_prefix_is_recognised_and_said(saved: Path) -> None:
    wrapped = nn.ModuleDict({"backbone": Mlp()})
    with pytest.raises(PlanError) as caught:
        resume(saved, {"model": wrapped})
    assert (
        caught.value.hint
        == "the names differ by a prefix only: 'model' in the checkpoint, 'model.backbone' in the"
        " state"
    )


def test_nearest_names_are_shown(saved: Path) -> None:
    model = nn.ModuleDict({"firts": nn.Linear(4, 8), "second": nn.Linear(8, 4)})
    with pytest.raises(
        PlanError, match=r"model.firts.weight  float32 \[8, 4\]  nearest: model.first.weight"
    ):
        resume(saved, {"model": model})


def test_a_part_is_loaded_by_glob_and_the_rest_keeps_what_it_has(saved: Path) -> None:
    model, whole = Mlp(), Mlp()
    before = copy.deepcopy(model.second.state_dict())
    state = {"model": model, "epoch": 99}
    resume(saved, state, select=["model.first.*"])
    resume(saved, {"model": whole})
    assert torch.equal(model.first.weight, whole.first.weight) and state["epoch"] == 99
    assert all(torch.equal(v, before[k]) for k, v in model.second.state_dict().items())


def test_a_model_alone_of_a_whole_checkpoint(saved: Path) -> None:
    checkpoints = resume(saved, {"model": Mlp()})
    assert checkpoints.last_load is not None
    assert any(
        note.startswith("the state has no such keys; left out:") and "optimizer" in note
        for note in checkpoints.last_load.notes
    )


def test_weights_alone_are_loaded_from_safetensors_without_a_manager(
    saved: Path, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    wanted = {name: value.to(torch.bfloat16) for name, value in Mlp().state_dict().items()}
    save_file(wanted, tmp_path / "weights.safetensors")
    model = Mlp()
    with pytest.raises(PlanError, match="types differ"):
        ckpt_tools.load(tmp_path / "weights.safetensors", {"model": model})
    report = ckpt_tools.load(tmp_path / "weights.safetensors", {"model": model}, cast=True)
    assert all(
        torch.equal(value, wanted[name].float()) for name, value in model.state_dict().items()
    )
    assert report.num_tensors == 4 and report.read_nbytes == 2 * sum(
        p.numel() for p in model.parameters()
    )
    before = model.second.weight.detach().clone()
    ckpt_tools.load(saved / "step-00000007", {"model": model}, select=["model.first.*"])
    assert not torch.equal(model.first.weight, wanted["first.weight"].float()) and torch.equal(
        model.second.weight, before
    )


def test_values_become_what_was_stored_whatever_their_structure_now(saved: Path) -> None:
    state: dict[str, Any] = {"epoch": 0, "best": []}
    resume(saved, state)
    assert state == {"epoch": 2, "best": [0.5, None]}


# ---- which step ----------------------------------------------------------------------------------


def test_there_is_nothing_to_resume_at_first(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "new" / "run") as checkpoints:
        assert (
            checkpoints.resume({"epoch": 0}) is None
            and checkpoints.latest() is None
            and checkpoints.steps() == []
        )


def test_a_step_that_is_not_there_is_refused_with_those_that_are(saved: Path) -> None:
    with (
        CheckpointManager(saved) as checkpoints,
        pytest.raises(NotACheckpointError, match="no step 8 in .*; there are: 7"),
    ):
        checkpoints.resume({"epoch": 0}, step=8)


def test_a_newer_step_that_is_incomplete_is_passed_over_and_the_reason_is_logged(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (saved / "step-00000009").mkdir()
    with caplog.at_level(logging.WARNING, "ckpt_tools"):
        resume(saved, {"epoch": 0})
    assert "passed over" in caplog.text and "the save never finished" in caplog.text


def test_retention_keeps_the_last_and_those_kept_by_rule(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, retention=Retention(2, every=4)) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, {"w": torch.ones(3)})
    assert [s.number for s in list_steps(open_root(tmp_path))] == [4, 6, 7]


@pytest.mark.parametrize("harm", ["flipped", "short", "no index"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_was_passed_over_is_saved_again_when_the_job_gets_there(
    harm: str, asynchronous: bool, tmp_path: Path
) -> None:
    model = nn.Linear(50, 40)
    state = {"model": model}
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
    data = tmp_path / "step-00000002" / "__0_0.distcp"
    if harm == "flipped":
        data.write_bytes(
            data.read_bytes().replace(model.weight.detach().numpy().tobytes()[:8], b"\x00" * 8, 1)
        )
    elif harm == "short":
        data.write_bytes(data.read_bytes()[:-100])
    else:
        (data.parent / ".metadata").unlink()
    with CheckpointManager(tmp_path, asynchronous=asynchronous) as checkpoints:
        # nobody has looked at it yet
        with pytest.raises(StorageError, match="step 2 is there already"):
            checkpoints.save(2, state)
        assert checkpoints.resume(state) == 1
        nn.init.ones_(model.weight)
        checkpoints.save(2, state)
        checkpoints.wait()
        with pytest.raises(StorageError, match="step 1 is there already"):
            checkpoints.save(1, state)
        nn.init.zeros_(model.weight)
        assert checkpoints.resume(state) == 2
        assert bool((model.weight == 1).all())
    assert [(s.number, s.problem) for s in list_steps(open_root(tmp_path))] == [(1, ""), (2, "")]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000002",
    ]


def test_what_was_resumed_from_stays_until_a_newer_one_is_committed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": torch.ones(3)})
    with CheckpointManager(tmp_path, keep_last=1) as checkpoints:
        checkpoints.resume({"w": torch.ones(3)}, step=1)
        checkpoints.save(4, {"w": torch.ones(3)})
        checkpoints.wait()
        checkpoints.save(5, {"w": torch.ones(3)})
    assert [s.number for s in list_steps(open_root(tmp_path))] == [5]


# ---- damage and hostile objects ------------------------------------------------------------------


def test_a_flipped_bit_of_a_tensor_is_found_on_load_and_named(saved: Path) -> None:
    path = saved / "step-00000007" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    at = data.find(bytes_of_first(saved))
    data[at + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        IntegrityError,
        match=r"bytes were damaged since they were written: .*'model.first.weight' in __0_0.distcp",
    ):
        resume(saved, {"model": Mlp()}, step=7)
    with pytest.raises(IntegrityError, match="every step is damaged: step-00000007"):
        resume(saved, {"model": Mlp()})


def bytes_of_first(root: Path) -> bytes:
    model = Mlp()
    resume(root, {"model": model})
    return model.first.weight.detach().numpy().tobytes()


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("canary"),)


def test_a_flipped_bit_is_found_by_every_copy_and_nothing_is_written(
    saved: Path, tmp_path: Path
) -> None:
    path = saved / "step-00000007"
    assert ckpt_tools.merge(path, tmp_path / "good.safetensors").num_tensors == 4
    data = bytearray((path / "__0_0.distcp").read_bytes())
    with CheckpointManager(saved) as checkpoints:
        state = {"model": Mlp()}
        checkpoints.resume(state, strict=False)
    at = bytes(data).index(state["model"].first.weight.detach().numpy().tobytes())
    for bit in (0, 63 * 8 + 5):
        flipped = bytearray(data)
        flipped[at + bit // 8] ^= 1 << bit % 8
        (path / "__0_0.distcp").write_bytes(flipped)
        with pytest.raises(
            IntegrityError,
            match=r"bytes were damaged since they were written: .*'model.first.weight'",
        ):
            ckpt_tools.merge(path, tmp_path / "bad.safetensors")
        with pytest.raises(IntegrityError, match=r"'model.first.weight'"):
            ckpt_tools.reshard(path, tmp_path / "bad", to_ranks=2)
        names = [path.name for path in tmp_path.iterdir()]
        assert not [name for name in names if name.startswith(("bad", ".tmp.bad", ".trash.bad"))]


def test_an_object_that_asks_for_code_is_refused_and_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"epoch": Harm()}, checkpoint_id=tmp_path / "step-00000007", no_dist=True)
    with pytest.raises(UnsafePickleError, match="refused an object"):
        resume(tmp_path, {"epoch": 0})
    assert not (tmp_path / "canary").exists()
    resume(tmp_path, {"epoch": 0}, trust_pickle=True)


# ---- in the background ---------------------------------------------------------------------------


def test_the_state_is_frozen_at_the_call(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1_000_000), "scalar": torch.tensor(1.0), "n": [1]}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        state["w"].fill_(9)
        state["scalar"].fill_(9)
        state["n"].append(2)
        checkpoints.resume(state)
    assert state["w"].sum() == 0 and state["scalar"] == 1 and state["n"] == [1]


def test_a_second_save_waits_or_is_skipped(tmp_path: Path) -> None:
    state = {"w": torch.zeros(30_000_000)}
    with CheckpointManager(tmp_path, keep_last=9, writing=Writing(when_busy="skip")) as checkpoints:
        assert checkpoints.save(1, state)
        skipped = not checkpoints.save(2, state)
        checkpoints.wait()
        assert checkpoints.save(3, state)
    assert skipped
    assert [s.number for s in list_steps(open_root(tmp_path))] == [1, 3]


def test_memory_is_one_copy_that_is_used_again(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1000)}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        first = checkpoints._stage._buffer.data_ptr()
        checkpoints.save(2, state)
        assert (
            checkpoints._stage._buffer.data_ptr() == first
            and checkpoints._stage._buffer.numel() == 4032
        )


def test_a_stage_goes_to_another_process_without_its_memory() -> None:
    stage = Stager()
    (view,) = stage.copy([torch.arange(100_000.0)]).wait()
    assert len(view) == 400_000 and len(pickle.dumps(stage)) < 1000
    assert len(pickle.loads(pickle.dumps(stage)).copy([torch.ones(3)]).wait()) == 1


def test_a_step_is_saved_once(saved: Path) -> None:
    with (
        CheckpointManager(saved) as checkpoints,
        pytest.raises(StorageError, match="step 7 is there already"),
    ):
        checkpoints.save(7, {"epoch": 1})


def test_threads_end_with_the_manager(tmp_path: Path) -> None:
    before = threading.active_count()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)})
    assert threading.active_count() == before


# ---- values of each rank -------------------------------------------------------------------------


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), float(np.random.rand()), torch.rand(2).tolist(), np.random.randn()

    with CheckpointManager(tmp_path) as checkpoints:
        np.random.randn()  # an odd one: the second of a pair waits
        checkpoints.save(1, {"rng": RngState()}, asynchronous=False)
        want = draw()
        checkpoints.resume({"rng": RngState()})
        assert draw() == want


@pytest.mark.parametrize("policy", ["never", 3, None])
def test_an_unknown_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match="on_resize"):
        PerRank(1, on_resize=policy)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    bad: list[tuple[str, Callable[[], object]]] = [
        ("keep_last", lambda: CheckpointManager(tmp_path, keep_last=0)),
        ("timeout_s", lambda: CheckpointManager(tmp_path, timeout_s="x")),  # type: ignore[arg-type]
        ("when_busy", lambda: Writing(when_busy="drop")),
        ("replicas", lambda: Writing(replicas="never")),
        ("names", lambda: Writing(names="model-{}")),
        ("jobs", lambda: Writing(jobs=0)),
        ("jobs", lambda: Writing(jobs=257)),
        ("background_jobs", lambda: Writing(background_jobs=0)),
        ("max_failures", lambda: Outages(max_failures=0)),
        ("retry_s", lambda: Outages(retry_s=-1)),
        ("mirror", lambda: CheckpointManager(tmp_path, mirror="a/path")),
        ("mirror", lambda: CheckpointManager("s3://bucket/run", mirror="s3://bucket/other")),
        ("mirror.every", lambda: Mirror("s3://bucket/run", every=0)),
    ]
    for name, call in bad:
        with pytest.raises(ValueError, match=f"^{re.escape(name)}: "):
            call()
    for name in ("writing", "resuming", "outages", "mirror", "retention"):
        with pytest.raises(TypeError, match=f"^{name}: expected"):
            CheckpointManager(tmp_path, **{name: 3})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:CheckpointManager")
def test_the_options_of_a_trainer_and_of_its_user_are_joined() -> None:
    mine = Writing(max_mbps=5)
    found = options_of({"writing": mine}, keep_last=4, names="checkpoint-{}", asynchronous=False)
    assert found["writing"] == Writing(max_mbps=5, names="checkpoint-{}")
    assert found["retention"] == Retention(4) and found["asynchronous"] is False
    own = Writing(names="global_step_{}")
    assert options_of({"writing": own}, keep_last=4, names="step-{}")["writing"] == own
    rules = Retention(2, every=10)
    assert options_of({"retention": rules}, keep_last=4)["retention"] == rules
    assert options_of({"keep_last": 2}, keep_last=4)["retention"] == Retention(2)
    old = {"keep_every": 10, "max_mbps": 5, "retry_s": 1, "step_format": "step-{}"}
    found = options_of(old, keep_last=4, names="checkpoint-{}")
    assert found["retention"] == Retention(4, every=10) and found["outages"] == Outages(1)
    assert found["writing"] == Writing(max_mbps=5, names="step-{}")
    for skips in ({"when_busy": "skip"}, {"writing": Writing(when_busy="skip")}):
        with pytest.raises(ValueError, match="only 'wait' works"):
            options_of(skips, keep_last=4)


def test_old_keywords_do_what_their_new_places_do(tmp_path: Path) -> None:
    """Each warns once, at the line of the caller, and the changelog lists it."""
    given: dict[str, Any] = {
        "keep_every": 5,
        "when_busy": "skip",
        "jobs": 2,
        "read_once": True,
        "retry_s": 7.0,
        "max_failures": 4,
        "step_format": "checkpoint-{}",
        "allow_not_finite": True,
        "overlap_copy": True,
        "writer_jobs": 1,
        "max_mbps": 500,
        "replicas": "check",
        "writer_nice": 3,
        "mirror_every": 9,
    }
    assert set(given) == set(OldOptions.__annotations__) == {*RENAMED, *GONE}
    mirror = Mirror("s3://bucket/run")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = grouped(3, None, mirror, None, None, None, given)
    assert found == (
        Retention(3, every=5),
        Mirror("s3://bucket/run", every=9),
        Writing(2, 1, 500, True, "skip", "check", "checkpoint-{}"),
        Resuming(True, True),
        Outages(7.0, 4),
    )
    assert [name for name in given if any(f"({name}=…)" in str(one.message) for one in told)] == [
        *given
    ]
    assert len(told) == len(given) and all(GONE_IN in str(one.message) for one in told)
    with pytest.warns(DeprecationWarning, match="outages=Outages\\(max_failures=…\\)") as seen:
        CheckpointManager(tmp_path, max_failures=2).close()
    assert seen[0].filename == __file__
    with (
        pytest.warns(DeprecationWarning, match="max_failures"),
        pytest.raises(ValueError, match="outages replaces max_failures"),
    ):
        CheckpointManager(tmp_path, max_failures=2, outages=Outages())
    with (
        pytest.warns(DeprecationWarning, match="mirror_every"),
        pytest.raises(ValueError, match="no mirror"),
    ):
        CheckpointManager(tmp_path, mirror_every=2)
    with pytest.warns(DeprecationWarning, match=r"retention=Retention\(last=…, every=…\)"):
        CheckpointManager(tmp_path, keep_last=2, keep_every=5).close()
    with pytest.warns(DeprecationWarning, match=r"mirror=Mirror\(url, every=…\)"):
        CheckpointManager(tmp_path, mirror_every=None).close()
    text = (ROOT / "CHANGELOG.md").read_text().partition(f"until {GONE_IN}")[2]
    assert all(f"`{name}=" in text for name in given)


def test_an_optimizer_without_its_module_is_refused(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(PlanError, match="has parameters that are nowhere in the state"),
    ):
        checkpoints.save(1, {"optimizer": trained(Mlp())})
