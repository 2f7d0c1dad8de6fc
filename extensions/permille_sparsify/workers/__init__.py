"""The workers' part of sparse models: the task."""
