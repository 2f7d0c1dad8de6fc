"""Fisher scores, masks, and the evidence behind them.

`masks`, `scores` and `coverage` need numpy only; `fisher` needs torch: import the
module you use.
"""
