"""PEFT loads a directory of adapters onto the base model of transformers_job: `peft_loads_job.py
ADAPTER END`. Its state is that of END, bit by bit.
"""

import json
import sys

import torch

sys.argv = [sys.argv[0], ".", json.dumps({"steps": 0}), *sys.argv[1:]]

from peft import PeftModel

from tests.peers.transformers_job import model


def main():
    adapter, end = sys.argv[3:]
    loaded = PeftModel.from_pretrained(model(), adapter).state_dict()
    want = torch.load(end)["model"]
    assert loaded.keys() == want.keys(), (list(loaded)[:4], list(want)[:4])
    assert all(torch.equal(loaded[name], value) for name, value in want.items())
    assert any("lora_B" in name and value.any() for name, value in want.items())
    print("loaded")


if __name__ == "__main__":
    main()
