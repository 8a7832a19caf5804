"""Where text meets tokens: templates, tokenizers, streams."""
