"""Draws the diagrams of the documentation. mkdocs calls it before each build (see .mkdocs.yml).

The pictures are SVG files without scripts, so the site needs no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

IMAGES = Path(__file__).parent / "images"
_STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #24292f }
.small { font-size: 12px; paint-order: stroke; stroke: #fff; stroke-width: 4px }
rect { fill: #f6f8fa; stroke: #57606a } .main { fill: #ddf4ff; stroke: #0969da }
path { stroke: #57606a; fill: none; marker-end: url(#tip) }
.life { stroke-dasharray: 4; marker-end: none }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } rect { fill: #161b22; stroke: #8b949e }
.main { fill: #0c2d6b; stroke: #58a6ff }
.small { stroke: #1e2129 } path { stroke: #8b949e } #tip path { fill: #8b949e } }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" orient="auto"
markerWidth="8" markerHeight="8">
<path d="M0 0 8 4 0 8z" style="fill:#57606a;stroke:none;marker-end:none"/></marker></defs>"""
_BOX_HEIGHT = 36


class Way(NamedTuple):
    """A box that a checkpoint leads to, and how."""

    label: str
    box: str


OVERVIEW = (
    Way("resume", "FSDP job, 4 ranks"),
    Way("ckpt merge", "model.safetensors"),
    Way("ckpt convert", "transformers, DeepSpeed, verl, …"),
    Way("ckpt copy", "s3://bucket/run"),
)
ACTORS = ("the attempt", ".tmp.NAME.ID (0700, locked)", "NAME")
# who does it, to whom, and what
COMMIT = (
    (0, 1, "data files, fsync of each"),
    (0, 1, "manifest, then index, fsync of both"),
    (0, 1, "fsync of the directory"),
    (1, 2, "renameat2: NOREPLACE, or EXCHANGE"),
    (0, 2, "fsync of the folder above"),
)


def _svg(width: int, height: int, parts: Sequence[str], title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
    lines = [f'{head} width="{width}" aria-label="{escape(title)}">', _STYLE, *parts, "</svg>"]
    return "\n".join(lines) + "\n"


def _box(x: int, y: int, width: int, text: str, kind: str = "") -> str:
    middle = f'x="{x + width // 2}" y="{y + 23}" text-anchor="middle"'
    shape = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{_BOX_HEIGHT}" rx="6"/>'
    return f"{shape}<text {middle}>{escape(text)}</text>"


def _arrow(start: tuple[int, int], end: tuple[int, int], text: str, at: tuple[int, int]) -> str:
    line = f'<path d="M{start[0]} {start[1]} L{end[0]} {end[1]}"/>'
    place = f'x="{at[0]}" y="{at[1]}" text-anchor="middle"'
    return f'{line}<text class="small" {place}>{escape(text)}</text>'


def overview() -> str:
    """Returns the picture of what leads to a checkpoint, and from it."""
    gap, left, middle, right = 56, 10, 330, 640
    height = gap * len(OVERVIEW)
    y = height // 2 - _BOX_HEIGHT // 2
    centre = y + _BOX_HEIGHT // 2
    parts = [
        _box(left, y, 150, "FSDP job, 8 ranks"),
        _box(middle, y, 160, "run/step-00000500", "main"),
        _arrow((left + 150, centre), (middle - 2, centre), "CheckpointManager.save", (244, y + 8)),
    ]
    for number, way in enumerate(OVERVIEW):
        top = number * gap + (gap - _BOX_HEIGHT) // 2
        end = top + _BOX_HEIGHT // 2
        parts.append(_box(right, top, 250, way.box))
        label = (572, (centre + 2 * end) // 3 - 8)
        parts.append(_arrow((middle + 160, centre), (right - 2, end), way.label, label))
    return _svg(right + 260, height, parts, "What leads to a checkpoint, and from it")


def commit() -> str:
    """Returns the picture of a commit on a file system."""
    places, top, step = (90, 380, 700), 60, 44
    bottom = top + step * len(COMMIT) + 16
    parts = [
        f'<path class="life" d="M{x} {_BOX_HEIGHT + 6} L{x} {bottom}"/>'
        + _box(x - 110 if number == 1 else x - 60, 6, 220 if number == 1 else 120, name)
        for number, (x, name) in enumerate(zip(places, ACTORS, strict=True))
    ]
    for number, (actor, target, what) in enumerate(COMMIT):
        y, start, end = top + step * number + 24, places[actor], places[target]
        parts.append(_arrow((start, y), (end - 2, y), what, ((start + end) // 2, y - 6)))
    note = "NAME is absent, old or complete at every instant"
    parts.append(f'<text x="{places[2]}" y="{bottom + 22}" text-anchor="middle">{note}</text>')
    return _svg(900, bottom + 36, parts, "The commit on a file system")


PICTURES = {"overview.svg": overview, "commit.svg": commit}


def on_pre_build(config: Any = None) -> None:
    """Writes the pictures."""
    del config
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw())


if __name__ == "__main__":
    on_pre_build()
