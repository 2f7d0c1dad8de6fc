"""Workers: they load, call the library and save."""
