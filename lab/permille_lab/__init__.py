"""Tools that measure permille: evaluation of methods, benchmarks, and the reference engine."""
