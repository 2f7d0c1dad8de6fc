"""Export of a package as a GGUF file for llama.cpp and programs that use it. The `gguf` package writes it."""
