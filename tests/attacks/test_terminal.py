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
        ["inspect", "s.pt", "--files"],
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


# what a regular expression, a formula, markup, a template, a format, a glob, a page, a shell and a
# parser of options would each read in its own way
INTERPRETED = [
    "(a+)+$b",
    r"\1\g<0>",
    "$x^{2}$",
    "[bold red]x[/bold red]",
    "[link=file:///etc/passwd]x",
    "{{ 7*7 }}",
    "{0.__class__}",
    "%(x)s %n",
    "[!a]*?",
    "<script>alert(1)</script>",
    "&amp;&#39;",
    "`id` $(id)",
    "~root",
    "--overwrite",
]


def test_text_of_a_checkpoint_is_never_read_as_a_language(tmp_path: Path, ckpt: Run) -> None:
    model = {name: torch.arange(2.0) + number for number, name in enumerate(INTERPRETED)}
    root = tmp_path / "run"
    with CheckpointManager(root, statistics=True) as checkpoints:
        for step in (1, 2):
            state = {"model": {n: t * step for n, t in model.items()}, "told": dict.fromkeys(model)}
            checkpoints.save(step, state, asynchronous=False)
    step = "run/step-00000002"
    for words in (
        ["inspect", step],
        ["inspect", step, "--tree"],
        ["stats", step],
        ["diff", "run/step-00000001", step],
    ):
        done = ckpt(*words, cwd=tmp_path)
        assert done.returncode in (0, 1), (words, done.stderr)
        for name in INTERPRETED:
            assert name in done.stdout, (words, name, done.stdout)
    for words, made in (
        (["merge", step, "m.safetensors"], "m.safetensors"),
        (["convert", step, "t.pt", "--to", "torch"], "t.pt"),
        (["reshard", step, "r", "--to", "2"], "r"),
        (["salvage", step, "g"], "g"),
    ):
        done = ckpt(*words, cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr)
        names = ckpt_tools.open(tmp_path / made).keys()
        assert {name.removeprefix("model.") for name in names} >= set(INTERPRETED), words
    done = ckpt("report", "run", "-o", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = ckpt_tools.report_data(root)  # test_report.py opens such pages in a browser
    assert {t["name"].removeprefix("model.") for t in data["tensors"]} == set(INTERPRETED)
    done = ckpt("report", "run", "--select", "*", "--png", "chart.png", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "chart.png").exists(), done.stderr
