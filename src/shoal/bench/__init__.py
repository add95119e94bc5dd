"""The benchmark suite: workloads as data, one harness for this engine and its peers, results with their ceilings."""
