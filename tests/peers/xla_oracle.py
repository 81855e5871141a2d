"""PyTorch/XLA's own consolidation of its FSDP's files: `xla_oracle.py STATE_DICT_UTILS.py PREFIX
OUT.pt`; that module needs torch alone.
"""

import importlib.util
import sys

spec = importlib.util.spec_from_file_location("state_dict_utils", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.torch.load = lambda path, load=module.torch.load, **more: load(
    path, **more, weights_only=False
)
module.consolidate_sharded_model_checkpoints(sys.argv[2], save_path=sys.argv[3])
