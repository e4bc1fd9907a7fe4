"""GGUF files as targets: header, configuration, tensors and tokenizer of llama.cpp's format."""
