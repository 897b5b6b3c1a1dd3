"""Parts of a decoder: plain numbers and prebound tensors, no configuration objects."""
