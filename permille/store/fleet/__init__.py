"""What many devices report, counted: by version, against another version, of the whole fleet."""
