"""Text: from lines of JSONL and a tokenizer to token files."""
