"""Secrets of URLs are shown and stored nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from ckpt_tools.errors import redacted
from tests.attacks.hostile import Run
from tests.servers.faults import serving

SIGNED = "X-Amz-Signature=5ecret1&X-Amz-Credential=AKIA5ecret2&sig=5ecret3"


@pytest.mark.slow
def test_secrets_of_urls_are_nowhere(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors")

    async def answer(request: web.Request) -> web.StreamResponse:
        path = tmp_path / request.path.lstrip("/")
        return web.FileResponse(path) if path.is_file() else web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    with serving(app) as url:
        signed = f"{url.replace('://', '://user:5ecret0@')}/m.safetensors?{SIGNED}"
        ckpt = Path(sys.executable).with_name("ckpt")
        for words in (
            ["merge", signed, "out.safetensors", "--json"],
            ["convert", signed, "out", "--to", "dcp", "--json"],
            ["copy", signed, "c.safetensors", "--json"],
            ["inspect", signed],
            ["inspect", signed, "--json"],
            ["verify", signed],
            ["merge", signed.replace("m.", "no."), "x.safetensors"],
            ["merge", f"s3://user:5ecret4@bucket/x?{SIGNED}", "x.safetensors"],
            ["diff", signed, signed, "--json"],
        ):
            done = subprocess.run(
                [ckpt, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
            )
            assert "5ecret" not in done.stdout + done.stderr, (words, done.stdout, done.stderr)
        assert done.returncode == 0, done.stderr
    for path in tmp_path.rglob("*.json"):
        assert b"5ecret" not in path.read_bytes(), path
    assert list(tmp_path.glob("out.safetensors.ckpt.manifest*"))


def test_logs_have_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    from ckpt_tools.core.logs import log

    log.warning("%s: %s", f"https://me:5ecret@host/x?{SIGNED}", "why")
    assert "5ecret" not in caplog.text and "host/x" in caplog.text
    assert redacted("s3://bucket/a@b/c?x=1") == "s3://bucket/a@b/c?x=***"


@pytest.mark.parametrize(
    "url",
    [
        "http://user:5ecr/et1@host/x",
        "http://user:a@5ecret1@host/x",
        "http://user:5ecret1@host/x",
        "http://user:5e cret 5ecret1@host/x",
        "https://host/x?private_token=5ecret1",
        "https://host/x?X%2DAmz%2DSignature=5ecret1",
        "https://host/x?a=1;sig=5ecret1",
        "https://host/x?client_secret=(5ecret1",
        "https://host/x#access_token=5ecret1",
        "abfs://container@host:5ecret1/x",
    ],
)
def test_no_secret_of_a_url_is_shown(url: str) -> None:
    shown = redacted(f"cannot read: {url} (again)")
    assert "5ecr" not in shown and "et1" not in shown and "host" in shown and "again" in shown
    for plain in (
        "http://localhost:9000/a@b/c",
        "http://[::1]:9000/a",
        "cannot: s3://bucket: no",
        "s3://bucket/run@v2/step",
        "file:///a/b@c",
    ):
        assert redacted(plain) == plain


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify"])
def test_a_login_that_another_package_repeats_is_hidden(verb: str, ckpt: Run) -> None:
    for url in ("hf://5ecretuser@x/y", "hf://me:5ecretword@x"):
        done = ckpt(verb, url, "--json")
        assert done.returncode and "5ecret" not in done.stdout + done.stderr, done
