"""What permille is measured with: evaluation of methods, benchmarks and the reference model."""
