"""The OpenAI API: chat completions, completions, responses."""
