"""The Anthropic Messages API over the same generations as the OpenAI one."""
