"""Code that comes with a model or a tokenizer never runs, and nobody is asked whether it may."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import jobs

CODE = """
from pathlib import Path
Path({mark!r}).write_text("it ran")
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
class Config(PretrainedConfig):
    model_type = "evil"
class Model(PreTrainedModel):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
CALLS = {
    "model": "from training.extras.pretrained import make; make({folder!r})",
    "sample": "from training.extras.sample import load_model; load_model(__import__('pathlib').Path({folder!r}))",
    "tokenizer": "from training.extras.sample import tokenizer_of; tokenizer_of(__import__('pathlib').Path({folder!r}))",
    "prepare": "from training.extras.prepare import _Tokenizer; _Tokenizer(__import__('pathlib').Path({folder!r}))",
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_code_of_a_directory_does_not_run(call: str, tmp_path: Path) -> None:
    folder, mark = tmp_path / "evil", tmp_path / "mark"
    folder.mkdir()
    (folder / "evil.py").write_text(CODE.format(mark=str(mark)))
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config = {"model_type": "evil", "architectures": ["Model"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {
        "tokenizer_class": "Tokenizer",
        "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    done = subprocess.run(
        [sys.executable, "-c", CALLS[call].format(folder=str(folder))],
        input="yes\n" * 5,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=jobs.ROOT,
        env=os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
    )
    assert not mark.exists()
    assert done.returncode != 0 and "[y/N]" not in done.stdout + done.stderr, done.stderr[-500:]


def test_one_function_opens_all_of_them() -> None:
    for path in (jobs.ROOT / "training").rglob("*.py"):
        calls = re.findall(r"\.from_(?:pretrained|config)\(", path.read_text())
        assert bool(calls) == (path.name == "local_models.py"), path
