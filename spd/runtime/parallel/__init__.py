"""Several processes that run one engine: what they exchange, who decides, and how they end together."""
