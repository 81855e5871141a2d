"""Runs Python code in a separate process, for questions that only transformers can answer.

The process imports nothing from the working directory.
"""

from __future__ import annotations

import os
import subprocess
import sys

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


def run_python(code: str, argument: str) -> subprocess.CompletedProcess[bytes]:
    """Runs code with one argument, and without standard input, so that no prompt can block it.

    `-P` and the root directory as working directory exclude modules of the caller's working
    directory. This also holds for relative paths in `PYTHONPATH`.
    """
    command = [sys.executable, "-P", "-c", FIND_CLASS + code, os.path.abspath(argument)]
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, cwd="/")


def last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """Returns the last line of a failed process's error output."""
    return (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
