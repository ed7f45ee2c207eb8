"""The parts of breakit.py and bench.py: instruments that look at attention. Training needs none of them."""
