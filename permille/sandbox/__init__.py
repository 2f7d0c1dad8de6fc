"""Foreign tokenizers and templates at work: a confined child process and its parent. No torch, no numpy."""
