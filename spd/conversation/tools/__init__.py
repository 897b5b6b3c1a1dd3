"""Tool calls: the forms that models write them in, grammars that hold them, and their reading."""
