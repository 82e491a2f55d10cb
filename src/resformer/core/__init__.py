"""The mechanism of value residual learning, usable alone in anyone's attention (torch only).

`plan` says which layer owns, reads and stores a value; `policy` says how it is mixed; `carry` hands tensors from layer
to layer; `registry` finds a variant by name; `variants/` holds one file a variant.
"""
