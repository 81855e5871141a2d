"""PEFT: `peft_job.py OUT DTYPE`: a tiny Llama, a LoRA adapter with random matrices, PEFT's own
merge of both, and the state of the PEFT model.
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    out, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(dtype)
    torch.save({"model": model.state_dict()}, out / "base.pt")
    lora = LoraConfig(
        r=4,
        lora_alpha=10,
        target_modules=["q_proj", "down_proj"],
        use_rslora=True,
        alpha_pattern={"down_proj": 3},
    )
    peft = get_peft_model(model, lora)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    peft.save_pretrained(out / "adapter")
    torch.save({"model": peft.state_dict()}, out / "peft.pt")
    torch.save(peft.merge_and_unload().state_dict(), out / "merged.pt")


if __name__ == "__main__":
    main()
