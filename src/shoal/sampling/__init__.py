"""From logits to tokens: the sampler, grammars, and what a JSON schema may ask for."""
