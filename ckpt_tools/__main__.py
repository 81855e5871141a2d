"""`python -m ckpt_tools` is `ckpt`."""

from ckpt_tools.cli import main

if __name__ == "__main__":
    main()
