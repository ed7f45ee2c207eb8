"""What train.py leans on, each file alone: checkpoint.py (a run stops and goes on, bit for bit), metrics.py (a run is
seen) and the rest of what would keep train.py from being read top to bottom."""
