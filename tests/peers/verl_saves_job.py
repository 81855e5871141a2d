"""verl's FSDP checkpoint manager, or ours in its place: `verl_saves_job.py OUT '{"steps": 4, …}'`.

The environment decides which one: CKPT_VERL. OUT has the folders as verl's trainers make them.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils.checkpoint import fsdp_checkpoint_manager
from verl.utils.fsdp_utils import apply_fsdp2

OUT, WANTED = Path(sys.argv[1]), json.loads(sys.argv[2])


def build():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=53,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config)
    if WANTED.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    apply_fsdp2(
        model,
        {"mesh": mesh},
        {"wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}},
    )
    return model


def main():
    dist.init_process_group("gloo")
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    kind = fsdp_checkpoint_manager.FSDPCheckpointManager
    assert (kind.__name__ == "CkptToolsManager") == bool(os.environ.get("CKPT_VERL")), kind
    manager = kind(model, optimizer, scheduler, checkpoint_config=WANTED.get("config"))
    step = WANTED.get("from", 0)
    if step:
        manager.load_checkpoint(str(OUT / f"global_step_{step}" / "actor"))
    while step < WANTED["steps"]:
        step += 1
        tokens = torch.randint(53, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with (OUT / f"losses-{dist.get_rank()}.txt").open("a") as file:
            file.write(f"{step} {loss.item()!r}\n")
        if step % 2 == 0:
            manager.save_checkpoint(
                str(OUT / f"global_step_{step}" / "actor"),
                global_step=step,
                max_ckpt_to_keep=WANTED.get("keep"),
            )
            if dist.get_rank() == 0:
                (OUT / "latest_checkpointed_iteration.txt").write_text(str(step))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    main()
