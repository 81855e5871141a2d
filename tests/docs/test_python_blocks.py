"""Every block of Python in README and docs runs as it is printed, after lines that make a small job.

Those of the how-to pages are in tests/peers/test_howto.py, since most need a trainer.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import run_job
from tests.jobs import PYTHON_PATH
from tests.servers import servers
from tests.servers.servers import Server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
ELSEWHERE = {"docs/tutorial.md"}  # test_tutorial.py; the how-to pages: see above
JOB = """
import json
from pathlib import Path

import torch
from torch import nn

import ckpt_tools
from ckpt_tools import CheckpointManager, Mirror, Outages, RngState

torch.manual_seed(0)
model = nn.ModuleDict({"embed": nn.Embedding(300, 4), "pos": nn.Linear(4, 3), "head": nn.Linear(4, 2)})
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
sum(p.sum() for p in model.parameters()).backward()
optimizer.step()
last = 1000
"""
STATE = 'state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}\n'
STEPS = """
state = {"model": model, "optimizer": optimizer}
with CheckpointManager("run", keep_last=None) as first:
    for number in (100, 200, 300):
        first.save(number, state, asynchronous=False)
checkpoints = CheckpointManager("run")
"""


def resuming(stored: str, present: str) -> str:
    """Returns the lines of a job whose model, `present`, differs from that of its checkpoint."""
    return f"""{JOB}
with CheckpointManager("run") as before:
    before.save(1, {{"model": nn.ModuleDict({stored})}})
state = {{"model": nn.ModuleDict({present})}}
checkpoints = CheckpointManager("run")
"""


LLAMA = """
import torch
import ckpt_tools
from pathlib import Path
from tests.operations.llamas import base, llama
from safetensors.torch import save_file

base(llama(), Path("llama"))
save_file({n: v.clone() for n, v in llama().state_dict().items()}, "m.safetensors")
how = {"to": "dcp", "key_map": "llama_hf_to_titan", "base": "llama"}
ckpt_tools.convert("m.safetensors", "run/step-00000500", **how)
"""
DEEPSPEED = (
    JOB
    + """
ckpt_tools.save("plain", {"model": model, "optimizer": optimizer})
ckpt_tools.convert("plain", "deepspeed_run/step-900", to="deepspeed-universal")
"""
)
POSITIONS = """
def resample(stored, shape): return stored[:1].expand(shape)
with CheckpointManager("run") as before:
    before.save(1, {"model": {"pos": torch.ones(2, 4)}})
state = {"model": {"pos": torch.zeros(3, 4)}}
checkpoints = CheckpointManager("run")
"""
NOTICE = """
import os, signal, threading, time

last = 10**9
def notify():
    while globals().get("step", 0) < 3:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=notify, daemon=True).start()
"""
DCP = JOB + 'state_dict = state = {"model": model.state_dict()}\n'
# page: for each block, the lines before it and after it; for a block of separate examples, such a
# pair for each statement
Pair = tuple[str, str]
BLOCKS: dict[str, tuple[Pair | tuple[Pair, ...], ...]] = {
    "README.md": ((JOB, "assert ckpt_tools.latest('run').number == 1000"),),
    "docs/convert.md": (
        (JOB, "assert Path('order.txt').read_text().split()[:2] == ['embed.weight', 'pos.weight']"),
        (
            (LLAMA, "assert ckpt_tools.inspect('model').format == 'safetensors'"),
            (DEEPSPEED, "assert ckpt_tools.inspect('run/step-900').world_size == 8"),
        ),
    ),
    "docs/formats/fsdp1.md": (
        (JOB, "assert json.load(open('shapes.json'))['embed.weight'] == [300, 4]"),
    ),
    "docs/object-stores.md": ((DCP + "ckpt_tools.save('s3://bucket/llama', state)\n", ""),),
    "docs/saving.md": (
        (JOB, "assert ckpt_tools.latest('run').number == 1000"),
        (
            JOB
            + "layers = nn.ModuleDict(model)\nckpt_tools.save('run/step-00000500', {'model': layers})\n"
            + "model, other_model, config = layers['head'], layers['head'], {'layers': 3}\n",
            "assert rows.shape == (3, 4)",
        ),
        (
            JOB
            + STATE
            + "last, batch, checkpoints = 3, None, CheckpointManager('run')\n"
            + "def loss_of(batch): return sum(p.sum() for p in model.parameters())\n",
            "assert done == 3",
        ),
        (
            (
                resuming("{'embed': nn.Embedding(200, 4)}", "{'embed': nn.Embedding(300, 4)}"),
                "assert 'step-00000001' in str(checkpoints.last_load.path)",
            ),
            (
                resuming("{'head': nn.Linear(4, 9)}", "{'head': nn.Linear(4, 2)}"),
                "assert 'step-00000001' in str(checkpoints.last_load.path)",
            ),
            (
                JOB + POSITIONS,
                "assert torch.equal(state['model']['pos'], torch.ones(3, 4))",
            ),
            (
                resuming("{'backbone': nn.Linear(4, 4)}", "{'encoder': nn.Linear(4, 4)}"),
                "assert 'step-00000001' in str(checkpoints.last_load.path)",
            ),
        ),
        (
            JOB + STEPS,
            """
checkpoints.close()
assert ckpt_tools.latest("run").number == 150
assert len(list(Path("run").glob("*.superseded-*"))) == 2
""",
        ),
        (JOB, ""),
        (DCP, "assert not ckpt_tools.verify('run/step-500').problems"),
        (
            DCP + "import torch.distributed.checkpoint as dcp\n",
            "assert not ckpt_tools.verify('run/step-600').problems",
        ),
    ),
    "docs/spot.md": (
        (JOB + STATE + NOTICE, "assert ckpt_tools.latest('s3://bucket/run').number == step < last"),
    ),
}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.running("moto", tmp_path_factory.mktemp("moto")) as running:
        yield running


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    return [
        textwrap.dedent(t) for t in re.findall(r"^ *```python\n(.*?)^ *```$", text, re.M | re.S)
    ]


def test_no_block_is_left_out() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in PAGES}
    found = {n for n in names if blocks(n) and "/how-to/" not in n and "/history/" not in n}
    assert found - ELSEWHERE == BLOCKS.keys()
    for page, given in BLOCKS.items():
        assert len(blocks(page)) == len(given), page


def pieces(page: str) -> Iterator[tuple[str, str, str]]:
    """Yields what runs on its own, with the lines before and after it."""
    for text, given in zip(blocks(page), BLOCKS[page], strict=True):
        first, *_ = given
        if isinstance(first, str):
            before, after = given
            yield str(before), text, str(after)
            continue
        body = ast.parse(text).body
        lines = [ast.get_source_segment(text, one) or "" for one in body]
        kept = [line for line in lines if not line.startswith(("import ", "from "))]
        assert len(kept) == len(given), page
        for (before, after), line in zip(given, kept, strict=True):
            yield before, line, after


# of many blocks, each a process of its own
SLOW_PAGES = ("docs/convert.md", "docs/saving.md")


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] * (p in SLOW_PAGES)) for p in BLOCKS]
)
def test_a_block_runs_as_it_is_printed(page: str, bucket: Server, tmp_path: Path) -> None:
    for number, (before, text, after) in enumerate(pieces(page)):
        store = bucket.bucket("bucket")
        if old := store.find("bucket"):
            store.rm(old)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "job.py").write_text(f"{before}\n{text}\n{after}\n")
        done = run_job(
            [sys.executable, str(folder / "job.py")],
            cwd=folder,
            env=os.environ | bucket.environment | {"PYTHONPATH": PYTHON_PATH},
        )
        assert done.returncode == 0, text + done.stdout[-2000:] + done.stderr[-4000:]
