"""Decides when a run saves: every n steps, every n seconds, or because somebody asked for it.

Rank 0 looks at the clock and at the root; a signal may reach any rank.
"""

from __future__ import annotations

import time

from ckpt_tools.core.logs import log
from ckpt_tools.errors import CheckpointError, printable
from ckpt_tools.run.base import RunRoot

SAVE_NOW = ".save-now"
_LOOK_S = 10.0  # between two requests to an object store


class SaveTimes:
    """The reasons for a save, as rank 0 knows them.

    Attributes:
        every: save when the number of the step is a multiple of this; None for no such rule.
        every_s: save when the last save began this many seconds ago; None for no such rule.
    """

    def __init__(self, root: RunRoot, every: int | None, every_s: float | None) -> None:
        """Starts the clock."""
        self.every, self.every_s, self._root = every, every_s, root
        self._last_save, self._last_look = time.monotonic(), -_LOOK_S
        self._is_ignored, self._is_pending, self._is_under_way = False, False, False
        self._before = self._last_save

    def is_due(self, step: int) -> bool:
        """Tells whether the clock, the number of the step, or the file `.save-now` asks for a save.

        The file is removed at once. Its request holds until a save is committed.
        """
        if self._take_file(time.monotonic()):
            self._is_pending = True
        return self._is_pending or self.is_periodic(step)

    def is_periodic(self, step: int) -> bool:
        """Tells whether the number of the step or the clock asks for a save."""
        by_clock = self.every_s is not None and time.monotonic() - self._last_save >= self.every_s
        return by_clock or (self.every is not None and step % self.every == 0)

    def ask(self) -> None:
        """Asks for a save, because of a signal. The request holds until a save is committed."""
        self._is_pending = True

    def began(self) -> None:
        """Notes that a save begins. No further one is due, unless this one fails."""
        self._is_under_way = self._is_pending
        self._before, self._last_save, self._is_pending = self._last_save, time.monotonic(), False

    def failed(self) -> None:
        """Notes that the save has failed: what asked for it asks again."""
        self._last_save, self._is_pending = self._before, self._is_pending or self._is_under_way

    def _take_file(self, now: float) -> bool:
        if self._is_ignored or (self._root.checks_at_commit and now - self._last_look < _LOOK_S):
            return False
        self._last_look = now
        try:
            if not self._root.has_file(SAVE_NOW):
                return False
            self._root.remove_note(SAVE_NOW)
        except (CheckpointError, OSError) as error:
            log.warning(
                "%s in %s is ignored from now on: %s",
                SAVE_NOW,
                printable(str(self._root.path)),
                error,
            )
            self._is_ignored = True
            return False
        log.info("found %s: saving now", SAVE_NOW)
        return True
