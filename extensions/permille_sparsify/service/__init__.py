"""The service's part of sparse models: the needs of a job, and its page."""
