"""What commands share: prompts, sampling, output, progress and refusals."""
