"""The report's numbers, and its page in a real browser without a network."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager, PlanError, StorageError
from ckpt_tools.operations.report.page import render_page
from ckpt_tools.operations.report.report import report_data

Run = Callable[..., subprocess.CompletedProcess[str]]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BAD_NAME = "a.<script>document.title='taken'</script>.0.w&amp;"


class Page:
    """A page in a browser without a network, and what went wrong in it."""

    def __init__(self, context: Any) -> None:
        self.page, self.wrong = context.new_page(), list[str]()
        self.page.on("console", lambda m: self.wrong.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("file:", "blob:", "data:")):
            self.wrong.append(f"it asked for {request.url}")

    def open(self, path: Path) -> Page:
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready]", timeout=60_000)
        return self

    def chart(self, name: str) -> list[dict[str, Any]]:
        """The traces of a chart, as the library has them."""
        script = "id => document.getElementById(id).data.map(t => JSON.parse(JSON.stringify(t)))"
        found: list[dict[str, Any]] = self.page.evaluate(script, name)
        return found

    def rows(self, table: str) -> list[list[str]]:
        script = (
            "id => [...document.querySelectorAll(`#${id} tbody tr`)]"
            ".map(tr => [...tr.children].map(td => td.textContent))"
        )
        found: list[list[str]] = self.page.evaluate(script, table)
        return found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any) -> Iterator[Page]:
    context = chromium.new_context(offline=True)
    yield Page(context)
    context.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with statistics and metrics; the last one has NaN, the first one is thinned."""
    root = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"layers": nn.ModuleList(nn.Linear(20, 20) for _ in range(3)), "head": nn.Linear(20, 4)}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(root, statistics=True, keep_last=None) as checkpoints:
        for step in range(1, 5):
            x = torch.ones(2, 20)
            for layer in model["layers"]:
                x = layer(x)
            model["head"](x).square().mean().backward()
            optimizer.step()
            if step == 4:
                with torch.no_grad():
                    model["head"].bias[1] = math.nan
            checkpoints.save(step, state, metrics={"loss": 5 - step})
    ckpt_tools.thin(root, 2)
    return root


@pytest.mark.slow
def test_the_page_of_a_run_shows_its_numbers(run: Path, tmp_path: Path, page: Page) -> None:
    ckpt_tools.report(run, output=tmp_path / "run.html")
    page.open(tmp_path / "run.html")
    steps = ckpt_tools.du(run)
    model, optimizer, other = page.chart("steps")
    assert model["x"] == [1, 2, 3, 4] and model["y"] == [one.model for one in steps]
    assert optimizer["y"] == [one.optimizer for one in steps] and optimizer["y"][0] == 0
    assert other["y"] == [one.other for one in steps]
    (loss,) = page.chart("metric-0")
    assert (loss["name"], loss["y"]) == ("loss", [4, 3, 2, 1])
    sealed = ckpt_tools.steps(run)[2].manifest
    assert sealed is not None
    change = norm = 0.0
    for name, tensor in sealed.tensors.items():
        found = tensor.statistics
        if name.startswith("model.") and found and found.change_rms is not None:
            change += found.change_rms**2 * found.numel
            norm += found.rms**2 * found.numel
    (drift,) = page.chart("drift")
    assert drift["y"][0] is None
    assert drift["y"][2] == pytest.approx(math.sqrt(change / norm), rel=1e-3)
    assert page.page.text_content("#verdict") == "4 complete steps, not finite: step 4"
    table = page.rows("steps-table")
    assert [row[4] for row in table] == ["yes", "yes", "yes", "no"]
    assert table[0][5] == "thinned: no optimizer"
    assert page.wrong == []


def test_the_page_of_a_checkpoint_shows_its_numbers(run: Path, tmp_path: Path, page: Page) -> None:
    ckpt_tools.report(run / "step-00000003", output=tmp_path / "one.html")
    page.open(tmp_path / "one.html")
    stats = ckpt_tools.stats(run / "step-00000003").tensors
    (heat,) = page.chart("heat")
    assert heat["x"] == ["–", "0", "1", "2"]
    at = heat["y"].index("model.layers.*.weight")
    want = [stats[f"model.layers.{n}.weight"].rms for n in range(3)]
    assert heat["customdata"][at][1:] == pytest.approx(want, rel=1e-3)
    assert heat["z"][at][1:] == pytest.approx([math.log10(v) for v in want], rel=1e-3)
    page.page.select_option("#health select >> nth=1", "max")
    (heat,) = page.chart("heat")
    want = [stats[f"model.layers.{n}.weight"].max_abs for n in range(3)]
    assert heat["customdata"][at][1:] == pytest.approx(want, rel=1e-3)
    (tree,) = page.chart("treemap")
    sums = dict(zip(tree["ids"], tree["values"], strict=True))
    assert sums["weights"] == sums["exp_avg"] == 4 * (3 * 420 + 84)
    (files,) = page.chart("files")
    assert files["y"] == [(run / "step-00000003" / "__0_0.distcp").stat().st_size]
    page.page.click("#tensors .more")
    rows = page.rows("tensor-table")
    assert len(rows) == len(stats) and {row[0] for row in rows} == set(stats)
    page.page.fill("#tensors input", "layers.1.weight")
    assert len(page.rows("tensor-table")) == 4  # weight, two moments, and a step
    assert page.wrong == []


def test_the_keyboard_the_dark_and_paper(run: Path, tmp_path: Path, chromium: Any) -> None:
    ckpt_tools.report(run, output=tmp_path / "run.html")
    context = chromium.new_context(
        offline=True, color_scheme="dark", viewport={"width": 390, "height": 800}
    )
    page = Page(context).open(tmp_path / "run.html")
    paper = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(20, 23, 28)"
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
    reached = set()
    for _ in range(60):
        page.page.keyboard.press("Tab")
        reached.add(page.page.evaluate("document.activeElement.tagName"))
    assert {"A", "SELECT", "INPUT", "BUTTON"} <= reached
    sizes = "#tensor-table th:nth-child(4) button"
    page.page.focus(sizes)
    page.page.keyboard.press("Enter")
    first = page.rows("tensor-table")[0][0]
    assert "layers" in first and first.endswith(("weight", "exp_avg", "exp_avg_sq"))
    page.page.emulate_media(media="print")
    assert page.page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.wrong == []
    context.close()


def test_no_word_is_broken_and_every_label_can_be_read(
    run: Path, tmp_path: Path, chromium: Any
) -> None:
    ckpt_tools.report(run / "step-00000003", output=tmp_path / "one.html")
    context = chromium.new_context(offline=True, viewport={"width": 1280, "height": 800})
    page = Page(context).open(tmp_path / "one.html")
    lines = page.page.evaluate(
        "[...document.querySelectorAll('td, th button')].map(c => {const r = document.createRange();"
        " r.selectNodeContents(c); return new Set([...r.getClientRects()].map(b => b.top)).size})"
    )
    assert len(lines) > 50 and max(lines) == 1
    (tree,) = page.chart("treemap")
    colors = set(tree["marker"]["colors"])
    assert tree["textfont"]["color"] == "#ffffff" and len(colors) >= 3
    for color in colors:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        luminance = sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
        assert 1.05 / (luminance + 0.05) >= 4.5, color  # WCAG 2.2, 1.4.3
    assert page.wrong == []
    context.close()


def test_the_page_says_what_is_there_twice_what_stood_still_and_what_check_says(
    tmp_path: Path, page: Page
) -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    with torch.no_grad():
        model["b"].weight.copy_(model["a"].weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    with CheckpointManager(tmp_path / "run", keep_last=None) as checkpoints:
        for step in range(1, 4):
            sum(model[k](torch.ones(1, 8)).sum() for k in "ab").backward()
            optimizer.step()
            checkpoints.save(step, {"model": model, "optimizer": optimizer})
    ckpt_tools.report(tmp_path / "run", output=tmp_path / "run.html")
    page.open(tmp_path / "run.html")
    text = str(page.page.text_content("#check"))
    told = [str(problem) for problem in ckpt_tools.check_run(tmp_path / "run")]
    assert len(told) == 2 and all(problem in text for problem in told)
    assert "2 of 8 tensors of step 3 (512 B) are the same as in step 2" in text
    assert ["model.a.weight, model.b.weight", "2", "256 B"] in page.rows("duplicate-table")
    assert page.wrong == []


def test_names_of_a_checkpoint_stay_text(tmp_path: Path, page: Page) -> None:
    state = {BAD_NAME: torch.ones(3), "x</script><img src=x onerror=alert(1)>": torch.ones(2)}
    save_file(state, tmp_path / "a.safetensors")
    ckpt_tools.report(tmp_path / "a.safetensors", output=tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    assert "taken" not in text and "onerror" not in text
    page.open(tmp_path / "a.html")
    assert {row[0] for row in page.rows("tensor-table")} == set(state)
    assert page.page.title().startswith("ckpt report") and page.wrong == []
    shown = page.page.evaluate("document.getElementById('heat').textContent")
    assert "<script>" in shown  # as text
    assert page.page.evaluate("document.querySelectorAll('img').length") == 0


def test_two_checkpoints(run: Path, tmp_path: Path, page: Page) -> None:
    a, b = run / "step-00000002", run / "step-00000003"
    ckpt_tools.report(a, b, output=tmp_path / "d.html")
    page.open(tmp_path / "d.html")
    found = {d.fqn: d for d in ckpt_tools.diff(a, b).differences}
    rows = page.rows("difference-table")
    assert {row[0] for row in rows} == set(found)
    norms = {
        name: one.rel_norm
        for name, one in found.items()
        if not one.is_object and one.rel_norm is not None
    }
    (bars,) = page.chart("largest")
    shown = dict(zip(bars["y"], bars["x"], strict=True))
    assert shown == pytest.approx(
        {n: v for n, v in norms.items() if n.startswith("model")}, rel=1e-3
    )
    assert bars["x"] == sorted(bars["x"])
    (heat,) = page.chart("heat")
    at = heat["y"].index("model.layers.*.weight")
    want = [norms[f"model.layers.{n}.weight"] for n in range(3)]
    assert heat["customdata"][at][-3:] == pytest.approx(want, rel=1e-3)
    assert "only in B" in str(page.page.text_content("#differences"))  # a is thinned
    assert page.wrong == []


@pytest.mark.slow
def test_twenty_thousand_tensors_and_a_hundred_steps(tmp_path: Path, page: Page) -> None:
    """Both are fluid: a table shows the first rows only."""
    tensor = {"dtype": "float32", "shape": [8, 8], "nbytes": 256, "kind": "weights", "rms": 0.5}
    tensor |= {"max": 2.0, "zeros": 0.0, "nan": 0, "inf": 0, "change": 0.1}
    many = [{**tensor, "name": f"layers.{i // 100}.m{i % 100}.w"} for i in range(20_000)]
    data = {"kind": "checkpoint", "name": "many", "made": "now", "tool": "x", "verdict": "finite"}
    data |= {"problems": [], "not_finite": [], "next": [], "is_measured": True, "files": []}
    (tmp_path / "many.html").write_bytes(render_page({**data, "tensors": many}))
    page.open(tmp_path / "many.html")
    (heat,) = page.chart("heat")
    assert len(heat["x"]) == 200 and len(heat["y"]) == 100
    assert len(page.rows("tensor-table")) == 25
    page.page.click("#tensors .more")
    assert len(page.rows("tensor-table")) == 100
    assert page.wrong == []


def test_values_without_statistics_are_read_or_not(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, math.nan])}, tmp_path / "a.safetensors")
    data = ckpt_tools.report_data(tmp_path / "a.safetensors")
    assert data["not_finite"] == ["w"] and data["verdict"] == "not finite: NaN or infinity in w"
    data = ckpt_tools.report_data(tmp_path / "a.safetensors", read_values=False)
    assert not data["is_measured"] and "values not measured" in data["verdict"]


def test_a_damaged_checkpoint_is_the_verdict(run: Path, tmp_path: Path, page: Page) -> None:
    shutil.copytree(run / "step-00000003", tmp_path / "step-3")
    (tmp_path / "step-3" / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(ckpt_tools.CheckpointError):
        ckpt_tools.inspect(tmp_path / "step-3")
    data = ckpt_tools.report_data(tmp_path / "step-3")
    assert data["verdict"].startswith("damaged") and "ckpt salvage" in " ".join(data["next"])
    ckpt_tools.report(tmp_path / "step-3", output=tmp_path / "bad.html")
    page.open(tmp_path / "bad.html")
    assert page.page.get_attribute("#verdict", "class") == "verdict bad" and page.wrong == []


def test_what_is_refused(run: Path, tmp_path: Path, ckpt: Run) -> None:
    with pytest.raises(PlanError, match=r"ends in \.html"):
        ckpt_tools.report(run, output=tmp_path / "a.txt")
    ckpt_tools.report(run, output=tmp_path / "a.html")
    with pytest.raises(StorageError, match="it exists"):
        ckpt_tools.report(run, output=tmp_path / "a.html")
    assert ckpt("report", run, "-o", tmp_path / "a.html", "--overwrite").returncode == 0
    (tmp_path / "link.html").symlink_to("nowhere.html")
    assert ckpt("report", run, "-o", tmp_path / "link.html").returncode == 15
    assert "a local file" in ckpt("report", run, "-o", "s3://b/x.html").stderr
    (tmp_path / "link.html").unlink()
    assert ckpt("report", run).returncode == 2
    assert ckpt("report", run, "--json", "-o", tmp_path / "b.html").returncode == 2
    assert json.loads(ckpt("report", run, "--json").stdout)["newest"] == 4
    assert ckpt("report", tmp_path / "nothing", "-o", tmp_path / "c.html").returncode == 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html"]


def test_a_plot(run: Path, tmp_path: Path, ckpt: Run) -> None:
    done = ckpt("report", run, "--select", "model.layers.*", "--png", tmp_path / "a.png")
    assert done.returncode == 0 and "6 tensors" in done.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    done = ckpt("report", run, "--select", "*", "--value", "change", "--png", tmp_path / "b.svg")
    assert done.returncode == 0 and "range of" in (tmp_path / "b.svg").read_text()
    assert ckpt("report", run, "--select", "zz*", "--png", tmp_path / "c.png").returncode == 13
    bad = ckpt("report", run, "--select", "*", "--value", "size", "--png", tmp_path / "c.png")
    assert bad.returncode == 13 and "expected one of rms" in bad.stderr
    assert not (tmp_path / "c.png").exists()
    again = ckpt("report", run, "--select", "*", "--png", tmp_path / "b.svg")
    assert again.returncode == 15 and "--overwrite replaces it" in again.stderr
    assert (
        ckpt("report", run, "--select", "*", "--png", tmp_path / "b.svg", "--overwrite").returncode
        == 0
    )


def test_a_page_is_written_whatever_is_damaged(tmp_path: Path, ckpt: Run) -> None:
    """Some kinds of damage ended in an error, and there was no page."""
    here = tmp_path / "here"
    for name in "abcd":
        ckpt_tools.save(here / name, {"w": torch.arange(100.0)})
    (here / "b" / ".metadata").write_bytes(b"garbage")
    (here / "c" / ".metadata").unlink()
    data = next((here / "d").glob("*.distcp"))
    changed = bytearray(data.read_bytes())
    changed[3] ^= 1
    data.write_bytes(changed)
    (here / "empty.safetensors").touch()
    (here / "short.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{}")
    for sources in (["b"], ["c"], ["d"], ["a", "b"], ["empty.safetensors"], ["short.safetensors"]):
        page = tmp_path / f"{'-'.join(sources)}.html"
        done = ckpt("report", *(here / name for name in sources), "-o", page)
        assert done.returncode == 0 and page.exists(), (sources, done.stderr)
        done = ckpt("report", *(here / name for name in sources), "--json")
        found = json.loads(done.stdout)
        assert "damaged" in found["verdict"] and found["problems"], (sources, found["verdict"])
    assert ckpt("report", here / "none", "-o", tmp_path / "none.html").returncode == 10
    assert not (tmp_path / "none.html").exists()


@pytest.mark.slow
def test_a_page_of_damaged_values_is_written(tmp_path: Path, page: Page) -> None:
    """Values without statistics are read, and one of their bits has flipped."""
    model = {"w": torch.arange(1000.0)}
    with CheckpointManager(tmp_path / "run", statistics=False) as checkpoints:
        checkpoints.save(1, {"model": model}, asynchronous=False)
    path = tmp_path / "run" / "step-00000001"
    data = ckpt_tools.report_data(path)
    assert data["verdict"].startswith("sealed, its tensors are as they were written, finite")
    unread = ckpt_tools.report_data(path, read_values=False)
    assert "no data were read: ckpt verify" in unread["verdict"]
    file = next(path.glob("*.distcp"))
    changed = bytearray(file.read_bytes())
    changed[len(changed) // 2] ^= 4
    file.write_bytes(changed)
    ckpt_tools.report(path, output=tmp_path / "bad.html")
    page.open(tmp_path / "bad.html")
    assert page.page.get_attribute("#verdict", "class") == "verdict bad" and page.wrong == []
    assert ckpt_tools.report_data(path)["verdict"].startswith("damaged: ")


def test_a_step_that_is_there_twice_counts_for_neither(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "run"
    shutil.copytree(run, there)
    shutil.copytree(there / "step-00000004", there / "step-4")
    data = ckpt_tools.report_data(there)
    told = {problem.step for problem in ckpt_tools.check_run(there) if problem.kind == "twice"}
    assert told == {4} and data["verdict"].startswith("3 complete steps, 1 there twice")
    assert any("neither counts" in problem for problem in data["problems"])


def test_a_step_without_a_manifest_is_named_as_check_names_it(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (manifest,) = (tmp_path / "run" / "step-00000004").glob("ckpt.manifest.*")
    manifest.unlink()
    (problem,) = [p for p in ckpt_tools.check_run(tmp_path / "run") if p.kind == "unsealed"]
    data = ckpt_tools.report_data(tmp_path / "run")
    assert f"step 4: {problem.text}" in data["problems"]
    assert data["verdict"].startswith("3 complete steps, 1 without a manifest, not counted")


def test_what_to_do_about_two_checkpoints_is_said_of_each(tmp_path: Path) -> None:
    for name in ("a", "b"):
        ckpt_tools.save(tmp_path / name, {"w": torch.ones(2)})
    next((tmp_path / "a").glob("*.distcp")).unlink()
    found = ckpt_tools.report_data(tmp_path / "a", tmp_path / "b")
    assert found["problems"] and found["next"] == [
        f"ckpt {words}"
        for name in ("a", "b")
        for words in (f"verify {tmp_path / name}", f"salvage {tmp_path / name} OUT")
    ]


@pytest.mark.slow
def test_what_differs_is_told_in_red_and_counted_by_kind(tmp_path: Path, page: Page) -> None:
    for name, more in (("a", {"n": 1, "x": torch.ones(2)}), ("b", {"n": 2, "y": torch.ones(2)})):
        ckpt_tools.save(tmp_path / name, {"w": torch.ones(2), "v": torch.ones(3), **more})
    ckpt_tools.report(tmp_path / "a", tmp_path / "b", output=tmp_path / "d.html")
    page.open(tmp_path / "d.html")
    assert page.page.get_attribute("#verdict", "class") == "verdict bad" and page.wrong == []
    verdict = str(page.page.text_content("#verdict"))
    for text in ("1 objects with other values", "1 only in the first", "1 only in the second"):
        assert text in verdict, verdict
    assert "tensors with other values" not in verdict


def test_a_pointer_of_git_lfs_is_to_be_fetched(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    data = report_data(tmp_path / "model.safetensors")
    assert data["next"] == ["git lfs pull"] and "Git LFS" in data["verdict"]
