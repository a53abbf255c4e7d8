"""Sweeps over OpenCLIP models: plan, run, status, collect. Importing this package does not import torch."""
