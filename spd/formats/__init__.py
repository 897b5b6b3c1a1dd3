"""The files of a model folder: reading and checking them, never arithmetic on weights.

Everything in such a folder is untrusted data. Each module owns one file or one convention.
"""
