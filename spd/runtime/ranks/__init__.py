"""Tensor parallel ranks: start, orders, exchange, watch."""
