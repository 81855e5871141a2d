"""Prints the man page of the command: `python -m ckpt_tools.cli.man > docs/reference/ckpt.1`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import typer

from ckpt_tools.cli.app import app
from ckpt_tools.cli.help import VERBS, spelt, usage
from ckpt_tools.cli.process import EXIT_STATUS
from ckpt_tools.version import __version__


def page() -> str:
    """Returns the man page: each verb with its examples and options, and the exit statuses."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group)
    yield f'.TH CKPT 1 "" "ckpt-tools {__version__}" "User Commands"'
    yield from (".SH NAME", r"ckpt \- work with PyTorch FSDP checkpoints")
    yield from (".SH SYNOPSIS", r".B ckpt", r"\fIVERB\fR [\fIOPTIONS\fR]")
    yield from (".SH DESCRIPTION", _text(command.help or ""))
    group = ""
    for name, about in VERBS.items():
        verb = command.commands[name]
        if about.group != group:
            group = about.group
            yield f".SH {_text(group.upper())}"
        yield from (f".SS ckpt {name} {_text(usage(verb))}", *_paragraphs(verb.help or ""))
        yield from (".PP", "Examples:", ".nf", ".RS")
        yield from map(_text, about.examples)
        yield from (".RE", ".fi")
        for option in verb.params:
            if isinstance(option, click.Option) and not option.hidden:
                yield from (".TP", rf"\fB{_text(spelt(option))}\fR", _text(option.help or ""))
    title, _, statuses = EXIT_STATUS.partition("\n\n")
    yield f".SH {title}"
    for status in re.split(r"\s*·\s*", " ".join(statuses.split())):
        number, _, meaning = status.partition(" ")
        yield from (".TP", rf"\fB{number}\fR", _text(meaning))


def _paragraphs(text: str) -> Iterator[str]:
    for number, part in enumerate(text.split("\n\n")):
        if number:
            yield ".PP"
        yield _text(part)


def _text(text: str) -> str:
    """Returns one line, with the characters of troff escaped."""
    line = " ".join(text.replace("`", "").split()).replace("\\", r"\e").replace("-", r"\-")
    line = re.sub(r"[^\x00-\x7f]", lambda sign: rf"\[u{ord(sign[0]):04X}]", line)
    return rf"\&{line}" if line.startswith((".", "'")) else line


if __name__ == "__main__":
    print(page(), end="")
