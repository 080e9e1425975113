"""Strings and token ids: tokenizer, chat prompts, incremental decoding, Engram's token map."""
