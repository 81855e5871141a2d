"""Means of checkpoints of several formats. The oracle computes with fractions, and rounds once."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckpt_tools
from ckpt_tools import CheckpointManager, IntegrityError, PlanError
from ckpt_tools.operations.average import chosen_weights
from tests.command import run_job
from tests.jobs import torchrun_command
from tests.servers.faults import faulty
from tests.servers.servers import Server
from tests.states import one_step

Run = Callable[..., subprocess.CompletedProcess[str]]
State = dict[str, Tensor]
FLOATS = ("wide", "half", "brain", "double")


def state(seed: int) -> State:
    """A model of every type that is averaged, with an integer and an empty tensor."""
    torch.manual_seed(seed)
    return {
        "wide": torch.randn(300, 70),
        "half": torch.randn(33, 5).half(),
        "brain": torch.randn(64, 9).bfloat16(),
        "double": torch.randn(17, dtype=torch.float64),
        "count": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }


@pytest.fixture
def saved(tmp_path: Path) -> tuple[list[Path], list[State]]:
    """The same model from four tools, one of them with an optimizer, one from four ranks."""
    states = [state(seed) for seed in range(4)]
    whole = {"model": states[0], "optimizer": {"x": torch.ones(3)}}
    dcp.save(whole, checkpoint_id=tmp_path / "0", no_dist=True)
    save_file(states[1], tmp_path / "1.safetensors")
    torch.save({"model": states[2]}, tmp_path / "2.pt")
    ckpt_tools.save(tmp_path / "one", {"model": states[3]})
    ckpt_tools.reshard(tmp_path / "one", tmp_path / "3", to_ranks=4)
    return [tmp_path / name for name in ("0", "1.safetensors", "2.pt", "3")], states


def nearest(exact: Fraction, dtype: torch.dtype) -> Tensor:
    """The nearest number of a type, to even if two are equally near, without another rounding."""
    near = torch.tensor(float(exact), dtype=torch.float64).to(dtype)
    around = [near, *(_neighbour(near, by) for by in (-1, 1))]
    finite = [value for value in around if torch.isfinite(value)]
    gaps = [abs(Fraction(value.double().item()) - exact) for value in finite]
    best = [value for value, gap in zip(finite, gaps, strict=True) if gap == min(gaps)]
    return next((v for v in best if not _bits(v) & 1), best[0])


_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(value: Tensor) -> int:
    return int(value.view(_WORDS[value.element_size()]).item())


def _neighbour(value: Tensor, by: int) -> Tensor:
    word = _WORDS[value.element_size()]
    return (value.view(word) + by).view(value.dtype)


def check(
    found: State, states: Sequence[State], weights: Sequence[float], divisor: int | Fraction = 1
) -> None:
    """Compares every element with the exact mean. A sum of float64 values rounds more than once."""
    for name in FLOATS:
        columns = zip(*(one[name].double().flatten().tolist() for one in states), strict=True)
        exact = [
            sum(Fraction(w) * Fraction(v) for w, v in zip(weights, column, strict=True)) / divisor
            for column in columns
        ]
        got, dtype = found[name].flatten(), found[name].dtype
        if dtype == torch.float64:
            want = torch.tensor([float(value) for value in exact], dtype=dtype)
            assert torch.allclose(got, want, rtol=1e-14, atol=1e-15)
            continue
        want = torch.stack([nearest(Fraction(value), dtype) for value in exact])
        assert torch.equal(got, want), name
    assert found["count"].item() == 3 and found["empty"].shape == (0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("memory_bytes", [None, 1 << 18])
def test_the_mean_is_exact_for_any_mix_of_formats(
    memory_bytes: int | None, saved: tuple[list[Path], list[State]], tmp_path: Path
) -> None:
    paths, states = saved
    out = tmp_path / "mean.safetensors"
    ckpt_tools.average(paths, out, memory_bytes=memory_bytes)
    check(load_file(out), states, [0.25] * 4)
    assert ckpt_tools.verify(out).problems == []
    weights = [3.0, 1.0, -2.0, 5.0]
    ckpt_tools.average(paths, out, weights=weights, overwrite=True)
    check(load_file(out), states, weights, 7)


@pytest.mark.slow
def test_every_target_holds_the_same_mean(
    saved: tuple[list[Path], list[State]], tmp_path: Path
) -> None:
    paths, states = saved
    for to in ("dcp", "hf", "torch", "accelerate", "per-rank"):
        out = tmp_path / f"out-{to}{'.pt' if to == 'torch' else ''}"
        ckpt_tools.average(paths, out, to=to)
        assert ckpt_tools.verify(out).problems == []
        merged = tmp_path / f"{to}.safetensors"
        ckpt_tools.merge(out, merged)
        check(load_file(merged), states, [0.25] * 4)
    assert ckpt_tools.inspect(tmp_path / "out-dcp").world_size == 4  # that of the last


def test_a_base_and_a_scale(saved: tuple[list[Path], list[State]], tmp_path: Path) -> None:
    paths, states = saved
    out = tmp_path / "out.safetensors"
    ckpt_tools.average(paths[1:], out, base_model=paths[0], scale=0.5)
    check(load_file(out), states, [1.5, 0.5, 0.5, 0.5], 3)
    with pytest.raises(PlanError, match="--scale is for --pretrained"):
        ckpt_tools.average(paths, tmp_path / "x.safetensors", scale=0.5)


def test_a_type_is_rounded_to_once(tmp_path: Path) -> None:
    """The sum lies just above the middle of two bfloat16. Through float32 it would become even."""
    low, tiny = 1.0 + 2.0**-8, 2.0**-40
    for number, value in enumerate((low + tiny, low + tiny)):
        tensors = {"w": torch.tensor([value], dtype=torch.float64)}
        save_file(tensors, tmp_path / f"{number}.safetensors")
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    ckpt_tools.average(paths, tmp_path / "out.safetensors", dtype="bf16")
    assert load_file(tmp_path / "out.safetensors")["w"].item() == 1.0 + 2.0**-7


def test_the_weights_of_a_schedule_are_the_differences_of_its_decay() -> None:
    assert chosen_weights(4, None, None) == chosen_weights(4, None, "linear") == [1.0] * 4
    for schedule, left in (
        ("cosine", lambda t: 0.5 * (1 + np.cos(np.pi * t))),
        ("sqrt", lambda t: 1 - np.sqrt(t)),
    ):
        weights = chosen_weights(5, None, schedule)
        assert math.fsum(weights) == pytest.approx(1)
        # an update before checkpoint i counts with the weights from i on
        tails = [math.fsum(weights[i:]) for i in range(5)]
        assert tails == pytest.approx([left(i / 5) for i in range(5)])
    falling = chosen_weights(4, None, "exponential")
    assert falling[3] / falling[2] == pytest.approx(1.25)


@pytest.mark.slow
def test_steps_of_a_run_are_chosen_by_number(tmp_path: Path, ckpt: Run) -> None:
    states = {number: state(number) for number in (10, 20, 30, 40)}
    for number, one in states.items():
        ckpt_tools.save(tmp_path / "run" / f"step-{number}", {"model": one})
    out = tmp_path / "out.safetensors"
    assert ckpt("average", tmp_path / "run", out, "--last", 2).returncode == 0
    check(load_file(out), [states[30], states[40]], [0.5] * 2)
    done = ckpt("average", tmp_path / "run", out, "--steps", "10:30:20", "--overwrite", "--json")
    assert done.returncode == 0, done.stderr
    check(load_file(out), [states[10], states[30]], [0.5] * 2)
    manifest = json.loads(next(tmp_path.glob("out.safetensors.ckpt.manifest.*")).read_text())
    assert manifest["operation"] == "average"
    assert [one["weight"] for one in manifest["source"]["of"]] == [0.5, 0.5]
    for words, text in (
        (("--steps", "10:50:20"), "not complete, or not there: 50"),
        (("--steps", "10:35:10"), "expected FIRST:LAST:EVERY"),
        (("--last", "9"), "at most the number of complete steps, 4"),
        (("--last", "2", "--weights", "1,nan"), "expected 2 finite numbers"),
        (("--last", "2", "--weights", "1,-1"), "whose sum is not 0"),
        (("--last", "2", "--weights", "1"), "expected 2 finite numbers"),
        (("--last", "2", "--schedule", "steep"), "expected one of linear, cosine"),
        (("--last", "2", "--select", "nothing*"), "--select"),
        ((), "give at least 2"),
    ):
        done = ckpt("average", tmp_path / "run", tmp_path / "no.safetensors", *words)
        assert done.returncode in (10, 13) and text in done.stderr, (words, done.stderr)
        assert not (tmp_path / "no.safetensors").exists()


def test_models_that_differ_are_refused_in_a_table(tmp_path: Path) -> None:
    one = {"a": torch.ones(3), "b": torch.ones(2, 2), "i": torch.ones(2).long()}
    others: dict[str, dict[str, Any]] = {
        "a: not in it": {"b": one["b"], "i": one["i"]},
        "c: only in it": {**one, "c": torch.ones(1)},
        r"b: float32 \[2, 2\], and float32 \[3\]": {**one, "b": torch.ones(3)},
        "i: int64 .*, and int32": {**one, "i": one["i"].int()},
    }
    save_file(one, tmp_path / "one.safetensors")
    for text, other in others.items():
        save_file(other, tmp_path / "other.safetensors")
        first = "other" if "only in it" in text or "not in it" in text else "one"
        second = "one" if first == "other" else "other"
        paths = [tmp_path / f"{name}.safetensors" for name in (first, second)]
        with pytest.raises(PlanError, match=text):
            ckpt_tools.average(paths, tmp_path / "out.safetensors")
    save_file(others["c: only in it"], tmp_path / "other.safetensors")
    both = [tmp_path / "other.safetensors", tmp_path / "one.safetensors"]
    with pytest.raises(PlanError, match="matches nothing|--exclude"):
        ckpt_tools.average(both, tmp_path / "out.safetensors", exclude=["z*"])


def test_a_file_with_tied_embeddings_beside_a_state_dict_with_a_head(tmp_path: Path) -> None:
    """All names of the file begin with `model.`; those of the state dict do not."""
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    save_file({"model.embed.weight": a, "model.w": a + 1}, tmp_path / "hf.safetensors")
    other = {"model.embed.weight": b, "model.w": b + 1, "lm_head.weight": b}
    torch.save(other, tmp_path / "t.pt")
    paths, out = [tmp_path / "hf.safetensors", tmp_path / "t.pt"], tmp_path / "out.safetensors"
    with pytest.raises(PlanError, match="lm_head.weight: not in it") as caught:
        ckpt_tools.average(paths, out)
    assert len(str(caught.value).splitlines()) == 2
    ckpt_tools.average(paths, out, exclude=["lm_head.weight"])
    found = load_file(out)
    assert set(found) == {"model.embed.weight", "model.w"}
    assert torch.allclose(found["model.w"], (a + b) / 2 + 1)
    alone = ckpt_tools.average(paths[:1], out, base_model=paths[0], scale=0.5, overwrite=True)
    assert not any("stripped" in note for note in alone.notes)
    assert set(load_file(out)) == {"model.embed.weight", "model.w"}
    # the same model, of which only one file has the key
    save_file({"embed.weight": b, "w": b + 1}, tmp_path / "bare.safetensors")
    ckpt_tools.average([paths[0], tmp_path / "bare.safetensors"], out, overwrite=True)
    assert torch.allclose(load_file(out)["w"], (a + b) / 2 + 1)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    optimizer = one_step(linear, torch.ones(1, 3))
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    with pytest.raises(PlanError, match="the state of an optimizer"):
        ckpt_tools.average([tmp_path / "o.pt"] * 2, tmp_path / "out.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    paths = [tmp_path / "a.safetensors"] * 2
    with pytest.raises(PlanError, match="up to 1e100"):
        ckpt_tools.average(paths, tmp_path / "out.safetensors", weights=[1e308, 1e308])
    result = ckpt_tools.average(paths, tmp_path / "hf", to="hf")
    assert "--base DIR" in " ".join(result.notes)


def test_other_types_and_other_integers_are_told(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3), "i": torch.tensor([1, 2])}, tmp_path / "a.safetensors")
    other = {"w": torch.full((3,), 2.0).bfloat16(), "i": torch.tensor([1, 9])}
    save_file(other, tmp_path / "b.safetensors")
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    result = ckpt_tools.average(paths, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert found["w"].dtype == torch.bfloat16 and found["w"].tolist() == [1.5] * 3
    assert found["i"].tolist() == [1, 9]
    notes = " ".join(result.notes)
    assert "of several types, written as the last one has it: w" in notes
    assert "not equal: taken from the last: i" in notes


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    mask = torch.tensor([0.0, -math.inf])
    save_file({"w": torch.ones(5), "mask": mask}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(5), "mask": mask}, tmp_path / "b.safetensors")
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    ckpt_tools.average(paths, tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["mask"], mask)
    bad = torch.ones(5)
    bad[3] = math.nan
    save_file({"w": bad, "mask": mask}, tmp_path / "b.safetensors")
    with pytest.raises(PlanError, match="'w' has NaN or infinity in .*b.safetensors"):
        ckpt_tools.average(paths, tmp_path / "no.safetensors")
    assert not (tmp_path / "no.safetensors").exists()
    save_file({"w": torch.full((5,), 3e38), "mask": mask}, tmp_path / "b.safetensors")
    out = tmp_path / "half.safetensors"
    result = ckpt_tools.average(paths, out, dtype="fp16")
    assert "5 values of w became infinite" in " ".join(result.notes)


@pytest.mark.parametrize("which", range(4))
def test_a_flipped_bit_of_any_part_stops_the_mean(
    which: int, saved: tuple[list[Path], list[State]], tmp_path: Path
) -> None:
    """safetensors have no checksum of their own; the other formats and a manifest have."""
    paths, states = saved
    if which == 1:
        ckpt_tools.seal(paths[1])
    file = paths[which]
    file = next(file.glob("__0_0.distcp")) if file.is_dir() else file
    data = bytearray(file.read_bytes())
    at = data.index(states[which]["wide"][0].numpy().tobytes()) + 5
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError):
        ckpt_tools.average(paths, tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".tmp*"))


@pytest.mark.slow
def test_several_processes_share_a_mean(
    saved: tuple[list[Path], list[State]], tmp_path: Path
) -> None:
    paths, states = saved
    out = tmp_path / "out.safetensors"
    words = ["-m", "ckpt_tools", "average", *map(str, paths), str(out)]
    done = run_job(torchrun_command(2, *words), timeout=300)
    assert done.returncode == 0, done.stderr
    check(load_file(out), states, [0.25] * 4)


@pytest.mark.slow
def test_a_mean_of_checkpoints_in_a_bucket(
    server: Server, saved: tuple[list[Path], list[State]], tmp_path: Path
) -> None:
    paths, states = saved
    server.bucket("means")
    for number in (0, 3):
        ckpt_tools.copy(paths[number], f"s3://means/{number}", to_storage_options=server.options)
    sources = ["s3://means/0", "s3://means/3"]
    ckpt_tools.average(sources, "s3://means/m", to="dcp", storage_options=server.options)
    merged = tmp_path / "out.safetensors"
    ckpt_tools.merge("s3://means/m", merged, storage_options=server.options)
    check(load_file(merged), [states[0], states[3]], [0.5, 0.5])


@pytest.mark.slow
def test_values_that_are_read_twice_are_counted_once(server: Server, tmp_path: Path) -> None:
    """The bytes of one answer are wrong, and everything is fetched again."""
    server.bucket("twice")
    large, counts = torch.full((100_000,), 3e38), torch.zeros(50, dtype=torch.int64)
    for number in range(2):
        state = {"w": large, "n": counts + number}
        with CheckpointManager(tmp_path / str(number), asynchronous=False) as checkpoints:
            checkpoints.save(1, state)
        step = tmp_path / str(number) / "step-00000001"
        ckpt_tools.copy(step, f"s3://twice/{number}", to_storage_options=server.options)
    flips = 0
    for seed in range(4):
        with faulty(server.endpoint, 0.4, seed, ("corrupt",), most=1) as (url, log):
            options = server.options | {"endpoint_url": url, "skip_instance_cache": True}
            result = ckpt_tools.average(
                ["s3://twice/0", "s3://twice/1"],
                tmp_path / f"{seed}.safetensors",
                dtype="fp16",
                storage_options=options,
            )
        flips += len(log)
        notes = " ".join(result.notes)
        assert "100,000 values of w became infinite" in notes
        assert "taken from the last: n" in notes
    assert flips > 2
