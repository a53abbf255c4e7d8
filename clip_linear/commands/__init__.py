"""Command modules of this package: each has main(argv) -> exit code, and prints."""
