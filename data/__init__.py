"""Text in, batches out: text.py and download.py (where it is from), prepare.py (text -> token files, as shards.py has
them, by tokenizer.py), loader.py (token files -> batches)."""
