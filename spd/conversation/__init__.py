"""Messages to prompts, and replies to messages. No torch."""
