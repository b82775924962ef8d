"""Judge whether a run learns: what is observed of it, and the rules that name a cause."""
