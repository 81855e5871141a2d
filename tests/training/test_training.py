"""The training program as a user starts it, on real process groups: every option, kills, resumes,
models of others, bad input.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
from tests.dist import device
from tests.dist.strategies import VARIANTS
from tests.jobs import LONG, PYTHON_PATH, kill_after_step
from tests.stock_jobs import assert_same, stock_load
from tests.training.runs import QUIET, TINY, command, lines, losses, run, sets
from training.extras.prepare import prepare

# ---- every option --------------------------------------------------------------------------------


# two ranks take as long as four, and show less
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4] if LONG else [1, 4])
def test_every_option_has_the_losses_of_a_plain_loop(num_ranks: int, tmp_path: Path) -> None:
    if device.is_shared(num_ranks):
        pytest.skip("ranks would share a GPU")
    expected = [
        n
        for n, v in VARIANTS.items()
        if num_ranks >= v.min_ranks and not ("shard_size=2" in v.options and num_ranks % 2)
    ]
    # those that need as many, and a sixth or a twelfth of the others
    if num_ranks > 1 and not LONG:
        chosen = {
            n
            for i, n in enumerate(expected)
            if n == "full"
            or VARIANTS[n].min_ranks == num_ranks
            or i % (3 * num_ranks) == num_ranks // 4
        }
        expected = [
            n for n in expected if n in chosen or n in {VARIANTS[c].same_as for c in chosen}
        ]
    said = run(
        *command(num_ranks, tmp_path, *expected, script="strategies.py"), PYTHONPATH=PYTHON_PATH
    )
    assert [line for line in said.splitlines() if line.startswith(("ok ", "FAILED "))] == [
        f"ok {name}" for name in expected
    ]
    assert "memory, effects and collectives are as they should be" in said


# ---- stopping and going on -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps on 2 ranks without a stop."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(*command(2, *sets(*TINY, f"run.dir={directory}", "run.steps=20", "data.accumulation=2")))
    return directory


def killed(directory: Path) -> None:
    """The same run, saved after 10 steps, and killed a moment later: the launcher and all ranks,
    wherever they are.
    """
    options = sets(
        *TINY, f"run.dir={directory}", "run.steps=20", "data.accumulation=2", "checkpoint.every=10"
    )
    kill_after_step(command(2, *options), directory, 10, os.environ | QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 1, 4] if LONG else [2])
def test_twenty_steps_are_ten_and_a_kill_and_ten_more(
    num_ranks: int, whole: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    killed(directory)
    said = run(
        *command(
            num_ranks, *sets(*TINY, f"run.dir={directory}", "run.steps=20", "data.accumulation=2")
        )
    )
    assert "resumed at step 10" in said
    if num_ranks == 2:
        assert losses(directory) == losses(whole)
        got, want = (stock_load(path / "step-00000020", tmp_path) for path in (directory, whole))
        got["config"] = (
            got["config"].replace(str(directory), str(whole)).replace("every = 10", "every = 0")
        )
        assert_same(got, want)
    else:
        assert losses(directory) == pytest.approx(losses(whole), rel=1e-6)


@pytest.mark.slow
def test_the_run_keeps_what_it_was_told(whole: Path, tmp_path: Path) -> None:
    text = (whole / "config.toml").read_text()
    assert "accumulation = 2" in text
    state: dict[str, Any] = {"config": "", "sampler": {}}
    ckpt_tools.load(whole / "step-00000020", state, strict=False)
    assert state["config"] == text
    assert state["sampler"]["index"] == 20 * 8


# ---- what others made ----------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[False, True] if LONG else [True],
    ids=["untied", "tied"] if LONG else ["tied"],
)
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        tie_word_embeddings=request.param,
        max_position_embeddings=64,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(sizes).to(torch.bfloat16).save_pretrained(path, max_shard_size="100KB")
    prepare(
        [Path(json.__file__).parent, Path(json.__file__).parents[1] / "argparse.py"],
        path / "tokens.npy",
        progress=False,
    )
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.mark.slow
def test_a_model_of_transformers_is_streamed_in_trained_exported_and_loaded_again(
    llama: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from training.data import Sampler, open_tokens

    options = (
        "run.steps=4",
        "data.seq_len=32",
        "data.batch_size=8",
        "optim.lr=1e-3",
        "metrics.progress=false",
        f"model.path={llama}",
    )
    options = (*options, f"data.train={llama}/tokens.npy")
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    tokens = open_tokens(f"{llama}/tokens.npy", 32, 8, 256)
    sampler, wanted = Sampler(len(tokens), 0), []
    named = [(n, p, "norm" in n or "embed" in n) for n, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p, is_vector in named if not is_vector], "weight_decay": 0.01},
            {"params": [p for _, p, is_vector in named if is_vector], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )
    for step in range(4):
        inputs, targets = tokens.batch(sampler.next_batch(8), slice(None))[:2]
        loss = torch.nn.functional.cross_entropy(
            model(inputs).logits.flatten(0, 1), targets.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (
                0.1 + 0.9 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / 4)).item())
            )
        optimizer.step()
        wanted.append(loss.item())
    for name, extra in {
        "fsdp2": ("run.export=true",),
        "fsdp1": ("fsdp.api=fsdp1",),
        "tensor": ("fsdp.tensor_parallel=2",),
    }.items():
        directory = tmp_path / name
        run(*command(2, *sets(*options, *extra, f"run.dir={directory}")))
        assert losses(directory) == pytest.approx(wanted, rel=1e-5), name
    export = tmp_path / "fsdp2" / "export"
    loaded, report = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(report.values()) and loaded.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, loaded.get_parameter(name), atol=1e-5), name
    assert (
        len(
            run(
                sys.executable,
                "-m",
                "training.extras.sample",
                str(export),
                "--tokens",
                "5",
                "--prompt",
                "abc",
            )
        )
        > 3
    )


def test_a_configuration_alone_starts_from_new_weights(llama: Path, tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        options = (
            "run.steps=1",
            "data.seq_len=32",
            "data.batch_size=8",
            f"model.path={llama}",
            "model.weights=false",
            f"data.train={llama}/tokens.npy",
        )
        run(*command(num_ranks, *sets(*options, f"run.dir={tmp_path}/{num_ranks}")))
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "2"), rel=1e-6)
    assert 5.0 < losses(tmp_path / "1")[0] < 6.2  # log(256) is 5.5


# ---- seeing --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_metrics_validation_profile_plots_export_and_sample(tmp_path: Path) -> None:
    (tmp_path / "validation.txt").write_text("for line in file:\n    print(line)\n" * 200)
    prepare([tmp_path / "validation.txt"], tmp_path / "validation.npy", progress=False)
    directory = tmp_path / "run"
    (tmp_path / "config.toml").write_text(
        f'[run]\ndir = "{directory}"\nsteps = 6\nexport = true\n[checkpoint]\nevery = 3\n'
    )
    options = sets(
        *TINY,
        f"data.validation={tmp_path}/validation.npy",
        "metrics.validate_every=5",
        "model.tied_embeddings=true",
    )
    run(*command(2, tmp_path / "config.toml", *options, "--profile", 2))
    steps = [line for line in lines(directory) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    for line in steps:
        assert len(line["peak_mib"]) == 2 and min(line["peak_mib"]) > 100
        assert line["tokens_per_s"] == pytest.approx(8 * 32 / line["step_s"])
        assert 0 < line["data_s"] < line["step_s"] and line["grad_norm"] > 0 and line["epoch"] == 0
        assert (line["checkpoint_s"] > 0) == (line["step"] in (3, 6))
    assert [line["lr"] for line in steps[:3]] == pytest.approx([1e-3, 2e-3, 3e-3])
    checks = [line for line in lines(directory) if "validation_loss" in line]
    assert [line["step"] for line in checks] == [5, 6]
    numel = 256 * 32 + 32 + 4 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32)
    for rank in range(2):
        trace = json.loads((directory / "profile" / f"rank{rank}.trace.json").read_text())
        assert trace["traceEvents"]
        text = (directory / "profile" / f"rank{rank}.txt").read_text()
        table = {
            words[0]: words[1:]
            for line in text.splitlines()
            if len(words := line.split()) in (3, 4)
        }
        # two steps of five units forward, four again backward
        assert int(table["allgather"][0]) >= 2 * 9, text
        assert table["reducescatter"][0] == str(2 * 5), text
        assert float(table["reducescatter"][1]) == pytest.approx(2 * numel * 4 / 2**20, rel=0.01), (
            text
        )
        assert float(table["reducescatter"][2]) > 0, "bytes and time stand in one row"
        moved = sum(e["dur"] for e in trace["traceEvents"] if e["name"] == "gloo:all_gather")
        assert float(table["allgather"][2]) == pytest.approx(moved / 1e3, rel=0.3), text
        held = dict(
            line.rsplit(maxsplit=1)
            for line in (directory / f"profile/rank{rank}.memory.txt").read_text().splitlines()
        )
        assert float(held["Sharded Param"]) == pytest.approx(numel * 4 / 2 / 2**20, abs=0.01)
        assert float(held["OptState"]) == pytest.approx(numel * 8 / 2 / 2**20, abs=0.01)
        assert float(held["Activation"]) > 0 and float(held["Total"]) > 0
        for kind in (
            "compute",
            "communication",
            "memcpy",
            "data",
            "checkpoint",
            "other",
            "(unsharding)",
        ):
            assert float(table[kind][0]) > 0, text
    shown = run(sys.executable, "-m", "training", str(tmp_path / "config.toml"), "--plot")
    assert shown.split() == [f"{directory}/metrics.png", f"{directory}/metrics.svg"]
    assert (directory / "metrics.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (
        directory / "metrics.svg"
    ).read_text()
    one = tmp_path / "one"
    run(
        sys.executable,
        "-m",
        "training",
        str(tmp_path / "config.toml"),
        *options,
        "--set",
        f"run.dir={one}",
    )
    assert losses(one) == pytest.approx(losses(directory), rel=1e-5)
    assert [c["validation_loss"] for c in lines(one) if "validation_loss" in c] == pytest.approx(
        [c["validation_loss"] for c in checks], rel=1e-5
    )
    assert set(load_file(directory / "export" / "model.safetensors")) == set(
        load_file(one / "export" / "model.safetensors")
    )
    assert run(
        sys.executable,
        "-m",
        "training.extras.sample",
        str(directory / "export"),
        "--tokens",
        "5",
        "--prompt",
        "abc",
    ).startswith("abc")


def test_an_accelerate_configuration_starts_a_run(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n "
        " fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n "
        " fsdp_transformer_layer_cls_to_wrap: Block\n"
    )
    options = (
        "--accelerate-config",
        tmp_path / "accelerate.yaml",
        *sets(*TINY, "run.steps=2", f"run.dir={tmp_path}/run"),
    )
    said = run(*command(2, *options))
    assert (
        "num_processes = 8 changes nothing: the launcher's business: give it to torchrun as"
        " --nproc-per-node" in said
    )
    assert (
        'param = "bfloat16"' in (tmp_path / "run" / "config.toml").read_text()
        and len(losses(tmp_path / "run")) == 2
    )


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["fsdp.tensor_parallel=3"], "fsdp.tensor_parallel = 3 does not divide 4 ranks"),
        (
            ["fsdp.wrap=classes", "fsdp.wrap_classes=LlamaDecoderLayer"],
            "the model has no 'LlamaDecoderLayer'",
        ),
        (
            ["fsdp.api=fsdp1", "fsdp.unshard_ahead=true"],
            'fsdp.unshard_ahead = True changes nothing without fsdp.api = "fsdp2"',
        ),
        (
            ["data.train={dir}/short.npy"],
            "is too short: 31 tokens are 0 sequences of 128, and one batch takes 16",
        ),
        (["data.train={dir}/cut.npy"], "is truncated, or was not made by"),
        (
            ["run.dir={dir}/other", "model.dim=48"],
            (
                "model.dim = 48, and the run that is resumed has 36: it is another model; use"
                " {dir}/other/config.toml"
            ),
        ),
        (["data.seq_len=512"], "data.seq_len = 512, and the model takes sequences of at most 256"),
        (["optim.momentum=1"], "unknown key optim.momentum"),
    ],
)
def test_bad_input_is_one_line_before_any_rank_waits(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    """One rank of four is started: it would wait for ever for the others."""
    (tmp_path / "short.txt").write_text("x" * 30)
    for name in ("short", "cut"):
        prepare([tmp_path / "short.txt"], tmp_path / f"{name}.npy", progress=False)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-5])
    (tmp_path / "other" / "step-00000001").mkdir(parents=True)
    (tmp_path / "other" / "config.toml").write_text("[model]\ndim = 36\n")
    options = [o.format(dir=tmp_path) for o in overrides]
    place = {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    said = run(
        sys.executable,
        "-m",
        "training",
        *sets(f"run.dir={tmp_path}/new", *options),
        status=2,
        **place,
    )
    assert (
        said.startswith("training: ")
        and said.count("\n") == 1
        and message.format(dir=tmp_path) in said
    )
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_that_does_not_fit_is_told_once(whole: Path, tmp_path: Path) -> None:
    options = sets(
        *TINY,
        "model.hidden_dim=96",
        f"run.dir={tmp_path}/run",
        f"run.resume_from={whole}/step-00000020",
    )
    said = run(*command(2, *options), status=1)
    assert said.count("the checkpoint does not fit the state") == 1
    assert (
        "model.layers.0.feed_forward.w1.weight" in said
        and "Traceback" not in said.split("torch/distributed")[0]
    )


def test_a_rank_that_raises_ends_the_job_with_its_own_error_first(tmp_path: Path) -> None:
    said = run(
        *command(2, *TINY, "run.steps=50", f"run.dir={tmp_path}/run", script="failing.py"), status=1
    )
    own = said.index("rank 1 failed:")
    assert "OSError: [Errno 5] Input/output error: 'tokens.npy'" in said[own:]
    others = said.find("rank 0")
    assert others == -1 or others > own
    assert said.count("rank 1 failed:") == 1 and "rank 0 failed" not in said
