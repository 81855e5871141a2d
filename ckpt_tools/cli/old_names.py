"""Old names of verbs and options. They work for one release, with a line on stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckpt_tools.cli.process import fail
from ckpt_tools.version import GONE_IN


class Renamed(NamedTuple):
    """What an old verb is now.

    Attributes:
        verb: its name.
        options: the names of its options that have changed.
        more: words that say what the old verb did.
    """

    verb: str
    options: Mapping[str, str] = {}
    more: tuple[str, ...] = ()


VERBS = {
    "best": Renamed("latest", {"--metric": "--best"}),
    "du": Renamed("ls", more=("--bytes",)),
    "plot": Renamed("report", {"--tensor": "--select", "--output": "--png", "-o": "--png"}),
}
# by verb; "*" stands for all
OPTIONS = {
    "*": {"--stats": "--traffic"},
    "average": {"--config-from": "--base"},
    "inspect": {"--ranks": "--files"},
    "prune": {"--grace-hours": "--grace"},
}
# options that are gone, and what to do instead
GONE = {
    "report": {
        "--serve": "repeat: ckpt report RUN -o FILE.html --overwrite",
        "--port": "nothing is served any more",
    },
    "check": {
        "--unchanged": "the bound is 3 steps; ckpt_tools.check_run(unchanged_steps=N) has another",
        "--jump": "the bound is 10 times; ckpt_tools.check_run(jump=X) has another",
    },
    "stats": {"--each": "--json lists each tensor"},
}
_IN_HOURS = ("--grace-hours",)  # a number of hours, which is a duration now


def with_present_names(words: Sequence[str]) -> list[str]:
    """Returns a command line with the present names of verbs and options; tells each old one.

    An option that is gone ends the command.
    """
    at = next((i for i, word in enumerate(words) if not word.startswith("-")), None)
    if at is None:
        return list(words)
    renamed = VERBS.get(words[at], Renamed(words[at]))
    options = {**OPTIONS["*"], **OPTIONS.get(words[at], {}), **renamed.options}
    found, is_hours, told = [*words[:at], renamed.verb], False, list[str]()
    if renamed.verb != words[at]:
        new = " ".join((renamed.verb, *renamed.more))
        told.append(f"ckpt {words[at]} is now ckpt {new}")
    end = words.index("--") if "--" in words else len(words)
    for word in words[at + 1 : end]:
        name = word.partition("=")[0]
        if (instead := GONE.get(renamed.verb, {}).get(name)) is not None:
            fail(f"ckpt {renamed.verb} has no {name} any more", instead, 2, "UsageError")
    for place, word in enumerate(words[at + 1 :], at + 1):
        name, equals, value = word.partition("=")
        if is_hours:
            word, is_hours = f"{word}h", False
        elif place < end and name in options:
            told.append(f"{name} is now {options[name]}")
            is_hours = name in _IN_HOURS and not equals
            word = options[name] + equals + value + "h" * (name in _IN_HOURS and bool(equals))
        found.append(word)
    if told:
        print(f"ckpt: {'; '.join(told)} (the old name works until {GONE_IN})", file=sys.stderr)
    return [*found[: at + 1], *renamed.more, *found[at + 1 :]]
