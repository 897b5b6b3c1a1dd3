"""The HTTP server of a loaded model, and its socket for commands of this machine."""
