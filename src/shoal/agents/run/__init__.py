"""How a graph runs: attempts, deadlines, prompts and the prefixes they share."""
