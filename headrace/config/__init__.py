"""Settings: flags and files, the rules that bind them, and what a model's files say of themselves."""
