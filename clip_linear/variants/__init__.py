"""One file per attention variant; the file name is the variant's name (see clip_linear.registry)."""
