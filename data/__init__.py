"""Text in, batches out: tokenizer.py, prepare.py (text -> token files), loader.py (token files -> batches)."""
