"""How a merge gets faster with processes where each connection to the store is slow: `python -m
tests.benchmarks.throttled DIR --gb 2`.

Writes a checkpoint of that size in DIR, serves it with nginx at so many MB/s a connection, and
merges it from there to DIR with 1, 2, 4 and 8 processes, in turn. Prints the seconds that the
command itself tells (what torch takes to import in each process is not in them) and how much of
linear that is. nginx must be installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import harness
import torch
from safetensors.torch import save_file

import ckpt_tools
from tests.jobs import torchrun_command
from tests.servers.servers import free_port

CONFIG = """
daemon off; worker_processes 2; pid {at}/nginx.pid; error_log {at}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; keepalive_requests 100000;
  client_body_temp_path {at}/body; proxy_temp_path {at}/proxy; fastcgi_temp_path {at}/fcgi; uwsgi_temp_path {at}/uwsgi; scgi_temp_path {at}/scgi;
  server {{ listen 127.0.0.1:{port}; root {at}; autoindex on; limit_rate {rate}; }}
}}
"""


def serve(at: Path, rate: int) -> tuple[subprocess.Popen[bytes], str]:
    """Starts nginx; returns it and its URL."""
    port = free_port()
    (at / "nginx.conf").write_text(CONFIG.format(at=at, port=port, rate=rate))
    server, url = (
        subprocess.Popen(["nginx", "-c", str(at / "nginx.conf"), "-p", str(at)]),
        f"http://127.0.0.1:{port}",
    )
    for _ in range(100):
        try:
            urllib.request.urlopen(url).close()
            return server, url
        except urllib.error.URLError:
            time.sleep(0.05)
    raise RuntimeError("nginx does not answer")


def merge(url: str, out: Path, size: int) -> float:
    """Merges with so many processes; returns the seconds."""
    command = torchrun_command(size, "-m", "ckpt_tools", "merge", url, out, "--overwrite", "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rate", type=int, default=3, help="MB/s a connection")
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args()
    at = asked.dir.resolve() / "throttled"
    shutil.rmtree(at, ignore_errors=True)
    (at / "src").mkdir(parents=True)
    save_file(
        {
            f"layers.{i}.weight": torch.randn(5000, 1000)
            for i in range(max(1, round(asked.gb * 50)))
        },
        at / "src" / "model.safetensors",
    )
    (at / "src" / "model.safetensors").chmod(0o644)  # nginx works as another user
    server, url = serve(at, asked.rate * 1_000_000)
    seconds: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: []}
    try:
        for _ in range(asked.runs):
            for size, found in seconds.items():
                found.append(merge(f"{url}/src/model.safetensors", at / "out.safetensors", size))
    finally:
        server.terminate()
        server.wait()
    assert ckpt_tools.diff(at / "src", at / "out.safetensors").is_same
    one = statistics.median(seconds[1])
    linear = {
        str(size): f"{one / statistics.median(found) / size:.2f}" for size, found in seconds.items()
    }
    speed = {
        str(size): f"{asked.gb * 1000 / statistics.median(found):.0f}"
        for size, found in seconds.items()
    }
    harness.show(
        f"{asked.gb:g} GB over HTTP, {asked.rate} MB/s a connection, by the number of processes",
        {str(size): found for size, found in seconds.items()},
        more={"MB/s": speed, "of linear": linear},
    )
    shutil.rmtree(at)


if __name__ == "__main__":
    main()
