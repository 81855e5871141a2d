"""`torchrun --standalone --nproc-per-node 8 -m training …` trains; see `training.command`."""

from training.command import main

if __name__ == "__main__":
    main()
