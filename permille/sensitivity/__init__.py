"""Fisher scores, masks, and the evidence behind them."""
