"""Runs Python in a process of its own, for what only transformers can tell. Nothing of the working
directory is imported there.
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
    """Runs code with one argument. It has no standard input, so that nobody answers a question
    there.

    `-P` and the root directory keep modules of the working directory out, whatever `PYTHONPATH`
    says of relative places.
    """
    command = [sys.executable, "-P", "-c", FIND_CLASS + code, os.path.abspath(argument)]
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, cwd="/")


def last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    """Returns the last line of what a failed process said."""
    return (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
