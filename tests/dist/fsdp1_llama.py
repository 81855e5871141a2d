"""FSDP1 saves a tied model of transformers, flat parameters, one file a rank: `fsdp1_llama.py OUT`;
`OUT/full.pt` has its weights by name.
"""

import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

warnings.simplefilter("ignore")


def main():
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=True, dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).bfloat16()
    if dist.get_rank() == 0:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(out / "model")
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    model = FSDP(model, auto_wrap_policy=policy, use_orig_params=False, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(20).reshape(2, 10)).logits.float().square().mean().backward()
    optimizer.step()
    (out / "flat").mkdir(exist_ok=True)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save({"model": model.state_dict()}, out / "flat" / f"ckpt_0001.rank_{dist.get_rank()}.pth")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        full = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(full, out / "full.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
