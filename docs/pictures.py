"""Draws the pictures of the docs, and of the command at two widths, from a small run that it makes.

    python docs/pictures.py OUT          # all of them
    python docs/pictures.py OUT --docs   # and the pictures that the docs show, into docs/images

It needs `ckpt-tools[report]`, playwright and Chromium. Look at the pictures after each change of
what people see.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager

IMAGES = Path(__file__).parent / "images"
SECTIONS = {
    "header": "verdict",
    "#bytes": "bytes",
    "#health": "health",
    "#ranks": "ranks",
    "#run": "run",
}
WIDTHS = (80, 200)


class Block(nn.Module):
    """One layer of a small decoder."""

    def __init__(self, dim: int) -> None:
        """Makes the modules, with the names that Llama has."""
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        heads = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.self_attn = nn.ModuleDict({k: nn.Linear(dim, dim, bias=False) for k in heads})
        wide = {"gate_proj": (dim, 4 * dim), "up_proj": (dim, 4 * dim), "down_proj": (4 * dim, dim)}
        self.mlp = nn.ModuleDict({k: nn.Linear(*sizes, bias=False) for k, sizes in wide.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [rows, tokens, dim] for the same."""
        h, a, m = self.input_layernorm(x), self.self_attn, self.mlp
        q, k, v = a["q_proj"](h), a["k_proj"](h), a["v_proj"](h)
        x = x + a["o_proj"](nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        h = self.post_attention_layernorm(x)
        return x + m["down_proj"](nn.functional.silu(m["gate_proj"](h)) * m["up_proj"](h))


def train(root: Path) -> None:
    """Trains 80 steps, and saves eight of them with statistics and metrics."""
    torch.manual_seed(0)
    dim, vocabulary = 64, 500
    model = nn.ModuleDict(
        {
            "embed_tokens": nn.Embedding(vocabulary, dim),
            "layers": nn.ModuleList(Block(dim) for _ in range(12)),
            "norm": nn.RMSNorm(dim),
            "lm_head": nn.Linear(dim, vocabulary, bias=False),
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with CheckpointManager(root, statistics=True, keep_last=None) as checkpoints:
        for step in range(1, 81):
            tokens = torch.randint(vocabulary, (4, 1)) + torch.arange(33)
            tokens %= vocabulary
            x = model["embed_tokens"](tokens[:, :-1])
            for layer in model["layers"]:
                x = layer(x)
            logits = model["lm_head"](model["norm"](x))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 10 == 0:
                rate = schedule.get_last_lr()[0]
                metrics = {"loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate}
                checkpoints.save(step, state, metrics=metrics)
    ckpt_tools.thin(root, 3)


def draw_commands(root: Path, out: Path) -> list[Path]:
    """Writes what commands print, as one SVG for each command and width."""
    step, written = root / "step-00000080", []
    commands = {
        "help": ["--help"],
        "inspect": ["inspect", step],
        "ls": ["ls", root],
        "bytes": ["ls", root, "--bytes"],
        "check": ["check", root],
        "diff": ["diff", root / "step-00000060", step],
        "verify": ["verify", step],
        "folder": ["inspect", root.parent],
    }
    for name, words in commands.items():
        for width in WIDTHS:
            env = os.environ | {"COLUMNS": str(width), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
            line = [sys.executable, "-m", "ckpt_tools", *map(str, words)]
            done = subprocess.run(line, env=env, capture_output=True, text=True, cwd=root.parent)
            with open(os.devnull, "w") as nowhere:
                console = Console(record=True, width=width, file=nowhere, force_terminal=True)
                console.print(Text.from_ansi(done.stdout + done.stderr), no_wrap=True)
            written.append(out / f"{name}-{width}.svg")
            console.save_svg(str(written[-1]), title=f"ckpt {name}, {width} columns")
    return written


def draw_pages(root: Path, out: Path, browser: Any, with_docs: bool) -> None:
    """Writes the three kinds of report, in light, in dark and on a phone."""
    step = root / "step-00000080"
    for name, paths in {
        "run": [root],
        "step": [step],
        "difference": [root / "step-00000060", step],
    }.items():
        ckpt_tools.report(*paths, output=out / f"{name}.html", overwrite=True)
        for mode, width in (("light", 1280), ("dark", 1280), ("phone", 390)):
            size = {"width": width, "height": 900}
            context = browser.new_context(
                offline=True, viewport=size, color_scheme="dark" if mode == "dark" else "light"
            )
            page = context.new_page()
            page.goto((out / f"{name}.html").as_uri())
            page.wait_for_selector("body[data-ready]")
            page.wait_for_timeout(500)
            page.screenshot(path=out / f"{name}-{mode}.png", full_page=True)
            if with_docs and mode == "light":
                for selector, image in SECTIONS.items():
                    if (image == "ranks") == (name == "step") and name != "difference":
                        page.locator(selector).first.screenshot(path=IMAGES / f"report-{image}.png")
                if name == "difference":
                    page.locator("#heat").screenshot(path=IMAGES / "report-difference.png")
            context.close()


def main() -> None:
    """Draws all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--docs", action="store_true", help="also the pictures in docs/images")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        os.chdir(folder)  # the pages show short paths
        root = Path("runs/pretrain")
        train(root)
        draw_pages(root, out, browser, args.docs)
        for path in draw_commands(root.absolute(), out):
            page = browser.new_page(
                viewport={"width": 2600 if "200" in path.name else 1100, "height": 400}
            )
            page.goto(path.as_uri())
            page.locator("svg").first.screenshot(path=path.with_suffix(".png"))
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
