"""What can be proved of a training step before it runs on a cluster: one rank at a time, on one process, without a GPU."""
