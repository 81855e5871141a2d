"""The zip archives of `torch.save`: read, checked and written."""
