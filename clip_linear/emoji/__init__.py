"""A small real image–text data set inside the package: emoji by four design teams, named by Unicode.

Noto, Fluent flat and Fluent color are for training; Twemoji is only ever evaluated on, so that zero-shot accuracy is
measured across a real change of style. ``README.md`` beside this file says how it was made and under which licences.
"""

from clip_linear.emoji.folder import write

__all__ = ["write"]
