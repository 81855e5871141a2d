"""`python -m ckpt_tools` is `ckpt`; where torchrun or srun has started it, it is one of the
processes that share the work.

`python -m` looks for modules in the working directory first, which may be somebody else's
checkpoint. That entry is taken out here. Only `python -P -m ckpt_tools`, or `ckpt`, never has it.
"""

import os
import sys

if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from ckpt_tools.cli.app import main

if __name__ == "__main__":
    main(may_share=True)
