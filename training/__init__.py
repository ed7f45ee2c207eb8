"""What train.py uses: configuration, one update, optimizers, checkpoints, metrics, instruments, several GPUs."""
