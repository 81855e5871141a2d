"""What a job may do in a bucket, and until when: it needs no more than `docs/object-stores.md`
says, and cleaning up is optional.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

import ckpt_tools
from ckpt_tools import CheckpointManager, StorageError
from tests.command import run_ckpt
from tests.conftest import HERE
from tests.servers.buckets import deny, save_locally
from tests.servers.faults import Breaker, before
from tests.servers.servers import Server


@pytest.fixture
def bucket(server: Server) -> Iterator[Any]:
    if server.name == "moto":
        pytest.skip("it accepts any request, whatever the policy says")
    fs = server.bucket("policed")
    yield fs
    fs.call_s3("delete_bucket_policy", Bucket="policed")
    fs.rm("policed", recursive=True)


def test_a_job_that_may_not_list_uploads_saves_and_prunes_with_a_warning(
    bucket: Any, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    deny(bucket, "policed", "s3:ListBucketMultipartUploads")
    with CheckpointManager(
        "s3://policed/run", storage_options=server.options, keep_last=1
    ) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.ones(3)}, asynchronous=False)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [
        w for w in warnings if "s3:ListBucketMultipartUploads" in w and "unfinished uploads" in w
    ], warnings
    done = run_ckpt("prune", "s3://policed/run", "--keep-last", "1", **server.environment)
    assert done.returncode == 0 and "s3:ListBucketMultipartUploads" in done.stderr, done.stderr
    assert [
        s.number for s in ckpt_tools.steps("s3://policed/run", storage_options=server.options)
    ] == [2]


def policies() -> dict[str, list[str]]:
    """The policies of the page, by the name of each."""
    text = (HERE.parent / "docs" / "object-stores.md").read_text()
    return {
        name: json.loads(body)["Statement"]
        for name, body in re.findall(r"<!-- policy: (\w+) -->\s+```json\n(.*?)```", text, re.DOTALL)
    }


def test_the_policies_of_the_page_are_enough(bucket: Any, server: Server, tmp_path: Path) -> None:
    """Whatever a policy does not name is refused; the verbs that it is for work."""
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": torch.ones(3_000_000)}, asynchronous=False)
    source, options = tmp_path / "run" / "step-00000001", {"storage_options": server.options}
    everything = {
        "s3:ListBucket",
        "s3:GetObject",
        "s3:PutObject",
        "s3:DeleteObject",
        "s3:AbortMultipartUpload",
        "s3:ListMultipartUploadParts",
        "s3:ListBucketMultipartUploads",
        "s3:GetBucketLocation",
    }
    allowed = {
        name: {action for s in found for action in s["Action"]}
        for name, found in policies().items()
    }
    assert set(allowed) == {"read", "write"}

    deny(bucket, "policed", *sorted(everything - allowed["write"]))
    ckpt_tools.copy(source, "s3://policed/run/step-00000001", **options)
    ckpt_tools.merge("s3://policed/run", "s3://policed/m.safetensors", **options)
    ckpt_tools.reshard("s3://policed/run/step-00000001", "s3://policed/two", to_ranks=2, **options)
    ckpt_tools.reshard(
        "s3://policed/run/step-00000001", "s3://policed/two", to_ranks=2, overwrite=True, **options
    )
    with CheckpointManager("s3://policed/run", keep_last=1, **options) as checkpoints:
        state = {"w": torch.zeros(3_000_000)}
        assert checkpoints.resume(state) == 1
        checkpoints.save(2, state, asynchronous=False)

    deny(bucket, "policed", *sorted(everything - allowed["read"]))
    for words in (
        ("inspect", "s3://policed/two"),
        ("verify", "s3://policed/two"),
        ("ls", "s3://policed/run"),
        ("latest", "s3://policed/run"),
        ("diff", "s3://policed/two", "s3://policed/two"),
        ("copy", "s3://policed/two", str(tmp_path / "two")),
        ("merge", "s3://policed/two", str(tmp_path / "m.safetensors")),
    ):
        done = run_ckpt(*words, **server.environment)
        assert done.returncode == 0, (words, done.stderr)


class Expiring(Breaker):
    """Answers as S3 does once a token has expired, from the first request of a kind on."""

    def arm(self, method: str, words: str) -> None:
        self.trigger, self.after = (method, words), list[str]()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.after or (request.method == self.trigger[0] and self.trigger[1] in request.path_qs):
            await request.read()
            self.after.append(request.method)
            text = (
                "<Error><Code>ExpiredToken</Code><Message>The provided token has"
                " expired.</Message></Error>"
            )
            return web.Response(
                status=400,
                body=None if request.method == "HEAD" else text.encode(),
                content_type="application/xml",
            )
        return await super().handle(request)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trigger",
    [("PUT", "partNumber=2"), ("POST", "uploadId="), ("PUT", "manifest"), ("PUT", ".metadata")],
)
def test_a_token_that_expires_during_an_upload_is_the_reason_that_is_told(
    trigger: tuple[str, str], server: Server, tmp_path: Path
) -> None:
    server.bucket("expiring")
    save_locally(tmp_path / "run", {"w": torch.arange(3_000_000.0)})
    breaker = Expiring(server.endpoint, 0.0, (), True, 0, random.Random(0))
    breaker.arm(*trigger)
    target = f"s3://expiring/{trigger[1].strip('=.')}"
    with (
        before(breaker) as url,
        pytest.raises(StorageError, match="ExpiredToken|expired") as caught,
    ):
        ckpt_tools.reshard(
            tmp_path / "run",
            target,
            to_ranks=1,
            storage_options=replace(server, endpoint=url).options,
        )
    assert caught.value.hint == "the credentials are wrong or have expired", caught.value
    # botocore asks for the region, too
    assert breaker.after.count("HEAD") <= 2 and len(breaker.after) <= 8, breaker.after
