"""The `ckpt` command."""
