"""The way from a plan to bytes: schedule, run, kernels, sinks."""
