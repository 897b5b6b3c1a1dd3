"""The engine behind HTTP and a Unix socket: what is asked is parsed here, and answered in the API's form."""
