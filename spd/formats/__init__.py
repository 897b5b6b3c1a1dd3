"""The files of a model folder: reading and checking them, never arithmetic on weights.

Everything in such a folder is untrusted data. Each module reads one file or one convention. Any
fault of a file raises `CheckpointError`, in one line that begins with the file and names the field
or the tensor; "refuse" in a docstring means that, and not every docstring repeats it.
"""
