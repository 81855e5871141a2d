"""Writes a copy of committed steps in Hugging Face's layout, in the background.

One thread converts one step at a time with the engine of `ckpt convert`. Training does not wait.
Jobs without such copies do not load what converts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ckpt_tools.core.counts import check_count
from ckpt_tools.core.logs import log
from ckpt_tools.errors import CheckpointError, PlanError, StorageError, printable
from ckpt_tools.loop.steps.waiting import wait_for_thread, with_hint
from ckpt_tools.storage import is_url
from ckpt_tools.transfer.options import Options


@dataclass(frozen=True)
class HuggingFace:
    """A copy in Hugging Face's layout beside a step: `step-00000500-hf` for `step-00000500`.

    Retention does not remove such copies.

    Attributes:
        base: the directory of the model's config, tokenizer and code, which are copied.
        every: steps whose number is a multiple of this are copied; all if None.
        dtype: of the model's tensors, such as `"bf16"`; as they are if None.
        adapter: write the directory of a PEFT adapter instead; `base` has its config.
        options: of `ckpt_tools.convert`, such as `select` or `key_map`.
    """

    base: str | os.PathLike[str] | None = None
    every: int | None = None
    dtype: str | None = None
    adapter: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("every", self.every, ValueError, or_none=True)
        if self.base is not None and not is_url(self.base):
            # the job may change its working directory
            object.__setattr__(self, "base", os.path.abspath(self.base))

    def check(self) -> None:
        """Refuses what the first copy would refuse, hours later.

        Raises:
            PlanError: an unknown type, or options that do not fit.
            StorageError: there is no `base`.
        """
        from ckpt_tools.operations.convert.options import Conversion, check_request
        from ckpt_tools.operations.merge_reshard import dtype_by_name

        import_module("ckpt_tools.operations.convert.convert")  # a fault in it must show now
        given = {"dtype": self.dtype, "base": self.base, **self.options}
        unknown = set(given) - set(Conversion.__annotations__) - set(Options.__annotations__)
        if unknown:
            raise PlanError(f"HuggingFace: convert has no option {sorted(unknown)[0]!r}")
        if self.dtype is not None:
            dtype_by_name(self.dtype)
        check_request("peft" if self.adapter else "hf", ".", given)
        if self.base is not None and not is_url(self.base) and not os.path.isdir(self.base):
            raise StorageError(f"HuggingFace: no such directory: {printable(str(self.base))}")


class HuggingFaceWriter:
    """Converts the newest waiting step. A failure is logged, and `close` raises the last one."""

    def __init__(self, how: HuggingFace, storage_options: Mapping[str, Any] | None) -> None:
        """Stores the settings.

        Args:
            how: the layout.
            storage_options: of the run's object store.
        """
        self._how, self._storage_options = how, storage_options
        self._waiting: str | None = None
        self._running: str | None = None
        self._error: CheckpointError | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, number: int, path: str) -> None:
        """Queues a newly committed step. It replaces one that still waits, which is logged."""
        if self._how.every and number % self._how.every:
            return
        with self._lock:
            if self._waiting is not None:
                log.warning(
                    "%s gets no copy for Hugging Face: a newer step is there first",
                    printable(self._waiting),
                )
            self._waiting = path
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ckpt-export")
                self._thread.start()

    def needed(self) -> list[str]:
        """Returns the steps that must stay, because they are not converted yet."""
        with self._lock:
            return [path for path in (self._running, self._waiting) if path is not None]

    def _work(self) -> None:
        while True:
            with self._lock:
                self._running, self._waiting = self._waiting, None
                path = self._running
                if path is None:
                    self._thread = None
                    return
            began = time.monotonic()
            try:
                self._convert(path)
                self._error = None
                log.info("%s-hf was written in %.1f s", path, time.monotonic() - began)
            except CheckpointError as error:
                self._error = error
                log.warning("no copy of %s for Hugging Face: %s", path, with_hint(error))
            except BaseException:  # noqa: BLE001  a thread must not die silently
                log.exception("no copy of %s for Hugging Face", path)
                self._error = CheckpointError(f"no copy of {printable(path)}: see the log")

    def _convert(self, path: str) -> None:
        from ckpt_tools.operations.convert.convert import convert

        how: dict[str, Any] = {"overwrite": True, **self._how.options}
        given: dict[str, Any] = {"base": self._how.base, "dtype": self._how.dtype}
        given["storage_options"] = self._storage_options
        how |= {name: value for name, value in given.items() if value is not None}
        convert(path, f"{path.rstrip('/')}-hf", to="peft" if self._how.adapter else "hf", **how)

    def wait(self) -> None:
        """Waits until no step is left to convert; logs this after 5 s and then every minute."""
        wait_for_thread(lambda: self._thread, "a copy for Hugging Face")

    def close(self) -> None:
        """Waits until no step is left to convert.

        Raises:
            StorageError: the last copy failed. The step itself is complete.
        """
        self.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise StorageError(
                f"the last copy for Hugging Face failed: {with_hint(error)}",
                hint="the step is complete: `ckpt convert` it with --to hf",
            ) from error
