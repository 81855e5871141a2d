"""The help of the command: verbs by purpose, examples from real work, and options by panel.

`--help` fits one screen of 40 lines and 80 columns. `--help-all` explains every option.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import click

WIDTH = 80
_JOINED = "\xa0"  # a space at which no line is broken
_LEFT = 24  # columns of names before their texts
EXIT_LINE = "Exit status 0 means fine. All others: docs/reference/exit-status.md"


class VerbHelp(NamedTuple):
    """The texts of a verb in the help.

    Attributes:
        group: the purpose under which it is listed.
        short: its line in the list of verbs.
        examples: command lines from real work.
    """

    group: str
    short: str
    examples: tuple[str, ...]


VERBS = {
    "inspect": VerbHelp(
        "Look",
        "Show what is in a checkpoint; it reads metadata only.",
        (
            "ckpt inspect run/step-00000500",
            "ckpt inspect run/step-00000500 --tree",
            "ckpt inspect s3://bucket/run/step-00000500",
        ),
    ),
    "ls": VerbHelp(
        "Look",
        "List the steps of a run, and where their bytes are.",
        ("ckpt ls run", "ckpt ls run --metrics", "ckpt ls run --bytes"),
    ),
    "diff": VerbHelp(
        "Look",
        "Compare names, shapes, types and values.",
        (
            "ckpt diff run/step-00000500 run/step-00000400",
            "ckpt diff run/step-00000500 model.safetensors --select '*.weight'",
        ),
    ),
    "stats": VerbHelp(
        "Look",
        "Measure the values: magnitudes, zeros, NaN and infinity.",
        (
            "ckpt stats run/step-00000500",
            "ckpt stats model.safetensors --histogram --select '*.weight'",
        ),
    ),
    "report": VerbHelp(
        "Look",
        "Make one HTML page about a checkpoint, a run or a change.",
        (
            "ckpt report run -o run.html",
            "ckpt report run/step-00000400 run/step-00000500 -o diff.html",
            "ckpt report run --png weights.png --select '*.weight'",
        ),
    ),
    "merge": VerbHelp(
        "Write",
        "Join the shards of a model into one safetensors file.",
        (
            "ckpt merge run/step-00000500 model.safetensors",
            "ckpt merge run/step-00000500 model.safetensors --dtype bf16",
            "ckpt merge run/step-00000500 shards --max-shard-size 5GB",
        ),
    ),
    "reshard": VerbHelp(
        "Write",
        "Rewrite a checkpoint as DCP for another number of ranks.",
        (
            "ckpt reshard run/step-00000500 four --from 8 --to 4",
            "ckpt reshard model.pt two --to 2",
            "ckpt reshard run/step-00000500 16 --mesh fsdp=8,tp=2 --plan plan.json",
        ),
    ),
    "convert": VerbHelp(
        "Write",
        "Write a checkpoint in the layout of another tool.",
        (
            "ckpt convert run/step-00000500 llama --to hf --base base",
            "ckpt convert run/step-00000500 run.pt --to torch",
            "ckpt convert model.pt step-0 --to dcp --ranks 8",
        ),
    ),
    "average": VerbHelp(
        "Write",
        "Write a weighted mean of the models of several checkpoints.",
        (
            "ckpt average run mean.safetensors --last 5",
            "ckpt average a.safetensors b.safetensors mean.safetensors --weights 1,3",
        ),
    ),
    "copy": VerbHelp(
        "Write",
        "Copy a checkpoint unchanged, also to and from a store.",
        (
            "ckpt copy run/step-00000500 s3://bucket/run/step-00000500",
            "ckpt copy run/step-00000500 backup/step-00000500",
        ),
    ),
    "verify": VerbHelp(
        "Prove and rescue",
        "Find out whether a checkpoint is whole.",
        ("ckpt verify run/step-00000500", "ckpt verify run/step-00000500 --quick"),
    ),
    "seal": VerbHelp(
        "Prove and rescue",
        "Add a manifest with checksums to a checkpoint without one.",
        ("ckpt seal stock",),
    ),
    "salvage": VerbHelp(
        "Prove and rescue",
        "Write what is undamaged of a damaged checkpoint.",
        ("ckpt salvage run/step-00000500 rescued",),
    ),
    "check": VerbHelp(
        "Prove and rescue",
        "Check the steps of a run, for CI and cron.",
        ("ckpt check run", "ckpt check run --verify --every 100"),
    ),
    "latest": VerbHelp(
        "Keep a run",
        "Print the path of the newest step, or of the best one.",
        ("ckpt latest run", "ckpt latest run --best loss"),
    ),
    "prune": VerbHelp(
        "Keep a run",
        "Remove old steps, and unfinished work of dead jobs.",
        (
            "ckpt prune run --keep-last 3 --dry-run",
            "ckpt prune run --keep-last 3 --keep-spaced 6h --grace 2d",
            "ckpt prune run --keep-last 3 --keep-best 2 --metric loss",
        ),
    ),
    "thin": VerbHelp(
        "Keep a run",
        "Remove optimizers and loaders from old steps.",
        ("ckpt thin run --keep-full 2 --dry-run", "ckpt thin run --keep-full 2 --dtype bf16"),
    ),
    "pin": VerbHelp(
        "Keep a run",
        "Keep a step for good.",
        ("ckpt pin run/step-00000500", "ckpt pin run/step-00000500 --remove"),
    ),
    "publish": VerbHelp(
        "Serve",
        "Publish the next version of a model, or only what changed.",
        (
            "ckpt publish run/step-00000400 versions --base base",
            "ckpt publish run/step-00000500 s3://bucket/versions --base base",
        ),
    ),
    "pull": VerbHelp(
        "Serve",
        "Bring a local model to a published version.",
        (
            "ckpt pull versions model",
            "ckpt pull versions model --version 1 --hook ./reload.sh",
            "ckpt pull s3://bucket/versions model --follow",
        ),
    ),
}
# the panels of options that `--help` only names
NAMED = ("Select", "More", "Output", "Run", "Store")


def write_verb(
    command: click.Command, context: click.Context, formatter: click.HelpFormatter
) -> None:
    """Writes the short help of a verb."""
    about, path = VERBS.get(context.info_name or ""), f"{context.command_path} --help-all"
    write = formatter.write
    sentence = (command.help or "").strip().split("\n\n")[0]
    write("\n".join(textwrap.wrap(" ".join(sentence.split()), WIDTH)) + "\n\n")
    write(f"{_title('Usage')} {context.command_path} {usage(command)}\n\n")
    if about is not None:
        write(_title("Examples") + "\n")
        write("".join(f"  {example}\n" for example in about.examples) + "\n")
    shown = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    shown = [p for p in shown if p.name not in ("help", "help_all")]
    own = [p for p in shown if _panel(p) not in NAMED]
    if own:
        write(_title("Options") + "\n")
        for option in own:
            write("".join(_entry(spelt(option), _first_clause(option.help or ""))))
    for panel in NAMED:
        names = [spelt(p) for p in shown if _panel(p) == panel]
        if names:
            kept = (name.replace(" ", _JOINED) for name in names)
            text = "".join(_entry(_title(panel), "   ".join(kept), indent=0))
            write(text.replace(_JOINED, " "))
    write(f"\n{path} explains them all.\n{EXIT_LINE}\n")


def write_all(verbs: Iterable[str], context: click.Context, formatter: click.HelpFormatter) -> None:
    """Writes the list of verbs by purpose."""
    write = formatter.write
    write("\n".join(textwrap.wrap(context.command.help or "", WIDTH)) + "\n\n")
    write(f"{_title('Usage')} ckpt VERB ...     ckpt VERB --help has examples\n")
    there, group = set(verbs), ""
    for name, about in VERBS.items():
        if name not in there:
            continue
        if about.group != group:
            group = about.group
            write(f"\n{_title(group)}\n")
        write(f"  {name:10}{about.short}\n")
    write(f"\n{_title('Also')} --version   --install-completion   --show-completion\n{EXIT_LINE}\n")


def _title(text: str) -> str:
    return text if os.environ.get("NO_COLOR") else click.style(text, bold=True)


def _panel(option: click.Parameter) -> str:
    return getattr(option, "rich_help_panel", None) or ""


def usage(command: click.Command) -> str:
    words = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            words.append(_metavar(parameter))
        elif parameter.required:
            words.append(spelt(parameter))
    return " ".join([*words, "[OPTIONS]"])


def _metavar(parameter: click.Parameter) -> str:
    return parameter.metavar or (parameter.name or "").upper()


def spelt(option: click.Parameter) -> str:
    """Returns an option as it is typed: `-j, --jobs N`."""
    names = ", ".join(sorted([*option.opts, *option.secondary_opts], key=len))
    if getattr(option, "is_flag", False):
        return names
    kinds: Mapping[str, str] = {"integer": "N", "integer range": "N", "float": "X"}
    value = option.metavar or kinds.get(
        option.type.name, "X" if "float" in option.type.name else ""
    )
    return f"{names} {value or 'VALUE'}"


def _first_clause(text: str) -> str:
    """Returns the first clause of an option's help."""
    words = " ".join(text.split())
    ends = [at for mark in (". ", "; ", "  [") if (at := words.find(mark)) > 0]
    return words[: min(ends)] if ends else words.removesuffix(".")


def _entry(name: str, text: str, indent: int = 2) -> Iterator[str]:
    """Yields the lines of a name and its text; texts begin in one column for all names."""
    lines = textwrap.wrap(text, WIDTH - _LEFT, break_on_hyphens=False)
    left = " " * indent + name
    room = _LEFT - len(click.unstyle(left))
    if room < 2 or not lines:
        yield f"{left}\n"
    else:
        yield f"{left}{' ' * room}{lines.pop(0)}\n"
    yield from (f"{' ' * _LEFT}{line}\n" for line in lines)
