"""Step time of a stack of transformer layers with one rank's shard of a model, measured on one device."""
