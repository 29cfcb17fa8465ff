"""Other programs that run the same models, measured beside this library."""
