"""The training loop's API: save a step, resume, keep the steps that are wanted."""
