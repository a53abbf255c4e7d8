"""Zero-shot evaluation, result rows, power-law fits and reports."""
