"""From text to batches. text.py and download.py get the text; prepare.py turns it into token files with tokenizer.py;
shards.py has the format of token files; loader.py makes batches from them."""
