"""The model: GPT, attention (model/attention.py chooses the implementation), dropout, loss and generation."""
