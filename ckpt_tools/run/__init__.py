"""A run: the directory or prefix that holds the steps of one job."""
