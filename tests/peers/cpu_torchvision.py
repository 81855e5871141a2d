"""Imported before torchvision, lets it be imported where torch has no CUDA: its kernels, of which
nothing here makes use, are built for it.
"""

import sys
import types

sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
