"""What a checkpoint is, without I/O: boxes, types, catalogs, views and plans."""
