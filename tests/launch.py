"""What `torchrun --standalone` does, with ranks that are forked from one process: what a job imports is imported once, not by each.

python tests/launch.py NUM_RANKS SCRIPT ARG …        python tests/launch.py NUM_RANKS -m MODULE ARG …
"""

from __future__ import annotations

import ast
import importlib.util
import os
import runpy
import signal
import socket
import sys
import uuid
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, and before torch looks

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def load_imports(script: Path) -> None:
    """Imports the modules that a script imports."""
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            importlib.import_module(str(node.module))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


def rank(*words: str) -> None:
    """Runs a script or a module as its own interpreter would, the launcher's signal handlers gone."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def main() -> None:
    """Launches. The rendezvous is static: another one has a thread, and a fork while it resolves a name leaves a lock to the child."""
    num_ranks, *words = sys.argv[1:]
    sys.path[0] = os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.abspath(words[0]))
    spec = importlib.util.find_spec(f"{words[1]}.__main__") if words[0] == "-m" else None
    load_imports(Path(spec.origin if spec else words[0]))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=int(num_ranks), run_id=str(uuid.uuid4()), rdzv_backend="static",
        rdzv_endpoint=f"localhost:{free_port()}", rdzv_configs={"rank": 0}, max_restarts=0, start_method="fork", monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, rank)(*words)


if __name__ == "__main__":
    main()
