"""One file a family: what differs from Llama."""
