"""From a plan to bytes: schedule, run, kernels, sinks."""
