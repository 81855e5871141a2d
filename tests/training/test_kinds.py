"""Modules of a factory, and models with experts. The oracles are a plain loop in one process, and
transformers itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import ckpt_tools
from tests.jobs import PYTHON_PATH, kill_after_step
from tests.training import modules
from tests.training.difficult import Unusual
from tests.training.runs import QUIET, command, losses, run, sets
from training import config as configuration
from training.checks import Degrees
from training.config import ConfigError
from training.data import Sampler, open_tokens
from training.extras.estimate import memory_of
from training.extras.prepare import prepare
from training.loss import PROMPT
from training.prove import prove

STEPS, BATCH = 4, 8
COMMON = (
    f"run.steps={STEPS}",
    f"data.batch_size={BATCH}",
    "optim.lr=1e-3",
    "optim.decay=all",
    "optim.min_lr_ratio=1",
    "metrics.progress=false",
)
WAYS = {
    1: {"fsdp2": ()},
    2: {
        "fsdp2": ("data.accumulation=2",),
        "fsdp1": ("fsdp.api=fsdp1",),
        "ddp": ("fsdp.strategy=NO_SHARD",),
    },
    4: {"hybrid": ("fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2")},
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows to fit a function, and images to classify."""
    folder = tmp_path_factory.mktemp("rows")
    torch.manual_seed(1)
    inputs = torch.randn(64, 10)
    fits = {"inputs": inputs, "targets": inputs @ torch.randn(10, 5)}
    save_file(fits, folder / "mlp.safetensors")
    labels = torch.randint(0, 10, (64,))
    labels[torch.rand(64) < 0.6] = -100  # no label: some micro-batches have none at all
    images = {"inputs": torch.rand(64, 1, 28, 28), "targets": labels}
    save_file(images, folder / "vision.safetensors")
    return folder


def given(kind: str, rows: Path) -> tuple[str, ...]:
    """The options of a run of one of the modules."""
    classes = {"mlp": "Linear", "vision": "TransformerEncoderLayer"}[kind]
    loss = ("model.loss=torch.nn.functional:mse_loss",) if kind == "mlp" else ()
    return (
        *COMMON,
        *loss,
        f"model.factory=tests.training.modules:{kind}",
        f"data.train={rows}/{kind}.safetensors",
        "fsdp.wrap=classes",
        f"fsdp.wrap_classes={classes}",
    )


def plain(kind: str, rows: Path) -> tuple[list[float], torch.nn.Module]:
    """The losses of a plain loop, and the trained module."""
    torch.manual_seed(0)
    model = getattr(modules, kind)()
    data, loss = load_file(rows / f"{kind}.safetensors"), F.cross_entropy
    if kind == "mlp":
        loss = F.mse_loss
    sampler, found = Sampler(64, 0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for _ in range(STEPS):
        numbers = sampler.next_batch(BATCH)
        value = loss(model(data["inputs"][numbers]), data["targets"][numbers])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found, model


def killed_after(step: int, folder: Path, *words: str) -> None:
    """Starts a job on two ranks and kills it when a step is there; later steps are removed."""
    words = (*words, "run.steps=900", "checkpoint.keep_last=900", f"run.dir={folder}")
    kill_after_step(command(2, *sets(*words)), folder, step, os.environ | QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "vision"])
def test_any_module_has_the_losses_of_a_plain_loop(kind: str, rows: Path, tmp_path: Path) -> None:
    wanted, model = plain(kind, rows)
    for ranks, ways in WAYS.items():
        for name, more in ways.items():
            folder = tmp_path / f"{ranks}-{name}"
            run(*command(ranks, *sets(*given(kind, rows), *more, f"run.dir={folder}")))
            assert losses(folder) == pytest.approx(wanted, rel=2e-5), (ranks, name)
    part = (*given(kind, rows), "checkpoint.every=2", "run.export=true")
    killed_after(2, tmp_path / "part", *part)
    said = run(*command(1, *sets(*part, f"run.dir={tmp_path}/part")))
    assert "resumed at step 2" in said and "rows/s" in said
    assert losses(tmp_path / "part") == pytest.approx(wanted, rel=2e-5)
    exported = load_file(tmp_path / "part/export/model.safetensors")
    again, inputs = getattr(modules, kind)(), load_file(rows / f"{kind}.safetensors")["inputs"]
    again.load_state_dict(exported, strict=False)
    assert torch.allclose(again(inputs), model(inputs), atol=1e-4)
    tied = {"second.weight": "first.weight", "first.weight": "second.weight"}
    missing = model.state_dict().keys() - exported.keys()
    assert all(tied.get(name) in exported for name in missing), missing


@pytest.mark.slow
def test_the_plan_and_the_estimate_of_a_module(rows: Path) -> None:
    said = run(
        *command(1, *sets(*given("vision", rows)), "--print-plan", "--estimate", "--ranks", "2")
    )
    assert "blocks" in said and "TransformerEncoderLayer" in said and "peak per rank" in said


def test_what_a_factory_cannot_do_is_said(rows: Path, tmp_path: Path) -> None:
    def refused(*more: str) -> str:
        with pytest.raises(ConfigError) as error:
            prove(configuration.resolve(None, [*given("mlp", rows), *more]), 1, 1)
        return str(error.value)

    base = "model.factory=tests.training.modules"
    assert "BatchNorm1d, whose statistics differ between ranks" in refused(f"{base}:normed")
    assert "returned int" in refused(f"{base}:number")
    assert "has no attribute 'absent'" in refused(f"{base}:absent")
    assert "No module named 'nowhere'" in refused("model.factory=nowhere:make")
    assert "expected package.module:function" in refused("model.factory=nowhere")
    assert "model.loss = 'a:b'" in refused("model.loss=a:b")
    assert "data.seq_len = 4 changes nothing without tokens" in refused("data.seq_len=4")
    assert "model.dim = 4 changes nothing without the built-in decoder" in refused("model.dim=4")
    assert "give one of them" in refused("model.path=.")
    assert "takes 640" in refused("data.batch_size=640")
    save_file({"inputs": torch.ones(3)}, tmp_path / "half.safetensors")
    assert "expected `inputs` and `targets`" in refused(f"data.train={tmp_path}/half.safetensors")
    (tmp_path / "no.safetensors").write_bytes(b"no")
    assert "is no safetensors file" in refused(f"data.train={tmp_path}/no.safetensors")
    for key in ("lora.alpha=2", "lora.rank=2"):
        assert "lora.rank" in refused(key)


def test_rows_that_a_module_or_its_loss_cannot_take_are_refused(rows: Path, tmp_path: Path) -> None:
    """A module whose forward reads values is tried once more, with values."""
    inputs, path = torch.randn(64, 10), tmp_path / "rows.safetensors"
    labels = torch.arange(64) % 5

    def refused(inputs: torch.Tensor, targets: torch.Tensor, *more: str) -> str:
        save_file({"inputs": inputs, "targets": targets}, path)
        options = [*given("mlp", rows), "model.loss=", f"data.train={path}", *more]
        with pytest.raises(ConfigError) as error:
            prove(configuration.resolve(None, options), 1, 1)
        return str(error.value)

    said = refused(inputs[:, :7].contiguous(), labels)
    assert "it failed on float32 [2, 7]: RuntimeError" in said and "modules:mlp" in said
    reads = "model.factory=tests.training.difficult:reads_values"
    said = refused(inputs[:, :7].contiguous(), labels, reads)
    assert "it failed on float32 [2, 7]: RuntimeError" in said and "difficult.py:" in said
    said = refused(inputs, torch.rand(64, 3))
    assert "it failed on float32 [2, 5] and float32 [2, 3]" in said
    for bad in (5, -1):
        said = refused(inputs, labels.index_fill(0, torch.tensor([17]), bad))
        assert f"row 17 has the label {bad}" in said and "5 classes" in said
    said = refused(inputs, labels.index_fill(0, torch.tensor([63]), 7), reads)
    assert "row 63 has the label 7" in said
    save_file({"inputs": inputs, "targets": labels.index_fill(0, torch.tensor([3]), -100)}, path)
    for factory in ((), (reads,)):
        options = [*given("mlp", rows), "model.loss=", f"data.train={path}", *factory]
        prove(configuration.resolve(None, options), 1, 1)


def difficult(name: str, rows: Path, *more: str) -> tuple[str, ...]:
    """The options of a run of one of the difficult modules."""
    words = (*given("mlp", rows), f"model.factory=tests.training.difficult:{name}")
    return (*words, "fsdp.wrap=none", "fsdp.wrap_classes=", *more)


def test_what_would_go_wrong_on_some_rank_is_refused_before_ranks_wait(rows: Path) -> None:
    def refused(name: str, *more: str) -> str:
        with pytest.raises(ConfigError) as error:
            prove(configuration.resolve(None, list(difficult(name, rows, *more))), 1, 1)
        return str(error.value)

    assert "InstanceNorm1d, whose statistics differ between ranks" in refused("instance_normed")
    assert "scale has no dimension to shard" in refused("scalar")
    assert "no parameter takes a gradient" in refused("frozen")
    assert "0.weight has no shape yet" in refused("lazy")
    assert "failed: SystemExit: 7" in refused("leaves")
    fsdp1 = ("fsdp.api=fsdp1", "fsdp1.use_orig_params=false")
    assert "set fsdp1.use_orig_params = true" in refused("partly_frozen", *fsdp1)
    for key in ("compute.checkpoint_every=1", "compute.compile=true"):
        assert "does not name its layers" in refused("CountsCalls", key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["KeepsAReference", "KeepsAClosure"])
def test_parameters_that_something_else_holds(name: str, rows: Path, tmp_path: Path) -> None:
    words = difficult(name, rows, f"run.dir={tmp_path}/a")
    assert "holds the parameter linear.weight" in run(*command(2, *sets(*words)), status=1)
    run(*command(2, *sets(*difficult(name, rows, *DDP, f"run.dir={tmp_path}/b"))))


@pytest.mark.slow
def test_an_unusual_module_has_the_losses_of_a_plain_loop(rows: Path, tmp_path: Path) -> None:
    """Its one child is called `module`, it begins in eval mode, and it has a `config`."""
    torch.manual_seed(0)
    model, data = Unusual(), load_file(rows / "mlp.safetensors")
    sampler, wanted = Sampler(64, 0), []
    matrices, others = (
        [p for p in model.parameters() if (p.ndim > 1) is is_] for is_ in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-1)
    for _ in range(STEPS):
        numbers = sampler.next_batch(BATCH)
        loss = F.mse_loss(model(data["inputs"][numbers]), data["targets"][numbers])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    options = ("optim.decay=matrices", "optim.weight_decay=0.5", "optim.lr=0.1")
    words = (*difficult("Unusual", rows), *options, "data.accumulation=2", "checkpoint.every=2")
    for name, more in {"fsdp2": (), "fsdp1": ("fsdp.api=fsdp1",), "ddp": DDP}.items():
        folder = tmp_path / name
        run(*command(2, *sets(*words, *more, "run.steps=2", f"run.dir={folder}")))
        said = run(*command(1, *sets(*words, *more, f"run.dir={folder}", "run.export=true")))
        assert "resumed at step 2" in said and "lack the prefix `module.`" in said
        assert losses(folder) == pytest.approx(wanted, rel=2e-5), name


@pytest.mark.slow
def test_estimates_of_what_a_tracker_or_fake_tensors_do_not_take(rows: Path) -> None:
    def estimate(*options: str, status: int = 0) -> str:
        words = command(1, *sets(*options), "--estimate", "--ranks", "2")
        return run(*words, status=status)

    assert "FULL_SHARD" in estimate(*difficult("partly_frozen", rows))
    said = estimate(*difficult("reads_values", rows), status=1)
    assert "no strategy can be estimated: FULL_SHARD: torch does not run this model on" in said
    assert "is not a multiple of 2 data-parallel ranks" in estimate("data.batch_size=3", status=1)
    assert "sequences of at most 256" in estimate("data.seq_len=999", status=1)
    peaks = []
    for chunk in (0, 64):
        config = configuration.resolve(
            None, ["model.vocab_size=20000", f"compute.loss_chunk={chunk}"]
        )
        peaks.append(sum(memory_of(config, Degrees(1, 2, 1)).values()))
    assert peaks[1] < peaks[0] - 4 * 8 * 128 * 20000 / 2  # half of the logits, at least


def test_a_factory_that_returns_one_module_twice_is_refused(rows: Path, tmp_path: Path) -> None:
    words = command(1, *sets(*difficult("always_the_same", rows), f"run.dir={tmp_path}"))
    assert "make a new module, with values, at each call" in run(*words, status=1)


def test_values_that_a_factory_draws_are_the_same_on_all_ranks(rows: Path, tmp_path: Path) -> None:
    hybrid = ("fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=1")
    for folder, ranks, more in (("one", 1, ()), ("two", 2, hybrid), ("ddp", 2, DDP)):
        words = difficult("drawn_elsewhere", rows, *more, f"run.dir={tmp_path}/{folder}")
        run(*command(ranks, *sets(*words)))
        assert losses(tmp_path / folder) == pytest.approx(losses(tmp_path / "one"), rel=2e-5)
    words = difficult("drawn_from_the_system", rows, f"run.dir={tmp_path}/other")
    assert "bias differs between ranks as the function" in run(*command(2, *sets(*words)), status=1)


DDP = ("fsdp.strategy=NO_SHARD",)


def test_buffers_that_ranks_change_differently_are_not_saved(rows: Path, tmp_path: Path) -> None:
    words = difficult("KeepsAnAverage", rows, f"run.dir={tmp_path}/two")
    said = run(*command(2, *sets(*words)), status=1)
    assert "average differs between ranks after this step" in said
    assert not ckpt_tools.steps(tmp_path / "two")
    run(*command(1, *sets(*words[:-1], f"run.dir={tmp_path}/one")))


def test_a_part_in_eval_mode_stays_so_after_a_validation(rows: Path, tmp_path: Path) -> None:
    validated = (f"data.validation={rows}/mlp.safetensors", "metrics.validate_every=1")
    words = difficult("PartlyEvaluated", rows, *validated, f"run.dir={tmp_path}")
    run(*command(1, *sets(*words)))
    assert len(losses(tmp_path)) == STEPS


def test_classes_of_units_are_the_layers_of_a_factory(rows: Path, tmp_path: Path) -> None:
    """Recomputed, each of two blocks runs twice in a step."""
    layers = ("fsdp.wrap=classes", "fsdp.wrap_classes=_Block", "run.steps=2")
    words = difficult("CountsCalls", rows, *layers)
    said = run(*command(1, *sets(*words, f"run.dir={tmp_path}/a")))
    assert "calls so far: 4" in said
    words = (*words, "compute.checkpoint_every=1", f"run.dir={tmp_path}/b")
    assert "calls so far: 6" in run(*command(1, *sets(*words)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "classes", "option"),
    [
        ("nested", "Outer,Inner", "compute.checkpoint_every=1"),
        ("sometimes", "Linear", "fsdp.cpu_offload=true"),
    ],
)
def test_options_that_only_save_memory_change_no_loss(
    kind: str, classes: str, option: str, rows: Path, tmp_path: Path
) -> None:
    given = (
        *COMMON,
        "model.loss=torch.nn.functional:mse_loss",
        f"model.factory=tests.training.modules:{kind}",
        f"data.train={rows}/mlp.safetensors",
        "fsdp.wrap=classes",
        f"fsdp.wrap_classes={classes}",
    )
    found = []
    for name, more in (("plain", ()), ("saving", (option,))):
        run(*command(1, *sets(*given, *more, f"run.dir={tmp_path}/{name}")))
        found.append(losses(tmp_path / name))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
def test_other_types_and_unused_layers(rows: Path, tmp_path: Path) -> None:
    words = difficult("Centred", rows)
    words = (*words, "checkpoint.statistics=true")
    for name, ranks, more in (("one", 1, ()), ("ddp", 2, DDP), ("fsdp", 2, ())):
        run(*command(ranks, *sets(*words, *more, f"run.dir={tmp_path}/{name}")))
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), rel=2e-5)
        manifest = ckpt_tools.steps(tmp_path / name)[-1].manifest
        assert manifest is not None and manifest.has_statistics
        assert manifest.metrics["loss"] == pytest.approx(losses(tmp_path / name)[-1], rel=1e-5)
    run(*command(1, *sets(*words, "model.dtype=bfloat16", f"run.dir={tmp_path}/half")))
    assert losses(tmp_path / "half") == pytest.approx(losses(tmp_path / "one"), rel=5e-2)


@pytest.mark.slow
def test_losses_that_are_no_mean_are_told_and_others_are_refused(
    rows: Path, tmp_path: Path
) -> None:
    def said(loss: str, status: int = 0) -> str:
        words = difficult("Centred", rows, f"model.loss=tests.training.difficult:{loss}")
        folder = f"run.dir={tmp_path}/{loss}"
        return run(*command(1, *sets(*words, "optim.lr=1e-6", folder)), status=status)

    assert "model.loss is no plain mean over rows of equal weight" in said("summed")
    assert "expected a tensor of one number" in said("by_row", 1)
    assert "does not depend on the outputs" in said("detached", 1)
    whole = run(*command(1, *sets(*difficult("Centred", rows, f"run.dir={tmp_path}/plain"))))
    assert "no plain mean" not in whole


@pytest.mark.slow
def test_an_edited_factory_is_told(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "edited.py").write_text(
        "from torch import nn\ndef make(): return nn.Linear(10, 5)\n"
    )
    words = difficult("x", rows, "model.factory=edited:make", f"run.dir={tmp_path}/run")
    more = {"PYTHONPATH": f"{tmp_path}:{PYTHON_PATH}"}
    run(*command(1, *sets(*words)), **more)
    longer = (*words, f"run.steps={STEPS + 1}")
    assert "has changed since" not in run(*command(1, *sets(*longer)), **more)
    with (tmp_path / "edited.py").open("a") as file:
        file.write("# another line\n")
    longer = (*words, f"run.steps={STEPS + 2}")
    said = run(*command(1, *sets(*longer)), **more)
    assert "the file of edited:make has changed since the checkpoint" in said


def test_the_error_of_one_rank_alone_is_printed(rows: Path, tmp_path: Path) -> None:
    text = (
        "import os\nfrom torch import nn\n"
        "def make():\n"
        "    if os.environ['RANK'] == '1': raise OSError('no weights on this node')\n"
        "    return nn.Linear(10, 5)\n"
    )
    (tmp_path / "one_rank.py").write_text(text)
    words = difficult("x", rows, "model.factory=one_rank:make", f"run.dir={tmp_path}/run")
    more = {"PYTHONPATH": f"{tmp_path}:{PYTHON_PATH}"}
    said = run(*command(2, *sets(*words)), status=1, **more)
    assert "rank 1: model.factory: one_rank:make failed: OSError: no weights" in said


@pytest.mark.slow
def test_parameters_are_kept_in_bfloat16(tmp_path: Path) -> None:
    options = (*COMMON, "model.dtype=bfloat16", "data.seq_len=16", "run.export=true")
    said = run(*command(2, *sets(*options, f"run.dir={tmp_path}/two")))
    assert "AdamW's steps are rounded to it" in said
    run(*command(1, *sets(*options, "fsdp.api=fsdp1", f"run.dir={tmp_path}/one")))
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=2e-2)
    stored = load_file(tmp_path / "two/export/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    with ckpt_tools.open(tmp_path / f"two/step-{STEPS:08d}") as step:
        moments = [name for name in step if name.endswith(".exp_avg")]
        assert moments and all(step[name].dtype == "bfloat16" for name in moments)
    status = run(
        *command(1, *sets(*COMMON, "data.seq_len=16", f"run.dir={tmp_path}/two")), status=1
    )
    assert "model.dtype" in status


# ---- experts -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose file has its experts one by one: more than ten, so that their order counts."""
    from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config: Any = MixtralConfig(**sizes, num_local_experts=12)
    if request.param == "qwen3_moe":
        own = {"moe_intermediate_size": 16, "head_dim": 8, "num_experts": 12}
        config = Qwen3MoeConfig(**sizes, **own, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    text = folder / "text.txt"
    text.write_text("Pack my box with five dozen liquor jugs. " * 40)
    prepare([text], folder / "tokens.npy", progress=False)
    return folder


@pytest.mark.slow
def test_models_with_experts(experts: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    options = (
        *COMMON,
        "data.seq_len=16",
        f"model.path={experts}",
        f"data.train={experts}/tokens.npy",
        "data.check_tokenizer=false",
        "checkpoint.every=2",
        "run.export=true",
    )
    model = AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float32)
    tokens, wanted = open_tokens(f"{experts}/tokens.npy", 16, BATCH, 256), []
    sampler = Sampler(len(tokens), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for _ in range(STEPS):
        inputs, targets = tokens.batch(sampler.next_batch(BATCH), slice(None))[:2]
        loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    kind = type(model).__name__.removesuffix("ForCausalLM")
    per_expert = ("fsdp.wrap=classes", f"fsdp.wrap_classes={kind}Experts,{kind}DecoderLayer")
    words = sets(f"model.path={experts}", f"data.train={experts}/tokens.npy", "data.seq_len=16")
    said = run(*command(1, *words, "--estimate", "--ranks", "2"), status=1)
    assert "torch does not run this model on fake tensors" in said and "Traceback" not in said
    killed_after(2, tmp_path / "layer", *options)
    run(*command(1, *sets(*options, f"run.dir={tmp_path}/layer")))
    run(*command(2, *sets(*options, *per_expert, f"run.dir={tmp_path}/expert")))
    run(*command(2, *sets(*options, "fsdp.strategy=NO_SHARD", f"run.dir={tmp_path}/ddp")))
    prompt = torch.tensor([list(PROMPT)])
    for name in ("layer", "expert", "ddp"):
        assert losses(tmp_path / name) == pytest.approx(wanted, rel=2e-5), name
        folder = tmp_path / name / "export"
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert torch.allclose(loaded(prompt).logits, model(prompt).logits, atol=2e-4), name
    # the names and shapes of the file that it began with
    begun, ended = load_file(experts / "model.safetensors"), {}
    for file in (tmp_path / "layer/export").glob("*.safetensors"):
        ended |= load_file(file)
    assert {n: t.shape for n, t in ended.items()} == {n: t.shape for n, t in begun.items()}
    assert not list((tmp_path / "layer/export").glob("model.safetensors*manifest*"))
    said = run(*command(1, *sets(*options, "fsdp.api=fsdp1", f"run.dir={tmp_path}/x")), status=1)
    assert 'set fsdp.api = "fsdp2"' in said
