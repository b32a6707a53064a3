"""Exact tokens: tokenizer, chat template, prompts that are continued and never re-tokenised, incremental decoding."""
