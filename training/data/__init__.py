"""Training data: text as bytes, files of token numbers, and texts and chats through a tokenizer."""
