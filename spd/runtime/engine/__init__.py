"""What the host decides: admission, scheduling, pages, draft length, text."""
