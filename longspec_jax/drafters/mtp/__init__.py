"""Multi-token prediction: the layer that some targets were trained with, or a trained copy."""
