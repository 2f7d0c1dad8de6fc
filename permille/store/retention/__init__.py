"""Retention: collection of unreferenced blobs, and rules that delete old results and reports."""
