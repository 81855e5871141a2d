"""Checks the arguments of the public functions.

It refuses misspelt keywords and values of a wrong type before any work starts.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Callable, Container, Mapping
from functools import wraps
from numbers import Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ckpt_tools.errors import PlanError, printable

P = ParamSpec("P")
T = TypeVar("T")


class _Kind(NamedTuple):
    """A kind of argument: its description for messages, and its test."""

    text: str
    fits: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and value >= 1


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(
        isinstance(item, str) for item in value
    )


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) or type(value).__module__ == "torch"


def _is_tolerance(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf


_PATH = _Kind("a path or a URL that is not empty", _is_path)
_COUNT = _Kind("a whole number of at least 1", _is_count)
_FLAG = _Kind("True or False", lambda value: isinstance(value, bool))
_TEXTS = _Kind("a list of texts", _are_texts)
_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_TABLE = _Kind("a dict", lambda value: isinstance(value, Mapping))
_TOLERANCE = _Kind("a number, at least 0 and finite", _is_tolerance)
_REQUIRED = ("src", "dst", "a", "b", "to", "root", "local", "from_version")
_KINDS = {
    **dict.fromkeys(
        ("src", "dst", "a", "b", "lora", "key_map", "base", "shapes", "plan", "root", "local"),
        _PATH,
    ),
    **dict.fromkeys(
        (
            "jobs",
            "memory_bytes",
            "to_ranks",
            "from_ranks",
            "ranks",
            "max_shard_bytes",
            "full_every",
            "version",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            "overwrite",
            "dry_run",
            "resume",
            "keep_prefix",
            "model_only",
            "check",
            "quick",
            "deep",
            "read_all",
            "strict",
            "cast",
            "trust_pickle",
            "full",
            "partial",
        ),
        _FLAG,
    ),
    **dict.fromkeys(("select", "exclude", "keep_dtype", "rename"), _TEXTS),
    **dict.fromkeys(
        ("to", "optimizer", "mesh", "names", "encoding", "checksum", "hook", "receiver"), _TEXT
    ),
    **dict.fromkeys(("storage_options", "to_storage_options", "settings"), _TABLE),
    **dict.fromkeys(("atol", "rtol"), _TOLERANCE),
    "from_version": _Kind(
        "a whole number of at least 0",
        lambda value: _is_count(value) or (type(value) is int and not value),
    ),
    "dtype": _Kind("bf16, fp16, fp32, fp64, or a dtype of torch", _is_dtype),
}


def checked(
    options: type | None = None, *, name: str = "", names_only: Container[str] = ()
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator that checks the arguments of each call.

    Args:
        options: the TypedDict of the function's `**options`.
        name: the function's name for messages, if callers know it by another one.
        names_only: arguments whose values the function checks itself.

    Raises:
        TypeError: raised by the decorated function for an unknown keyword; the message names the
            nearest one.
        PlanError: raised by the decorated function for a value of a wrong type.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters, shown = inspect.signature(function).parameters, name or function.__name__
        names = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD] + list(
            options.__annotations__ if options else ()
        )

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for key in kwargs:
                if key not in names:
                    close = difflib.get_close_matches(key, names, 1, 0.5)
                    hint = f"did you mean {close[0]!r}?" if close else f"it has: {', '.join(names)}"
                    raise TypeError(f"{shown}() has no argument {key!r}: {hint}")
            for key, value in [*zip(parameters, args, strict=False), *kwargs.items()]:
                if key not in names_only:
                    _check(shown, key, value)
            if type(kwargs.get("dtype")).__module__ == "torch":
                kwargs["dtype"] = str(kwargs["dtype"]).removeprefix("torch.")
            return function(*args, **kwargs)

        return call

    return decorate


def _check(function: str, name: str, value: Any) -> None:
    kind = _KINDS.get(name)
    if kind is None or (value is None and name not in _REQUIRED) or kind.fits(value):
        return
    got = printable(repr(value)[:80])
    hint = f"pass {name}=[{got}]" if kind is _TEXTS and isinstance(value, str) else None
    raise PlanError(
        f"{function}: {name} must be {kind.text}; got {got} of type {type(value).__name__}",
        hint=hint,
    )
