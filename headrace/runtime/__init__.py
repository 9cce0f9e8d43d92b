"""What one device does in a step: its table of sequences, the flat batch, the model, the sampler."""
