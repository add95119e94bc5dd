"""Outside suites, run against any server of the OpenAI API by its URL: what passes, what does not, and why."""
