"""GGUF files as models: what people have from llama.cpp and Ollama becomes a model folder."""
