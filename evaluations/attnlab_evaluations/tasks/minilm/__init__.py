"""The pretrained encoder with every variant in its layers, and attention distillation (`attnlab minilm`). Importing this imports no torch."""
