"""The model of a checkpoint, without I/O: boxes, types, catalogs, views and plans."""
