"""From text to batches. text.py finds and reads text, download.py fetches it, made.py makes it; prepare.py turns it
into token files with tokenizer.py; dataset.py opens them, or those of others; loader.py makes batches."""
