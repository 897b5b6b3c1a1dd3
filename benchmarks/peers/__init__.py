"""Worker processes, one an engine: each loads once and generates on request: runs interleave."""
