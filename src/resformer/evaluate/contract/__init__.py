"""The contract of a variant as checks that run on any registered variant, a user's own included.

It lives in `evaluate` since it measures whole models (their logits, gradients, caches, files) and knows nothing of
training: the first layer to the right of everything that it calls. A check is a function with a one-line docstring that
gets a `Subject`, returns what it saw, and raises `ContractError` or `NotApplicable`. `run` runs them all.
"""
