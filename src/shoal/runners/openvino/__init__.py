"""OpenVINO: paged, ragged, prefill and decode in one pass."""
