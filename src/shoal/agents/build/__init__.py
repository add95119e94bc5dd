"""What a graph is: agents, nodes, their dependencies and policies, and graph files."""
