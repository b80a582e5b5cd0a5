"""One page and one picture from results of ``fp4comm bench``, ``demo`` and ``plan``."""
