"""PEFT in one process: `lora_oracle.py MODEL TOKENS OUT`, with the batches, the first values and the
adapters of a run of `training` whose directory is OUT/run.

It writes OUT/losses.json, and logits of PEFT's own loading of OUT/run/export.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from training.data import Sampler, open_tokens

STEPS, BATCH, SEQ_LEN = 6, 8, 16


def main(source: str, tokens_file: str, out: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM"))
    # the adapter after no step, as PEFT reads it: both begin with the same random numbers
    first = load_file(out / "first" / "adapter_model.safetensors")
    named = dict(model.named_parameters())
    for name, value in first.items():
        named[name.replace(".weight", ".default.weight")].data.copy_(value)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.01)
    tokens, losses = open_tokens(tokens_file, SEQ_LEN, BATCH, 256), []
    sampler = Sampler(len(tokens), 0)
    for _ in range(STEPS):
        inputs, targets = tokens.batch(sampler.next_batch(BATCH), slice(None))[:2]
        loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    (out / "losses.json").write_text(json.dumps(losses))
    prompt = torch.arange(32)[None]
    fresh = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(fresh, str(out / "run" / "export"))
    with torch.no_grad():
        logits = {"oracle": model(prompt).logits, "export": loaded(prompt).logits}
    torch.save(logits, out / "logits.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
