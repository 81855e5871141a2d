"""The second client for reading S3: when it is asked, what it is told, and that s3fs goes on where
it does not.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ckpt_tools import StorageError
from ckpt_tools.storage import RemoteStore, read
from ckpt_tools.storage.base import Traffic
from ckpt_tools.storage.s3 import obstore_client as fast
from ckpt_tools.storage.s3.client import S3
from tests.servers.faults import faulty, watched
from tests.servers.servers import KEY, SECRET, Server

pytest.importorskip("obstore")
MIB = 1 << 20
ODD = "__0_0 ü#%?+&=~.distcp"


@pytest.fixture
def automatic(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is where nobody has chosen."""
    monkeypatch.delenv("CKPT_S3_CLIENT")


@pytest.fixture
def objects(server: Server) -> dict[str, bytes]:
    """A large object, one with an odd name, and a small one, in `s3://fast/run/`."""
    fs = server.bucket("fast")
    made = {"big": os.urandom(9 * MIB), ODD: os.urandom(MIB), "small": os.urandom(1000)}
    fs.pipe({f"fast/run/{name}": data for name, data in made.items()})
    return made


Asked = Callable[..., tuple[dict[str, bytes], list[tuple[str, dict[str, str], int]]]]


@pytest.fixture
def asked(server: Server, objects: dict[str, bytes]) -> Asked:
    """Reads all objects through a proxy; tells what came, and of each read who asked, the headers
    and the status.
    """

    def ask(url: str = "s3://fast/run", **options: Any) -> Any:
        with watched(server.endpoint) as (endpoint, passed):
            store = RemoteStore(
                url,
                server.options | {"endpoint_url": endpoint, "skip_instance_cache": True} | options,
            )
            store.will_read([("big", 0, 9 * MIB)], is_all=True)
            came = {name: read(store, name) for name in objects}
            store.close()
        reads = [(r, status) for r, status in passed if r.method == "GET" and "Range" in r.headers]
        return came, [
            (
                "obstore" if "object_store" in r.headers["User-Agent"] else "s3fs",
                dict(r.headers),
                status,
            )
            for r, status in reads
        ]

    return ask


def test_what_is_large_is_read_by_it_and_what_is_small_is_not(
    automatic: None, asked: Asked, objects: dict[str, bytes]
) -> None:
    came, reads = asked()
    assert came == objects
    assert [who for who, _, _ in reads] == ["obstore"] * 5 + ["s3fs"] and {
        status for _, _, status in reads
    } == {206}
    assert all(headers.get("If-Match", headers.get("if-match")) for _, headers, _ in reads)


def test_a_person_chooses(client: str, asked: Asked, objects: dict[str, bytes]) -> None:
    came, reads = asked()
    assert came == objects and {who for who, _, _ in reads} == {client}


@pytest.mark.parametrize("value", ["obstor", "boto3"])
def test_a_choice_that_there_is_not_is_one_clear_line(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_S3_CLIENT", value)
    with pytest.raises(StorageError, match=f"CKPT_S3_CLIENT is s3fs or obstore, got '{value}'"):
        RemoteStore("s3://bucket/run", {"key": "a", "secret": "b"})


def test_a_chosen_one_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = (
        "import sys; sys.modules['obstore'] = None; from ckpt_tools.storage import RemoteStore;"
        " RemoteStore('s3://b/k', {'key': 'a'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden],
        env=os.environ | {"CKPT_S3_CLIENT": "obstore"},
        capture_output=True,
        text=True,
    )
    assert "CKPT_S3_CLIENT=obstore, which is not installed" in done.stderr, done.stderr
    subprocess.run([sys.executable, "-c", hidden], check=True)


# ---- what it is told -----------------------------------------------------------------------------


def test_who_pays_is_told(automatic: None, asked: Asked, objects: dict[str, bytes]) -> None:
    came, reads = asked(requester_pays=True)
    assert came == objects and {who for who, _, _ in reads} == {"obstore", "s3fs"}
    assert all(
        {k.lower(): v for k, v in headers.items()}["x-amz-request-payer"] == "requester"
        for _, headers, _ in reads
    )


def test_credentials_are_those_that_s3fs_has_and_not_the_environments(
    automatic: None, asked: Asked, objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "of-another-account")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    came, reads = asked()
    assert (
        came == objects
        and "obstore" in {who for who, _, _ in reads}
        and {status for _, _, status in reads} == {206}
    )
    assert not any("of-another-account" in str(headers) for _, headers, _ in reads)


def test_credentials_that_a_program_gives_out_are_renewed(
    automatic: None,
    server: Server,
    objects: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # so soon that botocore asks the program every time
    until = (dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1)).isoformat()
    (tmp_path / "given.json").write_text(
        json.dumps(
            {"Version": 1, "AccessKeyId": KEY, "SecretAccessKey": SECRET, "Expiration": until}
        )
    )
    (tmp_path / "give").write_text(f"echo asked >> {tmp_path}/asked\ncat {tmp_path}/given.json\n")
    (tmp_path / "config").write_text(
        f"[profile given]\ncredential_process = sh {tmp_path}/give\nregion = us-east-1\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setattr(fast, "_FRESH", dt.timedelta(0))
    fs = fsspec.filesystem(
        "s3",
        skip_instance_cache=True,
        **server.options | {"key": None, "secret": None, "profile": "given"},
    )
    client, asked = S3(fs, Traffic()).server.fast, []
    for _ in range(3):
        assert client.get(fs, "fast", "run/big", 0, MIB, None) == objects["big"][:MIB]
        asked.append(len((tmp_path / "asked").read_text().splitlines()))
    assert asked[0] < asked[1] < asked[2]


def test_a_public_object_is_read_without_credentials(
    automatic: None, asked: Asked, server: Server, objects: dict[str, bytes]
) -> None:
    fs = server.bucket("fast")
    for name in objects:
        fs.call_s3("put_object_acl", Bucket="fast", Key=f"run/{name}", ACL="public-read")
    fs.call_s3("put_bucket_acl", Bucket="fast", ACL="public-read")
    came, reads = asked(key=None, secret=None, anon=True)
    assert (
        came == objects
        and "obstore" in {who for who, _, _ in reads}
        and {status for _, _, status in reads} == {206}
    )
    assert not any("authorization" in {k.lower() for k in headers} for _, headers, _ in reads)


def test_what_it_cannot_be_told_is_read_by_s3fs(
    automatic: None, asked: Asked, objects: dict[str, bytes], server: Server
) -> None:
    if server.name != "moto":
        pytest.skip("a RadosGW takes such a key by https only")
    customer = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "0" * 32}
    came, reads = asked(s3_additional_kwargs=customer)
    assert came == objects and {who for who, _, _ in reads} == {"s3fs"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "bucket", "endpoint"),
    [
        ({}, "plain", "https://plain.s3.eu-west-1.amazonaws.com"),
        ({}, "with.dots", "https://s3.eu-west-1.amazonaws.com/with.dots"),
        ({"endpoint_url": "http://127.0.0.1:9000"}, "plain", "http://127.0.0.1:9000/plain"),
        (
            {
                "endpoint_url": "https://store.example/base",
                "config_kwargs": {"s3": {"addressing_style": "path"}},
            },
            "plain",
            "https://store.example/base/plain",
        ),
        (
            {
                "endpoint_url": "https://store.example",
                "config_kwargs": {"s3": {"addressing_style": "virtual"}},
            },
            "plain",
            "https://plain.store.example",
        ),
        (
            {"config_kwargs": {"s3": {"use_dualstack_endpoint": True}}},
            "plain",
            "https://plain.s3.dualstack.eu-west-1.amazonaws.com",
        ),
        (
            {"client_kwargs": {"region_name": "cn-north-1"}},
            "plain",
            "https://plain.s3.cn-north-1.amazonaws.com.cn",
        ),
        ({"client_kwargs": {"region_name": "eu-west-1", "verify": "/own/ca.pem"}}, "plain", None),
        ({"config_kwargs": {"proxies": {"https": "http://proxy:1"}}}, "plain", None),
        ({}, "through-a-proxy", None),
        ({}, "fast--euw1-az1--x-s3", None),
        ({}, "arn:aws:s3:eu-west-1:123456789012:accesspoint/mine", None),
    ],
)
def test_a_bucket_is_reached_where_botocore_reaches_it(
    options: dict[str, Any], bucket: str, endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1" if bucket == "through-a-proxy" else "")
    options = {
        "key": "a",
        "secret": "b",
        "client_kwargs": {"region_name": "eu-west-1"},
        "skip_instance_cache": True,
    } | options
    fs = fsspec.filesystem("s3", **options)
    client = asyncio.run_coroutine_threadsafe(fast._open(fs, bucket), fs.loop).result()
    assert (client and client.config["endpoint"]) == endpoint


def test_a_trust_of_ones_own_is_left_to_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/own/ca.pem")
    for endpoint, is_left in (("https://store.example", True), ("http://store.example", False)):
        fs = fsspec.filesystem(
            "s3",
            key="a",
            secret="b",
            endpoint_url=endpoint,
            use_ssl=False,
            skip_instance_cache=True,
        )
        client = asyncio.run_coroutine_threadsafe(fast._open(fs, "plain"), fs.loop).result()
        assert (client is None) == is_left


# ---- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.slow
def test_what_fails_with_it_is_read_by_s3fs(
    automatic: None, server: Server, objects: dict[str, bytes]
) -> None:
    for seed, kind in enumerate(("503", "reset", "truncate")):
        with faulty(server.endpoint, 1.0, seed, (kind,), most=1) as (endpoint, log):
            store = RemoteStore(
                "s3://fast/run",
                server.options | {"endpoint_url": endpoint, "skip_instance_cache": True},
            )
            assert read(store, "big") == objects["big"] and log == [kind]
            store.close()


def test_it_rests_after_failures_in_a_row(
    automatic: None, server: Server, objects: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = fsspec.filesystem("s3", skip_instance_cache=True, **server.options)
    s3 = S3(fs, Traffic())

    def get(etag: str | None = None) -> bool:
        return s3.server.fast.get(fs, "fast", "run/big", 0, MIB, etag) is not None

    assert get()
    assert [get('"another"') for _ in range(4)] == [False] * 4 and not get()
    monkeypatch.setattr(s3.server.fast, "_rests_until", 0.0)
    assert get()


FORKED = """
import os, sys, time
from tests.servers.servers import Server
from ckpt_tools.storage import RemoteStore, read
server = Server("any", sys.argv[1])
def right(url):
    store = RemoteStore(url, server.options | {"skip_instance_cache": True})
    data = read(store, "big")
    store.close()
    return len(data) == 9 << 20
assert right("s3://fast/run")
child = os.fork()
if not child:
    os._exit(0 if right("s3://fast/run") else 1)
until = time.monotonic() + 60
while time.monotonic() < until:
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.05)
os.kill(child, 9)
sys.exit("the child hangs")
"""


def test_a_forked_process_reads_too(
    automatic: None, server: Server, objects: dict[str, bytes]
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, server.endpoint],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr


LEFT = """
import sys
from tests.servers.servers import Server
from ckpt_tools.storage import RemoteStore, prefetch, remote
prefetch.WINDOW_BYTES, remote.FRUGAL = 1 << 20, (2 << 20, 2 << 20)  # so that some have not begun
store = RemoteStore("s3://fast/run", Server("any", sys.argv[1]).options)
store.will_read([("big", n << 20, 1 << 20) for n in range(9)], is_all=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("last", ["", "store.close()", "raise KeyboardInterrupt"])
def test_a_process_that_ends_with_reads_on_their_way_ends_quietly(
    last: str, automatic: None, server: Server, objects: dict[str, bytes]
) -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", LEFT + last, server.endpoint],
            capture_output=True,
            text=True,
            timeout=60,
        )
        is_quiet = done.stderr == "" and done.returncode == 0
        assert is_quiet or (
            "Interrupt" in last
            and done.stderr.strip().endswith("KeyboardInterrupt")
            and done.returncode in (1, -2)
        ), done
