"""FSDP in Accelerate on a CPU. Accelerate takes FSDP for accelerators only: its state of a job on
CPUs is told to be that of FSDP here, and nothing else is changed.
"""

import os

import accelerate.state
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def allow(version):
    """Call it before an Accelerator or TrainingArguments is made."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ["FSDP_VERSION"] = str(version)
    begin = accelerate.state.AcceleratorState.__init__

    def init(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.device = torch.device("cpu")  # FSDP1 refuses "cpu:0"
            self.fsdp_plugin = kwargs.get("fsdp_plugin") or FullyShardedDataParallelPlugin(
                fsdp_version=version, state_dict_type="SHARDED_STATE_DICT"
            )

    accelerate.state.AcceleratorState.__init__ = init
