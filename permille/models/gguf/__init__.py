"""Conversion of GGUF files, as llama.cpp and Ollama use them, to model folders."""
