"""Prompts and answers, chat turns, padding and packing. The oracle is a loop in one process that sees
each example alone, without padding.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import ckpt_tools
from tests.jobs import kill_after_step
from tests.training.runs import QUIET, command, lines, losses, run, sets
from training import model as models
from training.batch import IGNORED
from training.config import ConfigError
from training.data import Sampler, open_tokens
from training.extras.prepare import prepare
from training.prove import prove

STEPS, SEQ_LEN, BATCH = 4, 24, 4
COMMON = (
    f"run.steps={STEPS}",
    f"data.seq_len={SEQ_LEN}",
    f"data.batch_size={BATCH}",
    "optim.lr=1e-3",
    "optim.decay=all",
    "metrics.progress=false",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions and answers of many lengths; two are longer than a row."""
    folder = tmp_path_factory.mktemp("examples")
    with (folder / "pairs.jsonl").open("w") as file:
        for number in range(40):
            prompt, completion = "q" * (1 + number % 7) + "?", "a" * (1 + number * 5 % 11) + "!"
            if number in (3, 30):
                prompt, completion = "long " * 3, "answer " * 6
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    about = prepare([folder / "pairs.jsonl"], folder / "pairs.npy", progress=False)
    assert about["examples"] == 40
    return folder


@pytest.fixture(scope="module", params=["llama", "opt"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    shared: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    if request.param == "llama":
        made: Any = LlamaForCausalLM(
            LlamaConfig(**shared, intermediate_size=48, num_key_value_heads=2)
        )
    else:
        made = OPTForCausalLM(
            OPTConfig(**shared, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, pad_token_id=1)
        )
    made.save_pretrained(folder)
    return folder


def plain(model: Any, data: Path, packs: bool, call: Any) -> list[float]:
    """The losses of a loop that gives the model one example at a time."""
    tokens = open_tokens(f"{data}/pairs.npy", SEQ_LEN, BATCH, 256, packs=packs)
    sampler = Sampler(len(tokens), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    found = []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for row in sampler.next_batch(BATCH):
            for example in range(tokens.rows[row], tokens.rows[row + 1]):
                start, end = tokens.starts[example], tokens.starts[example + 1]
                end = min(end, start + SEQ_LEN + 1)
                ids = torch.from_numpy(tokens.ids[start:end].astype(np.int64))
                is_trained = torch.from_numpy(tokens.mask[start + 1 : end] == 1)
                each = F.cross_entropy(call(model, ids[None, :-1])[0], ids[1:], reduction="none")
                total, count = total + each[is_trained].sum(), count + int(is_trained.sum())
        optimizer.zero_grad()
        (total / count).backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (
                0.1 + 0.9 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / STEPS)).item())
            )
        optimizer.step()
        found.append((total / count).item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
def test_fine_tuning_has_the_losses_of_examples_one_by_one(
    packs: bool, model: Path, data: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wanted = plain(loaded, data, packs, lambda m, ids: m(ids).logits)
    given = (
        *COMMON,
        f"data.train={data}/pairs.npy",
        f"data.packing={str(packs).lower()}",
        f"model.path={model}",
    )
    ways = {
        1: {"fsdp2": ()},
        2: {
            "fsdp2": ("data.accumulation=2",),
            "fsdp1": ("fsdp.api=fsdp1",),
            "ddp": ("fsdp.strategy=NO_SHARD", "compute.loss_chunk=10"),
        },
        4: {"hybrid": ("fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2")},
    }
    if model.name.startswith("llama"):
        ways[2]["tensor"] = ("fsdp.tensor_parallel=2",)
    for ranks, found in ways.items():
        for name, more in found.items():
            folder = tmp_path / f"{ranks}-{name}"
            said = run(*command(ranks, *sets(*given, *more, f"run.dir={folder}")))
            assert losses(folder) == pytest.approx(wanted, rel=2e-5), (ranks, name)
            assert "2 examples are longer than data.seq_len = 24: cut" in said


@pytest.mark.slow
@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
def test_the_decoder_sees_each_example_alone(packs: bool, data: Path, tmp_path: Path) -> None:
    sizes = ("model.dim=32", "model.num_layers=2", "model.num_heads=4", "model.hidden_dim=48")
    given = (*COMMON, *sizes, f"data.train={data}/pairs.npy", f"data.packing={str(packs).lower()}")
    run(*command(2, *sets(*given, f"run.dir={tmp_path}/two", "run.export=true", "run.steps=1")))
    from training.extras.sample import load_model

    # the exported weights of step 1 begin the plain loop and a second run
    first = ckpt_tools.steps(tmp_path / "two")[0].path
    export = load_model(tmp_path / "two" / "export").train()
    tokens = open_tokens(f"{data}/pairs.npy", SEQ_LEN, BATCH, 256, packs=packs)
    batch = tokens.batch(list(range(BATCH)), slice(None))
    logits = models.logits_of(export, batch.inputs, batch.documents, packs)
    for row in range(BATCH):
        for document in range(int(batch.documents[row].max()) + 1):
            own = batch.documents[row] == document
            alone = export(batch.inputs[row][own][None])[0]
            assert torch.allclose(logits[row][own], alone, atol=1e-5)
    more = ("fsdp.tensor_parallel=2", "fsdp.sequence_parallel=true", "fsdp.loss_parallel=true")
    again = (*given, f"run.resume_from={first}", "run.steps=3")
    for name, options in (("plain", ()), ("tensor", more)):
        run(*command(2, *sets(*again, *options, f"run.dir={tmp_path}/{name}")))
    found = [
        [line["loss"] for line in lines(tmp_path / name) if "loss" in line]
        for name in ("plain", "tensor")
    ]
    assert found[0] == pytest.approx(found[1], rel=2e-5) and len(found[0]) == 2


@pytest.mark.slow
def test_killed_in_an_epoch_and_resumed_on_other_ranks(data: Path, tmp_path: Path) -> None:
    given = (
        *COMMON,
        f"data.train={data}/pairs.npy",
        "data.packing=true",
        "run.steps=14",
        "checkpoint.every=5",
    )
    run(*command(2, *sets(*given, f"run.dir={tmp_path}/whole")))
    part = command(2, *sets(*given, f"run.dir={tmp_path}/part"))
    kill_after_step(part, tmp_path / "part", 5, os.environ | QUIET)
    for ranks in (2, 1):
        folder = tmp_path / f"on-{ranks}"
        shutil.copytree(tmp_path / "part", folder)
        run(*command(ranks, *sets(*given, f"run.dir={folder}")))
        got, want = losses(folder), losses(tmp_path / "whole")
        assert got == (want if ranks == 2 else pytest.approx(want, rel=2e-5))


def test_packing_is_refused_for_models_with_a_sliding_window(data: Path, tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    from training import config as configuration

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    made = MistralConfig(**sizes, vocab_size=256, num_key_value_heads=4, intermediate_size=48)
    MistralForCausalLM(made).save_pretrained(tmp_path)
    given = [f"model.path={tmp_path}", f"data.train={data}/pairs.npy", "data.seq_len=24"]
    prove(configuration.resolve(None, given), 1, 1)
    with pytest.raises(ConfigError, match="data.packing: not for model_type 'mistral'"):
        prove(configuration.resolve(None, [*given, "data.packing=true"]), 1, 1)


def test_rows_and_masks(data: Path) -> None:
    padded, packed = (
        open_tokens(f"{data}/pairs.npy", SEQ_LEN, BATCH, 256, packs=packs)
        for packs in (False, True)
    )
    assert len(padded) == 40 > len(packed) >= 20
    batch = padded.batch([0, 3], slice(None))
    # "q?" and "a!\n": the answer is predicted from the question mark on
    assert bytes(batch.inputs[0][:4].tolist()) == b"q?a!"
    assert batch.targets[0][:5].tolist() == [IGNORED, ord("a"), ord("!"), ord("\n"), IGNORED]
    assert batch.documents[0].tolist() == [0] * 4 + [-1] * (SEQ_LEN - 4)
    assert batch.num_targets == int((batch.targets != IGNORED).sum())
    every = packed.batch(list(range(len(packed))), slice(None))
    assert int((every.documents >= 0).sum()) == sum(
        min(int(n) - 1, SEQ_LEN) for n in np.diff(packed.starts)
    )
    assert len({padded.identity["fingerprint"], packed.identity["fingerprint"]}) == 2


def test_a_chat_template_says_what_the_assistant_wrote(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = "[U] [A] [E] hi hello how are you fine".split()
    made = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="[U]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[E]")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[U] ' if m.role == 'user' else '[A] ' }}{{ m.content }} [E] "
        "{% endfor %}{% if add_generation_prompt %}[A] {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    turns = [("user", "hi"), ("assistant", "hello"), ("user", "how are you"), ("assistant", "fine")]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    about = prepare([tmp_path / "chat.jsonl"], tmp_path / "c.npy", tmp_path / "tokenizer", False)
    ids, mask = np.load(tmp_path / "c.npy"), np.load(tmp_path / "c.npy.mask.npy")
    trained = [words[i] for i, m in zip(ids, mask, strict=True) if m]
    assert trained == ["hello", "[E]", "fine", "[E]"] and about["examples"] == 1
    with pytest.raises(ConfigError, match="line 1: 4 chat turns need --tokenizer"):
        prepare([tmp_path / "chat.jsonl"], tmp_path / "d.npy", progress=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}', "line 2: expected `prompt` and `completion`"),
        ('{"prompt": "a", "completion": 3}', "line 2: expected `prompt` and `completion`"),
        ("{", "line 2: Expecting property name"),
        ('{"messages": []}', "line 2: 0 chat turns need --tokenizer"),
        ('{"messages": ["hi"]}', "line 2: a turn needs `role` and `content`, two texts"),
        (
            '{"messages": [{"role": "assistant", "content": null}]}',
            "line 2: a turn needs `role` and `content`, two texts",
        ),
        ('{"prompt": "\\ud800", "completion": "b"}', "line 2: .*surrogate"),
    ],
)
def test_a_bad_line_is_named_and_leaves_nothing(text: str, message: str, tmp_path: Path) -> None:
    good = '{"prompt": "a", "completion": "b"}\n'
    (tmp_path / "x.jsonl").write_text(good + text + "\n")
    with pytest.raises(ConfigError, match=message):
        prepare([tmp_path / "x.jsonl"], tmp_path / "x.npy", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]


def test_bytes_of_another_encoding_and_a_byte_order_mark(tmp_path: Path) -> None:
    good = b'{"prompt": "a", "completion": "b"}\n'
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + good)
    assert prepare([tmp_path / "bom.jsonl"], tmp_path / "b.npy", progress=False)["examples"] == 1
    (tmp_path / "latin.jsonl").write_bytes(good + '{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.jsonl, line 2: .*codec can't decode"):
        prepare([tmp_path / "latin.jsonl"], tmp_path / "l.npy", progress=False)


def test_completions_that_are_cut_away_are_told_or_refused(data: Path, tmp_path: Path) -> None:
    from training import config as configuration

    rows = [("p" * 40, "gone"), ("short", "stays")]
    for name, kept in (("some", rows), ("none", rows[:1] * 4)):
        lines = [json.dumps({"prompt": p, "completion": c}) for p, c in kept]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        prepare([tmp_path / f"{name}.jsonl"], tmp_path / f"{name}.npy", progress=False)
    given = ["data.seq_len=24", "data.batch_size=2", "metrics.validate_every=1"]
    both = [f"data.train={data}/pairs.npy", f"data.validation={tmp_path}/some.npy"]
    plan = prove(configuration.resolve(None, [*given, *both]), 1, 1)
    assert "in 1 of these nothing is left that is trained on" in plan.notes
    both[1] = f"data.validation={tmp_path}/none.npy"
    with pytest.raises(
        ConfigError, match="data.validation: data.seq_len = 24 cuts the completions"
    ):
        prove(configuration.resolve(None, [*given, *both]), 1, 1)


def test_another_length_of_rows_is_other_data(data: Path) -> None:
    one, two = (open_tokens(f"{data}/pairs.npy", n, BATCH, 256) for n in (SEQ_LEN, SEQ_LEN - 1))
    assert one.identity["fingerprint"] != two.identity["fingerprint"]


def test_files_that_do_not_belong_together(data: Path, tmp_path: Path) -> None:
    for file in data.glob("pairs.npy*"):
        shutil.copy(file, tmp_path)
    np.save(tmp_path / "pairs.npy.mask.npy", np.ones(3, np.uint8))
    with pytest.raises(ConfigError, match="do not belong together"):
        open_tokens(f"{tmp_path}/pairs.npy", SEQ_LEN, BATCH, 256)
    (tmp_path / "pairs.npy.mask.npy").unlink()
    with pytest.raises(ConfigError, match="incomplete"):
        open_tokens(f"{tmp_path}/pairs.npy", SEQ_LEN, BATCH, 256)
    from training import config as configuration

    with pytest.raises(ConfigError, match="data.packing is for examples"):
        prove(configuration.resolve(None, ["data.packing=true"]), 1, 1)
