"""Rounds of many devices in one process, by the exact arithmetic: what each method gains and costs."""
