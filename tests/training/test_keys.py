"""Epochs, the best step, groups of the optimizer, loggers, and what a CPU makes of some keys."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import ckpt_tools
from tests.training.runs import ONE, TINY, lines, losses, run, sets
from training import config as configuration
from training import model as models
from training import parallel
from training.config import ConfigError
from training.extras.accelerate_config import read
from training.extras.prepare import prepare
from training.prove import prove


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven sequences of 32 bytes, and a few to validate with."""
    folder = tmp_path_factory.mktemp("data")
    for name, num in (("train", 11), ("check", 9)):
        power = 2 if name == "train" else 5
        (folder / f"{name}.txt").write_bytes(bytes(i**power % 251 for i in range(num * 32)))
        prepare([folder / f"{name}.txt"], folder / f"{name}.npy", progress=False)
    return folder


def options(data: Path, folder: Path, *more: str) -> list[str]:
    return sets(
        *TINY, f"data.train={data}/train.npy", f"run.dir={folder}", "data.batch_size=2", *more
    )


@pytest.mark.slow
@pytest.mark.parametrize(("drop_last", "steps"), [("true", 10), ("false", 11)])
def test_epochs_are_steps(drop_last: str, steps: int, data: Path, tmp_path: Path) -> None:
    """Two epochs of 11 sequences in batches of two, killed in the second one and resumed."""
    given = ("run.epochs=2", f"data.drop_last={drop_last}")
    said = run(*ONE, *options(data, tmp_path / "whole", *given))
    assert f"run.epochs = 2 are {steps} steps" in said
    assert len(losses(tmp_path / "whole")) == steps
    assert [line["epoch"] for line in lines(tmp_path / "whole")][-1] == 1
    run(*ONE, *options(data, tmp_path / "part", *given, "checkpoint.every=7", "run.export=false"))
    import shutil

    shutil.rmtree(tmp_path / "part" / f"step-{steps:08d}")
    said = run(*ONE, *options(data, tmp_path / "part", *given))
    assert "resumed at step 7" in said and "changed since" not in said
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


def test_epochs_with_another_batch_size_are_refused(data: Path, tmp_path: Path) -> None:
    run(*ONE, *options(data, tmp_path, "run.epochs=1"))
    said = run(*ONE, *options(data, tmp_path, "run.epochs=2", "data.batch_size=4"), status=2)
    assert "run.epochs with another data.batch_size than the checkpoint's" in said


def test_a_best_step_of_other_validation_data_is_none(data: Path, tmp_path: Path) -> None:
    given = (
        "checkpoint.every=2",
        "checkpoint.keep_last=1",
        "checkpoint.keep_best=true",
        "metrics.validate_every=2",
    )
    for steps, name in ((4, "train"), (10, "check")):
        more = (f"run.steps={steps}", f"data.validation={data}/{name}.npy")
        run(*ONE, *options(data, tmp_path, *given, *more))
    found = [x for x in lines(tmp_path) if "validation_loss" in x and x["step"] > 4]
    best = min(found, key=lambda line: line["validation_loss"])["step"]
    assert [step.number for step in ckpt_tools.steps(tmp_path)] == sorted({best, 10})


def test_the_best_step_stays(data: Path, tmp_path: Path) -> None:
    """The validation data are other bytes, so what is learnt makes their loss worse."""
    given = (
        "run.steps=8",
        "optim.warmup_steps=0",
        "checkpoint.every=2",
        "checkpoint.keep_last=1",
        "checkpoint.keep_best=true",
        "metrics.validate_every=2",
        "metrics.validate_batches=2",
        f"data.validation={data}/check.npy",
    )
    run(*ONE, *options(data, tmp_path / "run", *given))
    found = [line for line in lines(tmp_path / "run") if "validation_loss" in line]
    for line in found:
        assert line["validation_perplexity"] == pytest.approx(math.exp(line["validation_loss"]))
    best = min(found, key=lambda line: line["validation_loss"])["step"]
    assert [step.number for step in ckpt_tools.steps(tmp_path / "run")] == sorted({best, 8})
    assert best != 8
    run(*ONE, *options(data, tmp_path / "run", *given[1:], "run.steps=12"))
    assert [step.number for step in ckpt_tools.steps(tmp_path / "run")] == [best, 12]


def test_the_optimizer_of_a_checkpoint_with_other_groups(data: Path, tmp_path: Path) -> None:
    for first, second in (("all", ""), ("matrices", "all")):
        where = tmp_path / first
        run(*ONE, *options(data, where, "run.steps=2", f"optim.decay={first}"))
        given = options(data, where, "run.steps=3", f"optim.decay={second}")
        assert "optim.decay, or fsdp1.use_orig_params, was changed" in run(*ONE, *given, status=2)


def test_what_decays() -> None:
    model = models.make(configuration.Config(model=configuration.Model(tied_embeddings=True)))
    names = parallel.decayed_names(model)
    assert "layers.0.attention.wq.weight" in names and len(names) == 4 * 7
    conv = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.LayerNorm(4))
    assert parallel.decayed_names(conv) == {"0.weight"}


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("1b", (2048, 16, 512, 8192, 1_235_814_400)),  # Llama 3.2 1B, tied
        ("8b", (4096, 32, 1024, 14336, 8_030_261_248)),  # Llama 3.1 8B
    ],
)
def test_names_mean_the_published_shapes(name: str, shapes: tuple[int, ...]) -> None:
    model = models.make(configuration.Config(model=configuration.Model(name=name)))  # type: ignore[arg-type]
    dim, num_layers, kv, hidden, numel = shapes
    layer = model.layers[0]
    assert len(model.layers) == num_layers and layer.attention.wk.weight.shape == (kv, dim)
    assert layer.feed_forward.w1.weight.shape == (hidden, dim)
    assert sum(p.numel() for p in model.parameters()) == numel


def test_the_decoder_is_the_llama_of_transformers() -> None:
    """With grouped queries: the same logits from the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = models.ModelConfig(
        dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=48, rope_theta=5e5
    )
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_theta=5e5,
            rms_norm_eps=1e-6,
            max_position_embeddings=256,
        )
    ).eval()
    ours, stored = models.Decoder(sizes), theirs.state_dict()
    renames = (
        ("model.embed_tokens", "tok_embeddings"),
        ("model.", ""),
        ("lm_head", "output"),
        ("self_attn.q_proj", "attention.wq"),
        ("self_attn.k_proj", "attention.wk"),
        ("self_attn.v_proj", "attention.wv"),
        ("self_attn.o_proj", "attention.wo"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    )
    state = {}
    for name, value in stored.items():
        for before, after in renames:
            name = name.replace(before, after)
        state[name] = value
    ours.load_state_dict(state, strict=True)
    tokens = torch.randint(0, 256, (2, 17))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5)
        assert ours._rotary_table(tokens) is ours._rotary_table(tokens)  # computed once


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("run.epochs=2", "run.steps=7"), "run.epochs = 2 and run.steps = 7: give one of them"),
        (("checkpoint.keep_best=true",), "checkpoint.keep_best: checkpoint.every must be"),
        (("model.num_kv_heads=4",), "model.num_heads = 6 is not a multiple of model.num_kv_heads"),
        (
            ("fsdp.loss_parallel=true",),
            "fsdp.loss_parallel = True changes nothing without fsdp.tensor_parallel",
        ),
        (("optim.decay=some",), "optim.decay = 'some': expected"),
        (
            ("optim.decay=matrices", "fsdp.api=fsdp1", "fsdp1.use_orig_params=false"),
            'optim.decay = "matrices" needs fsdp1.use_orig_params',
        ),
        (("metrics.wandb=p",), "metrics.wandb needs the package wandb: pip install wandb"),
        (("metrics.tensorboard=true",), "metrics.tensorboard needs the package tensorboard"),
    ],
)
def test_mistakes_are_one_line_before_the_group_starts(
    given: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.split("(")[0].replace(".", r"\.")):
        prove(configuration.resolve(None, given), 1, 1)


def test_what_fsdp1_does_with_gpus_only_is_a_note_on_a_cpu(data: Path, tmp_path: Path) -> None:
    flat = ("fsdp.api=fsdp1", "run.steps=2")
    more = ("fsdp1.sync_module_states=true", "fsdp.cpu_offload=true")
    run(*ONE, *options(data, tmp_path / "plain", *flat))
    said = run(*ONE, *options(data, tmp_path / "more", *flat, *more))
    assert "fsdp1.sync_module_states changes nothing on a CPU" in said
    assert "fsdp.cpu_offload changes nothing with FSDP1 on a CPU" in said
    assert losses(tmp_path / "more") == losses(tmp_path / "plain")


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("fsdp_wrap_policy", "Accelerate calls it fsdp_config.fsdp_auto_wrap_policy now"),
        ("min_num_param", "Accelerate calls it fsdp_config.fsdp_min_num_params now"),
        ("xla", "refused: for TPUs"),
    ],
)
def test_spellings_of_guides_get_an_answer(key: str, answer: str, tmp_path: Path) -> None:
    text = f"distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  {key}: x\n"
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"fsdp_config.{key}: {answer}"):
        read(str(tmp_path / "a.yaml"))


def test_the_plot_has_every_panel(data: Path, tmp_path: Path) -> None:
    given = ("run.steps=4", "metrics.validate_every=2", f"data.validation={data}/check.npy")
    run(*ONE, *options(data, tmp_path / "run", *given))
    run(*ONE, "--plot", *options(data, tmp_path / "run", *given))
    import re

    text = (tmp_path / "run" / "metrics.svg").read_text()
    words = set(re.findall(r"<!-- (.*?) -->", text))
    for label in ("learning rate", "norm of the gradients", "tokens/s, all ranks", "validation"):
        assert label in words, words
    assert "run: 4 lines up to step 4" in words
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
