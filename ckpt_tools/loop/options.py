"""Options of the manager that few people set, grouped by what they are about.

Old keywords of the manager work until the release in `GONE_IN`, with a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict

import torch.distributed as dist

from ckpt_tools.core.counts import check_count
from ckpt_tools.core.threads import MAX_THREADS
from ckpt_tools.loop.saving.replicas import Proof
from ckpt_tools.publish.step_names import STEP_PATTERNS
from ckpt_tools.run.retention import Retention, check_rules
from ckpt_tools.storage import check_url, is_url
from ckpt_tools.version import GONE_IN


def check_seconds(name: str, value: float | None) -> None:
    """Refuses what is no number of at least 0; None is allowed.

    Raises:
        ValueError: it is none.
    """
    if value is not None and (type(value) not in (int, float) or not value >= 0):
        raise ValueError(f"{name}: expected a number of at least 0, got {value!r}")


@dataclass(frozen=True, slots=True)
class Mirror:
    """A second place for the steps of a run on a disk. It outlives the machine.

    Complete steps are copied in the background, and `resume` takes the newest of both places. Where
    the URL cannot be reached, the steps on the disk are used, with a warning.

    Attributes:
        url: of a directory in an object store, such as `s3://bucket/run`.
        every: steps whose number is a multiple of this are copied; all if None. After `preempted()`
            has answered with a signal, each step is copied.
    """

    url: str
    every: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is no URL.

        Raises:
            TypeError: `url` is no text.
            ValueError: `url` is a path or malformed, or `every` is below 1.
        """
        if not isinstance(self.url, str) or not self.url:
            raise TypeError(f"mirror: expected a URL, such as s3://bucket/run, got {self.url!r}")
        if not is_url(self.url):
            raise ValueError(
                "mirror: expected the URL of an object store, such as s3://bucket/run;"
                f" {self.url!r} is a path"
            )
        check_url(self.url)
        check_count("mirror.every", self.every, ValueError, or_none=True)


@dataclass(frozen=True, slots=True)
class Writing:
    """How a manager writes the steps.

    Attributes:
        jobs: threads per rank, also for reading. If None: the rank's share of the machine's
            processors, at most 4.
        background_jobs: threads per rank for background saves; `jobs` if None.
        max_mbps: megabytes per second that a background save writes on each rank, at most. The
            limit ends when the loop waits for the save.
        overlap_copy: a background save returns while parameters and the state of optimizers are
            still being copied. Optimizers wait for that before their next step. If anything else
            changes these tensors, call `before_step` first.
        when_busy: what a save does while the previous one is still being written. `"wait"` waits
            for it. `"skip"` skips the new one, if it is one in the background.
        replicas: when the copies are compared that several ranks hold of a parameter or an
            optimizer state (DDP, HSDP, replicated tensors). A difference is an error. `"check"`
            compares all at every save. `"first-save"` compares all at the first save, and then a
            part at each save, in turn. `"trust"` compares nothing, and stores any of them.
        names: of the steps: `step-{:08d}`, `step-{}`, `checkpoint-{}` or `global_step_{}`.
        incremental: `"auto"` writes the parameters that take no gradient once, into files of their
            own (from 1 MiB per rank). While they do not change, the next step links these files:
            they are neither copied to host memory nor written. Other tensors that have stayed the
            same for some saves are copied, and not written either. Every step stays a complete
            checkpoint. False writes all of them at every save.
    """

    jobs: int | None = None
    background_jobs: int | None = None
    max_mbps: float | None = None
    overlap_copy: bool = False
    when_busy: str = "wait"
    replicas: str = Proof.FIRST_SAVE
    names: str = STEP_PATTERNS[0]
    incremental: str | bool = "auto"

    def __post_init__(self) -> None:
        """Refuses values out of range.

        Raises:
            ValueError: a number is too small, or a choice is unknown.
        """
        for name in ("jobs", "background_jobs"):
            number = getattr(self, name)
            check_count(name, number, ValueError, or_none=True)
            if number is not None and number > MAX_THREADS:
                raise ValueError(f"{name}: expected at most {MAX_THREADS}, got {number!r}")
        limit = 1 if self.max_mbps is None else self.max_mbps
        if type(limit) not in (int, float) or not 0 < limit < math.inf:
            raise ValueError(f"max_mbps: expected a number above 0, got {self.max_mbps!r}")
        if self.when_busy not in ("wait", "skip"):
            raise ValueError(f"when_busy: expected 'wait' or 'skip', got {self.when_busy!r}")
        Proof.of(self.replicas)
        if self.incremental is not False and self.incremental != "auto":
            raise ValueError(f"incremental: expected 'auto' or False, got {self.incremental!r}")
        if self.names not in STEP_PATTERNS:
            raise ValueError(
                f"names: expected one of {', '.join(STEP_PATTERNS)}, got {self.names!r}"
            )


@dataclass(frozen=True, slots=True)
class Resuming:
    """How a manager reads a step at a resume.

    Attributes:
        read_once: whether one rank reads bytes that several ranks need (DDP, HSDP, columns of rows)
            and sends them to the others. True: among all ranks. False: never. None: only from an
            object store, among the ranks of a host.
        allow_not_finite: resume also from a step that its save found not finite. Else such a step
            is passed over.
    """

    read_once: bool | None = None
    allow_not_finite: bool = False


@dataclass(frozen=True, slots=True)
class Outages:
    """What a manager does when saves fail.

    Attributes:
        retry_s: seconds for which a save, a start or a resume is retried while the object store
            cannot be reached; at most 0.8 of the manager's `timeout_s`.
        max_failures: the number of background saves in a row whose failure raises. Earlier failures
            are logged as warnings.
    """

    retry_s: float = 300.0
    max_failures: int = 1

    def __post_init__(self) -> None:
        """Refuses values out of range.

        Raises:
            ValueError: a number is too small.
        """
        if self.retry_s is None:
            raise ValueError("retry_s: expected a number of at least 0, got None")
        check_seconds("retry_s", self.retry_s)
        check_count("max_failures", self.max_failures, ValueError)


class OldOptions(TypedDict, total=False):
    """The keywords of the manager before 0.2; see `RENAMED`."""

    keep_every: int | None
    when_busy: str
    jobs: int | None
    read_once: bool | None
    mirror_every: int | None
    retry_s: float
    max_failures: int
    step_format: str
    allow_not_finite: bool
    overlap_copy: bool
    writer_jobs: int | None
    writer_nice: int
    max_mbps: float | None
    replicas: str


# where each old keyword of the manager went: option and field
RENAMED = {
    "keep_every": ("retention", "every"),
    "when_busy": ("writing", "when_busy"),
    "jobs": ("writing", "jobs"),
    "read_once": ("resuming", "read_once"),
    "mirror_every": ("mirror", "every"),
    "retry_s": ("outages", "retry_s"),
    "max_failures": ("outages", "max_failures"),
    "step_format": ("writing", "names"),
    "allow_not_finite": ("resuming", "allow_not_finite"),
    "overlap_copy": ("writing", "overlap_copy"),
    "writer_jobs": ("writing", "background_jobs"),
    "max_mbps": ("writing", "max_mbps"),
    "replicas": ("writing", "replicas"),
}
GONE = {"writer_nice": "it does nothing any more: start the job with `nice` instead"}


_KINDS: dict[str, Any] = {
    "retention": Retention,
    "mirror": Mirror,
    "writing": Writing,
    "resuming": Resuming,
    "outages": Outages,
}


class GroupedOptions(NamedTuple):
    """The grouped options of a manager."""

    retention: Retention
    mirror: Mirror | None
    writing: Writing
    resuming: Resuming
    outages: Outages


def grouped(
    keep_last: int | None,
    retention: Retention | None,
    mirror: str | Mirror | None,
    writing: Writing | None,
    resuming: Resuming | None,
    outages: Outages | None,
    old: Mapping[str, Any],
) -> GroupedOptions:
    """Returns the grouped options of a manager, with the values of old keywords.

    Raises:
        TypeError: an option is of another type.
        ValueError: a value is out of range, or an old keyword stands beside its new place.
    """
    if mirror is not None and not isinstance(mirror, Mirror):
        mirror = Mirror(mirror)
    values = (retention, mirror, writing, resuming, outages)
    given: dict[str, Any] = dict(zip(_KINDS, values, strict=True))
    if retention is not None:
        check_rules(retention)
    for name, value in given.items():
        if value is not None and not isinstance(value, _KINDS[name]):
            raise TypeError(f"{name}: expected {_KINDS[name].__name__}(…), got {value!r}")
    if retention is not None and keep_last != Retention().last:
        raise ValueError("retention replaces keep_last: give only one, Retention(last=…, every=…)")
    made = {**given, "retention": retention or Retention(keep_last)}
    _take_old(made, given, old)
    return GroupedOptions(
        made["retention"],
        made["mirror"],
        made["writing"] or Writing(),
        made["resuming"] or Resuming(),
        made["outages"] or Outages(),
    )


def _take_old(made: dict[str, Any], given: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Puts the values of old keywords into the options, and warns of each."""
    for name, value in old.items():
        _warn(name)
        if name in GONE:
            continue
        option, field = RENAMED[name]
        if given[option] is not None and option != "mirror":
            raise ValueError(
                f"{option} replaces {name}: give only {option}={_KINDS[option].__name__}({field}=…)"
            )
        if made[option] is None and option == "mirror":
            if value is None:
                continue
            raise ValueError(f"{name}: there is no mirror")
        made[option] = replace(made[option] or _KINDS[option](), **{field: value})


def _warn(name: str) -> None:
    """Warns of an old keyword of the manager, on rank 0."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank():
        return
    now = GONE.get(name, "")
    if not now:
        option, field = RENAMED[name]
        beside = {"retention": "last=…, ", "mirror": "url, "}.get(option, "")
        now = f"write {option}={_KINDS[option].__name__}({beside}{field}=…)"
    warnings.warn(
        f"CheckpointManager({name}=…) is the old name, and works until {GONE_IN}: {now}",
        DeprecationWarning,
        stacklevel=6,
    )
