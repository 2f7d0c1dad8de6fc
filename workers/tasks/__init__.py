"""One module a kind of job."""
