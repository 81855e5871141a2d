"""The Transformers Trainer on a CPU: `trainer_job.py OUT STEPS [CHECKPOINT]` trains a tiny model
and saves every two steps.

Rank 0 writes `OUT/moments.pt`: the Trainer's own moments by the name of their parameter, which is
the oracle.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        tokens = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def make(out, steps):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    arguments = TrainingArguments(
        out, max_steps=steps, save_steps=2, per_device_train_batch_size=4, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
        seed=1, learning_rate=1e-2, weight_decay=0.1,
    )
    return Trainer(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), arguments, train_dataset=Tokens())


def inner(optimizer):
    return getattr(optimizer, "optimizer", optimizer)


def main():
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    trainer = make(str(out), steps)
    trainer.train(resume_from_checkpoint=sys.argv[3] if len(sys.argv) > 3 else None)
    if trainer.args.process_index == 0:
        model: nn.Module = trainer.model
        state = inner(trainer.optimizer).state
        moments = {name: {key: value.clone() for key, value in state[p].items()} for name, p in model.named_parameters()}
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        torch.save({"moments": moments, "model": model.state_dict(), "losses": losses}, out / "moments.pt")


if __name__ == "__main__":
    main()
