"""The parts of training that are not in train.py, so that train.py can be read from top to bottom: configuration,
checkpoints, optimizers, metrics, sweeps."""
