"""KV outside the device: host memory, files on disk, and what moves blocks between them and a runner."""
