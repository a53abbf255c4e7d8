"""The primitive in Triton. Importing this package needs Triton; nothing is compiled before the first call."""
