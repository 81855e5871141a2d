"""What `--print-plan` and `--estimate` say, against numbers worked out by hand or by torch."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

from tests.command import run_job
from training import model as models
from training.checks import Degrees, check
from training.config import ConfigError, resolve
from training.extras import estimate, plan
from training.job import schedule
from training.units import units_of


def groups(*overrides: str) -> dict[str, plan.Group]:
    config = resolve(None, overrides)
    return plan.groups_of(models.make(config), config)


def test_units_hold_every_parameter_once() -> None:
    found = groups()
    block = 4 * 192 * 192 + 3 * 192 * 512 + 2 * 192
    assert {n: g.numel for n, g in found.items()} == {f"layers.{i}": block for i in range(4)} | {
        "": 2 * 256 * 192 + 192
    }
    assert found["layers.0"].nbytes == 4 * block
    tied = groups(
        "model.tied_embeddings=true", "precision.param=bfloat16", "precision.overrides.norm=float32"
    )
    assert (tied[""].numel, tied[""].nbytes, tied["norm"].nbytes) == (
        256 * 192,
        2 * 256 * 192,
        4 * 192,
    )


def test_children_come_before_parents_and_tied_weights_stay_in_the_root() -> None:
    config = resolve(
        None,
        [
            "fsdp.wrap=classes",
            "fsdp.wrap_classes=Block,Attention",
            "fsdp.wrap_embeddings=true",
            "model.num_layers=1",
        ],
    )
    names = list(units_of(models.make(config), config))
    assert names == ["layers.0.attention", "layers.0", "tok_embeddings", "output", ""]
    tied = config.having("model", tied_embeddings=True)
    assert list(units_of(models.make(tied), tied)) == [
        "layers.0.attention",
        "layers.0",
        "",
    ]


@pytest.mark.parametrize("least", [1, 50_000, 150_000, 200_000, 500_000, 10**9])
def test_wrapping_by_size_chooses_what_fsdp1_chooses(least: int) -> None:
    config = resolve(None, ["fsdp.wrap=size", f"fsdp.min_num_params={least}", "model.num_layers=2"])
    ours = {name for name in units_of(models.make(config), config) if name}
    chosen = []
    model = models.make(config)
    names = {id(m): n for n, m in model.named_modules()}

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            chosen.append(names[id(module)])
            self.module = module

    def policy(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, least)

    _recursive_wrap(model, policy, Wrapper, set(), set())
    assert ours == set(chosen) - {""}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["fsdp.wrap=classes", "fsdp.wrap_classes=GPT2Block"],
            "the model has no 'GPT2Block'; it has Attention, Block, Decoder",
        ),
        (
            ["precision.overrides.head.*=float32"],
            "precision.overrides.head.*: no module with parameters is called that",
        ),
        (["model.dim=100"], "model.dim = 100 is not a multiple of 2 x model.num_heads = 6"),
        (
            ["model.path=/nothing"],
            "model.path: there is no directory /nothing",
        ),
    ],
)
def test_what_the_model_does_not_have_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        groups(*overrides)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["fsdp.wrap=none"],
            "only the root is a unit: each rank gathers the whole model at once, 7.1 MiB",
        ),
        (
            ["model.num_layers=1"],
            "layers.0 holds 82% of all parameters",
        ),
        (
            ["model.vocab_size=8000"],
            "tok_embeddings and output are in the root unit, which stays gathered",
        ),
        (["model.vocab_size=8000", "model.tied_embeddings=true"], "they share their weight"),
        (["fsdp.strategy=NO_SHARD"], "nothing is sharded"),
        (["model.hidden_dim=33"], "rank 0 holds 17% more than its part"),
        (["model.num_layers=30", "model.dim=24"], "30 units gather less than 1.0 MiB each"),
        (["model.hidden_dim=4000000"], "4 units gather more than 4.0 GiB each"),
    ],
)
def test_usual_mistakes_are_told(overrides: list[str], message: str) -> None:
    config = resolve(None, overrides)
    model = models.make(config)
    num_shards = 31 if "its part" in message else 1
    found = plan.warnings_of(model, config, plan.groups_of(model, config), num_shards)
    assert len(found) == 1 and message in found[0], found


@pytest.mark.slow
def test_reducing_at_each_micro_batch_keeps_less_and_sends_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["data.accumulation=2", "model.num_layers=1"]
    estimate.show(resolve(None, given), 4, 4, None)
    shown = capsys.readouterr().out
    numel = sum(p.numel() for p in models.make(resolve(None, given)).parameters())
    whole, twice = plan.size(numel * 4), plan.size(numel * 8)
    assert f"keeps {whole} of whole gradients and sends {whole} a step" in shown
    assert f"keeps its shards only, and sends {twice}" in shown and "the last one reduces" in shown
    at_last, at_each = (
        estimate.memory_of(resolve(None, more), Degrees(1, 4, 1))["gradients"]
        for more in (given, [*given, "fsdp.reduce_every=true"])
    )
    assert at_last >= numel * 4 > at_each


@pytest.mark.parametrize("what", ["--print-plan", "--estimate"])
def test_heads_that_tensor_ranks_do_not_divide_are_told_by_a_plan(what: str) -> None:
    words = ["--set", "model.num_kv_heads=3", "--set", "fsdp.tensor_parallel=2", "--ranks", "2"]
    done = run_job([sys.executable, "-m", "training", *words, what])
    assert done.returncode == 2
    assert "does not divide the model's num_kv_heads = 3" in done.stderr


def test_tensor_ranks_split_columns_of_some_and_rows_of_others() -> None:
    found = groups("fsdp.tensor_parallel=2")["layers.0"].shapes
    assert found.count(torch.Size((96, 192))) == 3 and torch.Size((192, 96)) in found  # wq wk wv wo
    assert found.count(torch.Size((256, 192))) == 2 and torch.Size((192, 256)) in found  # w1 w3 w2


def test_a_good_plan_has_no_warning() -> None:
    for overrides in ([], ["model.vocab_size=8000", "fsdp.wrap_embeddings=true"]):
        config = resolve(None, overrides)
        model = models.make(config)
        assert plan.warnings_of(model, config, plan.groups_of(model, config)) == []


def test_the_plan_is_printed_with_like_layers_on_one_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = resolve(None, ["model.num_layers=12", "precision.param=bfloat16"])
    plan.show(config, check(config, 4, 4))
    shown = capsys.readouterr().out
    assert "0 … 11  (each of 12)" in shown and shown.count("feed_forward") == 1
    assert "FSDP2 FULL_SHARD, ranks: 1 replicate x 4 shard x 1 tensor" in shown
    assert "864.8 KiB" in shown  # 442,752 parameters of two bytes


@pytest.mark.slow
def test_the_estimate_adds_up_by_hand() -> None:
    two = "model.num_layers=2"
    config = resolve(None, [two, "compute.checkpoint_every=1", "optim.implementation=for-loop"])
    numel = sum(p.numel() for p in models.make(config).parameters())
    for ranks in (1, 2, 4):
        held = estimate.memory_of(config, Degrees(1, ranks, 1))
        assert held["parameters"] == numel * 4 // ranks
        # the numbers of steps are a few bytes more
        assert held["optimizer"] == pytest.approx(2 * numel * 4 // ranks, rel=1e-3)
    uneven = estimate.memory_of(config, Degrees(1, 5, 1))
    assert uneven["parameters"] > numel * 4 / 5
    whole = estimate.memory_of(resolve(None, [two]), Degrees(1, 4, 1))
    assert whole["activations"] > 3 * held["activations"] / 2
    copied = estimate.memory_of(resolve(None, [two, "fsdp.strategy=NO_SHARD"]), Degrees(4, 1, 1))
    assert copied["parameters"] == numel * 4 and copied["gathered"] == 0
    tied = resolve(None, [two, "model.tied_embeddings=true", "fsdp.strategy=NO_SHARD"])
    held = estimate.memory_of(tied, Degrees(1, 1, 1))
    assert held["parameters"] == (numel - 256 * 192) * 4


def test_what_autograd_keeps_is_counted_as_it_really_is() -> None:
    config = resolve(None, ["data.batch_size=8", "fsdp.strategy=NO_SHARD"])
    expected = estimate.memory_of(config, Degrees(4, 1, 1))["activations"]
    model = models.make(config).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = torch.zeros(2, 128, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = torch.nn.functional.cross_entropy(
            model(tokens).flatten(0, 1).float(), tokens.flatten()
        )
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    real = sum(s.nbytes() for pointer, s in storages.items() if pointer not in own)
    assert loss > 0
    # at the peak, a few activations are freed, and their gradients are there
    assert expected == pytest.approx(real, rel=0.05)


@pytest.mark.slow
def test_estimates_mark_what_fits_and_say_why_a_strategy_is_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = "model.num_layers=1"
    estimate.show(resolve(None, [small, "fsdp.cpu_offload=true"]), 4, 4, 0.001)
    shown = capsys.readouterr().out
    assert (
        "NO_SHARD: fsdp.cpu_offload = True changes nothing without sharded parameters" in shown
        and "nothing fits into 0.001 GiB" in shown
    )
    estimate.show(resolve(None, [small]), 4, 4, 64)
    shown = capsys.readouterr().out
    assert shown.count("fits") == 5 and "HYBRID_SHARD_ZERO2" in shown


def test_warm_up_and_cosine() -> None:
    config = resolve(None, ["run.steps=110", "optim.warmup_steps=10", "optim.min_lr_ratio=0.2"])
    factors = [schedule(step, config) for step in range(120)]
    assert factors[0] == 0.1 and factors[9] == 1.0 == factors[10]
    assert factors[60] == pytest.approx(0.6) and factors[110] == factors[119] == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))
