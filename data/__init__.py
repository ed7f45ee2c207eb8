"""From text to batches. text.py and download.py get the text; prepare.py turns it into token files with tokenizer.py;
shards.py has the format of token files; dataset.py opens them; loader.py makes batches from them."""
