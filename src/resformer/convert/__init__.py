"""Value residual for models that exist: patches for stock models of transformers, and conversion to ours."""
