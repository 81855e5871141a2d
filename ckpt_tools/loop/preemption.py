"""Agrees with all ranks on the step after which the job ends, without an exchange at each step.

A thread of each rank looks into the job's store. When a rank gets a signal, each thread publishes
the number of `preempted()` calls of its rank. The next call waits until all numbers are known. The
job ends at the first call that no rank has made yet. The threads do not depend on the loops. So a
loop that waits for another rank in the training delays nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from ckpt_tools.core.logs import log
from ckpt_tools.errors import PeerError
from ckpt_tools.loop.signals import SignalWatch
from ckpt_tools.ranks.gloo import GlooGroup

_LOOK_S = 0.02  # between looks at this rank's own signals
_PER_RANK_S, _MAX_LOOK_S = 0.001, 1.0  # between looks into the store, which serves all ranks


class Preemption:
    """What `preempted()` answers.

    Args:
        group: all ranks.
        signals: this rank's signals.
        timeout_s: for which a question waits for the numbers of other ranks.
    """

    def __init__(self, group: GlooGroup, signals: SignalWatch, timeout_s: float) -> None:
        self._signals, self._timeout_s = signals, timeout_s
        self._rank, self._size = group.rank, group.size
        self._store = group.store("preempted")
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        self._num_asked = 0
        self._told: int | None = None  # questions asked when this rank wrote its number down
        self._is_agreed = threading.Event()
        self._end, self._number, self._problem = 0, 0, ""
        self._thread: threading.Thread | None = None

    def ask(self) -> int:
        """Returns the signal to end with, after this step; 0 to go on.

        Raises:
            PeerError: a rank got a signal, and another one did not answer.
        """
        self._signals.was_asked = True
        if self._store is None:
            return self._signals.number
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="ckpt-preempted", daemon=True)
            self._thread.start()
        with self._lock:
            self._num_asked += 1
            number, is_told = self._num_asked, self._told is not None
        # without the store nobody can be told, and this rank's signal must not be lost
        has_failed = self._is_agreed.is_set() and bool(self._signals.number)
        if not is_told and not has_failed:
            return 0
        self._is_agreed.wait(self._timeout_s)
        if not self._end:
            raise PeerError(
                f"preempted: a rank got a signal, and {self._problem or 'others did not answer'}",
                hint="look at that rank's own log; the newest complete step is as it was",
            )
        return self._number if number >= self._end else 0

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        """Waits for a signal of any rank, and agrees on the end. Runs in the thread."""
        try:
            if self._is_asked_for():
                self._agree()
        except (RuntimeError, ValueError) as error:  # the store ended with its process
            self._problem = f"the job's store is gone ({str(error).splitlines()[0]})"
            log.debug("preempted: %s", self._problem)
        finally:
            self._is_agreed.set()

    def _is_asked_for(self) -> bool:
        """Waits until a rank has got a signal; False if the manager closes before."""
        pause = min(_MAX_LOOK_S, max(_LOOK_S, _PER_RANK_S * self._size))
        last = time.monotonic()
        while not self._is_closed.wait(_LOOK_S):
            if number := self._signals.number:
                self._store.set(f"signal/{int(number == signal.SIGTERM)}", "")
                return True
            if time.monotonic() - last >= pause:
                last = time.monotonic()
                if any(self._has(f"signal/{kind}") for kind in (0, 1)):
                    return True
        return False

    def _agree(self) -> None:
        with self._lock:
            self._told = self._num_asked
        self._store.set(f"asked/{self._rank}", str(self._told))
        missing = list(range(self._size))
        while missing and not self._is_closed.is_set():
            missing = [rank for rank in missing if not self._has(f"asked/{rank}")]
            self._problem = f"rank {', '.join(map(str, missing))} did not answer"
            time.sleep(_LOOK_S if missing else 0)
        if not missing:
            asked = [int(self._store.get(f"asked/{rank}")) for rank in range(self._size)]
            # every rank that got a signal has written it before its number
            self._number = signal.SIGTERM if self._has("signal/1") else signal.SIGUSR1
            self._end = max(asked) + 1

    def _has(self, key: str) -> Any:
        return self._store.check([key])
