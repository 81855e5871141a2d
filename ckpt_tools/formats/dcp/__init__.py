"""PyTorch's Distributed Checkpoint (DCP): `.metadata` and `.distcp` files."""
