"""From logits to tokens: processing, noise, draws, and the rules that accept drafts."""
