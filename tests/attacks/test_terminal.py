"""Text of a checkpoint cannot control the terminal."""

from __future__ import annotations

from pathlib import Path

import torch

import ckpt_tools
from ckpt_tools import (
    CheckpointManager,
)
from ckpt_tools.errors import printable
from tests.attacks.hostile import (
    Run,
)

UNSEEN = "\x1b\x07\x9b\n\r\u061c\u2060\u206a\u00ad\u180e\u034f\u3164\U000e0041\u202e\u2066\ufeff\u200b\ufe0f\u115f\ufff9"


def test_nothing_that_controls_or_hides_is_printable() -> None:
    import unicodedata

    shown = printable(f"a{UNSEEN}b")
    assert shown.isascii() and shown.startswith("a\\x1b\\x07\\x9b\\n\\r\\u061c")
    for code in range(0x110000):
        if unicodedata.category(chr(code)) in ("Cf", "Cc", "Cs", "Zl", "Zp"):
            assert printable(chr(code)).isascii() and len(printable(chr(code))) > 1, hex(code)


def test_text_of_a_checkpoint_never_reaches_the_terminal_raw(tmp_path: Path, ckpt: Run) -> None:
    name = f"evil{UNSEEN}"
    torch.save(
        {"model": {name: torch.ones(3), "w": torch.ones(2)}, name: 3, "optimizer": {name: 4}},
        tmp_path / "s.pt",
    )
    torch.save(
        {"model": {name: torch.zeros(3), "w": torch.ones(2)}, f"other{UNSEEN}": 3},
        tmp_path / "t.pt",
    )
    root = tmp_path / "run"
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3)}, asynchronous=False)
    (path,) = (root / "step-00000001").glob("ckpt.manifest*")
    manifest = ckpt_tools.publish.manifest.parse_manifest(path.read_bytes(), "m")
    fields = {f: getattr(manifest, f) for f in manifest.__slots__}
    path.write_bytes(
        ckpt_tools.publish.manifest.Manifest(
            **fields | {"created": f"now{UNSEEN}", "tool": UNSEEN}
        ).render()
    )
    (root / f"step-00000001.superseded{UNSEEN.replace(chr(10), '')}").mkdir()
    (root / f"other{UNSEEN}".replace("\n", "x")).write_text("x")
    verbs = [
        ["inspect", "s.pt"],
        ["inspect", "s.pt", "--tree"],
        ["inspect", "s.pt", "--ranks"],
        ["merge", "s.pt", "m.safetensors"],
        ["verify", "s.pt"],
        ["verify", "s.pt", "--deep"],
        ["diff", "s.pt", "t.pt"],
        ["merge", "s.pt", "n.safetensors", "--select", "zz"],
        ["convert", "s.pt", "d", "--to", "dcp"],
        ["convert", "s.pt", "u.pt", "--to", "torch"],
        ["reshard", "s.pt", "r", "--to", "2"],
        ["salvage", "s.pt", "g"],
        ["seal", "s.pt"],
        ["ls", "run"],
        ["latest", "run", "--verify"],
        ["prune", "run", "--keep-last", "1"],
        ["inspect", "run"],
        ["merge", "s.pt", f"x{UNSEEN}.pt".replace("\n", "")],
    ]
    for words in verbs:
        done = ckpt(*words, cwd=tmp_path)
        assert "Traceback" not in done.stderr, (words, done.stderr)
        text = done.stdout + done.stderr
        assert not [c for c in UNSEEN.replace("\n", "") if c in text], (words, text)
