"""A package as a GGUF file, which llama.cpp and what is built on it load. The `gguf` package writes it."""
