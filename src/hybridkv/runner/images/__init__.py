"""Images in prompts: what callers hand over, the features that a model makes of it, and which rows read them."""
