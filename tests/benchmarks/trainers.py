"""How long a save holds training inside a trainer, beside the trainer's own save: `python
tests/benchmarks/trainers.py [MIB]`.

One process of two ranks with FSDP2 on a CPU saves alternately in both ways. The table has medians of
the blocked seconds, and their ratio. A plain write of as many bytes is measured beside.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROUNDS = 5


def accelerate(accelerator, folder, mib):
    """Yields the two ways of Accelerate."""
    import torch

    from ckpt_tools.integrations.accelerate import manager_of, save_state

    width = int((mib * (1 << 20) / 3 / 4 / 8) ** 0.5)
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(8)))
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    net(torch.ones(1, width)).sum().backward()
    optimizer.step()
    manager = manager_of(accelerator, folder / "ours", keep_last=1)

    def stock(number):
        accelerator.save_state(str(folder / f"stock-{number}"))

    def ours(number):
        save_state(accelerator, folder / "ours", number)

    return stock, ours, manager.wait


def main():
    sys.path.insert(0, str(ROOT))
    from tests.peers import cpu_fsdp

    cpu_fsdp.allow(2)
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    folder, mib = Path(sys.argv[2]), int(sys.argv[3])
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    stock, ours, wait = accelerate(accelerator, folder, mib)
    times = {"stock": [], "ours": [], "ours, until complete": [], "write": []}
    for number in range(ROUNDS + 1):
        for name, save in (("stock", stock), ("ours", ours)):
            accelerator.wait_for_everyone()
            began = time.perf_counter()
            save(number)
            accelerator.wait_for_everyone()
            times[name].append(time.perf_counter() - began)
            if name == "ours":
                wait()
                times["ours, until complete"].append(time.perf_counter() - began)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(folder / f"stock-{number}")
            began = time.perf_counter()
            with (folder / "plain").open("wb") as file:
                file.write(bytes(mib << 20))
                os.fsync(file.fileno())
            times["write"].append(time.perf_counter() - began)
    if accelerator.is_main_process:
        found = {name: statistics.median(values[1:]) for name, values in times.items()}
        for name, seconds in found.items():
            print(f"{name:22} {seconds:7.3f} s   {seconds / found['stock']:5.2f} of stock")
    accelerator.end_training()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main()
    else:
        mib = sys.argv[1] if len(sys.argv) > 1 else "600"
        with tempfile.TemporaryDirectory() as place:
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            job = [sys.executable, *words, __file__, "run", place, mib]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            subprocess.run(job, check=True, env=environment | {"PYTHONPATH": str(ROOT)})
