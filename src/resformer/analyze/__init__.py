"""What trained models do: measurements of one forward pass at a time, curves, fits and figures."""
