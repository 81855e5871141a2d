"""Token files and the global order of sequences."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import jobs
from training.config import ConfigError
from training.data import Sampler, open_tokens, shuffled
from training.extras.prepare import prepare


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_shuffling_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(i, size, seed, epoch) for i in range(size)) == list(range(size))


def test_seeds_and_epochs_are_shuffled_differently_and_well() -> None:
    orders = {
        (s, e): [shuffled(i, 1000, s, e) for i in range(1000)] for s in (0, 1) for e in (0, 1)
    }
    assert len({tuple(o) for o in orders.values()}) == 4
    for order in orders.values():
        assert sum(a == b for a, b in enumerate(order)) < 10
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.15
        assert sum(b == a + 1 for a, b in itertools.pairwise(order)) < 10


@given(
    size=st.integers(8, 200),
    seed=st.integers(0, 100),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    worlds=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=6),
    steps=st.integers(1, 8),
)
@settings(max_examples=100, deadline=None)
def test_runs_that_stop_and_go_on_with_other_ranks_see_the_order_of_one_that_does_not(
    size: int, seed: int, shuffle: bool, drop_last: bool, worlds: list[int], steps: int
) -> None:
    whole = Sampler(size, seed, shuffle, drop_last)
    wanted = [whole.next_batch(8) for _ in range(steps * len(worlds))]
    state = Sampler(size, seed, shuffle, drop_last).state_dict()
    seen = []
    for world in worlds:
        ranks = [Sampler(size, seed, shuffle, drop_last) for _ in range(world)]
        for sampler in ranks:
            sampler.load_state_dict(state)
        for _ in range(steps):
            batches = [sampler.next_batch(8) for sampler in ranks]
            part = 8 // world
            seen.append(
                [
                    n
                    for rank, batch in enumerate(batches)
                    for n in batch[rank * part : (rank + 1) * part]
                ]
            )
        assert all(sampler.state_dict() == ranks[0].state_dict() for sampler in ranks)
        state = ranks[0].state_dict()
    assert seen == wanted


@given(size=st.integers(5, 100), batch=st.integers(1, 5), epochs=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_every_sequence_once(size: int, batch: int, epochs: int) -> None:
    keeping = Sampler(size, 1, drop_last=False)
    stream = [n for _ in range(-(-size * epochs // batch)) for n in keeping.next_batch(batch)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))
    dropping = Sampler(size, 1, drop_last=True)
    for epoch in range(epochs):
        seen = [n for _ in range(size // batch) for n in dropping.next_batch(batch)]
        assert dropping.epoch == epoch
        assert len(set(seen)) == len(seen) == size // batch * batch


def test_a_changed_batch_size_goes_on_in_the_same_order() -> None:
    whole = Sampler(50, 3)
    order = [n for _ in range(10) for n in whole.next_batch(4)]
    first = Sampler(50, 3)
    seen = [n for _ in range(4) for n in first.next_batch(4)]
    then = Sampler(50, 3)
    then.load_state_dict(first.state_dict())
    assert seen + [n for _ in range(3) for n in then.next_batch(8)] == order


def test_the_state_of_another_order_is_refused() -> None:
    state = Sampler(50, 3).state_dict()
    with pytest.raises(
        ConfigError, match="the data has 60 sequences, and the checkpoint was trained on 50"
    ):
        Sampler(60, 3).load_state_dict(state)
    with pytest.raises(
        ConfigError, match="run.seed = 4, and the checkpoint has the order of run.seed = 3"
    ):
        Sampler(50, 4).load_state_dict(state)


def test_windows_overlap_by_the_one_token_that_is_input_of_one_and_target_of_the_other(
    tmp_path: Path,
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(100)))
    prepare([text], tmp_path / "tokens.npy", progress=False)
    tokens = open_tokens(str(tmp_path / "tokens.npy"), 10, 1, 256)
    assert len(tokens.ids) == 101
    sizes = [len(replace(tokens, seq_len=seq_len)) for seq_len in (10, 100, 101)]
    assert sizes == [10, 1, 0]
    inputs, targets, _, num_targets = tokens.batch([9, 0], slice(None))
    assert num_targets == 20
    assert inputs.tolist() == [list(range(90, 100)), list(range(10))]
    assert targets.tolist() == [[*range(91, 100), 10], list(range(1, 11))]
    assert inputs.dtype == torch.int64


def test_prepare_takes_files_and_folders_in_order_and_replaces_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "2.txt").write_text("two")
    (folder / "a.txt").write_text("one")
    (tmp_path / "last.txt").write_text("three")
    out = tmp_path / "tokens.npy"
    about = prepare([folder, tmp_path / "last.txt"], out, progress=False)
    assert bytes(np.load(out)) == b"one\ntwo\nthree\n"
    assert about == json.loads((tmp_path / "tokens.npy.json").read_text())
    assert len(about.pop("digest")) == 16
    assert about == {
        "tokenizer": "bytes",
        "tokenizer_fingerprint": "",
        "vocab_size": 256,
        "documents": 3,
        "tokens": 14,
    }
    before = out.read_bytes()
    with pytest.raises(ConfigError, match="no such file"):
        prepare([tmp_path / "missing"], out, progress=False)
    with pytest.raises(ConfigError, match="cannot load a tokenizer"):
        prepare([folder], out, tmp_path / "corpus", progress=False)
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "corpus",
        "last.txt",
        "tokens.npy",
        "tokens.npy.json",
    ]


def test_prepare_does_not_read_what_it_has_written(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ConfigError, match="is one of the sources"):
        prepare([tmp_path / "a.txt"], tmp_path / "a.txt", progress=False)
    prepare([tmp_path], tmp_path / "t.npy", progress=False)
    before = (tmp_path / "t.npy").read_bytes()
    with pytest.raises(ConfigError, match=r"t\.npy.* is one of the sources: write elsewhere"):
        prepare([tmp_path], tmp_path / "t.npy", progress=False)
    assert (tmp_path / "t.npy").read_bytes() == before
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="no text in"):
        prepare([tmp_path / "empty.txt"], tmp_path / "e.npy", progress=False)


def save_tokenizer(path: Path) -> None:
    """Saves a tokenizer of 70,005 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "<end>": 1, "the": 2, "cat": 3, "sat": 4} | {
        f"w{i}": 5 + i for i in range(70_000)
    }
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<end>", unk_token="[UNK]"
    ).save_pretrained(path)


def test_prepare_with_a_tokenizer_gives_its_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path / "tokenizer")
    text = "the cat sat\n" * 50_000 + "w69999 the"
    (tmp_path / "a.txt").write_text(text)
    about = prepare(
        [tmp_path / "a.txt"], tmp_path / "tokens.npy", tmp_path / "tokenizer", progress=False
    )
    ids = np.load(tmp_path / "tokens.npy")
    wanted = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")(text, add_special_tokens=False)[
        "input_ids"
    ]
    assert ids.dtype == np.uint32 and ids.tolist() == [*wanted, 1]
    assert about["vocab_size"] == 70_005 and about["tokens"] == len(ids)


@pytest.mark.slow
def test_the_commands_of_the_page_make_files_of_tokens_and_of_examples(tmp_path: Path) -> None:
    page = (jobs.ROOT / "docs" / "training.md").read_text()
    found = re.findall(r"^```console\n(.*?)^```$", page, re.M | re.S)
    assert len(found) == 1
    save_tokenizer(tmp_path / "llama")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("the cat sat\n")
    example = {"prompt": "the cat", "completion": "sat"}
    (tmp_path / "chat.jsonl").write_text(json.dumps(example) + "\n")
    for line in found[0].splitlines():
        words = [sys.executable, *shlex.split(line)[1:]]
        env = os.environ | {"PYTHONPATH": str(jobs.ROOT)}
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)
    assert np.load(tmp_path / "tokens.npy").tolist() == [2, 3, 4, 1]
    assert (tmp_path / "chat.npy").is_file()


@pytest.mark.slow
def test_the_command_says_what_it_made(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    command = [
        sys.executable,
        "-m",
        "training.data",
        "prepare",
        str(tmp_path / "a.txt"),
        "--out",
        str(tmp_path / "t.npy"),
    ]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith(
        "t.npy: 6 tokens of 1 documents, a vocabulary of 256 ids\n"
    )
    failed = subprocess.run(
        [*command[:4], str(tmp_path / "x"), *command[5:]], capture_output=True, text=True
    )
    assert (
        failed.returncode == 1
        and failed.stderr == f"training.data: no such file: {tmp_path / 'x'}\n"
    )


@pytest.mark.parametrize("cut", [1, 40, 128, 200])
def test_a_truncated_token_file_is_refused(cut: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    out = tmp_path / "tokens.npy"
    prepare([tmp_path / "a.txt"], out, progress=False)
    out.write_bytes(out.read_bytes()[:cut])
    with pytest.raises(ConfigError, match="data.train: .*is truncated, or was not made by"):
        open_tokens(str(out), 10, 1, 256)


def test_other_bad_token_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    out = tmp_path / "tokens.npy"
    with pytest.raises(ConfigError, match="cannot open .*tokens.npy: No such file"):
        open_tokens(str(out), 10, 1, 256)
    prepare([tmp_path / "a.txt"], out, progress=False)
    with pytest.raises(
        ConfigError, match="too short: 101 tokens are 10 sequences of 10, and one batch takes 11"
    ):
        open_tokens(str(out), 10, 11, 256)
    with pytest.raises(ConfigError, match="has a vocabulary of 256 ids, the model one of 100"):
        open_tokens(str(out), 10, 1, 100)
    np.save(out, np.zeros((3, 3), np.uint8))
    with pytest.raises(ConfigError, match="promises 101 tokens"):
        open_tokens(str(out), 10, 1, 256)
    (tmp_path / "tokens.npy.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot open .*tokens.npy.json"):
        open_tokens(str(out), 10, 1, 256)
