"""`python -m ckpt_tools` is `ckpt`; where torchrun or srun has started it, it is one of the processes that share the work."""

from ckpt_tools.cli import main

if __name__ == "__main__":
    main(may_share=True)
