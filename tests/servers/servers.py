"""Real S3 servers on loopback, started once a session: moto's, and Ceph's RadosGW where it is
installed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

KEY, SECRET = "testkey12345", "testsecret12345"
RADOSGW_NEEDS = ("radosgw", "ceph-mon", "ceph-osd", "ceph", "monmaptool", "radosgw-admin")


@dataclass(frozen=True)
class Server:
    """An S3 endpoint, and what reaches it."""

    name: str
    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        return {
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same for a process of its own: fsspec and botocore read it."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
        }

    def bucket(self, name: str) -> Any:
        """Makes a bucket and returns the file system."""
        fs = fsspec.filesystem("s3", **self.options, skip_instance_cache=True)
        with suppress(FileExistsError):
            fs.call_s3("create_bucket", Bucket=name)
        return fs

    def contents(self) -> set[tuple[str, str, str]]:
        """Returns bucket and key of each object, and of each open upload with its id."""
        found = set()
        fs = fsspec.filesystem("s3", **self.options, skip_instance_cache=True)
        for bucket in (each["Name"] for each in fs.call_s3("list_buckets")["Buckets"]):
            found |= {(bucket, path.partition("/")[2], "") for path in fs.find(bucket)}
            uploads = fs.call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", ())
            found |= {(bucket, each["Key"], each["UploadId"]) for each in uploads}
        return found

    def remove(self, contents: set[tuple[str, str, str]]) -> None:
        """Removes objects and open uploads."""
        fs = fsspec.filesystem("s3", **self.options, skip_instance_cache=True)
        for bucket, key, upload in contents:
            if upload:
                fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)
            else:
                fs.call_s3("delete_object", Bucket=bucket, Key=key)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def running(name: str, directory: Path) -> Iterator[Server]:
    """Yields a server, and stops it."""
    for _ in range(2):  # Ceph's start fails now and then
        port = free_port()
        if name == "moto":
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        else:
            command = [
                "bash",
                str(Path(__file__).with_name("radosgw.sh")),
                str(directory / "ceph"),
                str(port),
                str(free_port()),
            ]
        with (directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"AWS_ACCESS_KEY_ID": "x"},
            )
        try:
            if answers(port, process):
                yield Server(name, f"http://127.0.0.1:{port}")
                return
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(directory / "ceph", ignore_errors=True)
    raise RuntimeError(f"{name} does not start: {(directory / f'{name}.log').read_text()[-2000:]}")


def answers(port: int, process: subprocess.Popen[bytes], seconds: float = 90.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2).close()
            return True
        except urllib.error.HTTPError as error:
            error.close()
            return True
        except OSError:
            time.sleep(0.1)
    return False


def missing(name: str) -> str:
    """Says why a server cannot be started here, or nothing."""
    absent = (
        [program for program in RADOSGW_NEEDS if shutil.which(program) is None]
        if name == "radosgw"
        else []
    )
    return f"not installed: {', '.join(absent)}" if absent else ""


def storage_words(server: Server) -> list[str]:
    """Returns a server's storage options as the command line takes them."""
    return [
        word
        for key, value in _flat(server.options)
        for word in ("--storage-option", f"{key}={value}")
    ]


def _flat(options: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in options.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield above + key, json.dumps(value)
