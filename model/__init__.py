"""The model: GPT, attention (model/attention.py chooses the implementation), dropout and loss."""
