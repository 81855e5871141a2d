"""`torchrun --standalone --nproc-per-node 8 -m training …` trains; see `training.command`."""

try:
    from training.command import main
except ModuleNotFoundError as error:
    raise SystemExit(f"training: {error}: pip install 'ckpt-tools[train]'") from None

if __name__ == "__main__":
    main()
