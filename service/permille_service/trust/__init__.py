"""Trust metadata: kept, renewed, handed to devices, and taken from where offline keys are."""
