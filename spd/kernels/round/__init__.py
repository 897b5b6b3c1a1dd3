"""What a round does besides the model: windows, acceptance, commit, emission, lookup."""
