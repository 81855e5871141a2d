"""Every block of Python of a how-to runs as it is printed, after a few lines that make a small job.

Those of docs/how-to/loops.md are in test_recipes.py, but for one. Those of add-a-format.md are in
tests/formats/test_external.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tools import latest, verify
from tests import jobs
from tests.jobs import PYTHON_PATH, torchrun_command
from tests.peers.environments import python_of

PAGES = jobs.ROOT / "docs" / "how-to"
NET = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
"""
ACCELERATE = """
import os
os.environ["ACCELERATE_USE_CPU"] = "true"
from accelerate import Accelerator
accelerator, epochs = Accelerator(cpu=True), 2
rows = torch.utils.data.TensorDataset(torch.randn(2000, 4))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(rows, batch_size=2)
)


def train(batch):
    accelerator.backward(model(batch[0]).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
LIGHTNING = """
import lightning


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        if not hasattr(self.net, "reshard"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


net, model = model, Net()
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(1000, 4)), 1)
"""
TRANSFORMERS = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes))
args = TrainingArguments("run", max_steps=4, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 32
"""
RUN = """
step, loss, state = 1, 0.5, {"model": model}
writer, page_somebody = None, print
"""
OLD = ACCELERATE + 'accelerator.save_state("old/checkpoint_7")\n'
# page: the environment, then for each block: ranks, the lines before it, and lines after it
BLOCKS = {
    "accelerate.md": (
        "",
        (2, NET + ACCELERATE, "assert step == 1000"),
        (2, NET + OLD, "assert place.step == 3500"),
    ),
    "lightning.md": (
        "lightning",
        (2, NET + LIGHTNING, "trainer.strategy.barrier()"),
        (2, NET, "assert state['step'] == 500"),
    ),
    "transformers.md": (
        "",
        (1, NET + TRANSFORMERS, ""),
        (1, NET + TRANSFORMERS + "trainer = Trainer(model, args, train_dataset=data)\n", ""),
    ),
    "torchtitan.md": ("torchtitan", (1, "", "assert checkpoint.keep_latest_k == 3")),
    "runs.md": ("", (1, NET + RUN, "checkpoints.close()")),
    "trackers.md": (
        "trackers",
        (
            1,
            NET
            + RUN
            + "from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter()\n",
            "checkpoints.close()",
        ),
    ),
    "loops.md": (
        "",
        (
            1,
            NET
            + "from torchdata.stateful_dataloader import StatefulDataLoader\n"
            + "loader = StatefulDataLoader(list(range(8)), batch_size=2)\n",
            "import ckpt_tools\nckpt_tools.save('run/step-00000001', state)",
        ),
    ),
    "publish.md": (
        "",
        (
            1,
            NET
            + """
from pathlib import Path
from safetensors.torch import save_file
Path("base").mkdir()
Path("base/config.json").write_text('{"architectures": ["Mine"]}')
save_file({n: v.bfloat16() for n, v in model.state_dict().items()}, "base/model.safetensors")
last = 3


def train(model):
    with torch.no_grad():
        model[0].weight += 1
""",
            "import ckpt_tools\nassert ckpt_tools.pull('versions', 'local').version == 3",
        ),
        (
            1,
            """
import torch
from safetensors.torch import save_file
import ckpt_tools
for number in range(1, 4):
    state = {"a": torch.arange(4.0) * number, "n": torch.tensor(number)}
    save_file(state, "model.safetensors")
    ckpt_tools.publish_version("model.safetensors", "versions")
model, loaded = None, []


def load_checkpoint_weight_patches(model, patches):
    loaded.append([(patch.name, patch.values.tolist()) for patch in patches])
""",
            "assert loaded == [[('a', [3.0, 6.0, 9.0])], [('n', [3])]], loaded",
        ),
        (
            1,
            NET + "import ckpt_tools\nckpt_tools.save('run/step-00000200', {'model': model})\n",
            "assert result.version == 1",
        ),
    ),
}
# the step that each block leaves, if it leaves one
LEFT = {
    ("accelerate.md", 0): "run",
    ("lightning.md", 0): "saved/step=500.ckpt",
    ("lightning.md", 1): "saved/at=500.ckpt",
    ("transformers.md", 0): "run",
    ("transformers.md", 1): "run",
    ("runs.md", 0): "run",
    ("trackers.md", 0): "run",
    ("loops.md", 0): "run",
}


def blocks(page: str) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```$", (PAGES / page).read_text(), re.M | re.S)
    return found[1:2] if page == "loops.md" else found


def test_no_block_is_left_out() -> None:
    pages = {path.name for path in PAGES.glob("*.md") if "```python\n" in path.read_text()}
    assert pages - {"add-a-format.md"} == BLOCKS.keys()
    for page, (_, *given) in BLOCKS.items():
        assert len(blocks(page)) == len(given), page


@pytest.mark.parametrize(
    ("page", "number"),
    [(page, number) for page, (_, *given) in BLOCKS.items() for number in range(len(given))],
)
def test_a_block_runs_as_it_is_printed(page: str, number: int, tmp_path: Path) -> None:
    peer, *given = BLOCKS[page]
    ranks, before, after = given[number]
    (tmp_path / "job.py").write_text(f"{before}\n{blocks(page)[number]}\n{after}\n")
    python = python_of(peer) if peer else sys.executable
    words = torchrun_command(ranks, "job.py", is_forked=False)[1:] if ranks > 1 else ["job.py"]
    more = {
        "PL_TRAINER_ACCELERATOR": "cpu",
        "PL_TRAINER_DEVICES": "2",
        "PL_TRAINER_MAX_STEPS": "500",
    }
    more |= {"LT_ACCELERATOR": "cpu", "LT_DEVICES": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, *words],
        cwd=tmp_path,
        env=os.environ | more | {"PYTHONPATH": PYTHON_PATH, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    if left := LEFT.get((page, number)):
        place = tmp_path / left
        place = Path((latest(place) or pytest.fail(left)).path) if left == "run" else place
        assert not verify(place).problems
