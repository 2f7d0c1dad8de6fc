"""Workers: they run jobs. A job loads its inputs, calls the library, and saves the result."""
