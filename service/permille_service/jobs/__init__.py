"""Jobs: state, events, cancel, retry."""
