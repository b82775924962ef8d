"""Questions to anybody's training program: which samples it loses or repeats when it is killed and resumed."""
