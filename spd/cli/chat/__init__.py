"""`spd chat`: its loop, line editor, slash commands and view."""
