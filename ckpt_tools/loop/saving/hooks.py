"""Calls a user's functions after a commit and after a failed save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ckpt_tools.core.logs import log
from ckpt_tools.loop.saving.save import SaveReport

OnCommit = Callable[[SaveReport], object]
OnError = Callable[[int, BaseException], object]


class Hooks:
    """The functions of one manager. Only rank 0 calls them, in the thread that writes the step."""

    def __init__(
        self,
        on_commit: OnCommit | Sequence[OnCommit] | None,
        on_error: OnError | Sequence[OnError] | None,
    ) -> None:
        """Stores the functions, in the order of their calls."""
        self._on_commit, self._on_error = _listed(on_commit), _listed(on_error)
        self._thread = 0  # that calls a function now

    @property
    def is_calling(self) -> bool:
        """Tells whether one of the functions runs in this thread."""
        return self._thread == threading.get_ident()

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = 0

    def committed(self, report: SaveReport) -> None:
        """Tells that a step is complete. An exception of a function is logged: the step stays."""
        for function in self._on_commit:
            try:
                with self._call():
                    function(report)
            except Exception:  # noqa: BLE001  of a user's function
                log.exception("on_commit failed; step %s is complete all the same", report.step)

    def failed(self, step: int, error: BaseException) -> None:
        """Tells that a save failed. An exception of a function is logged."""
        for function in self._on_error:
            try:
                with self._call():
                    function(step, error)
            except Exception:  # noqa: BLE001  of a user's function
                log.exception("on_error failed, after the save of step %d", step)


F = TypeVar("F", bound=Callable[..., object])


def _listed(given: F | Sequence[F] | None) -> list[F]:
    if given is not None and not callable(given) and not isinstance(given, list | tuple):
        raise TypeError(f"a hook is a function, or a list of them; got {given!r}")
    functions = [] if given is None else [given] if callable(given) else list(given)
    for function in functions:
        if not callable(function):
            raise TypeError(f"a hook is a function, or a list of them; got {function!r}")
    return functions
