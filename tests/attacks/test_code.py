"""Attacks that would run code, or that would change the process that reads a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools import (
    CheckpointError,
)
from ckpt_tools.formats import torch_save
from ckpt_tools.formats.deepspeed import zero as deepspeed
from ckpt_tools.formats.pickle import plain_values
from ckpt_tools.formats.pickle import state as state_pickle
from ckpt_tools.formats.pickle import write as pickle_write
from tests.attacks.hostile import (
    torch_file,
)

EVIL = "import os; open(os.environ['PROOF'], 'a').write(__name__); raise SystemExit(0)\n"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
}


@pytest.mark.slow
def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    work, proof = tmp_path / "work", tmp_path / "proof"
    work.mkdir()
    for name in ("torch", "transformers", "json", "numpy", "safetensors"):
        (work / f"{name}.py").write_text(EVIL)
    (work / "config.json").write_text(json.dumps(LLAMA))
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "s.pt")
    ckpt = Path(sys.executable).with_name("ckpt")
    environment = os.environ | {"PROOF": str(proof), "PYTHONPATH": ""}
    inspect = ["inspect", str(tmp_path / "s.pt"), "--shapes", "."]
    convert = ["convert", str(tmp_path / "s.pt"), "out", "--to", "hf", "--base", ".", "--check"]
    python = [sys.executable, "-P", "-m", "ckpt_tools"]
    for words in ([ckpt, *inspect], [ckpt, *convert], [*python, *inspect]):
        done = subprocess.run(
            words, cwd=work, env=environment, capture_output=True, text=True, timeout=400
        )
        assert "Traceback" not in done.stderr, done.stderr
    assert not proof.exists()


def test_python_m_imports_nothing_of_ours_from_the_working_directory(tmp_path: Path) -> None:
    """What Python itself needs to find the package is looked for there; nothing that the package
    imports is.
    """
    for name in ("torch", "numpy", "safetensors", "fsspec"):
        (tmp_path / f"{name}.py").write_text(EVIL)
    save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors")
    environment = os.environ | {"PROOF": str(tmp_path / "proof"), "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "inspect", "m.safetensors"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0 and not (tmp_path / "proof").exists(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "flag"),
    [
        (["Evil"], "--check"),
        (["pipeline"], "--shapes"),
        (["os.system"], "--check"),
        ([{}], "--shapes"),
        ("AutoModel", "--check"),
        (["__builtins__"], "--shapes"),
    ],
)
def test_a_config_s_own_code_is_not_run_whoever_answers(
    flag: str, names: Any, tmp_path: Path
) -> None:
    base, proof = tmp_path / "base", tmp_path / "proof"
    base.mkdir()
    (base / "evil.py").write_text(EVIL)
    config = {
        **LLAMA,
        "architectures": names,
        "auto_map": {
            "AutoConfig": "evil.Config",
            "AutoModel": "evil.Model",
            "AutoModelForCausalLM": "evil.Model",
        },
    }
    config |= {"model_type": "evil"} if names != "AutoModel" else {}
    (base / "config.json").write_text(json.dumps(config))
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "s.pt")
    ckpt = Path(sys.executable).with_name("ckpt")
    words = (
        ["convert", "s.pt", "out", "--to", "hf", "--base", "base", "--check"]
        if flag == "--check"
        else ["inspect", "s.pt", "--shapes", "base"]
    )
    done = subprocess.run(
        [ckpt, *words],
        cwd=tmp_path,
        env=os.environ | {"PROOF": str(proof)},
        input="y\n" * 50,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert not proof.exists() and "Traceback" not in done.stderr
    assert done.returncode in (13, 14) or names == "AutoModel", done.stderr


def snapshot() -> str:
    """What the modules that read pickles have, functions with all that can be set on them."""
    found = []
    for module in (state_pickle, plain_values, torch_save, deepspeed, pickle_write):
        for name, value in sorted(vars(module).items()):
            if callable(value):
                about = [
                    repr(getattr(value, key, None))
                    for key in ("__kwdefaults__", "__defaults__", "__dict__")
                    if not isinstance(value, type)
                ]
                found.append(
                    f"{module.__name__}.{name} {about}"
                    f" {sorted(vars(value)) if isinstance(value, type) else ''}"
                )
    return "\n".join(found)


GLOBALS = [
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
    ("_codecs", "encode"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("builtins", "set"),
    ("builtins", "bytearray"),
    ("builtins", "complex"),
    ("builtins", "getattr"),
    ("collections", "OrderedDict"),
    ("collections", "Counter"),
    ("torch", "float32"),
    ("torch", "FloatStorage"),
    ("torch", "device"),
    ("torch", "Size"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "scalar"),
    ("torch._utils", "_rebuild_qtensor"),
    ("posix", "system"),
]


@pytest.mark.parametrize(
    "state",
    [
        {"x": 1},
        (None, {"__kwdefaults__": {"dtype": 3}}),
        (None, {"__defaults__": (1,)}),
        ({"__wrapped__": 1}, {"function": 3}),
        [1],
        ["float64"] * 5,
    ],
)
@pytest.mark.parametrize("name", GLOBALS)
def test_a_read_leaves_no_trace_in_the_process(
    name: tuple[str, str], state: Any, tmp_path: Path
) -> None:
    before = snapshot()
    data = (
        b"\x80\x02"
        b"}X\x01\x00\x00\x00a"
        + f"c{name[0]}\n{name[1]}\n".encode()
        + pickle_write.opcodes(state)
        + b"bs."
    )
    torch_file(tmp_path / "evil.pt", data)
    with _whatever():
        ckpt_tools.inspect(tmp_path / "evil.pt")
    assert snapshot() == before
    torch.save({"w": torch.arange(3.0)}, tmp_path / "honest.pt")
    ckpt_tools.merge(
        tmp_path / "honest.pt", tmp_path / f"{abs(hash((name, str(state))))}.safetensors"
    )
    assert ckpt_tools.inspect(tmp_path / "honest.pt").by_dtype.keys() == {"float32"}


class _whatever:
    """An error of ours, or none; never another one."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return isinstance(error, CheckpointError)


@pytest.mark.parametrize("name", [";reboot;", "\x1b[31mabcd", "`reboot`"])
def test_no_command_of_another_is_recommended(name: str, tmp_path: Path) -> None:
    """The hint about a result that was set aside is there to be pasted into a shell."""
    (tmp_path / f".aside.model.{name}").mkdir()
    (tmp_path / ".aside.model.00000000").symlink_to("/etc")
    with pytest.raises(CheckpointError, match="no such path") as error:
        ckpt_tools.inspect(tmp_path / "model")
    assert error.value.hint is None
    (tmp_path / "a; reboot").mkdir()
    (tmp_path / "a; reboot" / ".aside.model.01234567").mkdir()
    with pytest.raises(CheckpointError, match="no such path") as error:
        ckpt_tools.inspect(tmp_path / "a; reboot" / "model")
    assert f"mv '{tmp_path}/a; reboot/.aside.model.01234567'" in str(error.value.hint)
