"""The help of the command: one screen for each verb, examples that run, and names of before."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
from safetensors.torch import save_file
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager
from ckpt_tools.cli import app, old_names
from ckpt_tools.cli.help import VERBS as TEXTS
from ckpt_tools.cli.help import WIDTH
from tests.command import run_command
from tests.jobs import ROOT
from tests.servers.servers import Server

GROUP = typer.main.get_command(app.app)
assert isinstance(GROUP, click.Group)
VERBS = dict(GROUP.commands)
SCREEN = 40
CONFIG = {"model_type": "of_my_own", "hidden_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples name: a run, files of models, a stock checkpoint, a model's config."""
    folder, model = tmp_path_factory.mktemp("examples"), nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(folder / "run", keep_last=None, statistics=True) as checkpoints:
        for step in (100, 200, 300, 400, 500):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            state = {"model": model, "optimizer": optimizer}
            checkpoints.save(step, state, asynchronous=False, metrics={"loss": 1 / step})
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in ("a", "b", "c", "model"):
        save_file(weights, folder / f"{name}.safetensors")
    torch.save(weights, folder / "model.pt")
    dcp.save({"model": weights}, checkpoint_id=folder / "stock", no_dist=True)
    ckpt_tools.reshard(folder / "stock", folder / "eight", to_ranks=8)
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "base" / "model.safetensors")
    (folder / "reload.sh").write_text("#!/bin/sh\n")
    (folder / "reload.sh").chmod(0o755)
    return folder


def test_each_verb_has_one_purpose_one_line_and_examples() -> None:
    assert set(TEXTS) == set(VERBS)
    text = run_command("--help", env=os.environ | {"COLUMNS": "80"}).stdout
    alone = run_command(env=os.environ | {"COLUMNS": "80"})
    assert (alone.returncode, alone.stdout) == (2, text)
    lines = text.splitlines()
    assert len(lines) <= SCREEN and max(map(len, lines)) <= WIDTH, text
    groups = [about.group for about in TEXTS.values()]
    assert groups == sorted(groups, key=groups.index)  # verbs of a group stand together
    for name, about in TEXTS.items():
        assert any(line.split()[:1] == [name] and about.short in line for line in lines)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_fits_a_screen_and_names_every_option(verb: str) -> None:
    text = run_command(verb, "--help", env=os.environ | {"COLUMNS": "80"}).stdout
    lines = text.splitlines()
    assert len(lines) <= SCREEN and max(map(len, lines)) <= WIDTH, text
    assert 1 <= len(TEXTS[verb].examples) <= 3
    assert all(f"  {example}" in lines for example in TEXTS[verb].examples)
    whole = run_command(verb, "--help-all", env=os.environ | {"COLUMNS": "200"}).stdout
    for option in VERBS[verb].params:
        if isinstance(option, click.Option) and not option.hidden:
            name = max(option.opts, key=len)
            assert name in whole and (name in text or name == "--help"), name


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_run(verb: str, folder: Path, tmp_path: Path, server: Server) -> None:
    if server.name != "moto" and not any("s3://" in line for line in TEXTS[verb].examples):
        pytest.skip("nothing of it is in a bucket")
    server.bucket("bucket")
    environment = os.environ | server.environment
    for number, example in enumerate(TEXTS[verb].examples):
        here, words = tmp_path / str(number), shlex.split(example)
        shutil.copytree(folder, here)
        assert words[:2] == ["ckpt", verb]
        if verb in ("merge", "convert"):  # other examples read what is there
            (here / words[3]).unlink(missing_ok=True)
        if "s3://bucket/run/step-00000500" in words and verb != "copy":
            step = "s3://bucket/run/step-00000500"
            run_command("copy", "run/step-00000500", step, cwd=here, env=environment)
        if "plan.json" in words:
            (here / "plan.json").write_text('{"tp": {".*weight": 0}}')
        if verb == "pull":
            root = words[2]
            run_command("publish", "run/step-00000500", root, cwd=here, env=environment)
            words = [word for word in words if word != "--follow"]  # it has no end
        if "--from" in words:
            words[words.index("run/step-00000500")] = "eight"
        done = run_command(*words[1:], cwd=here, env=environment)
        allowed = (0, 1) if verb == "diff" else (0,)
        assert done.returncode in allowed, f"{example}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("best run --metric loss", "latest run --best loss"),
        ("best run --metric=loss --json", "latest run --best loss --json"),
        ("du run --price 0.02", "ls run --bytes --price 0.02"),
        ("du run --json", "ls run --bytes --json"),
        ("plot run --tensor * -o x.png", "report run --select * --png x.png"),
        ("inspect run/step-00000500 --stats", "inspect run/step-00000500 --traffic"),
        ("inspect run/step-00000500 --ranks", "inspect run/step-00000500 --files"),
        ("prune run --keep-last 4 --grace-hours 5", "prune run --keep-last 4 --grace 5h"),
        ("prune run --keep-last 4 --grace-hours=0", "prune run --keep-last 4 --grace 0h"),
        (
            "average a.safetensors b.safetensors m -q --to hf --config-from base",
            "average a.safetensors b.safetensors m -q --to hf --base base",
        ),
    ],
)
def test_an_old_name_does_what_the_new_one_does_and_says_it(
    old: str, new: str, folder: Path, tmp_path: Path
) -> None:
    found = []
    for number, line in enumerate((new, old)):
        shutil.copytree(folder, tmp_path / str(number))
        done = run_command(*line.split(), cwd=tmp_path / str(number))
        assert done.returncode == 0, done.stderr
        found.append(done)
    assert found[0].stdout == found[1].stdout
    told = [line for line in found[1].stderr.splitlines() if "the old name works until" in line]
    assert len(told) == 1 and old_names.GONE_IN in told[0]
    assert "the old name" not in found[0].stderr
    left = [sorted(p.name for p in (tmp_path / n).iterdir()) for n in "01"]
    assert left[0] == left[1]


# options of one name with two meanings, as the command line of the mission has them
TWICE = {"--to": {"reshard"}, "--mesh": {"convert"}}


def test_an_option_means_the_same_in_every_verb() -> None:
    found: dict[str, dict[str, tuple[object, ...]]] = {}
    for verb, command in VERBS.items():
        for option in command.params:
            for name in option.opts if isinstance(option, click.Option) else ():
                is_flag = option.is_flag
                kind = "" if is_flag else option.type.name, option.metavar, is_flag
                if verb not in TWICE.get(name, ()):
                    found.setdefault(name, {})[verb] = kind
    assert not {name: of for name, of in found.items() if len(set(of.values())) > 1}
    text = {name: next(iter(of.values()))[1] for name, of in found.items()}
    for name, value in {
        "--select": "GLOB",
        "--exclude": "GLOB",
        "--base": "DIR",
        "--to": "LAYOUT",
        "--ranks": "N",
        "--memory": "SIZE",
        "--max-shard-size": "SIZE",
        "--grace": "TIME",
        "--keep-spaced": "TIME",
        "--keep-younger": "TIME",
    }.items():
        assert text[name] == value
    assert set(found["--json"]) == set(VERBS)
    assert set(VERBS) - set(found["--quiet"]) == {"inspect", "ls", "latest"}  # they only print
    assert set(VERBS) - set(found["--jobs"]) == {"inspect", "ls", "pin"}  # they read no values
    assert all("--traffic" in found and verb in found["--traffic"] for verb in VERBS)


def test_pin_and_check_print_what_they_are_asked_for(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    words = ("pin", "run/step-00000100", "--json")
    one = json.loads(run_command(*words, cwd=tmp_path).stdout)
    assert one == {"path": "run/step-00000100", "is_pinned": True, "is_changed": True}
    assert not json.loads(run_command(*words, cwd=tmp_path).stdout)["is_changed"]
    gone = json.loads(run_command(*words, "--remove", cwd=tmp_path).stdout)
    assert not gone["is_pinned"] and gone["is_changed"]
    fine = run_command("check", "run", "-q", cwd=tmp_path)
    assert (fine.returncode, fine.stdout) == (0, "")
    shutil.rmtree(tmp_path / "run" / "step-00000200")
    bad = run_command("check", "run", "-q", "--every", 100, cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (1, "")


@pytest.mark.parametrize("verb", old_names.GONE)
def test_an_option_that_is_gone_says_what_to_do_instead(verb: str, folder: Path) -> None:
    for option, instead in old_names.GONE[verb].items():
        assert not any(option in parameter.opts for parameter in VERBS[verb].params)
        for word in (option, f"{option}=3"):
            done = run_command(verb, "run", word, cwd=folder)
            assert done.returncode == 2
            assert f"ckpt {verb} has no {option} any more" in done.stderr
            assert f"hint: {instead}" in done.stderr
    assert run_command(verb, "run", "--", "--serve", cwd=folder).returncode == 2


def test_the_changelog_lists_every_old_name() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    table = text.partition("**Deprecated**, until " + old_names.GONE_IN)[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    rows = [row for row in rows if "=" not in row]  # those of the manager have a test of their own
    verbs = {f"ckpt {verb}" for verb in old_names.VERBS}
    names = verbs | {name for names in old_names.OPTIONS.values() for name in names}
    assert all(any(name in row for row in rows) for name in names)
    assert all(any(name in row for name in names) for row in rows)


def test_words_that_only_look_like_old_names_stay() -> None:
    for line in (
        ["--version"],
        [],
        ["inspect", "best"],
        ["inspect", "--", "--stats"],
        ["merge", "du", "x.safetensors"],
    ):
        assert old_names.with_present_names(line) == line
