"""What breakit.py and bench.py lean on: instruments that look at attention, and nothing that training needs."""
