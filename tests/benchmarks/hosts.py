"""How long a save holds training in a trainer, beside the trainer's own save:
`python tests/benchmarks/hosts.py HOST [MIB]`, in an environment with the host: transformers,
lightning, torchtitan or verl. `torchtitan` has a second stock way, its asynchronous save.

Jobs of two ranks with FSDP2 on a CPU, stock and ours in turns; each saves six times, and the first
save of a job does not count. The table has medians over all jobs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
SAVES, JOBS = 6, 3


class Wide(nn.Module):
    """Eight matrices; with the two moments of AdamW, so many MiB."""

    def __init__(self, mib):
        super().__init__()
        width = int((mib * (1 << 20) / 3 / 4 / 8) ** 0.5)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(8))
        self.width = width

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


class Rows(torch.utils.data.Dataset):
    def __init__(self, width):
        self.width = width

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {"x": torch.full((self.width,), number / 64)}


def transformers(way, folder, mib, note):
    from tests.peers import cpu_fsdp

    cpu_fsdp.allow(2)
    from transformers import Trainer, TrainingArguments

    from ckpt_tools.integrations.transformers import CheckpointMixin

    class Timed:
        def _save_checkpoint(self, *args, **kwargs):
            self.accelerator.wait_for_everyone()
            began = time.perf_counter()
            super()._save_checkpoint(*args, **kwargs)
            note(time.perf_counter() - began)
            if way == "ours":
                self.checkpoints.wait()

    kinds = (Timed, CheckpointMixin, Trainer) if way == "ours" else (Timed, Trainer)
    arguments = TrainingArguments(
        str(folder),
        max_steps=SAVES,
        save_steps=1,
        save_total_limit=1,
        use_cpu=True,
        per_device_train_batch_size=1,
        report_to=[],
        disable_tqdm=True,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "transformer_layer_cls_to_wrap": ["Linear"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": False,
        },
    )
    model = Wide(mib)
    model._no_split_modules = ["Linear"]
    type("Timed", kinds, {})(model, arguments, train_dataset=Rows(model.width)).train()


def lightning(way, folder, mib, note):
    import lightning as host
    from lightning.pytorch.strategies import ModelParallelStrategy as Stock
    from torch.distributed.fsdp import fully_shard

    from ckpt_tools.integrations.lightning import ModelParallelStrategy as Ours

    class Model(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Wide(mib)

        def configure_model(self):
            for layer in self.net.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, _):
            return self.net(batch["x"])["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Saves(host.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.strategy.barrier()
            began = time.perf_counter()
            trainer.save_checkpoint(folder / f"at-{trainer.global_step}.ckpt")
            note(time.perf_counter() - began)
            if way == "ours":
                trainer.strategy.wait_for_checkpoints()
            if trainer.global_step > 1:
                trainer.strategy.remove_checkpoint(folder / f"at-{trainer.global_step - 1}.ckpt")

    kind = Ours if way == "ours" else Stock
    rows = torch.utils.data.DataLoader(Rows(Wide(mib).width), batch_size=1)
    host.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=kind(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=SAVES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Saves()],
        default_root_dir=folder,
    ).fit(Model(), rows)


def torchtitan(way, folder, mib, note):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        OptimizersContainer,
        ParamGroupConfig,
    )

    from ckpt_tools.integrations.torchtitan import CkptToolsManager

    dist.init_process_group("gloo")
    model = Wide(mib)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-4})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="foreach").build(
        model_parts=[model]
    )
    schedulers = LRSchedulersContainer.Config(warmup_steps=1).build(
        optimizers=optimizers, training_steps=SAVES
    )
    kind = CkptToolsManager if way == "ours" else CheckpointManager
    mode = {"stock": "disabled", "stock-async": "async"}.get(way)
    manager = kind.Config(
        enable=True,
        folder="run",
        interval=1,
        keep_latest_k=2,
        last_save_model_only=False,
        **({"async_mode": mode} if mode else {}),
    ).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=None,
        base_folder=str(folder),
    )
    row = torch.ones(1, model.width)
    for step in range(1, SAVES + 1):
        model(row)["loss"].backward()
        optimizers.step()
        optimizers.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        manager.save(step)
        manager.maybe_wait_for_staging()
        note(time.perf_counter() - began)
        if way == "ours":
            manager.manager.wait()
        elif way == "stock-async":
            manager.save_future.result()
    manager.close()
    dist.destroy_process_group()


def verl(way, folder, mib, note):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.fsdp_utils import apply_fsdp2

    dist.init_process_group("gloo")
    width = int((mib * (1 << 20) / 3 / 4 / 4 / 16) ** 0.5) // 64 * 64  # 16 matrices per layer
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config)
    wrap = {"wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    apply_fsdp2(model, {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))}, wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    manager = FSDPCheckpointManager(model, optimizer, scheduler)
    tokens = torch.arange(8)[None]
    for step in range(1, SAVES + 1):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        where = str(folder / f"global_step_{step}" / "actor")
        manager.save_checkpoint(where, global_step=step, max_ckpt_to_keep=1)
        note(time.perf_counter() - began)
    dist.barrier()
    dist.destroy_process_group()


HOSTS = {
    "transformers": transformers,
    "lightning": lightning,
    "torchtitan": torchtitan,
    "verl": verl,
}


def main():
    sys.path.insert(0, str(ROOT))
    _, _, host, way, folder, mib = sys.argv
    times = []
    HOSTS[host](way, Path(folder), int(mib), times.append)
    if os.environ["RANK"] == "0":
        Path(folder, "times.txt").write_text(" ".join(map(str, times[1:])))


def compare(host, mib):
    ways = ("stock", *(["stock-async"] if host == "torchtitan" else []), "ours")
    found = {way: [] for way in ways}
    for _ in range(JOBS):
        for way, seconds in found.items():
            with tempfile.TemporaryDirectory() as folder:
                words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
                job = [sys.executable, *words, __file__, "run", host, way, folder, mib]
                more = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
                environment = os.environ | more | {"PYTHONPATH": str(ROOT)}
                if host == "verl":
                    environment["CKPT_VERL"] = "1" if way == "ours" else ""
                subprocess.run(job, check=True, env=environment, stdout=subprocess.DEVNULL)
                times = Path(folder, "times.txt").read_text().split()
                seconds += [float(value) for value in times]
    median = {way: statistics.median(seconds) for way, seconds in found.items()}
    for way, seconds in median.items():
        print(f"{host:13} {way:11} {seconds:7.3f} s   {seconds / median['stock']:5.2f} of stock")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        main()
    else:
        compare(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "300")
