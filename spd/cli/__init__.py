"""The command line: arguments in, text out. The only room that prints, exits or reads argv."""
