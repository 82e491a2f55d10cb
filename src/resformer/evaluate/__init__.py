"""Evaluation of any causal LM of transformers: loss by domain, generation. Import from the modules."""
