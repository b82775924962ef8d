"""Review doubtful images of a folder: find them, decide on a page, write a plan, apply it."""
