"""Completes the values of options in a shell. Paths are completed by the shell itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable

DTYPES = ("bf16", "fp16", "fp32", "fp64")


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def one_of(*names: str) -> Callable[[str], list[str]]:
    """Returns the completion of an option that takes one of some names."""

    def complete(incomplete: str) -> list[str]:
        return _starting(names, incomplete)

    return complete


def layouts(incomplete: str) -> list[str]:
    """Returns the layouts that `convert` writes."""
    from ckpt_tools.operations.convert.targets import TARGETS

    return _starting(TARGETS, incomplete)


def maps(incomplete: str) -> list[str]:
    """Returns the names of the built-in maps of keys."""
    from importlib import resources

    files = resources.files("ckpt_tools.maps").iterdir()
    names = sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))
    return _starting(names, incomplete)
