"""The same contract on hidden states: variants that average the blocks' outputs over depth."""
