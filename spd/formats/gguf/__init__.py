"""GGUF, the file of llama.cpp: its container, and what a model in it is in Hugging Face's words."""
