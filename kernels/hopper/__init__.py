"""The kernels of Hopper GPUs (sm_90), in Gluon. kernels/launch.py says what they compute."""
