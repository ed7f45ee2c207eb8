"""From text to batches: text.py, download.py or made.py, then prepare.py with tokenizer.py, dataset.py, loader.py."""
