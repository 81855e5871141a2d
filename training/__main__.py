"""`torchrun --standalone --nproc-per-node 8 -m training …` trains; see `training.train`."""

from training.train import main

if __name__ == "__main__":
    main()
