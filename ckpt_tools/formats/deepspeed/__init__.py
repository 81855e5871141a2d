"""DeepSpeed's ZeRO checkpoints and its universal checkpoints."""
