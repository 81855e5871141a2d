"""One file per rank: FSDP, verl, torch_checkpointing and XLA."""
