"""The OpenAI-compatible API over one engine: `create_app(hub)`; `shoal serve` runs it. Needs the extra `server`."""
