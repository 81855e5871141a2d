"""Runs Python code in a separate process, for questions that only transformers can answer.

The process imports nothing from the working directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ckpt_tools.errors import PlanError
from ckpt_tools.operations.convert.known_answers import KnownAnswer

_LIMITS = """
import contextlib, ctypes, resource, signal, sys
with contextlib.suppress(AttributeError, OSError):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with its parent; Linux alone has this
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]),) * 2)
"""
_MODEL_BYTES, _MODEL_S = 4 << 30, 300  # for a model without weights, and the imports
TIMED_OUT = -9  # the status of a process that was ended
_BYTES_PER_S = 10_000_000  # the slowest disk that a model is loaded from

# imports make many objects and no garbage: without its collector, they take a fifth less time
_NO_GC = """
import gc
gc.disable()
"""

FIND_CLASS = '''
def find_class(names):
    """Returns the transformers class that a config names. Refuses a class with its own code."""
    import transformers
    name = names[0] if isinstance(names, list) and names else "AutoModel"
    is_name = isinstance(name, str) and name.isidentifier()
    kind = getattr(transformers, name, None) if is_name else None
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model and not (isinstance(kind, type) and name.startswith("AutoModel")):
        raise SystemExit(f"transformers has no model {str(name)[:80]!r}")
    return kind
'''


def run_python(
    code: str, argument: str, weight_nbytes: int = 0
) -> subprocess.CompletedProcess[bytes]:
    """Runs code with one argument, and without standard input, so that no prompt can block it.

    `-P` and the root directory as working directory exclude modules of the caller's working
    directory. This also holds for relative paths in `PYTHONPATH`. A config may describe a model
    without end, so memory and time have limits.

    Args:
        code: may use `find_class`.
        argument: a path.
        weight_nbytes: bytes of the weights that the code loads, twice at most.
    """
    most = _MODEL_BYTES + 3 * weight_nbytes
    seconds = _MODEL_S + weight_nbytes // _BYTES_PER_S
    command = [sys.executable, "-P", "-c", _LIMITS + FIND_CLASS + code]
    command += [os.path.abspath(argument), str(most)]
    try:
        return subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, cwd="/", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, TIMED_OUT, b"", f"it took longer than {seconds} s".encode()
        )


def ask(
    code: str, base: str | os.PathLike[str], config: Mapping[str, Any], question: Mapping[str, Any]
) -> tuple[Any, str]:
    """Returns what code prints as JSON; None and the reason if it fails.

    An answer that is known from an earlier command is not asked for again.

    Args:
        code: may use `find_class`. Its argument is a file with the question, as JSON, and the
            absolute path of `base` in it.
        base: the directory of a model's configuration, of which the code reads nothing else, unless
            the configuration names other files.
        config: the configuration.
        question: the rest of the question.

    Raises:
        PlanError: it did not end.
    """
    known = KnownAnswer(FIND_CLASS + code, question, config)
    if (answer := known.read()) is not None:
        return answer, ""
    import tempfile  # and what packs archives

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({**question, "base": os.path.abspath(base)}, file)
        file.flush()
        done = run_python(_NO_GC + code, file.name)
    if done.returncode == TIMED_OUT:
        raise PlanError(
            f"transformers did not end: {last_line(done)}",
            hint="is it the config of these weights? --partial writes the names as they are",
        )
    if done.returncode:
        return None, last_line(done)
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    known.keep(answer)
    return answer, ""


def last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """Returns the last line of a failed process's error output."""
    return (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
