"""The command line: words in, text out. The only room that prints, exits or reads argv."""
