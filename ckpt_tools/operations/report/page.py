"""Puts the numbers of a report and a chart library into one HTML file that fetches nothing.

Both are compressed, and no text of a checkpoint stands in the HTML itself.
"""

from __future__ import annotations

import base64
import gzip
import json
from importlib import resources
from typing import Any

from ckpt_tools.errors import CheckpointError


def render_page(data: dict[str, Any]) -> bytes:
    """Returns the page.

    Args:
        data: from `collect`.

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
        ("/*LIBRARY*/", _packed(get_plotlyjs().encode())),
        ("/*DATA*/", _packed(json.dumps(data, allow_nan=False).encode())),
    ):
        assert text.count(mark) == 1
        text = text.replace(mark, value)
    return text.encode()


def _packed(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode("ascii")
