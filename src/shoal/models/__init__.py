"""Models on disk: the store, GGUF metadata, tokenizer, chat template."""
