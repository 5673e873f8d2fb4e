"""Text in and out of token ids: the tokenizer, streaming decode with stop strings, chat templates. Knows no engine."""
