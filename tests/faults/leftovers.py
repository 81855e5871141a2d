"""Names that an attempt leaves if it is killed."""

from __future__ import annotations

from pathlib import Path


def leftovers(work: Path) -> list[str]:
    return [p.name for p in work.iterdir() if p.name.startswith((".tmp.", ".trash.", ".aside."))]
