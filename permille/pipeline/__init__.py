"""The way from a model to a package, as steps that the notebook, the jobs and `permille personalise` share.

    draw -> score -> select -> quantize -> pack (with its reference)

Each step takes its inputs, a progress callback and, if it can resume, a work folder. It returns layers,
their provenance and a report. A step knows no database, no queue and no command line. The same inputs give
the same bits everywhere.
"""
