"""The command `ckpt`: it parses arguments, calls one operation and renders the result.

Only this module turns errors into exit codes. Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, NoReturn

import click
import typer
import typer.core

from ckpt_tools.cli import (
    publication_verbs,
    read_verbs,
    report_verbs,
    run_verbs,
    thin_verbs,
    value_verbs,
    write_verbs,
)
from ckpt_tools.cli.help import write_all
from ckpt_tools.cli.old_names import with_present_names
from ckpt_tools.cli.options import Command
from ckpt_tools.cli.process import (
    CUT,
    EXIT_STATUS,
    drop_output,
    fail,
    interrupted,
    leave,
    prepare_streams,
    report_ignored,
    terminated,
)
from ckpt_tools.core import ending
from ckpt_tools.errors import CheckpointError, PlanError, printable, redacted
from ckpt_tools.ranks.base import Group, is_launched
from ckpt_tools.version import __version__


def _on_layout(message: str) -> str:
    """Returns a remark on a usage error: `reshard --to` got a layout, which `convert` writes."""
    from ckpt_tools.operations.convert.targets import TARGETS

    wrong = (name for name in TARGETS if f": {name!r} is not a valid int" in message)
    return "".join(f"; `ckpt convert --to {name}` writes this layout" for name in wrong)


def _fail_on_usage(error: click.UsageError) -> NoReturn:
    """Ends the command like any other error, with the usage as the hint."""
    message = redacted(error.format_message()).rstrip(".")  # an argument may be a URL with a secret
    message += _on_layout(message)
    hint = None
    if error.ctx is not None:
        usage = error.ctx.get_usage().removeprefix("Usage: ")
        hint = f"usage: {usage}; see {error.ctx.command_path} --help"
    fail(message, hint, error.exit_code, "UsageError")


class _Commands(typer.core.TyperGroup):
    """Handles the ends that typer does not: Ctrl-C, a closed pipe, and usage errors as JSON."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Shows the help, and exits with 2, if there is no verb."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit(2)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            _fail_on_usage(error)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the verbs by purpose."""
        write_all(self.list_commands(ctx), ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # flush here: an error can still set the exit status
            return result
        except click.UsageError as error:
            _fail_on_usage(error)
        except BrokenPipeError:  # the reader of the pipe has ended; click would exit with 1
            drop_output()
            raise SystemExit(128 + signal.SIGPIPE) from None
        except KeyboardInterrupt as stop:
            usual = "nothing was left at the destination"
            if ending.is_published:
                usual = "the result is complete at the destination"
            if ending.is_cut:
                usual = f"{usual}, but {CUT}" if ending.is_published else CUT
            what = stop.args[0] if stop.args else usual
            fail(f"interrupted; {what}", None, 130, "KeyboardInterrupt")


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click suggests commands itself
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Inspect, verify, compare, merge and reshard PyTorch FSDP checkpoints at the speed of a"
        " file copy, without running code from them."
    ),
    epilog=EXIT_STATUS.replace("\n\n", ": ").replace("\n", " "),
)


def _show_version(value: bool) -> None:
    if value:
        print(f"ckpt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    del version
    if context.obj is not None and context.invoked_subcommand not in _SHARED:
        raise PlanError(
            f"ckpt {context.invoked_subcommand} runs in one process only. Several processes can"
            f" share: {', '.join(_SHARED)}",
            hint="start it without the launcher",
        )


_SHARED = ("merge", "reshard", "convert", "average", "verify", "diff", "stats", "copy")


_VERBS: dict[str, Callable[..., Any]] = {
    "inspect": read_verbs.inspect,
    "ls": run_verbs.list_,
    "diff": read_verbs.diff,
    "stats": value_verbs.stats,
    "report": report_verbs.report,
    "merge": write_verbs.merge,
    "reshard": write_verbs.reshard,
    "convert": write_verbs.convert,
    "average": value_verbs.average,
    "copy": write_verbs.copy_,
    "verify": read_verbs.verify,
    "seal": read_verbs.seal,
    "salvage": write_verbs.salvage,
    "check": run_verbs.check,
    "latest": run_verbs.latest,
    "prune": run_verbs.prune,
    "thin": thin_verbs.thin,
    "pin": run_verbs.pin,
    "publish": publication_verbs.publish,
    "pull": publication_verbs.pull,
}
for _name, _verb in _VERBS.items():
    app.command(_name, cls=Command, epilog=app.info.epilog)(_verb)


# a report that cannot be written: a full disk behind a redirection, a closed stream
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO)


def main(may_share: bool = False) -> None:
    """Runs the command, and turns errors into exit codes.

    Args:
        may_share: share the work with the other processes of torchrun or srun, if it was started by
            one.
    """
    signal.signal(signal.SIGTERM, terminated)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup ignores it
        signal.signal(signal.SIGINT, interrupted)
    code: Any = 0
    try:
        _run(may_share)
    except SystemExit as end:
        if not ending.has_begun():
            raise
        code = end.code
    if ending.has_begun():  # the exception is gone: it would keep the frames that `leave` closes
        leave(code)


def _run(may_share: bool) -> None:
    prepare_streams()
    sys.argv[1:] = with_present_names(sys.argv[1:])
    sys.unraisablehook = report_ignored
    gc.disable()  # the process is short-lived, and has no cycles worth collecting
    # numpy's threads would wait for ours, and making them takes time at the start
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _leave_out_other_verbs()
    try:
        with _group(may_share) as group:
            app(prog_name="ckpt", obj=group)
    except CheckpointError as error:
        fail(str(error), error.hint, error.exit_code, type(error).__name__)
    except OSError as error:
        if error.filename is None and error.errno in _FULL:
            drop_output()
            fail(
                f"cannot write the report: {error.strerror or error}",
                "the command itself has done its work",
                15,
                type(error).__name__,
            )
        fail(
            f"{error.strerror or error} ({printable(str(error.filename or ''))})",
            None,
            15,
            type(error).__name__,
        )
    except KeyboardInterrupt:
        fail("interrupted", None, 130, "KeyboardInterrupt")
    except SystemExit as end:
        # the libraries that print the help exit with 1 when the reader of a pipe has ended
        if getattr(end.__context__, "errno", None) != errno.EPIPE:
            raise
        drop_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
    finally:
        # the work is done: a late Ctrl-C must not print a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave_out_other_verbs() -> None:
    """Keeps only the verb that is called: to build the others takes longer than to parse."""
    verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    is_asked_for_help = {"-h", "--help"} & set(sys.argv[1:2]) or "_CKPT_COMPLETE" in os.environ
    if verb in _VERBS and not is_asked_for_help:
        app.registered_commands[:] = [c for c in app.registered_commands if c.name == verb]


def _group(may_share: bool) -> AbstractContextManager[Group | None]:
    """Returns the group of processes that share the work; None if this process is alone."""
    if not may_share or not is_launched(os.environ):
        return nullcontext()
    from ckpt_tools.ranks.launch import joined  # imports torch

    return joined()


if __name__ == "__main__":
    main()
