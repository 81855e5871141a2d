"""What strangers tripped over in the training program: changed keys and data, losses that are not
finite, models that do not load.
"""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

from ckpt_tools.run.roots import open_root
from ckpt_tools.run.steps import list_steps
from tests.stock_jobs import stock_load
from tests.training.runs import ONE, TINY, command, lines, losses, run, sets
from training import units
from training.batch import fingerprint
from training.config import ConfigError, resolve
from training.data import open_tokens
from training.extras.local_models import tokenizer_fingerprint
from training.extras.prepare import prepare
from training.prove import prove


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens a.npy, and b.npy of the same length."""
    folder = tmp_path_factory.mktemp("data")
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
    for name, content in (("a", text), ("b", text[::-1])):
        (folder / f"{name}.txt").write_bytes(content)
        prepare([folder / f"{name}.txt"], folder / f"{name}.npy", progress=False)
    return folder


@pytest.fixture(scope="module")
def first(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("first") / "run"
    said = run(*ONE, *sets(*TINY, "run.steps=2", f"data.train={data}/a.npy", f"run.dir={folder}"))
    assert (
        f"data: {data}/a.npy, " in said
        and "tokens (bytes), fingerprint " in said
        and "from scratch" in said
    )
    return folder


def again(first: Path, tmp_path: Path, *overrides: str, status: int = 0) -> str:
    shutil.copytree(first, tmp_path / "run", dirs_exist_ok=True)
    return run(*ONE, *sets(*TINY, *overrides, f"run.dir={tmp_path}/run"), status=status)


def test_hyperparameters_that_were_changed_are_applied_and_told(
    first: Path, data: Path, tmp_path: Path
) -> None:
    changed = (
        "optim.lr=1e-6",
        "optim.weight_decay=0.5",
        "optim.beta1=0.5",
        "optim.warmup_steps=0",
        "run.steps=4",
    )
    said = again(first, tmp_path, *changed, f"data.train={data}/a.npy")
    for line in (
        "optim.lr = 1e-06, was 0.003",
        "optim.weight_decay = 0.5, was 0.01",
        "optim.beta1 = 0.5, was 0.9",
        "run.steps = 4, was 2",
    ):
        assert f"changed since the checkpoint: {line}\n" in said, said
    rates = {line["step"]: line["lr"] for line in lines(tmp_path / "run")}
    assert (
        rates[3] == pytest.approx(1e-6 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * 2 / 4))))
        and rates[3] > rates[4] > 0
    )
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "run" / "step-00000004", tmp_path / "whole.pt")
    group, vectors = torch.load(tmp_path / "whole.pt", weights_only=False)["optimizer"][
        "param_groups"
    ]
    assert vectors["weight_decay"] == 0.0 and vectors["lr"] == group["lr"]
    assert all("norm" in name or "embed" in name for name in vectors["params"])
    assert (group["weight_decay"], tuple(group["betas"]), group["initial_lr"]) == (
        0.5,
        (0.5, 0.999),
        1e-6,
    )


def test_nothing_changed_is_nothing_told_and_other_keys_cannot_change(
    first: Path, data: Path, tmp_path: Path
) -> None:
    said = again(first, tmp_path, "run.steps=1", f"data.train={data}/a.npy")
    assert "nothing to do: run.steps = 1, and the checkpoint has step 2" in said
    assert said.count("changed since the checkpoint") == 1
    said = again(
        first, tmp_path, "run.steps=4", "data.shuffle=false", f"data.train={data}/a.npy", status=2
    )
    assert (
        "data.shuffle = False, and the run that is resumed has True: it cannot change within a run"
        in said
    )


def test_other_data_of_the_same_length_is_refused_unless_told(
    first: Path, data: Path, tmp_path: Path
) -> None:
    said = again(first, tmp_path, "run.steps=3", f"data.train={data}/b.npy", status=2)
    assert (
        said.startswith(f"training: the checkpoint was trained on {data}/a.npy (")
        and "set data.may_change = true" in said
    )
    assert [s.number for s in list_steps(open_root(tmp_path / "run"))] == [2]
    said = again(first, tmp_path, "run.steps=3", f"data.train={data}/b.npy", "data.may_change=true")
    assert "the checkpoint was trained on" in said and [
        s.number for s in list_steps(open_root(tmp_path / "run"))
    ] == [2, 3]
    shutil.copytree(data, tmp_path / "moved")
    said = again(first, tmp_path / "third", "run.steps=3", f"data.train={tmp_path}/moved/a.npy")
    assert "the checkpoint was trained on" not in said


def test_a_fingerprint_tells_files_apart_wherever_they_differ() -> None:
    ids = np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8)
    assert fingerprint(ids) == fingerprint(ids.copy()) != fingerprint(ids[:-1])
    for at in (0, 20_000, 49_999):
        other = ids.copy()
        other[at] ^= 1
        assert fingerprint(other) != fingerprint(ids)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing_of_it(
    data: Path, tmp_path: Path
) -> None:
    options = (
        *TINY,
        "run.steps=20",
        "optim.warmup_steps=0",
        "optim.lr=1e30",
        "checkpoint.every=1",
        f"data.train={data}/a.npy",
    )
    said = run(*ONE, *sets(*options, f"run.dir={tmp_path}/run"), status=3)
    assert (
        "training: the loss of step " in said
        and " is not finite: it was not saved" in said
        and "Traceback" not in said
    )
    last = int(said.split("the loss of step ")[1].split(",")[0])
    good = list_steps(open_root(tmp_path / "run"))[-1]
    assert all(
        bool(torch.isfinite(t).all()) for t in stock_load(good.path, tmp_path)["model"].values()
    )  # a finite loss may have gradients that are not
    assert max(s.number for s in list_steps(open_root(tmp_path / "run"))) == last - 1
    said = run(*ONE, *sets(*options, "run.stop_at_nan=false", f"run.dir={tmp_path}/on"))
    assert f"warning: the loss of step {last}, or the norm of its gradients, is not finite" in said
    written = [
        json.loads(line, parse_constant=pytest.fail)
        for line in (tmp_path / "on" / "metrics.jsonl").read_text().splitlines()
    ]
    assert written[-1]["step"] == 20 and written[-1]["loss"] is None
    run(*ONE, "--plot", *sets(f"run.dir={tmp_path}/on"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=-1", "optim.lr = -1: expected greater than 0"),
        ("optim.lr=nan", "expected a finite number"),
        ("optim.beta1=2", "optim.beta1 = 2: expected less than 1"),
        ("optim.warmup_steps=-5", "expected greater than or equal to 0"),
        ("optim.weight_decay=-0.1", "expected greater than or equal to 0"),
        ("optim.min_lr_ratio=1.5", "expected less than or equal to 1"),
        ("checkpoint.every=-1", "expected greater than or equal to 0"),
        ("run.seed=-1", "expected greater than or equal to 0"),
        ("model.path=/somewhere", "model.path needs data.train"),
        ("optim.lr=2e38", "beyond a float32"),
        ("optim.eps=1e300", "expected less than 3.4e38"),
        ("compute.compile_backend=nonsense", "torch knows .*inductor"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_the_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        prove(resolve(None, [override, "compute.compile=true"]), 1, 1)
    assert override.partition("=")[0] in str(caught.value)


def test_ids_beyond_what_a_file_promises_are_one_line(data: Path, tmp_path: Path) -> None:
    ids = np.load(data / "a.npy")
    ids[len(ids) // 2 :] = 255
    np.save(tmp_path / "bad.npy", ids)
    about = json.loads((data / "a.npy.json").read_text()) | {"vocab_size": 200}
    (tmp_path / "bad.npy.json").write_text(json.dumps(about))
    said = run(
        *ONE,
        *sets(*TINY, "run.steps=9", f"data.train={tmp_path}/bad.npy", f"run.dir={tmp_path}/run"),
        status=1,
    )
    assert (
        "training: rank 0: " in said
        and "holds the id 255 in sequences" in said
        and "Traceback" not in said
    )


@pytest.mark.slow
def test_memory_that_runs_out_on_a_cpu_is_one_line(tmp_path: Path) -> None:
    limited = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30));"
        " runpy.run_module('training', run_name='__main__')"
    )
    options = sets(
        "model.dim=8192",
        "model.hidden_dim=65536",
        "model.num_heads=8",
        "run.steps=1",
        f"run.dir={tmp_path}/run",
    )
    said = run(sys.executable, "-c", limited, *options, status=1)
    assert (
        "training: rank 0: " in said
        and "out of memory; python -m training … --estimate" in said
        and "Traceback" not in said
    ), said


def test_a_profile_that_would_be_empty_is_told(data: Path, tmp_path: Path) -> None:
    said = run(
        *ONE,
        "--profile",
        "5",
        *sets(*TINY, "run.steps=2", f"data.train={data}/a.npy", f"run.dir={tmp_path}/run"),
    )
    assert "warning: --profile 5 takes 7 steps, 2 of them to warm up, and 2 are left" in said


def test_validation_is_not_charged_to_the_next_step(data: Path, tmp_path: Path) -> None:
    """A validation of many batches takes many times as long as a step."""
    options = (
        "run.steps=6",
        "metrics.validate_every=3",
        "metrics.validate_batches=40",
        f"data.validation={data}/a.npy",
    )
    run(*ONE, *sets(*TINY, *options, f"data.train={data}/a.npy", f"run.dir={tmp_path}/run"))
    spent = {line["step"]: line["step_s"] for line in lines(tmp_path / "run") if "loss" in line}
    assert spent[4] < 5 * max(spent[3], spent[5], spent[6])


def test_sampling_takes_an_export_and_a_temperature_of_zero(
    first: Path, data: Path, tmp_path: Path
) -> None:
    again(first, tmp_path, "run.steps=3", "run.export=true", f"data.train={data}/a.npy")
    sample = (sys.executable, "-m", "training.extras.sample")
    assert "no exported model in" in run(*sample, str(first), status=1)
    assert f"give {tmp_path}/run/export" in run(*sample, f"{tmp_path}/run", status=1)
    greedy = [
        run(
            *sample,
            f"{tmp_path}/run/export",
            "--temperature",
            "0",
            "--tokens",
            "5",
            "--seed",
            str(seed),
        )
        for seed in (1, 2)
    ]
    assert greedy[0] == greedy[1]
    assert "must be at least 0" in run(
        *sample, f"{tmp_path}/run/export", "--temperature", "-1", status=1
    )


# ---- models of transformers ----------------------------------------------------------------------


def small(kind: str, folder: Path, **more: object) -> Path:
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 256,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def options_for(model: Path, data: Path, folder: Path, *more: str) -> list[str]:
    shared = (
        "run.steps=4",
        "data.seq_len=32",
        "data.batch_size=4",
        "metrics.progress=false",
        f"data.train={data}/a.npy",
    )
    return sets(*shared, f"model.path={model}", f"run.dir={folder}", *more)


@pytest.mark.slow
def test_a_tied_model_in_flat_parameters_of_fsdp1_loads_trains_and_resumes(
    data: Path, tmp_path: Path
) -> None:
    opt = small("OPT", tmp_path / "opt", ffn_dim=64, word_embed_proj_dim=32, dropout=0.0)
    flat = ("fsdp.api=fsdp1", "fsdp1.use_orig_params=false")
    said = run(*command(2, *options_for(opt, data, tmp_path / "flat", *flat)))
    assert f"from the weights in {opt}" in said
    run(*command(2, *options_for(opt, data, tmp_path / "plain")))
    assert losses(tmp_path / "flat") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)
    said = run(*command(2, *options_for(opt, data, tmp_path / "flat", *flat, "run.steps=6")))
    assert "resumed at step 4" in said and len(losses(tmp_path / "flat")) == 6


@pytest.mark.slow
def test_ranks_of_a_tensor_group_draw_the_same_dropout(data: Path, tmp_path: Path) -> None:
    phi = small("Phi", tmp_path / "phi", intermediate_size=64, resid_pdrop=0.5, embd_pdrop=0.3)
    words = [
        o
        for o in options_for(
            phi, data, tmp_path / "run", "fsdp.tensor_parallel=2", "model.weights=false"
        )
        if o != "--set"
    ]
    run(*command(2, *words, script="dropout.py"))


def test_experts_that_are_missing_are_refused(data: Path, tmp_path: Path) -> None:
    mixtral = small(
        "Mixtral",
        tmp_path / "moe",
        intermediate_size=64,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    place = {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    weights = load_file(mixtral / "model.safetensors")
    options = (*options_for(mixtral, data, tmp_path / "run"), "--set", "data.check_tokenizer=false")
    one = {n: t for n, t in weights.items() if "experts.3." not in n}
    save_file(one, mixtral / "model.safetensors", metadata={"format": "pt"})
    said = run(*ONE, *options, status=2)
    assert "an expert may be missing" in said and "Traceback" not in said
    none = {n: t for n, t in weights.items() if "layers.0" not in n or "experts" not in n}
    save_file(none, mixtral / "model.safetensors", metadata={"format": "pt"})
    said = run(*ONE, *options, status=2, **place)  # before any rank waits for another
    assert "weights of the model are not in" in said
    assert said.splitlines()[-1].startswith("training: model.path: ")


def test_a_model_that_cannot_be_made_is_one_line(data: Path, tmp_path: Path) -> None:
    # its class raises AssertionError
    (tmp_path / "config.json").write_text('{"model_type": "reformer"}')
    said = run(*ONE, *options_for(tmp_path, data, tmp_path / "run"), status=2)
    assert said.splitlines()[-1].startswith(
        f"training: model.path: {tmp_path} holds no causal LM that transformers can make here:"
        " If you"
    )


@pytest.mark.slow
def test_another_config_of_the_same_shapes_is_refused_and_another_spelling_is_not(
    data: Path, tmp_path: Path
) -> None:
    llama = small("Llama", tmp_path / "llama", intermediate_size=64)
    options = options_for(llama, data, tmp_path / "run", "data.check_tokenizer=false")
    run(*ONE, *options, "--set", "run.steps=1")
    llama.rename(tmp_path / "moved")
    options = [o.replace(str(llama), f"{tmp_path}/moved/") for o in options]
    assert "resumed at step 1" in run(*ONE, *options, "--set", "run.steps=2")
    about = json.loads((tmp_path / "moved" / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (tmp_path / "moved" / "config.json").write_text(json.dumps(about))
    said = run(*ONE, *options, status=2)
    assert (
        "rms_norm_eps = 0.5 in the config.json of model.path, and the checkpoint was trained with"
        " 1e-06" in said
    )
    assert "rms_norm_eps = 0.5" in run(*ONE, *options, "--set", "model.may_change=true")


def test_layers_of_another_type_fit_between_those_of_float32(data: Path, tmp_path: Path) -> None:
    run(
        *ONE,
        *sets(
            *TINY,
            "run.steps=2",
            "precision.overrides.layers.1=bfloat16",
            f"data.train={data}/a.npy",
            f"run.dir={tmp_path}/run",
        ),
    )


def test_gpt2_from_scratch_begins_alike_in_fsdp1_and_fsdp2(data: Path, tmp_path: Path) -> None:
    """Its attention scales a weight of a layer within it, which FSDP1 may have wrapped by then."""
    gpt2 = small("GPT2", tmp_path / "gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    shared = ("model.weights=false", "data.check_tokenizer=false")
    run(*ONE, *options_for(gpt2, data, tmp_path / "one", *shared))
    wrapped = (
        "fsdp.api=fsdp1",
        "fsdp1.use_orig_params=false",
        "fsdp.wrap=classes",
        "fsdp.wrap_classes=GPT2Block,Conv1D",
    )
    run(*command(2, *options_for(gpt2, data, tmp_path / "two", *shared, *wrapped)))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_tokens_of_another_tokenizer_are_refused(data: Path, tmp_path: Path) -> None:
    llama = small("Llama", tmp_path / "llama", intermediate_size=64)
    (llama / "tokenizer.json").write_text('{"model": {"type": "WordLevel"}}')
    said = run(*ONE, *options_for(llama, data, tmp_path / "run"), status=2)
    assert (
        f"data.train: the tokens of {data}/a.npy are of another tokenizer (bytes) than the model's,"
        f" in {llama}" in said
    )
    run(
        *ONE,
        *options_for(llama, data, tmp_path / "run", "data.check_tokenizer=false", "run.steps=1"),
    )
    for name in ("a.npy", "a.npy.json"):
        shutil.copy(data / name, tmp_path / name)
    about = json.loads((tmp_path / "a.npy.json").read_text())
    about |= {"tokenizer": str(llama), "tokenizer_fingerprint": tokenizer_fingerprint(llama)}
    (tmp_path / "a.npy.json").write_text(json.dumps(about))
    run(*ONE, *options_for(llama, tmp_path, tmp_path / "own", "run.steps=1"))
    assert open_tokens(f"{tmp_path}/a.npy", 32, 4, 256).identity["tokenizer"] == str(llama)


def test_units_by_size_are_those_of_fsdp1_s_own_policy() -> None:
    """Its oracle is torch's own function, with a wrapper that only counts; OPT is tied, BERT has
    heads of its own.
    """
    from functools import partial

    import transformers

    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.inner = module

    sizes = {
        "vocab_size": 200,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    models = [
        transformers.OPTForCausalLM(
            transformers.OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=32)
        ),
        transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=64)),
        nn.Sequential(
            nn.MultiheadAttention(32, 4),
            nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8)),
            nn.Linear(8, 4),
        ),
    ]
    for model in models:
        names = {id(module): name for name, module in model.named_modules()}
        for least in (100, 1000, 3000, 7000, 20_000, 10**9):
            ours = units._by_size(model, least)
            theirs: set[str] = set()

            def wrap(
                module: nn.Module, seen: set[str] = theirs, known: dict[int, str] = names
            ) -> nn.Module:
                seen.add(known[id(module)])
                return Wrapped(module)

            before = {id(m): dict(m._modules) for m in model.modules()}
            policy = partial(size_based_auto_wrap_policy, min_num_params=least)
            _recursive_wrap(
                model,
                policy,
                wrap,
                ignored_modules=set(),
                ignored_params=set(),
                only_wrap_children=True,
            )
            for module in [m for m in model.modules() if id(m) in before]:
                module._modules.update(before[id(module)])
            assert ours == theirs, (type(model).__name__, least)


# ---- going back, and on --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_from_an_older_step_is_a_branch_that_is_exported_and_gone_on_with(
    first: Path, data: Path, tmp_path: Path
) -> None:
    """Its steps are below those of the directory: they stay, the old ones are set aside, and the
    same command goes on.
    """
    tokens = f"data.train={data}/a.npy"
    again(first, tmp_path, "run.steps=8", "checkpoint.every=2", "checkpoint.keep_last=9", tokens)
    back = (
        "run.steps=5",
        f"run.resume_from={tmp_path}/run/step-00000004",
        "optim.lr=1e-5",
        "checkpoint.keep_last=9",
        tokens,
    )
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    said = run(
        *ONE, *sets(*TINY, *back, "run.steps=4", "run.export=true", f"run.dir={tmp_path}/run")
    )
    assert "nothing to do" in said and (tmp_path / "run" / "metrics.jsonl").read_text() == before
    merged = load_file(tmp_path / "run" / "export" / "model.safetensors")
    stock = stock_load(tmp_path / "run" / "step-00000004", tmp_path)["model"]
    assert all(torch.equal(merged[name], stock[name]) for name in merged)
    said = run(*ONE, *sets(*TINY, *back, f"run.dir={tmp_path}/run"))
    assert "resumed at step 4" in said and "optim.lr = 1e-05, was 0.003" in said
    assert [s.number for s in list_steps(open_root(tmp_path / "run"))] == [2, 4, 5]
    assert len(list((tmp_path / "run").glob("*.superseded-*"))) == 2
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4, 5]
    said = run(*ONE, *sets(*TINY, *back, "run.steps=6", f"run.dir={tmp_path}/run"))
    assert "resumed at step 5" in said and [
        s.number for s in list_steps(open_root(tmp_path / "run"))
    ] == [
        2,
        4,
        5,
        6,
    ]


def test_another_model_is_refused_however_it_is_said_and_the_same_one_is_not(
    first: Path, data: Path, tmp_path: Path
) -> None:
    tokens, source = f"data.train={data}/a.npy", f"run.resume_from={first}/step-00000002"
    said = run(
        *ONE,
        *sets(
            *TINY, "run.steps=3", "model.num_heads=8", source, tokens, f"run.dir={tmp_path}/other"
        ),
        status=2,
    )
    assert "model.num_heads = 8, and the run that is resumed has 4: it is another model" in said
    said = run(
        *ONE,
        *sets(
            *TINY, "run.steps=3", "model.vocab_size=256", source, tokens, f"run.dir={tmp_path}/same"
        ),
    )
    assert "resumed at step 2" in said


def test_other_data_of_another_length_begin_an_epoch_where_they_are_allowed(
    first: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "c.txt").write_bytes((data / "a.txt").read_bytes()[:9000])
    prepare([tmp_path / "c.txt"], tmp_path / "c.npy", progress=False)
    said = again(
        first, tmp_path, "run.steps=3", f"data.train={tmp_path}/c.npy", "data.may_change=true"
    )
    assert "the checkpoint was trained on" in said and lines(tmp_path / "run")[-1]["epoch"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--print-plan", "--ranks", "0"), "argument --ranks: expected at least 1, got 0"),
        (("--profile", "-1"), "argument --profile: expected at least 1, got -1"),
        (
            ("--logits", "/nowhere/logits.pt"),
            "--logits /nowhere/logits.pt: there is no such directory",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_made(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    assert message in run(*ONE, *options, *sets(f"run.dir={tmp_path}/run"), status=2)
    assert not (tmp_path / "run").exists()
