"""verl's checkpoint manager saves on a CPU: `verl_job.py OUT {fsdp2|hsdp|fsdp1} DTYPE [FROM]`,
under torchrun; `whole.pt` beside has all of it.

With FROM it loads that instead of training, and saves what it has then.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2


def build(kind, dtype):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=53,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config).to(dtype)
    size = dist.get_world_size()
    mesh = (
        init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("ddp", "fsdp"))
        if kind == "hsdp"
        else None
    )
    mesh = mesh or init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=False
        )
    apply_fsdp2(
        model,
        {"mesh": mesh},
        {"wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}},
    )
    return model


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def main():
    out, kind, dtype = Path(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3])
    dist.init_process_group("gloo")
    model = build(kind, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    manager = FSDPCheckpointManager(model, optimizer, scheduler)
    if len(sys.argv) > 4:
        manager.load_checkpoint(sys.argv[4])
    for step in range(0 if len(sys.argv) > 4 else 2):
        torch.manual_seed(step)
        tokens = torch.randint(53, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    manager.save_checkpoint(str(out), global_step=2)
    if kind != "fsdp1":
        whole = {
            "model": {n: full(t) for n, t in model.state_dict().items()},
            "state": {
                n: {k: full(v) for k, v in optimizer.state[p].items()}
                for n, p in model.named_parameters()
            },
            "lr": optimizer.param_groups[0]["lr"],
            "epoch": scheduler.last_epoch,
        }
        if dist.get_rank() == 0:
            torch.save(whole, out.parent / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
