"""Copies of a tensor on several ranks: a save proves that they are equal, or refuses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import torchrun
from tests.stock_jobs import stock_load

HOW = ("save", "background", "stages", "plugin")
# the tensor that is named, and the largest difference
DIFFER = {
    "experts": ("model.experts.0.weight", "16 of 16 elements"),
    "linear": ("model.weight", "4 of 4 elements, by at most 1 "),
    "plain": ("x.w", "3 of 3 elements, by at most 1 "),
    "ddp": ("1.weight", "1 of 32 elements, by at most 0.5 "),
    "ema": ("ema.model.weight", "16 of 16 elements, by at most 1 "),
    "scales": ("optimizer.state.weight.m", "3 of 3 elements, by at most 1 "),
}
DIFFER |= {
    "renamed": ("model.weight", "6 of 6 elements, by at most 1 "),
    "held": ("w", "4 of 4 elements, by at most 1 "),
    "own and buffer": ("model.b", "3 of 3 elements, by at most 1 "),
    "conjugated": ("'w'", "3 of 3 elements, by at most 1 "),
    "trainer": ("job.net.weight", "4 of 4 elements, by at most 1 "),
    "container": ("optimizer.state.w.exp_avg", "4 of 4 elements, by at most 1 "),
    "fp4": ("'w'", "4 of 4 elements ("),
    "one kind each": ("model.w", "3 of 3 elements, by at most 1 "),
}
ON_FOUR = {
    "two meshes": ("'w'", "6 of 6 elements, by at most 12 "),
    "far": ("'w'", "4 of 4 elements, by at most 100 "),
    "hsdp": ("model.weight", "1 of 32 elements, by at most 0.25 "),
}
NO_MODEL = ("ema", "scales", "held", "own and buffer", "statistics", "trainer", "container")  # the plugin gets models and plain tensors here
LOCAL = ("local, even", "local, uneven")
NOTED = ("batch norm", "sharded batch norm", "statistics")


def cases(names: Any) -> list[str]:
    return [f"{how}: {n}" for how in HOW for n in names if how != "plugin" or n not in NO_MODEL]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What two ranks got for each state, and four for those that need more."""
    folder, told = tmp_path_factory.mktemp("copies"), {}
    more = ["save: sampler", *(f"{how}: equal" for how in HOW), "trust: ddp", "drift: ", "small drift: "]
    more += [f"{how}: {name}" for how in ("save", "background") for name in LOCAL]
    jobs = {2: [*cases(DIFFER), *cases(NOTED), *more], 4: [*cases(ON_FOUR), "save: other split"]}
    for num_ranks, mine in jobs.items():
        torchrun(num_ranks, "copies.py", str(folder), str(folder / "out.json"), *mine)
        told |= json.loads((folder / "out.json").read_text())
    return folder, told


@pytest.mark.parametrize("case", cases(DIFFER) + cases(ON_FOUR))
def test_copies_that_differ_are_refused_on_every_rank(case: str, found: tuple[Path, dict[str, Any]]) -> None:
    how, _, name = case.partition(": ")
    folder, told = found
    wanted, amount = (DIFFER | ON_FOUR)[name]
    for text in told[case]:
        assert "copies of a tensor differ between rank 0 and rank" in text and wanted in text, text
        assert amount in text or how == "plugin", text
        assert "PerRank" in text and 'replicas="trust"' in text
    path = folder / case.replace(": ", "-").replace(" ", "_")
    assert not list(path.rglob("*.distcp")) and not list(path.rglob(".metadata"))


@pytest.mark.parametrize("case", [f"{how}: {name}" for how in ("save", "background") for name in LOCAL])
def test_plain_state_of_a_part_of_a_parameter_is_refused(case: str, found: tuple[Path, dict[str, Any]]) -> None:
    for text in found[1][case]:
        assert "plain state for a part of a parameter" in text and "'weight.m'" in text


def test_one_name_that_is_split_in_two_ways_is_refused(found: tuple[Path, dict[str, Any]]) -> None:
    for text in found[1]["save: other split"]:
        assert "ranks split 'w' differently" in text and "rank 0 has [4, 3], rank 2 has [2, 3]" in text


@pytest.mark.parametrize("case", cases(NOTED))
def test_statistics_of_a_batch_norm_are_those_of_rank_0_and_a_note_says_so(
    case: str, found: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, told = found
    how, _, name = case.partition(": ")
    notes = told[case][0]
    if how != "plugin":  # it logs them
        (note,) = notes
        assert "model.1.running_mean, model.1.running_var" in note and "num_batches" not in note
    path = folder / case.replace(": ", "-").replace(" ", "_")
    step = path / "step-00000001" if how in ("background", "stages") else path
    got = stock_load(step, tmp_path)["model"]
    buffers = f"{'batch_norm' if name == 'statistics' else name.replace(' ', '_')}.pt"
    for key, want in torch.load(folder / buffers).items():
        found_names = [n for n in got if n.endswith(key)]
        assert len(found_names) == 1 and torch.equal(got[found_names[0]], want)


def test_states_of_other_objects_are_those_of_rank_0(found: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, told = found
    assert "sampler.generator" in told["save: sampler"][0][0]
    assert stock_load(folder / "save-sampler", tmp_path)["sampler"]["generator"].tolist() == [0] * 4


@pytest.mark.parametrize("case", [*(f"{how}: equal" for how in HOW), "trust: ddp"])
def test_equal_copies_are_saved_and_trusted_ones_are_not_compared(case: str, found: tuple[Path, dict[str, Any]]) -> None:
    assert found[1][case] == [[], []]


def test_a_copy_that_drifts_later_is_found_within_a_round(found: tuple[Path, dict[str, Any]]) -> None:
    for (number, text), (again, other) in found[1]["drift: "]:
        assert 1 <= number <= 64 and "1 of 65536 elements, by at most 0.5 ('w')" in text
        assert again == number + 1 and other == text, "a save after a refusal compares again"


def test_a_replica_that_drifts_as_a_whole_is_found_at_the_next_save(
    found: tuple[Path, dict[str, Any]],
) -> None:
    assert found[1]["small drift: "] == [5, 5]
