"""What transformers has answered is kept for the next command, and only as long as it is true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tools.core.checksum import crc64nvme

Run = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[2]


class Case:
    """A small mixture of experts under its names in memory, and a cache of its own."""

    def __init__(self, folder: Path, ckpt: Run) -> None:
        transformers = pytest.importorskip("transformers", minversion="5")
        self.folder, self.run, self.cache = folder, ckpt, folder / "cache"
        self.environment = {**os.environ, "CKPT_CACHE": str(self.cache)}
        config = transformers.Qwen3MoeConfig(
            vocab_size=32,
            hidden_size=16,
            moe_intermediate_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
        )
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(config)
        config.architectures = ["Qwen3MoeForCausalLM"]
        config.save_pretrained(folder / "base")
        save_file({n: v.clone() for n, v in model.state_dict().items()}, folder / "m.safetensors")
        self.release = transformers.__version__

    def convert(self, base: str = "base") -> str:
        """Converts to the names of files, and returns the release that the note names."""
        words = ("convert", self.folder / "m.safetensors", self.folder / "out", "--to", "hf")
        done = self.run(*words, "--base", self.folder / base, "--overwrite", env=self.environment)
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if "names of transformers" in line]
        assert "tensors became 24 with" in line, line
        return line.split("names of transformers ")[1].split(":")[0]

    def answers(self) -> list[Path]:
        return sorted((self.cache / "transformers").iterdir())

    def forge(self, change: Callable[[Any], Any], has_checksum: bool = True) -> None:
        """Changes the answer to tell whether it is used."""
        (path,) = self.answers()
        crc, _, data = path.read_bytes().partition(b"\n")
        data = json.dumps(change(json.loads(data))).encode()
        crc = f"{crc64nvme(data):016x}".encode() if has_checksum else crc
        path.write_bytes(crc + b"\n" + data)


@pytest.fixture
def case(tmp_path: Path, ckpt: Run) -> Case:
    return Case(tmp_path, ckpt)


def test_an_answer_is_used_again(case: Case) -> None:
    assert case.convert() == case.release
    assert [path.suffix for path in case.answers()] == [".json"]
    assert case.answers()[0].parent.stat().st_mode & 0o777 == 0o700
    case.forge(lambda answer: {**answer, "release": "forged"})
    assert case.convert() == "forged"
    # the same model in another directory
    (case.folder / "base").rename(case.folder / "moved")
    assert case.convert("moved") == "forged"
    # an empty name turns it off
    case.environment["CKPT_CACHE"] = ""
    assert case.convert("moved") == case.release
    del case.environment["CKPT_CACHE"]
    case.environment["XDG_CACHE_HOME"] = str(case.folder / "home")
    assert case.convert("moved") == case.release
    assert len([*(case.folder / "home" / "ckpt-tools" / "transformers").iterdir()]) == 1


@pytest.mark.slow
def test_another_model_is_asked_for(case: Case) -> None:
    case.convert()
    case.forge(lambda answer: {**answer, "release": "forged"})
    file = case.folder / "base" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "rope_theta": 77.0}))
    assert case.convert() == case.release
    assert len(case.answers()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flipped", "short", "empty", "no JSON"])
def test_a_damaged_answer_is_asked_for_again(kind: str, case: Case) -> None:
    case.convert()
    (path,) = case.answers()
    good = path.read_bytes()
    if kind == "no JSON":
        path.write_bytes(f"{crc64nvme(b'[1, '):016x}\n[1, ".encode())
    elif kind == "flipped":
        case.forge(lambda answer: {**answer, "release": "forged"}, has_checksum=False)
    else:
        path.write_bytes(good[:-9] if kind == "short" else b"")
    assert case.convert() == case.release
    assert path.read_bytes() == good


def in_a_new_process(*words: object, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_tools", *map(str, words)]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_changed_package_is_asked(case: Case, tmp_path: Path) -> None:
    """A working copy of transformers has the same release after an edit."""
    import transformers

    place = Path(transformers.__file__).parent
    site = tmp_path / "site"
    site.mkdir()
    (site / "transformers").mkdir()
    for path in place.iterdir():  # links to all but one file, which is edited
        if path.name not in ("conversion_mapping.py", "__pycache__"):
            (site / "transformers" / path.name).symlink_to(path)
    text = (place / "conversion_mapping.py").read_text()
    (site / "transformers" / "conversion_mapping.py").write_text(text)
    case.run = in_a_new_process  # which begins with another path of modules
    case.environment["PYTHONPATH"] = f"{site}:{case.environment.get('PYTHONPATH', '')}"
    case.convert()
    case.forge(lambda answer: {**answer, "release": "forged"})
    assert case.convert() == "forged"
    (site / "transformers" / "conversion_mapping.py").write_text(text + "\n# edited\n")
    assert case.convert() == case.release


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_no_error(case: Case) -> None:
    case.cache.write_text("a file")
    assert case.convert() == case.release
    case.environment["CKPT_CACHE"] = "/proc/none"
    assert case.convert() == case.release


@pytest.mark.slow
def test_the_oldest_answers_go_and_no_other_files(case: Case) -> None:
    folder = case.cache / "transformers"
    folder.mkdir(parents=True)
    for number in range(70):
        (folder / f"{number:064x}.json").write_text("x")
        os.utime(folder / f"{number:064x}.json", (number + 1, number + 1))
        (folder / f"mine-{number}.json").write_text("x")
    case.convert()
    left = {path.name for path in folder.iterdir()}
    assert len(left) == 64 + 70 and sum(name.startswith("mine-") for name in left) == 70
    assert f"{6:064x}.json" not in left and f"{7:064x}.json" in left


@pytest.mark.slow
def test_a_config_that_names_other_files_is_always_asked_for(case: Case) -> None:
    """transformers may read one of these in place of config.json."""
    file = case.folder / "base" / "config.json"
    config = json.loads(file.read_text())
    (case.folder / "base" / "config.5.0.0.json").write_text(json.dumps(config))
    file.write_text(json.dumps({**config, "configuration_files": ["config.5.0.0.json"]}))
    assert case.convert() == case.release
    assert not (case.cache / "transformers").exists()


@pytest.mark.slow
def test_a_link_that_leads_nowhere_in_the_package_is_no_error(case: Case, tmp_path: Path) -> None:
    """As the lock files of an editor are."""
    import transformers

    site = tmp_path / "site" / "transformers"
    site.mkdir(parents=True)
    for path in Path(transformers.__file__).parent.iterdir():
        (site / path.name).symlink_to(path)
    (site / ".#x.py").symlink_to("user@host.1")
    case.run = in_a_new_process
    case.environment["PYTHONPATH"] = str(site.parent)
    assert case.convert() == case.release
    case.forge(lambda answer: {**answer, "release": "forged"})
    assert case.convert() == "forged"
