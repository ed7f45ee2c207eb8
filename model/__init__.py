"""What is learned: the GPT, its attention (the one door), dropout, loss and generation."""
