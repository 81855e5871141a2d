"""The storage reader and writer for jobs that call `torch.distributed.checkpoint` themselves."""

from ckpt_tools.loop.dcp_plugin import StorageReader, StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
