"""What DeepSpeed itself makes of a checkpoint: `deepspeed_oracle.py CHECKPOINT OUT`: `OUT/fp32.pt`
by zero_to_fp32, `OUT/universal` by ds_to_universal.
"""

import subprocess
import sys
from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


def main():
    checkpoint, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True)
    torch.save(dict(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))), out / "fp32.pt")
    tag = (checkpoint / "latest").read_text().strip()
    command = [
        sys.executable,
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--inject_missing_state",
        "--input_folder",
        str(checkpoint / tag),
    ]
    command += [
        "--output_folder",
        str(out / "universal"),
        "--num_extract_workers",
        "1",
        "--num_merge_workers",
        "1",
    ]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
