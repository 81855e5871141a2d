"""Puts the numbers of a report and a chart library into one HTML file that fetches nothing.

Both are compressed, and no text of a checkpoint stands in the HTML itself.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from importlib import resources
from typing import Any

from ckpt_tools.errors import CheckpointError


def render_page(data: dict[str, Any], reload_s: int = 0) -> bytes:
    """Returns the page.

    Args:
        data: from `collect`.
        reload_s: the browser loads the page again so many seconds after it is drawn; never if 0.

    Raises:
        CheckpointError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise CheckpointError(
            "a report needs plotly", hint="pip install 'ckpt-tools[report]'"
        ) from error
    text = resources.files("ckpt_tools.operations.report").joinpath("page.html").read_text("utf-8")
    for mark, value in (
        ("/*RELOAD_S*/", str(reload_s)),
        ("/*LIBRARY*/", _packed(get_plotlyjs().encode())),
        ("/*DATA*/", _packed(json.dumps(data, allow_nan=False).encode())),
    ):
        assert text.count(mark) == 1
        text = text.replace(mark, value)
    return text.encode()


def render_problem(text: str, reload_s: int) -> bytes:
    """Returns a page for a moment in which there is nothing to show. The browser tries again."""
    refresh = f'<meta http-equiv="refresh" content="{reload_s}">'
    title = "<title>ckpt report</title>"
    return f"<!doctype html>{refresh}{title}<p>{html.escape(text)}</p>".encode()


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode("ascii")
