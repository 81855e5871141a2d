"""One file for each rank: FSDP, verl, torch_checkpointing and XLA."""
