"""One run: build its parts, train, evaluate, save, resume, stop."""
