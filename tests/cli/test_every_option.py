"""Each option of each verb, with a value that means nothing: an error, and nothing is written. A
new option has to be entered here.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
import typer

from ckpt_tools.cli import app as cli

Run = Callable[..., subprocess.CompletedProcess[str]]
GROUP = typer.main.get_command(cli.app)
assert isinstance(GROUP, click.Group)
VERBS = dict(GROUP.commands)
ARGUMENTS = {
    "inspect": "s.pt",
    "merge": "s.pt out.safetensors",
    "reshard": "s.pt out",
    "convert": "s.pt out",
    "average": "s.pt s.pt out.safetensors",
    "verify": "s.pt",
    "diff": "s.pt s.pt",
    "stats": "s.pt",
    "seal": "s.pt",
    "salvage": "s.pt out",
    "copy": "s.pt out.pt",
    "ls": "run",
    "latest": "run",
    "check": "run",
    "prune": "run",
    "thin": "run",
    "report": "s.pt",
    "pin": "run/step-1",
    "publish": "s.pt versions",
    "pull": "versions model",
}
NEEDED = {
    "reshard": "--to 2",
    "convert": "--to dcp",
    "prune": "--keep-last 1",
    "thin": "--keep-full 1",
    "report": "--output x.html",
}
FLAGS = {
    "--tree",
    "--json",
    "--traffic",
    "--help-all",
    "--bytes",
    "--keep-prefix",
    "--overwrite",
    "--resume",
    "--dry-run",
    "--quiet",
    "--model-only",
    "--files",
    "--partial",
    "--quick",
    "--deep",
    "--read-all",
    "--verify",
    "--remove",
    "--check",
    "--require-manifest",
    "--histogram",
    "--metrics",
    "--timing",
    "--allow-not-finite",
    "--higher-is-better",
    "--open",
    "--no-values",
    "--no-prove",
    "--full",
    "--follow",
}
# a value that matches nothing, or that is none, of every other option; more words that it needs
NOTHING = {
    "--select": "zz*",
    "--exclude": "zz*",
    "--dtype": "fp17",
    "--keep-dtype": "zz* --dtype bf16",
    "--max-shard-size": "0B",
    "--lora": "no/such",
    "--model-key": "no.such",
    "--storage-option": "key=value",
    "--to-storage-option": "key=value",
    "--shapes": "no/such.json",
    "--jobs": "0",
    "--memory": "0",
    "--to": "0",
    "--from": "7",
    "--ranks": "0",
    "--rename": "zz=y",
    "--map": "no_such_map",
    "--names": "zz",
    "--set": "heads=2",
    "--param-order": "no/such",
    "--optimizer": "zz",
    "--base": "no/such",
    "--mesh": "cpu:x",
    "--plan": "no_such_plan",
    "--quantize": "zz",
    "--atol": "nan",
    "--rtol": "-1",
    "--keep-last": "0",
    "--keep-every": "0",
    "--grace": "soon",
    "--keep-spaced": "0s",
    "--keep-younger": "soon",
    "--keep-best": "1",
    "--keep-full": "0",
    "--drop": "zz*",
    "--price": "-1",
    "--output": "x.txt",
    "--png": "x.txt",
    "--best": "zz",
    "--pretrained": "no/such",
    "--value": "size",
    "--every": "0",
    "--metric": "zz",
    "--last": "2",
    "--steps": "1:2",
    "--weights": "1,x",
    "--schedule": "steep",
    "--scale": "0.5",
    "--layout": "zip",
    "--encoding": "zip",
    "--checksum": "md5",
    "--version": "0",
    "--hook": "false",
    "--receiver": "engine-1",
    "--full-every": "0",
}
SPECIAL = {
    ("convert", "--to"): "zz",
    ("convert", "--max-shard-size"): "5GB",
}


def options(verb: str) -> list[str]:
    return [max(o.opts, key=len) for o in VERBS[verb].params if isinstance(o, click.Option)]


CASES = [(verb, option) for verb in VERBS for option in options(verb) if option not in FLAGS]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    torch.save(
        {
            "model": {"w": torch.ones(3)},
            "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        },
        tmp_path / "s.pt",
    )
    (tmp_path / "run").mkdir()
    return tmp_path


@pytest.mark.parametrize(("verb", "option"), CASES)
def test_a_value_that_means_nothing_is_refused(
    verb: str, option: str, work: Path, ckpt: Run
) -> None:
    value = SPECIAL.get((verb, option), NOTHING[option])
    needed = "" if option in NEEDED.get(verb, "").split() else NEEDED.get(verb, "")
    before = sorted(work.rglob("*"))
    done = ckpt(
        verb, *ARGUMENTS[verb].split(), *needed.split(), option, *str(value).split(), cwd=work
    )
    assert done.returncode not in (0, 1), done.stdout
    assert "Traceback" not in done.stderr and done.stderr.strip()
    assert sorted(work.rglob("*")) == before


def test_every_verb_and_option_is_entered() -> None:
    assert set(ARGUMENTS) == set(VERBS)
    assert {option for verb in VERBS for option in options(verb)} == FLAGS | set(NOTHING)
