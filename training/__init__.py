"""The parts of training that are not in train.py, so that train.py can be read from top to bottom: command line, the
step, what a run does between its steps, its messages, checkpoints, optimizers, metrics, sweeps."""
