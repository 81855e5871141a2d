"""transformers' Trainer on a CPU: `transformers_job.py OUT '{"steps": 20, …}'`, under torchrun.

Every loss goes to `OUT/losses.txt` at once, so that a killed job leaves its own. At the end, rank 0
writes the state to `OUT/end.pt`.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

OUT, WANTED = Path(sys.argv[1]), json.loads(sys.argv[2])
if WANTED.get("fsdp"):
    from tests.peers import cpu_fsdp

    cpu_fsdp.allow(WANTED["fsdp"])


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, number):
        tokens = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            with (OUT / "losses.txt").open("a") as file:
                file.write(f"{state.global_step} {logs['loss']!r} {logs['grad_norm']!r}\n")


class Writes(TrainerCallback):
    """Puts an average into each checkpoint. Later, a person puts a note into checkpoint-4."""

    def on_save(self, args, state, control, **kwargs):
        folder = OUT / f"checkpoint-{state.global_step}" / "ema"
        folder.mkdir()
        (folder / "average.bin").write_bytes(b"average")
        kwargs["model"].save_pretrained(folder.parent)  # writes config.json anew

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5:
            (OUT / "checkpoint-4" / "notes.txt").write_text("the best so far")


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    made = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=4, **sizes)
    )
    if WANTED.get("peft"):
        from peft import LoraConfig, get_peft_model

        made = get_peft_model(made, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return made


def arguments():
    fsdp = {}
    if WANTED.get("fsdp"):
        fsdp = {
            "fsdp": True,
            "fsdp_config": {
                "version": WANTED["fsdp"],
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "state_dict_type": "SHARDED_STATE_DICT",
                "cpu_ram_efficient_loading": False,
                "sync_module_states": False,
            },
        }
    return TrainingArguments(
        str(OUT),
        max_steps=WANTED["steps"],
        save_steps=WANTED.get("save", 5),
        use_cpu=True,
        per_device_train_batch_size=4,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        seed=1,
        learning_rate=1e-2,
        weight_decay=0.1,
        average_tokens_across_devices=False,
        **fsdp,
        **WANTED.get("arguments", {}),
    )


def main():
    OUT.mkdir(exist_ok=True)
    kind = Trainer
    if not WANTED.get("stock"):
        from ckpt_tools import Writing
        from ckpt_tools.integrations.transformers import CheckpointMixin, install

        class Ours(CheckpointMixin, Trainer):
            checkpoint_root = WANTED.get("root")
            limit = WANTED.get("max_mbps")
            checkpoint_options = {"writing": Writing(max_mbps=limit)} if limit else {}

        kind = Ours if not WANTED.get("install") else Trainer
    trainer = kind(
        model(),
        arguments(),
        train_dataset=Tokens(),
        eval_dataset=Tokens() if WANTED.get("evaluate") else None,
        callbacks=[Losses(), *([Writes()] if WANTED.get("writes") else [])],
    )
    if WANTED.get("install"):
        install(trainer, WANTED.get("root"))
    trainer.train(resume_from_checkpoint=WANTED.get("resume"))
    found = {
        n: p.full_tensor() if hasattr(p, "full_tensor") else p
        for n, p in trainer.model.state_dict().items()
    }
    if trainer.is_world_process_zero():
        torch.save(
            {
                "model": {n: p.clone() for n, p in found.items()},
                "best": trainer.state.best_model_checkpoint,
            },
            OUT / "end.pt",
        )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
