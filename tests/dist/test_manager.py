"""Real jobs that save and resume with the manager, on the same ranks and on others, and what others
make of their files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools.run.roots import open_root
from ckpt_tools.run.step import damage, look_at
from ckpt_tools.run.steps import list_steps
from tests.conftest import torchrun
from tests.dist import device
from tests.stock_jobs import assert_same, same_bits, stock_load

CRASHES = ["fsdp1"] if device.is_shared(4) else []


def no_shared_gpu(num_ranks: int) -> pytest.MarkDecorator:
    """Skips jobs whose collectives on a GPU's tensors crash gloo."""
    reason = "gloo crashes at this on tensors of a GPU"
    return pytest.mark.skipif(device.is_shared(num_ranks), reason=reason)


CASES = [case for case in "fsdp2 hsdp tp fsdp1 ddp wrapped tied two all big".split() if case not in CRASHES]
# the others need a mesh of an even number of ranks
ANYWHERE = [case for case in "fsdp2 fsdp1 ddp wrapped tied two big".split() if case in CASES]


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case trained, saved, disturbed and resumed on 4 ranks, compared bit for bit within the
    job.
    """
    root = tmp_path_factory.mktemp("managed")
    torchrun(4, "manage.py", str(root), "save", *CASES)
    return root


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_save_of_four_ranks_resumes_bit_for_bit_on_others(num_ranks: int, managed: Path) -> None:
    torchrun(num_ranks, "manage.py", str(managed), "resume", *ANYWHERE)


def test_of_what_several_ranks_need_one_reads_and_sends(managed: Path) -> None:
    torchrun(4, "manage.py", str(managed), "once", "ddp", "hsdp", "two")


def test_a_flipped_bit_that_one_rank_meets_makes_all_resume_from_the_step_before(tmp_path: Path) -> None:
    torchrun(3, "manage.py", str(tmp_path), "fallback", "big")


def nested(value: Any) -> Any:
    """As DCP nests it: lists become dicts by position where they were flattened; tuples compare as
    lists.
    """
    return {str(k): nested(v) for k, v in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("case", CASES)
def test_stock_torch_reads_what_the_manager_wrote(case: str, managed: Path, tmp_path: Path) -> None:
    want = torch.load(managed / f"{case}.pt", weights_only=False)
    got = stock_load(managed / case / "step-00000002", tmp_path)
    assert_same(got["model"], want["model"])
    for key in (k for k in want if k.startswith("optimizer")):
        if want[key]:
            assert_same(got[key], want[key])
    assert (got["epoch"], got["nested"]["ema"].tolist()) == (3, [0.0, 1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("case", CASES)
def test_the_command_merges_what_the_manager_wrote(case: str, managed: Path, tmp_path: Path) -> None:
    want = torch.load(managed / f"{case}.pt", weights_only=False)["model"]
    ckpt_tools.merge(managed / case / "step-00000002", tmp_path / "m.safetensors")
    got = load_file(tmp_path / "m.safetensors")
    assert set(got) == set(want)
    assert all(same_bits(got[n], want[n]) for n in want)


@pytest.mark.parametrize("case", CASES)
def test_every_step_is_sound_and_replicas_are_stored_once(case: str, managed: Path) -> None:
    steps = list_steps(open_root(managed / case))
    assert [s.number for s in steps] == [1, 2]
    assert [damage(s) for s in steps] == ["", ""]
    for step in steps:
        report = ckpt_tools.inspect(step.path)
        assert all(len({c.box for c in t.chunks}) == len(t.chunks) for t in report.catalog.tensors.values())
        assert report.world_size == 4
        assert step.manifest is not None and step.manifest.step == step.number


@pytest.mark.parametrize("case", ["fsdp2", "tied", "ddp", "hsdp", "tp"])
def test_the_fingerprints_of_a_save_are_those_of_whole_tensors(case: str, managed: Path) -> None:
    from awscrt.checksums import crc64nvme

    (step,) = [s for s in list_steps(open_root(managed / case)) if s.number == 2]
    assert step.manifest is not None
    live = torch.load(managed / f"{case}.pt", weights_only=False)["model"]
    for name, value in live.items():
        raw = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        assert step.manifest.tensors[f"model.{name}"].fingerprint == f"{crc64nvme(raw):016x}", name


def test_replicated_tensors_are_spread_over_the_ranks(managed: Path) -> None:
    report = ckpt_tools.inspect(managed / "ddp" / "step-00000002")
    files = {c.extent.file for t in report.catalog.tensors.values() for c in t.chunks}
    assert files == {f"__{rank}_0.distcp" for rank in range(4)}


Saved = Callable[[int], Path]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_stock_checkpoint_resumes(num_ranks: int, saved: Saved) -> None:
    torchrun(num_ranks, "manage.py", str(saved(8)), "stock", "adamw", "local")


def test_a_flattened_checkpoint_as_torchtitan_writes_it_resumes(saved: Saved) -> None:
    torchrun(3, "manage.py", str(saved(8)), "titan", "flat")


def test_accelerate_reads_what_the_manager_wrote_and_the_other_way_round(tmp_path: Path) -> None:
    torchrun(3, "manage.py", str(tmp_path), "accelerate", "acc")
    outer = tmp_path / "acc-3" / "checkpoint-2"
    want = torch.load(tmp_path / "acc-3" / "want.pt", weights_only=False)["model"]
    ckpt_tools.merge(outer, tmp_path / "m.safetensors")
    assert_same(load_file(tmp_path / "m.safetensors"), want)
    report = ckpt_tools.inspect(outer)
    assert (report.format, report.world_size, set(report.by_key)) == ("accelerate", 3, {"model", "optimizer"})
    ckpt_tools.reshard(outer, tmp_path / "one", to_ranks=2)
    assert_same(stock_load(tmp_path / "one", tmp_path)["model"], want)


PLUGGED = [case for case in "adamw hsdp tp columns dtypes strided names fsdp1 titan headless".split() if case not in CRASHES]


def test_the_writer_and_reader_for_dcp_save_and_load(tmp_path: Path) -> None:
    torchrun(4, "plugin.py", str(tmp_path), *PLUGGED)
    for case in PLUGGED:
        step = look_at(0, tmp_path / f"{case}-ours")
        assert damage(step) == "", case
        assert step.manifest is not None
        ckpt_tools.reshard(tmp_path / f"{case}-stock", tmp_path / f"{case}-again", to_ranks=1)
        again = look_at(0, tmp_path / f"{case}-again")
        assert again.manifest is not None
        prints = {n: t for n, t in again.manifest.tensors.items() if n in step.manifest.tensors}
        assert prints == dict(step.manifest.tensors), case
        assert prints or case == "columns"


@pytest.mark.parametrize("scenario", ["different_steps", "different_arguments", "different_values", "one_rank_only", "user_code_fails_on_one_rank"])
def test_ranks_that_do_not_make_the_same_calls_are_told_who_did_what(scenario: str, tmp_path: Path) -> None:
    torchrun(3, "calls.py", str(tmp_path), scenario)


@pytest.mark.skipif(bool(CRASHES), reason="FSDP1 crashes where ranks share a GPU")
def test_a_rank_without_any_row_of_a_tensor(tmp_path: Path) -> None:
    torchrun(3, "fewer_rows.py", str(tmp_path))


@no_shared_gpu(2)
def test_what_changes_on_one_rank_or_on_all_between_saves_is_saved(tmp_path: Path) -> None:
    torchrun(2, "unchanged.py", str(tmp_path))


@no_shared_gpu(3)
def test_shards_of_another_shape_are_loaded_as_declared(tmp_path: Path) -> None:
    torchrun(3, "resize.py", str(tmp_path))
