"""What a checkpoint's texts make a program do has an end: patterns, models, templates. And nobody
but its owner can hold the lock of a run.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import CheckpointManager, PlanError, StorageError
from tests.operations.llamas import llama

Run = Callable[..., subprocess.CompletedProcess[str]]
NOBODY = 65534


def adapter(folder: Path, module: str, config: dict[str, object]) -> Path:
    folder.mkdir()
    sides = {"A": torch.ones(1, 3), "B": torch.ones(3, 1)}
    save_file(
        {f"base_model.model.{module}.lora_{s}.weight": t for s, t in sides.items()},
        folder / "adapter_model.safetensors",
    )
    whole = {"peft_type": "LORA", "r": 1, "lora_alpha": 4} | config
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return folder


@pytest.mark.parametrize("key", ["alpha_pattern", "rank_pattern"])
@pytest.mark.parametrize(
    "pattern", ["(.|[^~])" * 30 + "~", "(a+)+b", "(a|a)*c", "(?:a{0,9}){0,30}b"]
)
def test_a_pattern_without_end_matches_at_once(
    key: str, pattern: str, tmp_path: Path, ckpt: Run
) -> None:
    name = "a" * 60
    save_file({f"{name}.weight": torch.zeros(3, 3)}, tmp_path / "b.safetensors")
    folder = adapter(tmp_path / "ad", name, {key: {pattern: 8}})
    start = time.monotonic()
    done = ckpt("merge", tmp_path / "b.safetensors", tmp_path / "o.safetensors", "--lora", folder)
    assert done.returncode == 0 and time.monotonic() - start < 60, done.stderr
    assert torch.equal(
        load_file(tmp_path / "o.safetensors")[f"{name}.weight"], torch.full((3, 3), 4.0)
    )


@pytest.mark.parametrize("pattern", ["(?:x\\.)?q", "layers\\.[0-9]+\\.(?:q|k)", "q"])
def test_an_honest_pattern_is_matched(pattern: str, tmp_path: Path) -> None:
    name = "layers.0.q"
    save_file({f"{name}.weight": torch.zeros(3, 3)}, tmp_path / "b.safetensors")
    folder = adapter(tmp_path / "ad", name, {"alpha_pattern": {pattern: 8}})
    ckpt_tools.merge(tmp_path / "b.safetensors", tmp_path / "o.safetensors", lora=folder)
    assert load_file(tmp_path / "o.safetensors")[f"{name}.weight"][0, 0] == 8.0


def test_all_patterns_together_have_a_limit_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt_tools.operations.convert import lora

    name = "layers.0." + "x" * 200 + "q"
    save_file({f"{name}.weight": torch.zeros(3, 3)}, tmp_path / "b.safetensors")
    slow = {"(x+x+)+" * 12 + f"y{i}" + "(a|b|ab)*" * 20: 8 for i in range(200)}
    folder = adapter(tmp_path / "ad", name, {"alpha_pattern": slow})
    monkeypatch.setattr(lora, "_MAX_MATCH_S", 1e-4)
    with pytest.raises(PlanError, match="matching 200 patterns of alpha_pattern took longer"):
        ckpt_tools.merge(tmp_path / "b.safetensors", tmp_path / "o.safetensors", lora=folder)
    monkeypatch.undo()
    ckpt_tools.merge(tmp_path / "b.safetensors", tmp_path / "o.safetensors", lora=folder)


# ---- processes of models -------------------------------------------------------------------------


def huge(folder: Path) -> Path:
    model = llama()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)
    config["num_hidden_layers"] = 100_000_000
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_a_model_without_end_takes_no_more_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt_tools.operations.convert import child_process

    monkeypatch.setattr(child_process, "_MODEL_BYTES", 400 << 20)
    folder = huge(tmp_path / "base")
    with pytest.raises(PlanError, match="transformers cannot build a model"):
        ckpt_tools.convert(tmp_path, tmp_path / "o", to="dcp", shapes=folder)
    monkeypatch.setattr(child_process, "_MODEL_S", 2)
    monkeypatch.setattr(child_process, "_MODEL_BYTES", 16 << 30)
    with pytest.raises(PlanError, match="it took longer than 2 s"):
        ckpt_tools.convert(tmp_path, tmp_path / "o", to="dcp", shapes=folder)


@pytest.mark.slow
def test_a_config_without_end_does_not_switch_the_comparison_of_names_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt_tools.operations.convert import child_process

    monkeypatch.setattr(child_process, "_MODEL_S", 2)
    save_file({"model.norm.weight": torch.zeros(3)}, tmp_path / "m.safetensors")
    how = {"to": "hf", "base": huge(tmp_path / "base")}
    with pytest.raises(PlanError, match="transformers did not end: it took longer than 2 s"):
        ckpt_tools.convert(tmp_path / "m.safetensors", tmp_path / "o", **how)
    assert not (tmp_path / "o").exists()
    told = ckpt_tools.convert(tmp_path / "m.safetensors", tmp_path / "o", partial=True, **how)
    assert any("it took longer than 2 s" in note for note in told.notes), told.notes


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    folder = huge(tmp_path / "base")
    command = [sys.executable, "-m", "ckpt_tools", "convert", str(tmp_path), str(tmp_path / "o")]
    process = subprocess.Popen([*command, "--to", "dcp", "--shapes", str(folder)])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while not (found := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    child = Path(f"/proc/{found[0]}/stat")
    while child.exists() and time.monotonic() < deadline:
        if child.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    assert found and (not child.exists() or "Z" in child.read_text())


# ---- chat templates ------------------------------------------------------------------------------

TEMPLATES = {
    "memory": "{{ 'x' * 100000000000 }}",
    "much memory": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s * 2 %}{% endfor %}{{ ns.s }}",
    "time": "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}{% endfor %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
}


class Tokenizer:
    """The one method of a tokenizer that renders, with transformers' own sandbox."""

    def __init__(self, template: str) -> None:
        self.template = template

    def apply_chat_template(
        self, turns: object, tools: object, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        return str(_compile_jinja_template(self.template).render(messages=turns))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_without_end_is_ended(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from training.config import ConfigError
    from training.extras import templates

    monkeypatch.setattr(templates, "SECONDS", 5.0)
    monkeypatch.setattr(templates, "BYTES", 1 << 29)
    fine = templates.Renderer(Tokenizer("{{ messages[0]['content'] }}"))
    assert fine.render([{"content": "hello"}], None, False) == "hello"
    evil = templates.Renderer(Tokenizer(TEMPLATES[kind]))
    start = time.monotonic()
    with pytest.raises(ConfigError, match="the chat template fails: it (takes longer|needs more)"):
        evil.render([], None, False)
    assert time.monotonic() - start < 60 and evil._process is None
    fine.close()


# ---- the lock of a run ---------------------------------------------------------------------------


def test_a_lock_does_not_name_a_dead_job_as_its_holder(tmp_path: Path) -> None:
    dies = (
        "import os, sys, ckpt_tools; m = ckpt_tools.CheckpointManager(sys.argv[1]);"
        " print(os.getpid(), flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", dies, tmp_path], capture_output=True, text=True)
    pid, lock = done.stdout.strip(), tmp_path / ".ckpt.lock"
    assert f'"pid": {pid}' in lock.read_text()
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match=f"unknown; the last one .* has ended .*pid {pid}"):
            CheckpointManager(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_nobody_else_can_hold_the_lock_of_a_run(tmp_path: Path) -> None:
    run, lock = tmp_path / "run", tmp_path / "run" / ".ckpt.lock"
    for folder in (*tmp_path.parents, tmp_path):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    run.mkdir()
    lock.touch(0o644)  # as an earlier release left it
    with CheckpointManager(run) as checkpoints:
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        other = subprocess.run(["cat", lock], user=NOBODY, capture_output=True, text=True)
        assert "Permission denied" in other.stderr
        checkpoints.save(1, {"w": torch.ones(2)}, asynchronous=False)
        with open(lock) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
