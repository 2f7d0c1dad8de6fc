"""Fisher scores, masks, and the evidence behind them.

Import the module that you use: `masks`, `scores` and `coverage` need only numpy, but `fisher` needs
torch.
"""
