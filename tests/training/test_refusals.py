"""Mistakes in configuration, data and modules that are one line before any rank waits."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests.training.runs import TINY, run, sets
from tests.training.runs import lines as metrics
from training.changes import check_directory, check_same, check_train_state, config_of, notes_on
from training.checks import check
from training.config import ConfigError, resolve, to_toml
from training.data import open_tokens
from training.extras import accelerate_config
from training.extras.prepare import prepare
from training.extras.tensor import check_heads
from training.metrics import _forget
from training.model import make
from training.prove import prove
from training.units import units_of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["model.dtype=bfloat16", "precision.param=float32", "fsdp.strategy=NO_SHARD"],
            "precision.param",
        ),
        (
            ["model.dtype=bfloat16", "precision.reduce=float32", "fsdp.strategy=NO_SHARD"],
            "precision.reduce",
        ),
        (
            ["precision.cast_forward_inputs=false", "fsdp.strategy=NO_SHARD"],
            "precision.cast_forward_inputs",
        ),
        (["precision.output=float16"], "precision float16"),
        (
            [
                "fsdp.api=fsdp1",
                "fsdp.cpu_offload=true",
                "fsdp.reduce_every=true",
                "data.accumulation=2",
            ],
            "fsdp.reduce_every",
        ),
        (["compute.compile_backend=eager"], "changes nothing without compute.compile = true"),
        (["fsdp.min_num_params=7"], 'changes nothing without fsdp.wrap = "size"'),
        (["fsdp.reduce_every=true"], "changes nothing without data.accumulation above 1"),
        (["checkpoint.mirror_every=3"], "changes nothing without checkpoint.mirror"),
        (["metrics.validate_batches=3"], "changes nothing without metrics.validate_every"),
        (
            ["model.num_layers=1000000000"],
            "model.num_layers = 1000000000: expected less than or equal to",
        ),
        (["model.dim=-16"], "model.dim = -16: expected greater than or equal to 0$"),
    ],
)
def test_keys_that_nothing_would_apply_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(resolve(None, options))


def test_units_that_cannot_be_sharded_are_refused() -> None:
    tied = resolve(None, ["model.tied_embeddings=true", "precision.overrides.output=bfloat16"])
    with pytest.raises(ConfigError, match="output shares a weight with another module"):
        units_of(make(tied), tied)
    lists = resolve(None, ["fsdp.wrap=classes", "fsdp.wrap_classes=ModuleList"])
    with pytest.raises(ConfigError, match="layers is only a list of modules"):
        units_of(make(lists), lists)
    odd = make(resolve(None, ["model.hidden_dim=33"]))
    with pytest.raises(ConfigError, match="does not divide the model's hidden_dim = 33"):
        check_heads(odd, 2)


def test_units_that_share_a_weight_are_told(tmp_path: Path) -> None:
    options = ["fsdp.wrap_embeddings=true", f"run.dir={tmp_path}/run"]
    assert prove(resolve(None, options), 1, 1).notes == []
    (note,) = prove(resolve(None, [*options, "model.tied_embeddings=true"]), 1, 1).notes
    assert note.startswith("output, tok_embeddings share a weight with a module outside")


FACTORIES = """
import functools, torch
from torch import nn

class Callable:
    def __call__(self): return nn.Linear(4, 3)

good = Callable()
part = functools.partial(nn.Linear, 4, 3)
def complex_weights(): return nn.Linear(4, 3, dtype=torch.complex64)
def linear(): return nn.Linear(4, 3)
def nothing(outputs, targets): return None
def number(outputs, targets): return 1.5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "factories_of_a_test.py").write_text(FACTORIES)
    (tmp_path / "ends_at_import.py").write_text("raise SystemExit(5)")
    torch.manual_seed(0)
    rows = {"inputs": torch.randn(16, 4), "targets": torch.randint(0, 3, (16,))}
    save_file(rows, tmp_path / "rows.safetensors")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def of_factory(folder: Path, *options: str) -> None:
    given = ["fsdp.wrap=none", f"data.train={folder}/rows.safetensors", "data.batch_size=4"]
    prove(resolve(None, [*given, f"run.dir={folder}/run", *options]), 1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.factory=factories_of_a_test:complex_weights"], "weight is complex"),
        (["model.factory=ends_at_import:f"], "model.factory = 'ends_at_import:f'"),
        (
            [
                "model.factory=factories_of_a_test:linear",
                "model.loss=factories_of_a_test:nothing",
            ],
            "it returned NoneType: expected a tensor",
        ),
        (
            ["model.factory=factories_of_a_test:linear", "model.loss=factories_of_a_test:number"],
            "it returned float: expected a tensor",
        ),
    ],
)
def test_modules_and_losses_that_cannot_be_trained(
    folder: Path, options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        of_factory(folder, *options)


def test_any_callable_is_a_factory(folder: Path) -> None:
    from training.extras.factory import source_digest

    for name in ("good", "part"):
        option = f"model.factory=factories_of_a_test:{name}"
        of_factory(folder, option)
        assert isinstance(source_digest(resolve(None, [option])), str)


def test_examples_are_not_read_as_text(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a", "completion": "b"})
    (tmp_path / "a.json").write_text(f"{line}\n{line}\n")
    with pytest.raises(ConfigError, match="looks like examples"):
        prepare([tmp_path / "a.json"], tmp_path / "t.npy", progress=False)
    (tmp_path / "a.json").rename(tmp_path / "a.jsonl")
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(ConfigError, match="cannot be mixed"):
        prepare([tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / "t.npy", progress=False)
    prepare([tmp_path / "a.jsonl"], tmp_path / "t.npy", progress=False)
    with pytest.raises(ConfigError, match="make it with `python -m training.data prepare`"):
        open_tokens(str(tmp_path / "a.jsonl"), 4, 1, 256)


@pytest.mark.parametrize("suffix", ["", ".mask.npy", ".starts.npy"])
@pytest.mark.parametrize("kind", ["empty", "float", "2-d", "0-d", "archive"])
def test_damaged_files_of_examples_are_one_line(suffix: str, kind: str, tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a", "completion": "b"})
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line}\n")
    prepare([tmp_path / "a.jsonl"], tmp_path / "t.npy", progress=False)
    file = tmp_path / f"t.npy{suffix}"
    values = np.load(file)
    file.unlink()
    with file.open("wb") as stream:
        if kind == "archive":
            np.savez(stream, values)
        elif kind != "empty":
            np.save(stream, {"float": values * 1.0, "2-d": values[None], "0-d": values[0]}[kind])
    with pytest.raises(ConfigError, match="data: the files of"):
        open_tokens(str(tmp_path / "t.npy"), 4, 1, 256)


def test_a_damaged_line_of_the_metrics_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"st\n7\n{"step": 2}\n{"step": 3}\n{"step": 4')
    _forget(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


V2 = {
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
}


def mapped(tmp_path: Path, given: dict[str, object]) -> accelerate_config.Mapped:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(given))
    return accelerate_config.read(str(tmp_path / "a.yaml"))


def test_keys_of_accelerate_that_contradict_each_other(tmp_path: Path) -> None:
    both = V2["fsdp_config"] | {"fsdp_sharding_strategy": 2}  # type: ignore[operator]
    with pytest.raises(ConfigError, match="contradicts an earlier key"):
        mapped(tmp_path, V2 | {"fsdp_config": both})
    for name, value in (("dp_replicate_size", "two"), ("tp_size", "²")):
        sizes = {f"parallelism_config_{name}": value}
        with pytest.raises(ConfigError, match="expected a whole number"):
            mapped(tmp_path, V2 | {"parallelism_config": sizes})
    plain = mapped(tmp_path, V2 | {"mixed_precision": False})  # an unquoted no
    assert plain.tables.get("precision", {"param": ""})["param"] == ""
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    hybrid = mapped(tmp_path, V2 | {"parallelism_config": sizes})
    assert hybrid.tables["fsdp"]["strategy"] == "HYBRID_SHARD"
    assert any("makes fsdp.strategy = HYBRID_SHARD" in note for note in hybrid.notes)
    layers = V2["fsdp_config"] | {"fsdp_transformer_layer_cls_to_wrap": "Block"}  # type: ignore[operator]
    unused = mapped(tmp_path, V2 | {"fsdp_config": layers})
    assert any("fsdp_transformer_layer_cls_to_wrap" in note for note in unused.notes)


def test_tables_and_values_of_accelerate_that_are_wrong(tmp_path: Path) -> None:
    assert mapped(tmp_path, {"distributed_type": "FSDP", "fsdp_config": None}).notes == []
    with pytest.raises(ConfigError, match="fsdp_config: expected a table, got"):
        mapped(tmp_path, {"distributed_type": "FSDP", "fsdp_config": [1]})
    for key, value in (("fsdp_sharding_strategy", "FULLSHARD"), ("fsdp_backward_prefetch", "X")):
        given = {"fsdp_version": 1, key: value}
        with pytest.raises(ConfigError, match=rf"fsdp_config\.{key}: .*a\.yaml"):
            mapped(tmp_path, {"distributed_type": "FSDP", "fsdp_config": given})
    with pytest.raises(ConfigError, match="Accelerate calls it mixed_precision now"):
        mapped(tmp_path, V2 | {"mixed_precison": "bf16"})


def test_weights_of_other_shapes_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from training.extras.weights import check_weights

    sizes = {"intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    for width in (16, 32):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=width, **sizes, **heads))
        model.save_pretrained(tmp_path / str(width))
    config = resolve(None, [f"model.path={tmp_path}/16", "data.train=x"])
    assert check_weights(make(config), config) is False
    shutil.copy(tmp_path / "32" / "config.json", tmp_path / "16" / "config.json")
    with pytest.raises(ConfigError, match=r"has the shape \[.*16.*\] in .* and \[.*32"):
        check_weights(make(config), config)


@pytest.mark.slow
def test_another_model_is_refused_where_the_steps_lie_elsewhere(tmp_path: Path) -> None:
    places = [f"run.dir={tmp_path}/run", f"checkpoint.dir={tmp_path}/steps"]
    given = (*TINY, *places, "run.steps=1")
    run(sys.executable, "-m", "training", *sets(*given))
    with pytest.raises(ConfigError, match="model.dim = 48, and the run that is resumed has"):
        prove(resolve(None, [*given, "model.dim=48"]), 1, 1)


def test_tools_of_a_chat_are_written_or_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(("<u>", "hi", "tool", "ho", "</s>"))}
    plain = Tokenizer(models.WordLevel(words, "<u>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<u>", eos_token="</s>")
    turns = "{% for m in messages %}{{ m.content }} {% endfor %}"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": chat, "tools": [{"name": "tool"}]}))
    for template, wanted in (
        ("{{ tools[0].name if tools else '' }} " + turns, [2, 1, 3]),
        (turns, None),
    ):
        shutil.rmtree(tmp_path / "tok", ignore_errors=True)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "tok")
        given = ([tmp_path / "c.jsonl"], tmp_path / "t.npy", tmp_path / "tok", False)
        if wanted is None:
            with pytest.raises(ConfigError, match="does not write the line's `tools`"):
                prepare(*given)
        else:
            prepare(*given)
            assert np.load(tmp_path / "t.npy").tolist() == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["run.dir=/dev/null"], "run.dir = '/dev/null': no directory can be made there"),
        (["run.dir=s3://bucket/run"], "give the URL in checkpoint.dir"),
        (["checkpoint.dir=http://x/y"], "checkpoint.dir = 'http://x/y': expected a store"),
        (["checkpoint.dir=s3://"], "checkpoint.dir = 's3://'"),
        (["run.resume_from=nowhere"], "run.resume_from = 'nowhere'"),
    ],
)
def test_places_that_cannot_hold_a_run(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        prove(resolve(None, [f"run.dir={tmp_path}/run", *options]), 1, 1)


@pytest.mark.parametrize(
    "given",
    [
        {"RANK": "x"},
        {"WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"},
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
    ],
)
def test_ranks_that_contradict_each_other(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from training import command

    monkeypatch.setattr(sys, "argv", ["training"])
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2 and "WORLD_SIZE" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["model.vocab_size=64"], ["model.max_seq_len=8"]])
def test_logits_of_a_prompt_that_the_model_cannot_take(options: list[str], tmp_path: Path) -> None:
    from training.command import _check_logits

    config = resolve(None, [*options, "data.seq_len=8"])
    with pytest.raises(ConfigError, match="--logits: the fixed prompt has"):
        _check_logits(tmp_path / "l.pt", config)
    with pytest.raises(ConfigError, match="it is a directory"):
        _check_logits(tmp_path, resolve(None))


def test_a_step_without_a_target_has_no_loss(tmp_path: Path) -> None:
    long = {"prompt": "a" * 40, "completion": "b"}
    short = {"prompt": "a", "completion": "bcd"}
    lines = [json.dumps(one) for one in (long, short) * 4]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prepare([tmp_path / "a.jsonl"], tmp_path / "t.npy", progress=False)
    options = (
        *TINY,
        "run.steps=4",
        "data.seq_len=16",
        "data.batch_size=1",
        "data.shuffle=false",
        f"data.train={tmp_path}/t.npy",
        f"run.dir={tmp_path}/run",
    )
    run(sys.executable, "-m", "training", *sets(*options))
    found = [line["loss"] for line in metrics(tmp_path / "run")]
    assert [value is None for value in found] == [True, False, True, False]


def test_rows_of_another_kind_are_no_continuation() -> None:
    before, other = resolve(None), resolve(None, ["data.seq_len=64"])
    with pytest.raises(ConfigError, match="data.seq_len = 64, and the run that is resumed has 128"):
        notes_on(before, other)
    assert notes_on(before, other.having("data", may_change=True))
    stored, now = ({"data": {"name": n, "tokens": 9, "fingerprint": n}} for n in ("a", "b"))
    allowed = before.having("data", may_change=True)
    assert len(check_same(stored, now | {"model": {}}, allowed)) == 1
    with pytest.raises(ConfigError, match="run.epochs: the checkpoint was trained on a"):
        check_same(stored, now | {"model": {}}, allowed.having("run", epochs=2))


@pytest.mark.parametrize(
    "stored",
    [
        {"step": -5},
        {"step": "x"},
        {"step": float("nan")},
        {"step": 10**30},
        {"step": 3, "best": 5},
        {"step": 3, "best": [1]},
        {"step": 3, "best": [[1], "x"]},
    ],
    ids=str,
)
def test_a_train_state_that_no_training_stores_is_refused(stored: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the checkpoint"):
        check_train_state(stored, 3)


def test_the_step_of_a_directory_without_a_number_is_the_stored_one() -> None:
    check_train_state({"step": 7, "best": [3, 0.5]}, 0)
    check_train_state({"step": 7}, 7)


def test_a_configuration_that_starts_can_be_read_back() -> None:
    names = ",".join(f"module_{number}" for number in range(5000))
    config = resolve(None, ["fsdp.wrap=classes", f"fsdp.wrap_classes={names}"])
    assert config_of({"config": to_toml(config)}) == config
    with pytest.raises(ConfigError, match="in a line"):
        to_toml(resolve(None, [f"run.dir={'d' * 5000}"]))


@pytest.mark.parametrize(
    "text", [5, "[" + "a." * 200_000 + "a]", "[" * 9], ids=lambda t: str(t)[:9]
)
def test_a_stored_configuration_that_is_none_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="the checkpoint's configuration"):
        config_of({"config": text})


def test_an_empty_configuration_beside_steps_stops_no_resume(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "config.toml").touch()
    check_directory(resolve(None, [f"run.dir={tmp_path}", "model.dim=48"]))
