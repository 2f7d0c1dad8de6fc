"""Training of a personal model: options, plan, steps, decision and durable run.

Words that all modules here use (docs/reference/glossary.md has more):

- The state has one integer for each masked weight. The integer times the step unit, a power of two, is the
  trained change of that weight. The base is the model without a state.
- A descent is a series of steps. If its steps are too large, the run starts another descent.
- The user's text has three splits. The train split trains, the select split selects the best state of the
  descents, and the test split judges this state. A short text has parts instead (`text/preparation.py`).
- The strength is the number of eighths of the state that are kept, to protect general knowledge.
"""
