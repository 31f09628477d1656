"""Text in and out: tokenizer, chat template, byte-exact detokenizer, stop strings."""
