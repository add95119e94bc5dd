"""SwarmBench: the page at `/`, its routes and its history."""
