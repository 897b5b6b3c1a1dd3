"""Products of rows and weights, and the norms and activations around them."""
