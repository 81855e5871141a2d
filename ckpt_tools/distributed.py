"""Storage and planners for jobs that call `torch.distributed.checkpoint` themselves."""

from ckpt_tools.loop.dcp_planner import LoadPlanner, SavePlanner
from ckpt_tools.loop.dcp_plugin import StorageReader, StorageWriter

__all__ = ["LoadPlanner", "SavePlanner", "StorageReader", "StorageWriter"]
