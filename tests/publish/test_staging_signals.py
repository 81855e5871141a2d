"""A signal at any line of making and cleaning a staging directory leaves nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from ckpt_tools.publish.disk import attempt_mark, flock, staging

FILES = (staging.__file__, flock.__file__, attempt_mark.__file__)


class SignalAtLine:
    """Raises what a handler of SIGTERM raises, before the n-th line of the modules that stage."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.number:
                sys.settrace(None)
                raise SystemExit(143)
        return self


def test_a_signal_at_any_line_leaves_no_staging_directory(tmp_path: Path) -> None:
    number, left = 0, {}
    while True:
        number += 1
        work = tmp_path / str(number)
        work.mkdir()
        tracer = SignalAtLine(number)
        sys.settrace(tracer)
        try:
            with staging.staging(work / "out", "12345678-1234-1234-1234-123456789abc") as place:
                sys.settrace(None)
                (place.path / "data").write_bytes(b"some")
                sys.settrace(tracer)
        except SystemExit:
            pass
        finally:
            sys.settrace(None)
        if tracer.seen < number:
            break
        if found := [path.name for path in work.iterdir()]:
            left[number] = found
    assert number > 60 and left == {}
